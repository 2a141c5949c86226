"""Every setting of a run, as frozen dataclasses with checks. The defaults are the paper's (Table hparams),
but for plan.clip_actions.

What is known only from the data (the action size) is an argument of the model, not a setting.
"""

import dataclasses
import math
import sys
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from atlas_wm.errors import SettingError, UserError, did_you_mean, short, unknown

T = TypeVar("T")
MOST_FLOAT = sys.float_info.max  # what is larger is infinite, or no float at all; NaN compares as neither
RGB = tuple[float, float, float]
IMAGENET_MEAN: RGB = (0.485, 0.456, 0.406)
IMAGENET_STD: RGB = (0.229, 0.224, 0.225)


# No model comes near these. They keep a file that asks for a billion of anything from being obeyed.
MOST_WIDTH, MOST_HIDDEN, MOST_DEPTH, MOST_HEADS, MOST_STEPS, MOST_SEED = 2**16, 2**20, 128, 1024, 1024, 2**63 - 1


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise SettingError(message)


def check_types(where: str, config: Any) -> None:
    """Every setting has its declared type, as in a file, and becomes what JSON gives back: 1 for a float is 1.0, a
    list for a tuple is a tuple."""
    for name, hint in get_type_hints(type(config)).items():
        try:
            object.__setattr__(config, name, _parse(hint, getattr(config, name), f"{where}{name}"))
        except UserError as error:
            raise SettingError(str(error)) from None


def within(where: str, config: Any, low: float, high: float, *names: str) -> None:
    """The settings of these names lie in [low, high]; NaN does not."""
    for name in names:
        value = getattr(config, name)
        _require(low <= value <= high, f"{where}{name} must lie between {low:g} and {high:g}, not {short(value)}")


@dataclass(frozen=True)
class EncoderConfig:
    """The ViT. Defaults: ViT-Tiny with patch 14, trained from scratch."""

    kind: Literal["vit", "dinov2"] = "vit"
    """vit: trained, its projected CLS token is the latent. dinov2: frozen, its patch tokens are the latent."""
    weights: str | None = None
    """Pretrained weights of a dinov2 encoder: a .safetensors or .pth file. None: from the hub."""
    image_size: int = 224
    """Frames are reduced to this many pixels a side before they enter the encoder."""
    patch_size: int = 14
    width: int = 192
    depth: int = 12
    heads: int = 3
    mlp_ratio: float = 4.0
    positions: Literal["random", "sincos"] = "random"
    """Start of the learned position embedding: std 0.02, or low 2-D sine-cosine waves of amplitude 1."""
    norm_eps: float = 1e-6
    """Of the LayerNorms. Hugging Face's ViT, and so an imported LeWM, has 1e-12."""
    pixel_mean: RGB = IMAGENET_MEAN
    pixel_std: RGB = IMAGENET_STD

    @property
    def patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    def __post_init__(self) -> None:
        check_types("encoder.", self)
        within("encoder.", self, 1, 4096, "image_size", "patch_size")
        within("encoder.", self, 1, MOST_WIDTH, "width")
        within("encoder.", self, 1, MOST_DEPTH, "depth")
        within("encoder.", self, 1, MOST_HEADS, "heads")
        within("encoder.", self, 1e-3, 1e3, "mlp_ratio")
        within("encoder.", self, 0, 1, "norm_eps")
        _require(
            self.image_size % self.patch_size == 0,
            f"encoder.image_size {self.image_size} is not a multiple of encoder.patch_size {self.patch_size}",
        )
        _require(
            self.width % self.heads == 0,
            f"encoder.width {self.width} is not divisible by encoder.heads {self.heads}",
        )
        _require(
            self.positions != "sincos" or self.width % 4 == 0,
            f"encoder.positions 'sincos' needs a width divisible by 4, not {self.width}",
        )
        _require(all(math.isfinite(v) for v in self.pixel_mean), "encoder.pixel_mean must be finite")
        _require(all(0 < v < math.inf for v in self.pixel_std), "encoder.pixel_std must be positive and finite")
        _require(
            self.weights is None or self.kind == "dinov2",
            "encoder.weights are for encoder.kind dinov2: a vit encoder is trained from scratch",
        )


@dataclass(frozen=True)
class PredictorConfig:
    """The latent dynamics. Defaults: LeWM's causal Transformer, conditioned on actions by AdaLN-zero."""

    kind: Literal["causal", "prefix", "patch"] = "causal"
    """causal: one step after the other (LeWM). prefix: every action prefix at once (FAST-WM). patch: over the
    patch tokens of a frozen encoder (DINO-WM)."""
    width: int = 192
    depth: int = 6
    heads: int = 16
    head_dim: int = 64
    mlp: int = 2048
    dropout: float = 0.1
    positions_std: float = 1.0
    """Start of the learned position embedding. LeWM's is 1; a narrow predictor drowns in that."""
    prefixes: int = 5
    """kind prefix: blocks of the longest action prefix, and so of the longest plan."""
    prefix_depth: int = 3
    """kind prefix: the causal Transformer that encodes action prefixes, and its sizes."""
    prefix_heads: int = 6
    prefix_head_dim: int = 32
    prefix_mlp: int = 768

    def __post_init__(self) -> None:
        check_types("predictor.", self)
        within("predictor.", self, 1, MOST_WIDTH, "width", "mlp", "prefix_mlp")
        within("predictor.", self, 1, MOST_DEPTH, "depth", "prefix_depth")
        within("predictor.", self, 1, MOST_HEADS, "heads", "head_dim", "prefix_heads", "prefix_head_dim")
        within("predictor.", self, 1, MOST_STEPS, "prefixes")
        within("predictor.", self, 0, 1e3, "positions_std")
        _require(0 <= self.dropout < 1, f"predictor.dropout must lie in [0, 1), not {self.dropout}")


@dataclass(frozen=True)
class ModelConfig:
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    predictor: PredictorConfig = field(default_factory=PredictorConfig)
    latent: int = 192
    """Size d of the planning latent z."""
    hidden: int = 2048
    """Hidden width of the projector and of the prediction head."""
    action_smooth: int = 10
    """Width of the first, linear layer of the action encoder; for DINO-WM of the whole embedding."""
    action_hidden: int = 768
    history: int = 3
    """Frames the predictor sees."""
    frameskip: int = 5
    """Environment steps per model step: one model action is a block of this many actions."""
    inverse_hidden: int = 0
    """Hidden width of an inverse-dynamics head on (z_{t+1}, z_t), for objective.inverse; 0: none."""

    def __post_init__(self) -> None:
        check_types("model.", self)
        within("model.", self, 1, MOST_STEPS, "history", "frameskip")
        within("model.", self, 1, MOST_WIDTH, "latent", "action_smooth")
        within("model.", self, 1, MOST_HIDDEN, "hidden", "action_hidden")
        within("model.", self, 0, MOST_HIDDEN, "inverse_hidden")
        _require(
            (self.encoder.kind == "dinov2") == (self.predictor.kind == "patch"),
            "encoder.kind dinov2 and predictor.kind patch belong together",
        )

    @property
    def clip_frames(self) -> int:
        return 1 + (self.predictor.prefixes if self.predictor.kind == "prefix" else self.history)

    @property
    def clip_rows(self) -> int:
        """Dataset rows from the first to the last frame of a clip, both included: 16 in the paper."""
        return (self.clip_frames - 1) * self.frameskip + 1

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Of the latent of one frame: (d,), or (K, w) for patch tokens."""
        if self.encoder.kind == "dinov2":
            return (self.encoder.patches, self.encoder.width)
        return (self.latent,)


@dataclass(frozen=True)
class ObjectiveConfig:
    """Weights of the loss terms: L = L_pred + λ·L_WEM + μ·L_OOD. A weight of 0 leaves the term out."""

    prediction: float = 1.0
    wemreg: float = 0.0
    """λ, exact sliced Wasserstein-2 to a Gaussian."""
    sigreg: float = 0.0
    """LeWM's characteristic-function regulariser."""
    relational: float = 0.0
    """μ, OOD-recovery: z keeps the pairwise geometry of the mean patch token."""
    std: float = 0.0
    """PLDM: every coordinate keeps a deviation of 1 over the batch."""
    std_t: float = 0.0
    """The same over time."""
    cov: float = 0.0
    """PLDM: coordinates are uncorrelated over the batch."""
    cov_t: float = 0.0
    """The same over time."""
    temporal: float = 0.0
    """PLDM: latents of neighbouring frames are close."""
    inverse: float = 0.0
    """PLDM: actions can be told from two neighbouring latents; needs model.inverse_hidden."""
    extra: dict[str, float] = field(default_factory=dict)
    """Weights of your own terms, functions named as module:function (docs/own-method.md)."""
    directions: int = 1024
    """Random projections a step, for wemreg and sigreg."""

    def __post_init__(self) -> None:
        check_types("objective.", self)
        for name in BUILT_IN_TERMS:
            _require(getattr(self, name) >= 0, f"objective.{name} must be >= 0, not {getattr(self, name)}")
        for name in self.extra:
            _require(":" in name, f"objective.extra names a term as module:function, not {name!r}")
        within("objective.", self, 1, MOST_HIDDEN, "directions")
        _require(bool(self.weights), "the objective needs at least one term with a weight above 0")

    @property
    def weights(self) -> dict[str, float]:
        """The terms that take part, and their weights."""
        weights = {name: getattr(self, name) for name in BUILT_IN_TERMS} | self.extra
        return {name: weight for name, weight in weights.items() if weight != 0}


BUILT_IN_TERMS = tuple(f.name for f in dataclasses.fields(ObjectiveConfig) if f.name not in ("extra", "directions"))


@dataclass(frozen=True)
class TrainConfig:
    epochs: int = 10
    steps: int | None = None
    """Optimiser steps in all; overrides epochs."""
    batch: int = 128
    """Clips a step."""
    lr: float = 5e-5
    weight_decay: float = 1e-3
    warmup: float = 0.01
    """Share of the steps with a linearly rising rate; cosine to 0 after that."""
    clip: float = 1.0
    """Largest gradient norm."""
    precision: Literal["auto", "32-true", "bf16-mixed"] = "auto"
    """auto: bf16-mixed on a GPU, 32-true elsewhere."""
    compile: Literal["auto", "always", "never"] = "auto"
    """torch.compile on a GPU, for what the fused kernels leave. auto: in long runs of models that have none."""
    seed: int = 3072
    split: Literal["clips", "episodes"] = "clips"
    """What the validation part is made of. The paper holds out clips; episodes keep it truly unseen."""
    holdout: float = 0.1
    """Share of the data that only monitors."""
    split_seed: int = 0
    """Fixes what is held out, whatever the training seed."""
    batchnorm_batches: int = 20
    """Batches over which BatchNorm statistics are measured before each validation and, in float32, at the end;
    0: never, the running averages of training are used, which trail the weights."""
    keep_tokens: Literal["auto", "always", "never"] = "auto"
    """Tokens of a frozen encoder are computed once for each frame and kept on disk while it trains, instead of at
    every step. auto: where that saves work and fits the disk."""
    keep_frames: Literal["auto", "always", "never"] = "auto"
    """On a GPU: read all frames once, and keep them there as the tiles that differ from the background. auto: where
    each is needed more than once and they fit."""
    workers: int = 0
    """Loader processes; 0 loads in the training process."""
    log_every: int = 10
    validate_every: int = 500
    checkpoint_every: int | None = None
    """Steps between checkpoints, from which an interrupted run goes on. None: about every minute, and so rarely
    that they take at most 1 % of the time."""
    keep_every: int | None = None
    """Weights of every so many steps stay in RUN/weights; None: only the best of the validations."""

    def __post_init__(self) -> None:
        check_types("train.", self)
        for name in ("epochs", "batch", "lr", "clip", "log_every", "validate_every"):
            _require(getattr(self, name) > 0, f"train.{name} must be positive, not {getattr(self, name)}")
        for name in ("steps", "checkpoint_every", "keep_every"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"train.{name} must be positive, not {value}")
        _require(0 <= self.warmup < 1, f"train.warmup is a share in [0, 1), not {self.warmup}")
        _require(0 < self.holdout < 1, f"train.holdout is a share in (0, 1), not {self.holdout}")
        _require(self.batch >= 2, "train.batch must be at least 2: the losses are statistics of a batch")
        within("train.", self, 0, MOST_SEED, "seed", "split_seed", "workers", "batchnorm_batches")


@dataclass(frozen=True)
class PlanConfig:
    """Cross-entropy method over blocks of standardised actions."""

    candidates: int = 300
    iterations: int = 30
    elites: int = 30
    horizon: int = 5
    """Blocks looked ahead."""
    execute: int = 5
    """Blocks executed before planning again. Fewer than the horizon pay with the rule nearest only."""
    rule: Literal["terminal", "nearest"] = "terminal"
    """terminal: a plan costs what its end is away from the goal, and begins from nothing (the paper). nearest: what
    the nearest of its steps is away, and it begins with what the last plan left over."""
    candidate_chunk: int | None = None
    """Most candidates rolled out at once, over all episodes planned together; bounds memory. None: all."""
    clip_actions: bool = True
    """Clip the actions of a plan to the bounds stored with the run; False: return what the search found (the
    paper). Candidates are never clipped."""

    def __post_init__(self) -> None:
        check_types("plan.", self)
        within("plan.", self, 1, 1e6, "candidates", "iterations", "horizon")
        _require(
            2 <= self.elites <= self.candidates,
            f"plan.elites must lie between 2 and plan.candidates ({self.candidates}), not {self.elites}",
        )
        _require(
            1 <= self.execute <= self.horizon,
            f"plan.execute must lie between 1 and plan.horizon ({self.horizon}), not {self.execute}",
        )
        _require(self.candidate_chunk is None or self.candidate_chunk >= 1, "plan.candidate_chunk must be >= 1")

    @property
    def replanning(self) -> str:
        """How it differs from the paper's way to replan, for the names of files; empty where it does not."""
        rule = "" if self.rule == "terminal" else f"_{self.rule}"
        return rule + ("" if self.execute == self.horizon else f"_replan{self.execute}")


@dataclass(frozen=True)
class RunConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)

    def __post_init__(self) -> None:
        check_types("", self)
        _require(
            self.objective.inverse == 0 or self.model.inverse_hidden > 0,
            "objective.inverse needs the head model.inverse_hidden (PLDM: 512)",
        )
        _require(
            self.model.encoder.kind == "vit" or set(self.objective.weights) == {"prediction"},
            "a frozen encoder has nothing to regularise: only objective.prediction may have a weight",
        )
        _require(
            self.model.predictor.kind != "prefix" or self.plan.horizon <= self.model.predictor.prefixes,
            f"plan.horizon {self.plan.horizon} is longer than predictor.prefixes {self.model.predictor.prefixes}",
        )


def to_dict(config: Any) -> dict[str, Any]:
    return dataclasses.asdict(config)


def from_dict(cls: type[T], data: Any, where: str = "config") -> T:
    """The strict inverse of :func:`to_dict`: unknown names and wrong types are errors that say where."""
    if not isinstance(data, dict):
        raise UserError(f"{where} must be an object, not {type(data).__name__}")
    hints = get_type_hints(cls)
    for name in data:
        if name not in hints:
            raise unknown(f"setting in {where}", str(name), hints)
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        if f.name not in data and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise UserError(f"{where} lacks {f.name}")
    settings = {name: _parse(hints[name], value, f"{where}.{name}") for name, value in data.items()}
    try:
        return cls(**settings)
    except SettingError as error:
        raise UserError(f"{where}: {error}") from error


def _parse(hint: Any, value: Any, where: str) -> Any:
    origin = get_origin(hint)
    if dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else from_dict(hint, value, where)  # type: ignore[arg-type]
    if origin is Literal:
        if isinstance(value, str) and value in get_args(hint):
            return value
        names = " or ".join(repr(name) for name in get_args(hint))
        raise UserError(f"{where} must be {names}, not {short(value)}.{did_you_mean(value, get_args(hint))}")
    if origin in (Union, UnionType):
        if value is None:
            return None
        return _parse(next(a for a in get_args(hint) if a is not type(None)), value, where)
    if origin in (list, tuple) and get_args(hint)[1:] in ((), (...,)) and isinstance(value, (list, tuple)):
        return origin(_parse(get_args(hint)[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is tuple and isinstance(value, (list, tuple)) and len(value) == len(get_args(hint)):
        return tuple(
            _parse(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(get_args(hint), value, strict=True))
        )
    if origin is dict and isinstance(value, dict):
        _, of = get_args(hint)
        return {str(k): _parse(of, v, f"{where}.{short(k)}") for k, v in value.items()}
    if hint is float and isinstance(value, (int, float)) and type(value) is not bool and abs(value) <= MOST_FLOAT:
        return float(value)
    if hint in (int, str, bool) and type(value) is hint:
        return value
    name = getattr(hint, "__name__", None) if origin is None else str(hint)
    raise UserError(f"{where} must be {name or hint}, not {short(value)}")
