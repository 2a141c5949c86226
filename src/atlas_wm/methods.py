"""The methods of the paper, as rows of one table: encoder, predictor, weighted loss terms, training, planning.

The four arms of the 2×2 ablation and PLDM differ only in the weights of loss terms. Your own row:
docs/guides/own-method.md (loss terms) and docs/guides/own-model.md (encoder, predictor, planning cost, solver).
"""

from dataclasses import dataclass, field

from atlas_wm.config import (
    EncoderConfig,
    ModelConfig,
    ObjectiveConfig,
    PlanConfig,
    PredictorConfig,
    RunConfig,
    TrainConfig,
)
from atlas_wm.errors import UserError, unknown
from atlas_wm.plugins import import_named

# Terms that hold the latents apart, or near a distribution: what a study tunes unless a method names its own.
REGULARISERS = ("wemreg", "sigreg", "std", "std_t", "cov", "cov_t", "temporal")


@dataclass(frozen=True)
class Method:
    """One row. Your own parts are named in it as module:Class: ``encoder=EncoderConfig(kind=…)``,
    ``predictor=PredictorConfig(kind=…)``, ``plan=PlanConfig(cost=…, solver=…)``."""

    summary: str
    objective: ObjectiveConfig
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    predictor: PredictorConfig = field(default_factory=PredictorConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    source: str = ""
    regulariser: tuple[str, ...] = ()
    """Terms whose weights a study tunes, by one factor; own ones as module:name. Default: all of REGULARISERS."""

    def regulariser_of(self, objective: ObjectiveConfig) -> dict[str, float]:
        """Those terms, with their weights in an objective, which a recipe may have changed."""
        names = self.regulariser or REGULARISERS
        return {name: weight for name, weight in objective.weights.items() if name in names}

    @property
    def run_config(self) -> RunConfig:
        """The paper's run with this method; ``plan`` decides whether actions are clipped."""
        return RunConfig(ModelConfig(self.encoder, self.predictor), self.objective, self.train, self.plan)


METHODS: dict[str, Method] = {
    "atlas": Method(
        "ATLAS: WEMReg and OOD-recovery",
        ObjectiveConfig(wemreg=3.0, relational=0.1),
        source="the ATLAS paper",
    ),
    "lewm": Method(
        "LeWM: SIGReg alone",
        ObjectiveConfig(sigreg=0.09),
        source="LeWM, in stable-worldmodel as wm.lewm",
    ),
    "lewm+ood": Method(
        "ATLAS without WEMReg: SIGReg and OOD-recovery",
        ObjectiveConfig(sigreg=0.09, relational=0.1),
        source="2×2 ablation of the ATLAS paper",
    ),
    "wemreg": Method(
        "ATLAS without OOD-recovery: WEMReg alone",
        ObjectiveConfig(wemreg=3.0),
        source="2×2 ablation of the ATLAS paper",
    ),
    "pldm": Method(
        "PLDM: variance, covariance and temporal alignment",
        ObjectiveConfig(std=18.0, std_t=0.7, cov=12.0, temporal=0.2),
        source="PLDM, arXiv 2502.14819; in stable-worldmodel as wm.pldm",
    ),
    "dino-wm": Method(
        "DINO-WM: dynamics of frozen DINOv2-S/14 patch tokens",
        ObjectiveConfig(),
        encoder=EncoderConfig(kind="dinov2", width=384, heads=6),
        predictor=PredictorConfig(kind="patch"),
        train=TrainConfig(lr=5e-4, weight_decay=0.0),
        # 256 tokens a frame, 3 frames a window: all 300 candidates at once need tens of GB.
        plan=PlanConfig(candidate_chunk=64),
        source="DINO-WM, arXiv 2411.04983; in stable-worldmodel as wm.prejepa",
    ),
    "fast-wm": Method(
        "FAST-WM: the latent after every action prefix in one pass, SIGReg",
        ObjectiveConfig(sigreg=0.09),
        predictor=PredictorConfig(kind="prefix"),
        source="Fast-LeWM, as the ATLAS paper uses it",
    ),
}


def get_method(name: str) -> Method:
    """A row of the table, or your own :class:`Method` as module:NAME."""
    if ":" in name:
        method = import_named("method", name)
        if not isinstance(method, Method):
            raise UserError(f"{name} is a {type(method).__name__}, not an atlas_wm.methods.Method")
        for term in method.objective.extra:  # a wrong name is an error now, not after the data was read
            import_named("loss term", term)
        for part, own in method.run_config.own_parts.items():
            import_named(part, own)
        return method
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]
