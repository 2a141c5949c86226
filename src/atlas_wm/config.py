"""Every setting of a run, as frozen dataclasses with checks. The defaults are the paper's (Table hparams),
but for plan.clip_actions.

What is known only from the data (the action size) is an argument of the model, not a setting.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Literal

from atlas_wm import __version__
from atlas_wm.errors import short
from atlas_wm.plan_config import PlanConfig as PlanConfig
from atlas_wm.settings import Options, check_types, known_or_own, own_names, require, within

RGB = tuple[float, float, float]
IMAGENET_MEAN: RGB = (0.485, 0.456, 0.406)
IMAGENET_STD: RGB = (0.229, 0.224, 0.225)


# No model comes near these. They keep a file that asks for a billion of anything from being obeyed.
MOST_WIDTH, MOST_HIDDEN, MOST_DEPTH, MOST_HEADS, MOST_STEPS, MOST_SEED = 2**16, 2**20, 128, 1024, 1024, 2**63 - 1
MOST_ACTIONS, MOST_SIDE = 4096, 2**20  # coordinates of an action; pixels
FORMAT = 3  # of run folders
# The parts of this package by name; any other part is your own class, as module:Class (docs/guides/own-model.md).
ENCODER_KINDS, PREDICTOR_KINDS = ("vit", "dinov2"), ("causal", "prefix", "patch")


@dataclass(frozen=True)
class EncoderConfig:
    """The ViT. Defaults: ViT-Tiny with patch 14, trained from scratch."""

    kind: str = "vit"
    """vit: trained, its projected CLS token is the latent. dinov2: frozen, its patch tokens are the latent. Or your
    own Encoder as module:Class (docs/guides/own-model.md)."""
    options: Options = field(default_factory=dict)
    """Settings of your own encoder, by name."""
    weights: str | None = None
    """Pretrained weights of a dinov2 encoder: a .safetensors or .pth file. None: from the hub."""
    image_size: int = 224
    """Frames are resized to this many pixels per side."""
    patch_size: int = 14
    """Pixels per side of a patch."""
    width: int = 192
    """Width of a token."""
    depth: int = 12
    """Transformer blocks."""
    heads: int = 3
    """Attention heads."""
    mlp_ratio: float = 4.0
    """Hidden width of the MLPs, in token widths."""
    positions: Literal["random", "sincos"] = "random"
    """Initial position embedding. random: std 0.02. sincos: low 2-D sine-cosine waves of amplitude 1."""
    norm_eps: float = 1e-6
    """Epsilon of the LayerNorms. Hugging Face's ViT, and so an imported LeWM, uses 1e-12."""
    pixel_mean: RGB = IMAGENET_MEAN
    """Subtracted from pixels in [0, 1]."""
    pixel_std: RGB = IMAGENET_STD
    """Divides them after that."""

    @property
    def patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def frozen(self) -> bool:
        """Its patch tokens are the latent, and it is not trained."""
        return self.kind == "dinov2"

    def __post_init__(self) -> None:
        check_types("encoder.", self)
        known_or_own("encoder.", self, "kind", ENCODER_KINDS)
        within("encoder.", self, 1, 4096, "image_size", "patch_size")
        within("encoder.", self, 1, MOST_WIDTH, "width")
        within("encoder.", self, 1, MOST_DEPTH, "depth")
        within("encoder.", self, 1, MOST_HEADS, "heads")
        within("encoder.", self, 1e-3, 1e3, "mlp_ratio")
        within("encoder.", self, 0, 1, "norm_eps")
        own = self.kind not in ENCODER_KINDS  # which may use none of the sizes below
        require(
            own or self.image_size % self.patch_size == 0,
            f"encoder.image_size {self.image_size} is not a multiple of encoder.patch_size {self.patch_size}",
        )
        require(
            own or self.width % self.heads == 0,
            f"encoder.width {self.width} is not divisible by encoder.heads {self.heads}",
        )
        require(
            own or self.positions != "sincos" or self.width % 4 == 0,
            f"encoder.positions 'sincos' needs a width divisible by 4, not {self.width}",
        )
        require(all(math.isfinite(v) for v in self.pixel_mean), "encoder.pixel_mean must be finite")
        require(all(0 < v < math.inf for v in self.pixel_std), "encoder.pixel_std must be positive and finite")
        require(
            self.weights is None or self.frozen,
            "encoder.weights are for encoder.kind dinov2: other encoders are trained from scratch",
        )
        require(own or not self.options, f"encoder.options are for your own encoder, not for {self.kind}")


@dataclass(frozen=True)
class PredictorConfig:
    """The latent dynamics. Defaults: LeWM's causal Transformer, conditioned on actions by AdaLN-zero."""

    kind: str = "causal"
    """causal: one step after the other (LeWM). prefix: every action prefix at once (FAST-WM). patch: over the
    patch tokens of a frozen encoder (DINO-WM). Or your own Predictor as module:Class (docs/guides/own-model.md)."""
    options: Options = field(default_factory=dict)
    """Settings of your own predictor, by name."""
    width: int = 192
    """Width of a token."""
    depth: int = 6
    """Transformer blocks."""
    heads: int = 16
    """Attention heads."""
    head_dim: int = 64
    """Width of a head."""
    mlp: int = 2048
    """Hidden width of the MLPs."""
    dropout: float = 0.1
    """Dropout probability in training."""
    positions_std: float = 1.0
    """Initial standard deviation of the learned position embedding. LeWM uses 1; narrow predictors need less."""
    prefixes: int = 5
    """kind prefix: action chunks in the longest prefix, and so in the longest plan."""
    prefix_depth: int = 3
    """kind prefix: depth and sizes of the causal Transformer that encodes action prefixes."""
    prefix_heads: int = 6
    prefix_head_dim: int = 32
    prefix_mlp: int = 768

    def __post_init__(self) -> None:
        check_types("predictor.", self)
        known_or_own("predictor.", self, "kind", PREDICTOR_KINDS)
        require(
            self.kind not in PREDICTOR_KINDS or not self.options,
            f"predictor.options are for your own predictor, not for {self.kind}",
        )
        within("predictor.", self, 1, MOST_WIDTH, "width", "mlp", "prefix_mlp")
        within("predictor.", self, 1, MOST_DEPTH, "depth", "prefix_depth")
        within("predictor.", self, 1, MOST_HEADS, "heads", "head_dim", "prefix_heads", "prefix_head_dim")
        within("predictor.", self, 1, MOST_STEPS, "prefixes")
        within("predictor.", self, 0, 1e3, "positions_std")
        require(0 <= self.dropout < 1, f"predictor.dropout must lie in [0, 1), not {self.dropout}")


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
    """Hidden width of the action encoder."""
    history: int = 3
    """Frames the predictor sees."""
    frameskip: int = 5
    """Environment steps per model step: the model takes actions in chunks of this many."""
    inverse_hidden: int = 0
    """Hidden width of an inverse-dynamics head on (z_{t+1}, z_t), for objective.inverse; 0: none."""

    def __post_init__(self) -> None:
        check_types("model.", self)
        within("model.", self, 1, MOST_STEPS, "history", "frameskip")
        within("model.", self, 1, MOST_WIDTH, "latent", "action_smooth")
        within("model.", self, 1, MOST_HIDDEN, "hidden", "action_hidden")
        within("model.", self, 0, MOST_HIDDEN, "inverse_hidden")
        require(
            self.predictor.kind not in PREDICTOR_KINDS or self.encoder.frozen == (self.predictor.kind == "patch"),
            "encoder.kind dinov2 and predictor.kind patch belong together",
        )

    @property
    def own_parts(self) -> dict[str, str]:
        return own_names(encoder=self.encoder.kind, predictor=self.predictor.kind)

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
        if self.encoder.frozen:
            return (self.encoder.patches, self.encoder.width)
        return (self.latent,)


@dataclass(frozen=True)
class ObjectiveConfig:
    """Weights of the loss terms: L = L_pred + λ·L_WEM + μ·L_OOD. A weight of 0 leaves the term out."""

    prediction: float = 1.0
    """Mean squared error of predicted latents."""
    wemreg: float = 0.0
    """λ: WEMReg, exact sliced Wasserstein-2 distance to a Gaussian."""
    sigreg: float = 0.0
    """SIGReg, LeWM's regulariser, which compares characteristic functions."""
    relational: float = 0.0
    """μ: OOD-recovery, z keeps the pairwise distances of the mean patch token."""
    std: float = 0.0
    """PLDM: each coordinate has a standard deviation of at least 1 over the batch."""
    std_t: float = 0.0
    """std over time instead of the batch."""
    cov: float = 0.0
    """PLDM: coordinates are uncorrelated over the batch."""
    cov_t: float = 0.0
    """cov over time instead of the batch."""
    temporal: float = 0.0
    """PLDM: latents of neighbouring frames are close."""
    inverse: float = 0.0
    """PLDM: actions can be predicted from two neighbouring latents; needs model.inverse_hidden."""
    extra: dict[str, float] = field(default_factory=dict)
    """Weights of your own terms: functions or nn.Module classes, named module:name (docs/guides/own-method.md)."""
    directions: int = 1024
    """Random projections a step, for wemreg and sigreg."""
    target: Literal["online", "stop_gradient", "ema"] = "online"
    """Latents that predictions are compared with. online: those of the encoder, with gradient (the paper).
    stop_gradient: the same without gradient. ema: those of an exponential moving average of encoder and projector,
    without gradient."""
    ema_decay: float = 0.996
    """Decay of that average per update; for target ema only."""

    def __post_init__(self) -> None:
        check_types("objective.", self)
        for name in BUILT_IN_TERMS:
            require(getattr(self, name) >= 0, f"objective.{name} must be >= 0, not {getattr(self, name)}")
        for name in self.extra:
            require(":" in name, f"objective.extra names a term as module:name, not {name!r}")
        within("objective.", self, 1, MOST_HIDDEN, "directions")
        within("objective.", self, 0, 1, "ema_decay")
        require(bool(self.weights), "the objective needs at least one term with a weight above 0")

    @property
    def weights(self) -> dict[str, float]:
        """The terms that take part, and their weights."""
        weights = {name: getattr(self, name) for name in BUILT_IN_TERMS} | self.extra
        return {name: weight for name, weight in weights.items() if weight != 0}


NOT_TERMS = ("extra", "directions", "target", "ema_decay")
BUILT_IN_TERMS = tuple(f.name for f in dataclasses.fields(ObjectiveConfig) if f.name not in NOT_TERMS)


@dataclass(frozen=True)
class TrainConfig:
    epochs: int = 10
    """Passes over the training clips."""
    steps: int | None = None
    """Optimizer steps in total; overrides epochs."""
    batch: int = 128
    """Clips per step, over all processes."""
    lr: float = 5e-5
    """Peak learning rate of AdamW."""
    weight_decay: float = 1e-3
    """Weight decay of AdamW."""
    warmup: float = 0.01
    """Fraction of the steps in which the learning rate rises linearly; after that it follows a cosine to 0."""
    clip: float = 1.0
    """Maximum gradient norm."""
    precision: Literal["auto", "32-true", "bf16-mixed"] = "auto"
    """auto: bf16-mixed on a GPU, 32-true elsewhere."""
    compile: Literal["auto", "always", "never"] = "auto"
    """torch.compile on a GPU, for what the fused kernels leave. auto: in long runs of models that have none."""
    seed: int = 3072
    """Seed of initial weights, clip order, projections and dropout."""
    split: Literal["clips", "episodes", "groups"] = "clips"
    """What is held out for validation. clips: as in the paper. episodes: whole episodes, which stay unseen. groups:
    all variants of a demonstration together, for data such as the published PushT set."""
    holdout: float = 0.1
    """Fraction of the data held out for validation."""
    split_seed: int = 0
    """Seed of the split, so that runs with other training seeds hold out the same data."""
    batchnorm_batches: int = 20
    """Batches over which BatchNorm statistics are measured before each validation and, in float32, at the end.
    0: use the running averages of training, which trail the weights."""
    cache_tokens: Literal["auto", "always", "never"] = "auto"
    """Compute the tokens of a frozen encoder once and store them on disk during training. auto: if that saves work
    and fits the disk."""
    cache_frames: Literal["auto", "always", "never"] = "auto"
    """Read frames once and hold them in the memory of the device, as the tiles that differ from the background.
    auto: as many as fit, if each is needed more than once. always: all."""
    workers: int | None = None
    """Loader processes. None: 0, or for a GPU that cannot hold all frames one per core but one, at most 16."""
    log_every: int = 10
    """Steps between rows of metrics."""
    validate_every: int = 500
    """Steps between validations."""
    probe: bool = False
    """At every validation, log as val_probe_… how well a linear probe reads each coordinate of the state from z."""
    best: Literal["score", "loss"] = "score"
    """Which validation gives RUN/weights/best: the highest planning score (docs/concepts.md) or the lowest loss."""
    checkpoint_every: int | None = None
    """Steps between checkpoints, from which an interrupted run resumes. None: about every minute, and at most 1 %
    of the time."""
    save_every: int | None = None
    """Steps between weights that stay in RUN/weights. None: only those of the best validation."""

    def __post_init__(self) -> None:
        check_types("train.", self)
        for name in ("epochs", "batch", "lr", "clip", "log_every", "validate_every"):
            require(getattr(self, name) > 0, f"train.{name} must be positive, not {getattr(self, name)}")
        for name in ("steps", "checkpoint_every", "save_every"):
            value = getattr(self, name)
            require(value is None or value > 0, f"train.{name} must be positive, not {value}")
        require(0 <= self.warmup < 1, f"train.warmup is a share in [0, 1), not {self.warmup}")
        require(0 < self.holdout < 1, f"train.holdout is a share in (0, 1), not {self.holdout}")
        require(self.batch >= 2, "train.batch must be at least 2: the losses are statistics of a batch")
        counts = ["workers"] if self.workers is not None else []
        within("train.", self, 0, MOST_SEED, "seed", "split_seed", "batchnorm_batches", "weight_decay", *counts)


@dataclass(frozen=True)
class RunConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)

    @property
    def own_parts(self) -> dict[str, str]:
        """The parts that are your own classes, as module:Class, by what they are."""
        return self.model.own_parts | self.plan.own_parts

    def __post_init__(self) -> None:
        check_types("", self)
        require(
            self.objective.inverse == 0 or self.model.inverse_hidden > 0,
            "objective.inverse needs the head model.inverse_hidden (PLDM: 512)",
        )
        require(
            not self.model.encoder.frozen or set(self.objective.weights) == {"prediction"},
            "a frozen encoder has nothing to regularise: only objective.prediction may have a weight",
        )
        require(
            not self.model.encoder.frozen or self.objective.target == "online",
            f"objective.target {self.objective.target} needs an encoder that is trained: latents of the frozen "
            f"{self.model.encoder.kind} encoder never change, so use objective.target online",
        )
        require(
            self.model.predictor.kind != "prefix" or self.plan.horizon <= self.model.predictor.prefixes,
            f"plan.horizon {self.plan.horizon} is longer than predictor.prefixes {self.model.predictor.prefixes}",
        )


@dataclass(frozen=True)
class DataInfo:
    """Where the training data came from and which part of it was held out."""

    path: str
    hash: str
    episodes: int
    rows: int
    training_clips: int
    validation_clips: int
    frame_size: tuple[int, int] | None = None
    """Height and width of the stored frames; None where they are drawn, or in runs of older versions."""
    held_out: tuple[int, ...] | None = None
    """The held-out episodes of a split by groups. Other splits follow from train.split_seed."""

    def __post_init__(self) -> None:
        require(
            self.frame_size is None or all(1 <= side <= MOST_SIDE for side in self.frame_size),
            f"data.frame_size must lie between 1 and {MOST_SIDE}, not {short(self.frame_size)}",
        )
        require(
            all(0 <= episode < self.episodes for episode in self.held_out or ()),
            f"data.held_out must number episodes of {self.episodes}, not {short(self.held_out)}",
        )


@dataclass(frozen=True)
class RunInfo:
    """What a run folder says of itself."""

    task: str
    method: str
    recipe: str
    action_size: int
    config: RunConfig
    data: DataInfo
    device: str
    versions: dict[str, str] = field(default_factory=dict)
    init: str | None = None
    """The run whose weights it started from (atlas train --init): its folder, or its name on the hub."""
    format: int = FORMAT
    atlas_wm: str = field(default=__version__)

    def __post_init__(self) -> None:
        within("", self, 1, MOST_ACTIONS, "action_size")
