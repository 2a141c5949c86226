"""The diagnostics and their settings. Light to import: the command line and the report read this table too."""

from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

from atlas_wm.errors import UserError


@dataclass(frozen=True)
class QuerySettings:
    queries: int | None = None
    """None: 100; 16 for Cube, which renders slowly (the paper also has 16)."""
    candidates: int = 128
    horizon: int = 5
    """Model steps of a candidate."""
    offset: int = 50
    """Rows between start and goal."""
    seed: int = 0

    def __post_init__(self) -> None:
        if min(1 if self.queries is None else self.queries, self.horizon, self.offset) < 1 or self.candidates < 2:
            raise UserError("--queries and --offset must be at least 1, --candidates at least 2")


class Diagnostic(NamedTuple):
    question: str
    settings: tuple[str, ...]  # that the result depends on: names of QuerySettings or attributes of Diagnosis
    keys: tuple[str, ...]  # of the result, that the report needs
    uses_bank: bool = False  # looks at training frames
    needs_env: bool = False  # the others also work on recorded data alone


DiagnosticName = Literal[
    "probe", "state", "marginal", "rollout", "relational", "regret", "geometry", "cases", "imagined"
]
QUERY_SETTINGS = tuple(field.name for field in fields(QuerySettings))
DIAGNOSTICS: dict[DiagnosticName, Diagnostic] = {
    "probe": Diagnostic(
        "does novelty predict failure?",
        ("offset", "evaluation"),
        ("representations", "episodes", "failures"),
        uses_bank=True,
        needs_env=True,
    ),
    "state": Diagnostic(
        "how much of the state can be read from the latent?",
        ("seed",),
        ("coordinates", "representations", "fitted", "judged"),
        uses_bank=True,
    ),
    "marginal": Diagnostic(
        "is the latent Gaussian?",
        ("seed",),
        ("frames", "mean_norm", "covariance_error", "cvm", "cvm_whitened", "cvm_null"),
    ),
    "rollout": Diagnostic(
        "how large is the error of predicted latents?",
        QUERY_SETTINGS,
        ("horizons", "median", "low", "high"),
        uses_bank=True,
    ),
    "relational": Diagnostic(
        "how much are distances distorted?",
        QUERY_SETTINGS,
        ("rmse", "percentile_95", "maximum"),
        uses_bank=True,
        needs_env=True,
    ),
    "regret": Diagnostic(
        "how tight is the planning bound?",
        QUERY_SETTINGS,
        ("bound", "regret", "means", "guaranteed"),
        uses_bank=True,
        needs_env=True,
    ),
    "geometry": Diagnostic(
        "where in the latent space are unusual states?",
        ("seed",),
        ("points", "novelty_percentile", "explained", "rank_correlation"),
        uses_bank=True,
    ),
    "cases": Diagnostic(
        "what do the same episodes look like for every run?",
        ("offset", "evaluation", "rows"),
        ("episodes",),
        needs_env=True,
    ),
    "imagined": Diagnostic(
        "what does the model imagine, and what happens?",
        ("offset", "evaluation"),
        ("episodes",),
        uses_bank=True,
        needs_env=True,
    ),
}
