"""Import and export LeWM checkpoints of stable-worldmodel: weights.pt, a state dict, and config.json for hydra.

The numbers are the same on both sides. The names differ, as do q, k and v (separate in Hugging Face's ViT, one
matrix here) and an axis of length 1 in two tensors.
"""

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from atlas_wm.config import RunInfo
from atlas_wm.convert.dinov2 import read_tensors
from atlas_wm.convert.lewm_config import CHECKPOINT, SETTINGS, first_few, hydra_config, obstacle, sizes
from atlas_wm.data.states import save_states
from atlas_wm.data.training_set import open_training_set
from atlas_wm.errors import UserError
from atlas_wm.methods import get_method
from atlas_wm.models.image_bank import ImageBank
from atlas_wm.models.world_model import WorldModel
from atlas_wm.runs.card import write_card
from atlas_wm.runs.files import read_json, write_json
from atlas_wm.runs.folder import new_run_folder
from atlas_wm.runs.model import load_model, save_model
from atlas_wm.runs.versions import versions
from atlas_wm.tasks import Task, task_id

log = logging.getLogger(__name__)
Names = Literal["installed", "old", "new"]

# Our names and theirs; # is the index of a block. Weights and biases follow their layer.
LAYERS = {
    "encoder.vit.cls_token": "encoder.embeddings.cls_token",
    "encoder.vit.pos_embed": "encoder.embeddings.position_embeddings",
    "encoder.vit.patch_embed.proj": "encoder.embeddings.patch_embeddings.projection",
    "encoder.vit.blocks.#.norm1": "encoder.layers.#.layernorm_before",
    "encoder.vit.blocks.#.attn.qkv": "encoder.layers.#.attention.[qkv]_proj",
    "encoder.vit.blocks.#.attn.proj": "encoder.layers.#.attention.o_proj",
    "encoder.vit.blocks.#.norm2": "encoder.layers.#.layernorm_after",
    "encoder.vit.blocks.#.mlp.fc1": "encoder.layers.#.mlp.fc1",
    "encoder.vit.blocks.#.mlp.fc2": "encoder.layers.#.mlp.fc2",
    "encoder.vit.norm": "encoder.layernorm",
    "projector.up": "projector.net.0",
    "projector.norm": "projector.net.1",
    "projector.down": "projector.net.3",
    "predictor.action_encoder.0": "action_encoder.patch_embed",
    "predictor.action_encoder.1": "action_encoder.embed.0",
    "predictor.action_encoder.3": "action_encoder.embed.2",
    "predictor.positions": "predictor.pos_embedding",
    "predictor.blocks.#.attention_norm": "predictor.transformer.layers.#.attn.norm",
    "predictor.blocks.#.attention.to_qkv": "predictor.transformer.layers.#.attn.to_qkv",
    "predictor.blocks.#.attention.out": "predictor.transformer.layers.#.attn.to_out.0",
    "predictor.blocks.#.mlp_norm": "predictor.transformer.layers.#.mlp.net.0",
    "predictor.blocks.#.mlp.up": "predictor.transformer.layers.#.mlp.net.1",
    "predictor.blocks.#.mlp.down": "predictor.transformer.layers.#.mlp.net.4",
    "predictor.blocks.#.modulation.1": "predictor.transformer.layers.#.adaLN_modulation.1",
    "predictor.norm": "predictor.transformer.norm",
    "predictor.head.up": "pred_proj.net.0",
    "predictor.head.norm": "pred_proj.net.1",
    "predictor.head.down": "pred_proj.net.3",
}
AXIS_OF_ONE = {"predictor.pos_embedding": 0, "action_encoder.patch_embed.weight": 2}  # a convolution of width 1

# transformers renamed the layers of its ViT (5.22 has the new names). Published checkpoints use the old names.
VIT_LAYER = re.compile(r"encoder\.(?:encoder\.)?layers?\.(\d+)\.(.+)\.(weight|bias)")
OLD_NAMES = {
    "attention.q_proj": "attention.attention.query",
    "attention.k_proj": "attention.attention.key",
    "attention.v_proj": "attention.attention.value",
    "attention.o_proj": "attention.output.dense",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}
NEW_NAMES = {old: new for new, old in OLD_NAMES.items()}
# Parts of Hugging Face's ViT that LeWM does not use: it reads the CLS token.
UNUSED = ("encoder.pooler.", "encoder.embeddings.mask_token")


def import_lewm(path: Path, task: Task, data_path: str | Path, out: Path, *, overwrite: bool = False) -> Path:
    """Make a run folder from a checkpoint: a folder with weights.pt and config.json, or the .pt file itself.

    A checkpoint does not store the statistics of its actions: they are computed from ``data_path``, as in training.
    """
    path = path / CHECKPOINT if path.is_dir() else path
    theirs = read_checkpoint(path)
    settings = read_json(path.with_name(SETTINGS)) if path.with_name(SETTINGS).exists() else {}
    try:
        model_config = sizes(theirs, settings, task)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    assert task.action_size is not None  # sizes checks
    config = replace(get_method("lewm").run_config, model=model_config)
    with torch.device("meta"):  # allocate memory only if the tensors match
        weights = WorldModel(model_config, task.action_size).state_dict()
    check_tensors(path, theirs, to_lewm(weights))
    model = WorldModel(model_config, task.action_size)
    model.load_state_dict(from_lewm(theirs, weights))
    with new_run_folder(out, overwrite) as folder:
        ready = open_training_set(data_path, task, config)
        model.normalizer = ready.normalizer
        model.run = RunInfo(
            task=task_id(task),
            method="lewm",
            recipe="imported",
            action_size=task.action_size,
            config=config,
            data=ready.info,
            device="cpu",
            versions=versions(),
        )
        model.build_bank(ready.sample_frames(), ImageBank.of(*ready.image_frames()))
        save_model(model, folder)
        save_states(folder, ready.data, model.run)
        write_card(folder)
    return out


def export_lewm(run: Path, out: Path, *, names: Names = "installed", overwrite: bool = False) -> Path:
    """Write a folder with weights.pt and config.json that stable-worldmodel loads as its LeWM.

    names: names of the encoder's layers: those of the installed transformers, or the old or new ones.
    """
    model = load_model(run)
    reason = obstacle(model.config)
    if reason is not None:
        raise UserError(f"{run} does not fit LeWM's architecture: {reason}")
    old = names == "old" or (names == "installed" and installed_names_are_old())
    weights = to_lewm(model.state_dict())
    parts = {"bank": model.bank, "demonstrations": model.demonstrations, "temporal head": model.temporal_head}
    if left_out := [name for name, part in parts.items() if part is not None]:
        log.info("not exported, as LeWM's format has no place for them: %s", ", ".join(left_out))
    with new_run_folder(out, overwrite) as folder:
        torch.save(
            {old_name(name) if old else name: tensor for name, tensor in weights.items()}, folder / CHECKPOINT
        )
        write_json(folder / SETTINGS, hydra_config(model.config, model.action_size))
    return out


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """The tensors of a .pt file, by their new names. Nothing in the file is executed."""
    if not path.is_file():
        raise UserError(f"there is no file {path}: name a folder with {CHECKPOINT}, or the .pt file itself")
    stored = read_tensors(path)
    if stored is None:
        raise UserError(
            f"{path} is refused: it is damaged, or holds objects other than named tensors, which could run code "
            f"when loaded; save it again with torch.save(model.state_dict(), ...)"
        )
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        renamed = new_name(str(name))
        if renamed in tensors:
            raise UserError(f"{path} has {renamed} twice, under its old and its new name: remove one of them")
        if not renamed.startswith(UNUSED):
            tensors[renamed] = tensor
    for name, tensor in tensors.items():
        if tensor.is_complex() or not bool(tensor.float().isfinite().all()):
            raise UserError(f"{path} is damaged, or its training failed: {name} is not finite")
    return tensors


def new_name(name: str) -> str:
    layer = VIT_LAYER.fullmatch(name)
    return f"encoder.layers.{layer[1]}.{NEW_NAMES.get(layer[2], layer[2])}.{layer[3]}" if layer else name


def old_name(name: str) -> str:
    layer = VIT_LAYER.fullmatch(name)
    return f"encoder.encoder.layer.{layer[1]}.{OLD_NAMES.get(layer[2], layer[2])}.{layer[3]}" if layer else name


def installed_names_are_old() -> bool:
    """Whether the installed transformers uses the old names; True if there is none, as in published checkpoints."""
    try:
        from transformers import ViTConfig, ViTModel
    except ImportError:
        return True
    smallest = ViTConfig(hidden_size=1, num_hidden_layers=1, num_attention_heads=1, intermediate_size=1)
    return any(name.startswith("encoder.") for name in ViTModel(smallest, add_pooling_layer=False).state_dict())


def their_names(ours: str) -> list[str]:
    """Usually one name; three for the encoder's qkv."""
    number = re.search(r"(?<=blocks\.)\d+", ours)
    generic = re.sub(r"(?<=blocks\.)\d+", "#", ours)
    if generic in LAYERS:
        theirs = LAYERS[generic]
    else:
        layer, _, leaf = generic.rpartition(".")
        theirs = f"{LAYERS[layer]}.{leaf}"
    theirs = theirs.replace("#", number[0] if number else "")
    return [theirs.replace("[qkv]", letter) for letter in "qkv"] if "[qkv]" in theirs else [theirs]


def to_lewm(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    theirs = {}
    for ours, tensor in weights.items():
        names = their_names(ours)
        for name, part in zip(names, tensor.chunk(len(names)) if len(names) > 1 else [tensor], strict=True):
            theirs[name] = part.unsqueeze(AXIS_OF_ONE[name]) if name in AXIS_OF_ONE else part.clone()
    return theirs


def from_lewm(theirs: dict[str, Tensor], like: dict[str, Tensor]) -> dict[str, Tensor]:
    """``like``: our tensors, which give the names and shapes."""
    parts = {ours: [theirs[name] for name in their_names(ours)] for ours in like}
    return {
        ours: (torch.cat(tensors) if len(tensors) > 1 else tensors[0]).reshape(like[ours].shape)
        for ours, tensors in parts.items()
    }


def check_tensors(path: Path, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    shapes = [
        f"{name} {tuple(found[name].shape)} instead of {tuple(wanted[name].shape)}"
        for name in wanted
        if name in found and found[name].shape != wanted[name].shape
    ]
    integers = [
        f"{name} ({str(found[name].dtype).removeprefix('torch.')})"
        for name in wanted
        if name in found and wanted[name].is_floating_point() and not found[name].is_floating_point()
    ]
    faults = {
        "missing": [name for name in wanted if name not in found],
        "unexpected": [name for name in found if name not in wanted],
        "of wrong shape": shapes,
        "not floating-point": integers,
    }
    if any(faults.values()):
        listed = "; ".join(f"{kind}: {first_few(names)}" for kind, names in faults.items() if names)
        raise UserError(f"{path} is not the checkpoint of a whole LeWM, as stable-worldmodel saves it: {listed}")
