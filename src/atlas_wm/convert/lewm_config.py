"""Convert LeWM settings: ours from its tensors and config.json, its config.json from ours."""

import math
from typing import Any, TypeVar

from torch import Tensor

from atlas_wm.config import IMAGENET_MEAN, IMAGENET_STD, EncoderConfig, ModelConfig, PredictorConfig
from atlas_wm.errors import UserError
from atlas_wm.tasks import Task

T = TypeVar("T", int, float)
CHECKPOINT, SETTINGS = "weights.pt", "config.json"

# Sizes that vit_hf knows by name: width, depth, heads, MLP width.
VIT_SIZES = {
    (192, 12, 3, 768): "tiny",
    (384, 12, 6, 1536): "small",
    (768, 12, 12, 3072): "base",
    (1024, 24, 16, 4096): "large",
    (1280, 32, 16, 5120): "huge",
}
VIT_EPS = 1e-12  # of the LayerNorms in Hugging Face's ViT
HEAD_DIM = 64  # default of LeWM's encoder and predictor


def first_few(names: list[str], most: int = 6) -> str:
    """The first names of a list and the number of the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def sizes(tensors: dict[str, Tensor], settings: Any, task: Task) -> ModelConfig:
    """From the shapes; the numbers of heads and the epsilon of the norms come from config.json."""
    keys = {
        "patch": "encoder.embeddings.patch_embeddings.projection.weight",  # (w, 3, p, p)
        "grid": "encoder.embeddings.position_embeddings",  # (1, 1 + K, w)
        "mlp": "encoder.layers.0.mlp.fc1.weight",
        "projector": "projector.net.0.weight",
        "positions": "predictor.pos_embedding",  # (1, T, d)
        "qkv": "predictor.transformer.layers.0.attn.to_qkv.weight",
        "predictor_mlp": "predictor.transformer.layers.0.mlp.net.1.weight",
        "action": "action_encoder.patch_embed.weight",  # (smooth, chunk, 1)
        "action_mlp": "action_encoder.embed.0.weight",
    }
    missing = [key for key in keys.values() if key not in tensors]
    if missing:
        raise UserError(f"not a LeWM checkpoint as stable-worldmodel saves it; missing: {first_few(missing)}")
    shape = {name: tuple(tensors[key].shape) for name, key in keys.items()}

    def at(*names: str) -> str:
        return " and ".join(f"{keys[name]} {shape[name]}" for name in names)

    axes = {"patch": 4, "grid": 3, "positions": 3, "action": 3}
    for name, key in keys.items():
        if len(shape[name]) != axes.get(name, 2) or 0 in shape[name]:
            raise UserError(f"of wrong shape: {key} {shape[name]}, which needs {axes.get(name, 2)} axes")
    width, _, _, patch = shape["patch"]
    patches = shape["grid"][1] - 1
    grid = math.isqrt(patches)
    if not patches or grid**2 != patches:
        raise UserError(f"of wrong shape: {at('grid')} has {patches} patches, which make no square image")
    _, history, latent = shape["positions"]
    inner, predictor_width = shape["qkv"][0] // 3, shape["qkv"][1]
    if predictor_width != latent:
        raise UserError(
            f"of wrong shape: {at('qkv', 'positions')}; a predictor {predictor_width} wide for latents of {latent} "
            f"numbers is not supported here"
        )
    smooth, chunk, _ = shape["action"]
    if task.action_size is None:
        raise UserError(f"its frameskip depends on the action size: set action_size in the task {task.name}")
    if chunk % task.action_size:
        raise UserError(
            f"of wrong shape: {at('action')}; its action chunk has {chunk} numbers, not a multiple of the "
            f"{task.action_size} of {task.name}: "
            f"is it a model of another task?"
        )
    encoder, predictor = _section(settings, "encoder"), _section(settings, "predictor")
    encoder |= _section(encoder, "config")  # of a transformers.ViTModel
    usual = next((size[2] for size in VIT_SIZES if size[0] == width), width // HEAD_DIM)
    head_dim = _number(predictor, "dim_head", HEAD_DIM)
    heads = _number(predictor, "heads", max(1, inner // head_dim))
    if 3 * heads * head_dim != shape["qkv"][0]:
        raise UserError(
            f"{at('qkv')} holds queries, keys and values of {inner} channels each, which are not {heads} heads of "
            f"{head_dim}: its shape is wrong, or predictor.heads and predictor.dim_head in {SETTINGS} do not match "
            f"the training"
        )
    try:
        return ModelConfig(
            encoder=EncoderConfig(
                image_size=grid * patch,
                patch_size=patch,
                width=width,
                depth=_count(tensors, "encoder.layers."),
                heads=_number(encoder, "num_attention_heads", max(1, usual)),
                mlp_ratio=_ratio(shape["mlp"][0], width),
                norm_eps=_number(encoder, "layer_norm_eps", VIT_EPS),
            ),
            predictor=PredictorConfig(
                width=predictor_width,
                depth=_count(tensors, "predictor.transformer.layers."),
                heads=heads,
                head_dim=head_dim,
                mlp=shape["predictor_mlp"][0],
            ),
            latent=latent,
            hidden=shape["projector"][0],
            action_smooth=smooth,
            action_hidden=shape["action_mlp"][0],
            history=history,
            frameskip=chunk // task.action_size,
        )
    except UserError as error:  # an invalid size: name the tensor that it comes from
        read_from = {
            "encoder.image_size": ("grid", "patch"),
            "encoder.": ("patch", "mlp"),
            "predictor.": ("qkv", "predictor_mlp"),
            "model.history": ("positions",),
            "model.latent": ("positions",),
            "model.hidden": ("projector",),
            "model.action_hidden": ("action_mlp",),
            "model.": ("action",),
        }
        names = next((names for setting, names in read_from.items() if setting in str(error)), tuple(keys))
        raise UserError(f"of wrong shape: {at(*names)}; {error}") from error


def _ratio(mlp: int, width: int) -> float:
    """The ratio for which int(width · ratio), which timm computes, is the MLP's width."""
    ratio = mlp / width
    return ratio if int(width * ratio) == mlp else math.nextafter(ratio, math.inf)


def _count(tensors: dict[str, Tensor], prefix: str) -> int:
    return len({name.removeprefix(prefix).split(".")[0] for name in tensors if name.startswith(prefix)})


def _section(settings: Any, name: str) -> dict[str, Any]:
    section = settings.get(name, {}) if isinstance(settings, dict) else None
    if not isinstance(section, dict):
        raise UserError(f"its {SETTINGS} is not that of a LeWM: {name} must be an object")
    return dict(section)


def _number(section: dict[str, Any], name: str, default: T) -> T:
    value = section.get(name, default)
    if isinstance(value, bool) or not isinstance(value, type(default)) or value <= 0:
        raise UserError(f"{name} in its {SETTINGS} must be a positive {type(default).__name__}, not {value!r}")
    return value


def obstacle(config: ModelConfig) -> str | None:
    """Why the model does not fit LeWM's architecture; None if it does."""
    encoder, predictor = config.encoder, config.predictor
    pixels = (encoder.pixel_mean, encoder.pixel_std)
    obstacles = {
        f"its encoder is of kind {encoder.kind}, LeWM's is a ViT that is trained": encoder.kind != "vit",
        f"its predictor is of kind {predictor.kind}, LeWM's is causal": predictor.kind != "causal",
        f"its predictor is {predictor.width} wide and its latent {config.latent}, which must be the same": (
            predictor.width != config.latent
        ),
        f"the width {config.action_hidden} of its action encoder is no multiple of its latent's {config.latent}": (
            config.action_hidden % config.latent != 0
        ),
        "its predictor has one head as wide as itself, which LeWM does not project": (
            predictor.heads == 1 and predictor.head_dim == predictor.width
        ),
        "it has an inverse-dynamics head": config.inverse_hidden > 0,
        "its pixels are not scaled by ImageNet's mean and std": pixels != (IMAGENET_MEAN, IMAGENET_STD),
    }
    return next((reason for reason, holds in obstacles.items() if holds), None)


def hydra_config(config: ModelConfig, action_size: int) -> dict[str, Any]:
    """In the layout of published checkpoints, from which stable-worldmodel's load_pretrained makes the model."""
    encoder, predictor, latent = config.encoder, config.predictor, config.latent
    module = "stable_worldmodel.wm.lewm.module"

    def mlp(size: int) -> dict[str, Any]:
        return {
            "_target_": f"{module}.MLP",
            "input_dim": size,
            "hidden_dim": config.hidden,
            "output_dim": latent,
            "norm_fn": {"_target_": "torch.nn.BatchNorm1d", "_partial_": True},
        }

    return {
        "_target_": "stable_worldmodel.wm.lewm.LeWM",
        "encoder": _hydra_encoder(encoder),
        "predictor": {
            "_target_": f"{module}.Predictor",
            "num_frames": config.history,
            "depth": predictor.depth,
            "heads": predictor.heads,
            "dim_head": predictor.head_dim,
            "mlp_dim": predictor.mlp,
            "input_dim": latent,
            "hidden_dim": latent,
            "output_dim": latent,
            "dropout": predictor.dropout,
            "emb_dropout": 0.0,
        },
        "action_encoder": {
            "_target_": f"{module}.Embedder",
            "input_dim": config.frameskip * action_size,
            "smoothed_dim": config.action_smooth,
            "emb_dim": latent,
            "mlp_scale": config.action_hidden // latent,
        },
        "projector": mlp(encoder.width),
        "pred_proj": mlp(latent),
    }


def _hydra_encoder(encoder: EncoderConfig) -> dict[str, Any]:
    mlp = int(encoder.width * encoder.mlp_ratio)
    size = VIT_SIZES.get((encoder.width, encoder.depth, encoder.heads, mlp))
    if size is not None and encoder.norm_eps == VIT_EPS:
        return {
            "_target_": "stable_pretraining.backbone.utils.vit_hf",
            "size": size,
            "patch_size": encoder.patch_size,
            "image_size": encoder.image_size,
            "pretrained": False,
            "use_mask_token": False,
        }
    # vit_hf only makes ViTs of named sizes, with Hugging Face's epsilon.
    return {
        "_target_": "transformers.ViTModel",
        "config": {
            "_target_": "transformers.ViTConfig",
            "hidden_size": encoder.width,
            "num_hidden_layers": encoder.depth,
            "num_attention_heads": encoder.heads,
            "intermediate_size": mlp,
            "patch_size": encoder.patch_size,
            "image_size": encoder.image_size,
            "layer_norm_eps": encoder.norm_eps,
        },
        "add_pooling_layer": False,
    }
