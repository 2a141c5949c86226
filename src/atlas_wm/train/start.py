"""What happens before the first step: the run folder is opened or resumed, and the model is made."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from atlas_wm.config import RunConfig, RunInfo
from atlas_wm.convert.dinov2 import load_dinov2
from atlas_wm.data.states import save_states
from atlas_wm.data.training_set import TrainingSet
from atlas_wm.errors import UserError
from atlas_wm.models.world_model import WorldModel
from atlas_wm.parallel.devices import free_memory
from atlas_wm.parallel.processes import from_main, is_main, world_size
from atlas_wm.runs.files import saving
from atlas_wm.runs.folder import NOT_FINITE, training_folder, write_info
from atlas_wm.runs.model import absolute_source, load_model
from atlas_wm.runs.versions import versions
from atlas_wm.tasks import Task, task_id
from atlas_wm.train.checkpointer import Saved, bytes_needed, check_room, previous
from atlas_wm.train.step import is_mixed

log = logging.getLogger(__name__)


def check_memory(config: RunConfig, device: torch.device) -> None:
    """On a CPU the system kills what needs more memory than is free: refuse to train then, or warn where a step
    may need more."""
    if device.type != "cpu":
        return
    needed, free = step_bytes(config, device), free_memory(device)
    text = (
        f"a training step of {config.train.batch} clips needs about {needed / 1e9:.1f} GB of memory, of which "
        f"{free / 1e9:.1f} are free: use --recipe demo, a smaller --train.batch, or a GPU"
    )
    if needed > free:
        raise UserError(text)
    if 1.5 * needed > free:  # see step_bytes
        log.warning("%s", text)


def step_bytes(config: RunConfig, device: torch.device) -> int:
    """What the encoder stores for the backward pass, most of the memory of a step, in each process. 0 for encoders
    that are frozen or your own.

    Each block stores 9 numbers per token and unit of width, and the input and output of the GELU. Whole steps of
    the recipes took 1.0 to 1.5 times as much.
    """
    encoder, clips = config.model.encoder, -(-config.train.batch // world_size())
    if encoder.kind != "vit":
        return 0
    tokens = clips * config.model.clip_frames * (encoder.patches + 1)
    numbers = tokens * encoder.depth * encoder.width * (9 + 2 * encoder.mlp_ratio)
    return int(numbers) * (2 if is_mixed(config.train, device) else 4)


@contextmanager
def shared_folder(out: Path, overwrite: bool) -> Iterator[Path]:
    """The folder that a run is written to. The main process creates and locks it."""
    with training_folder(out, overwrite) if is_main() else nullcontext(out) as folder:
        yield from_main(folder)


def run_info(
    config: RunConfig,
    task: Task,
    training_set: TrainingSet,
    device: torch.device,
    method: str,
    recipe: str,
    init: str | Path | None,
) -> RunInfo:
    return RunInfo(
        task=task_id(task),
        method=method,
        recipe=recipe,
        action_size=training_set.normalizer.size,
        config=config,
        data=training_set.info,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        versions=versions(),
        init=None if init is None else absolute_source(init),
    )


def start_or_resume(folder: Path, info: RunInfo, training_set: TrainingSet, overwrite: bool) -> Saved | None:
    """The checkpoint to resume from, None for a new run. The main process decides, and writes the settings."""
    saved = None
    if is_main():
        saved = previous(folder, info, overwrite)
        with saving(folder):
            write_info(folder, info, training_set.normalizer)
            save_states(folder, training_set.data, info)
            (folder / NOT_FINITE).unlink(missing_ok=True)
    saved = from_main(saved)
    if saved is not None:
        log.info("resuming from step %d of %d in %s", saved.step, training_set.steps, folder)
    return saved


def make_model(info: RunInfo, training_set: TrainingSet, resumed: bool) -> WorldModel:
    """The model with its initial weights. A resumed run gets them from its checkpoint, not from ``info.init``.

    Other processes get the main one's weights before the first step.
    """
    config = info.config.model
    source = load_model(info.init).state_dict() if info.init and is_main() and not resumed else None
    torch.manual_seed(info.config.train.seed)
    model = WorldModel(config, info.action_size, training_set.normalizer)
    model.run = info
    if source is not None:
        initialise(model, source, str(info.init))
    if config.encoder.frozen:
        load_dinov2(model.encoder, config.encoder.weights)
    model.prepare_training(info.config.objective)  # last: an EMA target starts from these weights
    return model


def initialise(model: nn.Module, source: Mapping[str, Tensor], name: str) -> None:
    """Load every tensor whose name and shape match. Logs which did not."""
    own = model.state_dict()
    matching = {key: tensor for key, tensor in source.items() if key in own and own[key].shape == tensor.shape}
    if not any(key in matching for key, _ in model.named_parameters()):
        raise UserError(
            f"--init {name}: none of its {len(source)} tensors has the name and shape of one in this model: choose "
            f"a run of the same architecture, or leave --init out"
        )
    model.load_state_dict(matching, strict=False)

    def shape(tensors: Mapping[str, Tensor], key: str) -> str:
        return str(tuple(tensors[key].shape)) if key in tensors else "none"

    others = [f"{key} ({shape(own, key)} here, {shape(source, key)} there)" for key in own if key not in matching]
    others += [f"{key} (none here, {shape(source, key)} there)" for key in source if key not in own]
    missing = f"; not loaded: {', '.join(others)}" if others else ""
    log.info("loaded %d of %d tensors from %s%s", len(matching), len(own), name, missing)


def token_encoder(
    model: WorldModel, settings: RunConfig, device: torch.device
) -> Callable[[Tensor], Tensor] | None:
    """(n, 3, S, S) uint8 frames → (n, K, w) tokens of a frozen encoder; None for an encoder that is trained."""
    if not settings.model.encoder.frozen:
        return None
    model.to(device)

    @torch.inference_mode()
    def encode(frames: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=is_mixed(settings.train, device)):
            return model.encode(frames.to(device)).float()

    return encode


def check_disk(folder: Path, model: WorldModel, training_set: TrainingSet) -> None:
    """Refuse a new run that would fill the disk."""
    if is_main():
        check_room(folder, bytes_needed(model, training_set.config.train, training_set.steps), "this run")
