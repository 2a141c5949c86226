"""Trained models on disk and on the Hugging Face hub: load, save, publish."""

import logging
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atlas_wm.errors import UserError
from atlas_wm.models.bank import LatentBank
from atlas_wm.models.demonstrations import Demonstrations
from atlas_wm.models.image_bank import COLOURS, SIDE, ImageBank
from atlas_wm.models.temporal_head import TemporalHead
from atlas_wm.models.world_model import TRAINING_ONLY, WorldModel
from atlas_wm.runs.card import CARD, model_card
from atlas_wm.runs.files import write_atomically, write_tensors
from atlas_wm.runs.folder import (
    BANK,
    DEMONSTRATIONS,
    STATES,
    TEMPORAL_HEAD,
    TERMS,
    WEIGHTS,
    read_bank,
    read_run,
    read_states,
    read_weights,
    weights_path,
    write_info,
)
from atlas_wm.runs.hub import fetch, publish
from atlas_wm.runs.shipped import shipped

log = logging.getLogger(__name__)


def load_model(
    source: str | Path,
    device: torch.device | str = "cpu",
    *,
    revision: str | None = None,
    weights: str | None = None,
) -> WorldModel:
    """Load a trained model, in eval mode, from a run folder or from a Hugging Face repository ``user/name``.
    ``demo`` is a model that comes with the package.

    ``model.run`` holds the settings it was trained with. ``revision``: branch, tag or commit on the hub.
    ``weights``: other weights of a run folder than the final ones, such as ``best`` or ``step-2000``. The latent
    bank, the demonstrations and the temporal head belong to the final weights, so the model has none then.
    """
    source = shipped(source) or source
    if is_hub_id(source):
        source = fetch(str(source), revision)
    info, normalizer = read_run(source)
    with torch.device("meta"):  # compare names and shapes before the model takes any memory
        expected = WorldModel(info.config.model, info.action_size, normalizer).state_dict()
    tensors = read_weights(weights_path(source, weights), expected)
    model = WorldModel(info.config.model, info.action_size, normalizer)
    model.load_state_dict(tensors)
    model.run = info
    if weights is None:
        width = info.config.model.latent_shape[-1]
        model.bank = load_bank(source, width)
        chunk = info.config.model.frameskip * info.action_size
        model.demonstrations = load_demonstrations(source, width, chunk)
        model.temporal_head = load_temporal_head(source, width)
    model.states = read_states(source)
    return model.eval().to(device)


def is_hub_id(source: str | Path) -> bool:
    """Whether ``user/name`` means a Hugging Face repository: it looks like one, and there is no folder ``user``."""
    looks_like_one = isinstance(source, str) and source.count("/") == 1 and not source.startswith((".", "/"))
    return looks_like_one and not Path(source).parent.is_dir()


def absolute_source(source: str | Path) -> str:
    """A run folder with its whole path, so that it means the same from any folder; a hub id as it is."""
    return str(source) if is_hub_id(source) else str((shipped(source) or Path(source)).resolve())


def save_model(model: WorldModel, folder: str | Path) -> None:
    """Write what :func:`load_model` reads: settings, weights, normalizer and, where there are, bank,
    demonstrations, temporal head and states.

    The parameters of the user's loss terms go to a file of their own, which load_model does not read.
    """
    if model.run is None:
        raise UserError("only a trained or loaded model can be saved: set model.run to its RunInfo")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_info(folder, model.run, model.normalizer)
    state = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
    write_tensors(folder / WEIGHTS, {n: t for n, t in state.items() if not n.startswith(TRAINING_ONLY)})
    terms = {n.removeprefix("terms.").replace("/", "."): t for n, t in state.items() if n.startswith("terms.")}
    parts: list[tuple[str, Any, Callable[[Any, Path], None]]] = [
        (TERMS, terms or None, lambda terms, folder: write_tensors(folder / TERMS, terms)),
        (BANK, model.bank, save_bank),
        (DEMONSTRATIONS, model.demonstrations, save_demonstrations),
        (TEMPORAL_HEAD, model.temporal_head, save_temporal_head),
    ]
    for name, part, save in parts:
        if part is None:
            (folder / name).unlink(missing_ok=True)  # of another model that was saved here
        else:
            save(part, folder)
    if model.states is not None:
        with write_atomically(folder / STATES) as temporary:
            temporary.write_bytes(model.states)


def push_to_hub(model: WorldModel, repo_id: str, private: bool | None = None) -> str:
    """Upload the model to a Hugging Face repository, creating it if needed. Returns its URL.

    Paths of the training data and of the run it started from may reveal your machine: only their last parts are
    published.
    """
    with TemporaryDirectory() as folder:
        save_model(model, folder)
        assert model.run is not None  # save_model checks
        data = replace(model.run.data, path=Path(model.run.data.path).name)
        init = model.run.init and (model.run.init if is_hub_id(model.run.init) else Path(model.run.init).name)
        write_info(Path(folder), replace(model.run, data=data, init=init), model.normalizer)
        parameters = sum(p.numel() for p in model.parameters())
        Path(folder, CARD).write_text(model_card(model.run, parameters, repo_id=repo_id))
        return publish(Path(folder), repo_id, private)


def load_bank(folder: str | Path, width: int) -> LatentBank | None:
    """The bank of a run folder, or None. width: coordinates of the model's points. Older banks have no images."""
    stored = read_bank(folder)
    if stored is None:
        return None
    path = Path(folder) / BANK
    remedy = f"delete it and make it again with `atlas bank {folder}`"
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    count, judged = (stored[name].numel() if name in stored else 0 for name in ("novelty", "image_novelty"))
    expected: dict[str, tuple[int, ...]] = {"points": (count, width), "novelty": (count,)}
    if judged:
        expected |= {"image_colours": (SIDE**2, COLOURS, 3), "image_novelty": (judged,)}
    if "footprints" in stored:
        expected["footprints"] = (count, SIDE**2 // 8)
    if count < 2 or shapes != expected:
        raise UserError(
            f"{path} does not fit the model, whose points have {width} coordinates (it holds {shapes}): {remedy}"
        )
    if not all(tensor.isfinite().all() for tensor in stored.values()):
        raise UserError(f"{path} is damaged (it is not finite): {remedy}")
    images = None
    if judged:
        images = ImageBank(stored["image_colours"].to(torch.uint8), stored["image_novelty"].float())
    footprints = _unpacked(stored["footprints"]) if "footprints" in stored else None
    return LatentBank(stored["points"].float(), stored["novelty"].double(), images, footprints)


def save_bank(bank: LatentBank, folder: Path) -> None:
    tensors = {"points": bank.points, "novelty": bank.novelty}
    if bank.images is not None:
        tensors |= {"image_colours": bank.images.colours, "image_novelty": bank.images.novelty}
    if bank.footprints is not None:
        tensors["footprints"] = torch.from_numpy(np.packbits(bank.footprints.numpy(), axis=1))
    write_tensors(folder / BANK, tensors)


def _unpacked(bits: Tensor) -> Tensor:
    """(N, P / 8) → (N, P) bool"""
    return torch.from_numpy(np.unpackbits(bits.to(torch.uint8).numpy(), axis=1)).bool()


def load_demonstrations(folder: str | Path, width: int, chunk: int) -> Demonstrations | None:
    """The demonstrations of a run folder, or None. width, chunk: numbers of a point and of an action chunk."""
    stored = read_bank(folder, DEMONSTRATIONS)
    if stored is None:
        return None
    path, remedy = Path(folder) / DEMONSTRATIONS, f"delete it and make it again with `atlas bank {folder}`"
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    count = stored["episodes"].numel() if "episodes" in stored else 0
    wanted = {"points": (count, width), "actions": (count, chunk), "episodes": (count,)}
    if "usual" in stored:
        wanted["usual"] = (stored["usual"].numel(),)
    if count == 0 or shapes != wanted or any(tensor.is_complex() for tensor in stored.values()):
        raise UserError(
            f"{path} does not fit the model, whose points have {width} coordinates and action chunks {chunk} (it "
            f"holds {shapes}): {remedy}"
        )
    if not all(tensor.isfinite().all() for tensor in stored.values()):
        raise UserError(f"{path} is damaged (it is not finite): {remedy}")
    usual = stored["usual"].float() if "usual" in stored else None
    return Demonstrations(stored["points"].half(), stored["actions"].float(), stored["episodes"].long(), usual)


def save_demonstrations(demonstrations: Demonstrations, folder: Path) -> None:
    tensors = {field.name: getattr(demonstrations, field.name) for field in fields(demonstrations)}
    write_tensors(folder / DEMONSTRATIONS, {name: t for name, t in tensors.items() if t is not None})


def load_temporal_head(folder: str | Path, width: int) -> TemporalHead | None:
    """The temporal head of a run folder, or None. width: coordinates of the model's points."""
    stored = read_bank(folder, TEMPORAL_HEAD)
    if stored is None:
        return None
    path, remedy = Path(folder) / TEMPORAL_HEAD, f"delete it and make it again with `atlas head {folder}`"
    if "scale" in stored and "step" not in stored:
        log.warning("%s is of an older version and not used: make it again with `atlas head %s`", path, folder)
        return None
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    if shapes != TemporalHead.shapes(width) or any(tensor.is_complex() for tensor in stored.values()):
        raise UserError(
            f"{path} does not fit the model, whose points have {width} coordinates (it holds {shapes}): {remedy}"
        )
    head = TemporalHead(**{name: tensor.float() for name, tensor in stored.items()})
    if not all(tensor.isfinite().all() for tensor in vars(head).values()) or head.step <= 0:
        raise UserError(f"{path} is damaged (it is not finite, or its step has no length): {remedy}")
    return head


def save_temporal_head(head: TemporalHead, folder: Path) -> None:
    write_tensors(folder / TEMPORAL_HEAD, {name: t.cpu().contiguous() for name, t in vars(head).items()})
