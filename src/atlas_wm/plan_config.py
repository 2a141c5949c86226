"""The settings of planning. The defaults are the paper's, but for clip_actions."""

from dataclasses import dataclass, field
from typing import Literal

from atlas_wm.settings import Options, check_types, known_or_own, own_names, require, within

# The parts of this package by name; any other part is your own class, as module:Class (docs/guides/own-model.md).
COST_KINDS, SOLVER_KINDS = ("terminal", "nearest", "temporal"), ("cem",)


@dataclass(frozen=True)
class PlanConfig:
    """Search over sequences of standardised action chunks, by the cross-entropy method or a solver of your own."""

    candidates: int = 300
    iterations: int = 30
    elites: int = 30
    horizon: int = 5
    """Action chunks that a plan looks ahead."""
    execute: int = 5
    """Action chunks executed before planning again. Fewer than the horizon help with the costs nearest and temporal
    only."""
    cost: str = "terminal"
    """terminal: distance from the goal at the end of the plan; every search starts at zero (the paper). nearest:
    smallest distance over the steps of the plan; a search starts with the unused rest of the last plan. temporal:
    as nearest, but the distance counts model steps, the mean of what a head of the run (`atlas head RUN`) and the
    latent distance say, and jumps of the predicted latents cost extra. Or your own Cost as module:Class
    (docs/guides/own-model.md)."""
    start: Literal["zero", "retrieval"] = "zero"
    """Where a search starts. zero: at zero, the mean of the training actions (the paper), or with the rest of the
    last plan where the cost asks for it. retrieval: at the cheapest of that and of training demonstrations that
    began near the current frame and came near the goal, which are also candidates of the first iteration."""
    solver: str = "cem"
    """cem: the cross-entropy method. Or your own Solver as module:Class."""
    options: Options = field(default_factory=dict)
    """Settings of your own cost and solver, by name."""
    candidate_chunk: int | None = None
    """Most candidates rolled out at once, over all episodes planned together; bounds memory. None: no limit."""
    clip_actions: bool = True
    """Clip the actions of a plan to the action bounds stored with the run. False: return what the search found (the
    paper). Candidates are never clipped."""

    def __post_init__(self) -> None:
        check_types("plan.", self)
        known_or_own("plan.", self, "cost", COST_KINDS)
        known_or_own("plan.", self, "solver", SOLVER_KINDS)
        require(bool(self.own_parts) or not self.options, "plan.options are for your own plan.cost or plan.solver")
        within("plan.", self, 2, 1e6, "candidates")
        within("plan.", self, 1, 1e6, "iterations", "horizon")
        require(
            2 <= self.elites <= self.candidates,
            f"plan.elites must lie between 2 and plan.candidates ({self.candidates}), not {self.elites}",
        )
        require(
            1 <= self.execute <= self.horizon,
            f"plan.execute must lie between 1 and plan.horizon ({self.horizon}), not {self.execute}",
        )
        require(self.candidate_chunk is None or self.candidate_chunk >= 1, "plan.candidate_chunk must be >= 1")

    @property
    def replanning(self) -> str:
        """How it differs from the paper's planning, for names of files; empty where it does not."""
        names = [name for name in (self.cost, self.start, self.solver) if name not in ("terminal", "zero", "cem")]
        parts = [name.rpartition(":")[2] for name in names]
        return "".join(f"_{part}" for part in parts) + (
            "" if self.execute == self.horizon else f"_replan{self.execute}"
        )

    @property
    def own_parts(self) -> dict[str, str]:
        return own_names(cost=self.cost, solver=self.solver)
