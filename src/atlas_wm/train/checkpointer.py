"""Checkpoints: the full state of a run after a step, in checksummed safetensors files.

    checkpoints/step-00001200.safetensors   weights, optimiser, random states, losses since the last report
    checkpoints/step-00001200.sha256        its checksum, written last; `sha256sum -c` reads it too
    weights/best.safetensors                weights of the best validation; every k steps: step-….safetensors

Clip order, projection directions and learning rate are functions of (seed, step), so they are not stored.
"""

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from atlas_wm.config import RunInfo, TrainConfig
from atlas_wm.errors import UserError
from atlas_wm.models.world_model import TRAINING_ONLY
from atlas_wm.rng import TrainRng, make_rng
from atlas_wm.runs.files import LOCK, saving, write_atomically
from atlas_wm.runs.folder import BEST, CHECKPOINTS, OTHER_WEIGHTS, read_run, step_name
from atlas_wm.settings import to_dict
from atlas_wm.train.monitors import StopSignals

log = logging.getLogger(__name__)
CHECKPOINTS_TO_KEEP = 2  # if the last one is damaged, there is another
MIN_SECONDS, MAX_SHARE = 60.0, 0.01  # between checkpoints; of the time that saving may take
SPARE = 2**20  # bytes for the small files beside a checkpoint
NOT_COMPARED = {
    "train.workers",
    "train.cache_frames",
    "train.probe",
    "train.best",
    "train.checkpoint_every",
    "train.save_every",
    "plan.clip_actions",
}  # settings that do not change the weights


class Saved(NamedTuple):
    tensors: dict[str, Tensor]
    notes: dict[str, Any]  # the step, and other facts

    @property
    def step(self) -> int:
        return int(self.notes["step"])

    def part(self, prefix: str) -> dict[str, Tensor]:
        """``model`` → the tensors named ``model.…``, without the prefix."""
        return {n.partition(".")[2]: t for n, t in self.tensors.items() if n.partition(".")[0] == prefix}


class Damaged(Exception):
    """The file is not what was written."""


def write_saved(path: Path, saved: Saved) -> None:
    """Atomic: first the tensors, then their checksum. Each file is on disk before it gets its name."""
    data = safetensors.torch.save(saved.tensors, {"notes": json.dumps(saved.notes)})
    with saving(path.parent):
        path.parent.mkdir(exist_ok=True)
        check_room(path.parent, len(data))
        with write_atomically(path) as temporary:
            temporary.write_bytes(data)
        with write_atomically(checksum_of(path)) as temporary:
            temporary.write_text(f"{hashlib.sha256(data).hexdigest()}  {path.name}\n")


def read_saved(path: Path) -> Saved:
    try:
        data = path.read_bytes()
        expected = checksum_of(path).read_bytes()[:64].decode("ascii", "replace")
    except OSError as error:
        raise Damaged(f"it cannot be read: {error.strerror}") from error
    if hashlib.sha256(data).hexdigest() != expected:
        raise Damaged("its checksum differs")
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return Saved(safetensors.torch.load(data), json.loads(header["__metadata__"]["notes"]))
    except (SafetensorError, ValueError, KeyError) as error:
        raise Damaged(f"training did not write it: {error}") from error


def checksum_of(path: Path) -> Path:
    return path.with_suffix(".sha256")


def check_room(folder: Path, needed: int, what: str = "a checkpoint") -> None:
    free = shutil.disk_usage(folder).free
    if free < needed + SPARE:
        raise UserError(
            f"the disk of {folder} has {free / 1e6:,.0f} MB left, {what} needs {needed / 1e6:,.0f} MB: free some "
            f"space, and run the same command again to resume from the last checkpoint"
        )


def bytes_needed(model: nn.Module, settings: TrainConfig, steps: int) -> int:
    """The most that a run takes on disk at once, without metrics and tokens."""
    weights = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    checkpoint = weights + 2 * trained  # Adam's two moments
    exported = 3 + (
        steps // settings.save_every if settings.save_every else 0
    )  # the final weights, the best, a new best
    return (
        CHECKPOINTS_TO_KEEP + 1
    ) * checkpoint + exported * weights  # a new one is written before an old one goes


def previous(staging: Path, info: RunInfo, overwrite: bool) -> Saved | None:
    """The checkpoint of an interrupted run. None: start a new run; the folder is then empty."""
    found = checkpoints_in(staging)
    if found:
        obstacle = what_differs(staging, info)
        if obstacle is None:
            saved = last_good(found)
            if saved is not None:
                _sweep(staging)
                return saved
            obstacle = "none of its checkpoints is intact"
        if not overwrite:
            raise UserError(
                f"{staging} holds an interrupted run that cannot be resumed, because {obstacle}: use the settings "
                f"it was started with, pass --overwrite to start over, or choose another --out"
            )
    with saving(staging):
        for path in staging.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()
    return None


def checkpoints_in(staging: Path) -> list[Path]:
    """Completely written checkpoints, the latest first."""
    found = (staging / CHECKPOINTS).glob("step-*.sha256")
    return [path.with_suffix(".safetensors") for path in sorted(found, reverse=True)]


def last_good(found: list[Path]) -> Saved | None:
    """The latest intact checkpoint of a list, latest first. Removes the damaged ones after it."""
    for number, path in enumerate(found):
        try:
            saved = read_saved(path)
        except Damaged as error:
            older = "using the one before it" if number + 1 < len(found) else "there is no older one"
            log.warning("%s is damaged (%s): %s", path, error, older)
            continue
        with saving(path.parent):
            for later in found[:number]:
                remove(later)
        return saved
    return None


def _sweep(staging: Path) -> None:
    """Remove incomplete files of a process that was killed while writing."""
    with saving(staging):
        for path in staging.rglob("*.tmp"):
            path.unlink()
        for path in (staging / CHECKPOINTS).glob("*.safetensors"):
            if not checksum_of(path).exists():
                path.unlink()


def remove(path: Path) -> None:
    checksum_of(path).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def what_differs(staging: Path, info: RunInfo) -> str | None:
    """Why a run cannot be resumed as ``info``, None if it can. Another device or version only gets a warning."""
    try:
        before, _ = read_run(staging)
    except UserError as error:
        return str(error)
    old, new = (_facts(i) for i in (before, info))
    changed = [
        f"{name} was {old.get(name)}, is {new.get(name)}" for name in old | new if old.get(name) != new.get(name)
    ]
    if changed:
        return "; ".join(changed)
    if (before.device, before.versions) != (info.device, info.versions):
        log.warning(
            "%s was started on another device or with other versions: rounding may differ from here on", staging
        )
    return None


def _facts(info: RunInfo) -> dict[str, Any]:
    """Everything that decides the weights, by name."""

    def leaves(prefix: str, value: Any) -> dict[str, Any]:
        if isinstance(value, dict) and value:
            return {k: v for name, part in value.items() for k, v in leaves(f"{prefix}.{name}", part).items()}
        return {prefix.removeprefix("."): value}

    facts: dict[str, Any] = {"task": info.task, "method": info.method, "recipe": info.recipe, "init": info.init}
    facts["hash of the data"] = info.data.hash
    return facts | {
        name: value for name, value in leaves("", to_dict(info.config)).items() if name not in NOT_COMPARED
    }


class Checkpointer:
    """Restores the state of an interrupted run and saves checkpoints during training. Rank 0 writes, all ranks
    read."""

    def __init__(
        self,
        staging: Path,
        settings: TrainConfig,
        saved: Saved | None,
        stop: StopSignals,
        flush: Callable[[], None] = lambda: None,
        rank: int = 0,
        agree: Callable[[int], int] | None = None,
        **notes: Any,
    ):
        """flush: puts other files on disk before a checkpoint. notes: stored in every checkpoint.

        Several processes must stop at the same step: ``agree`` gives all of them the main process's signal.
        """
        self.staging, self.settings, self.saved, self.stop = staging, settings, saved, stop
        self.flush, self.notes, self.rank, self.agree = flush, notes, rank, agree
        self.step = saved.step if saved else 0
        self.save_seconds, self.last_save = 0.0, time.monotonic()
        self.best = self._best()

    def _best(self) -> float:
        try:
            return self._criterion(read_saved(self.staging / OTHER_WEIGHTS / f"{BEST}.safetensors").notes)
        except Damaged:
            return float("inf")

    def _criterion(self, notes: Mapping[str, Any]) -> float:
        """By which validations are compared: the lower, the better. A run without a planning score has the loss."""
        score, loss = notes.get("val_score"), notes.get("val_total")
        if self.settings.best == "score" and score is not None:
            return -float(score)
        return float("inf") if loss is None else float(loss)

    def restore(self, model: nn.Module, optimizer: Any) -> Tensor | None:
        """Load the weights and the optimiser state in place, before the first update. Returns the losses since the
        last report."""
        if self.saved is None:
            return None
        try:
            model.load_state_dict(self.saved.part("model"))
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise UserError(
                f"{self.staging} holds another model ({reason}): delete it to start over, or choose another --out"
            ) from error
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in self.saved.part("optimizer").items():
            number, _, key = name.partition(".")
            moments.setdefault(int(number), {})[key] = tensor
        rates = [group["lr"] for group in optimizer.param_groups]
        optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate  # loading replaces it by a copy, but a captured graph reads the original
        return self.saved.tensors["losses"]

    def restore_random(self, device: torch.device) -> None:
        """Restore the random states. Call it after the loader has started, which draws from them. The checkpoint
        holds rank 0's state; the other ranks seed their own, so that dropout masks differ."""
        if self.saved is None:
            return
        if self.rank:
            torch.manual_seed(make_rng(self.settings.seed, TrainRng.DROPOUT, self.step, self.rank).initial_seed())
            return
        states = self.saved.part("random")
        torch.set_rng_state(states["cpu"])
        if device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], device)
        if device.type == "mps" and "mps" in states:
            torch.mps.set_rng_state(states["mps"])

    def after(
        self,
        step: int,
        steps: int,
        model: nn.Module,
        optimizer: Any,
        losses: Callable[[], Tensor],
        row: Mapping[str, float],
    ) -> None:
        """Save what is due after a step. End the run after a signal.

        losses: returns the losses since the last report, on the CPU. It raises where one is not finite, before
        anything is saved. row: the metrics of the step, empty where none are due.
        """
        stopped = self.stop.received
        if self.agree is not None:
            stopped = 0 if step % self.settings.log_every else self.agree(stopped)
        export = self.settings.save_every and step % self.settings.save_every == 0
        validation = {name: row.get(name) for name in ("val_total", "val_score")}
        better = self._criterion(validation) < self.best
        due = bool(stopped) or step == steps or self._is_due(step)
        if self.rank == 0 and (due or export or better):
            started = time.monotonic()
            recent = losses()
            state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
            weights = {name: tensor for name, tensor in state.items() if not name.startswith(TRAINING_ONLY)}
            notes = {"step": step, **validation, **self.notes}
            if export and step < steps:
                write_saved(self.staging / OTHER_WEIGHTS / f"{step_name(step)}.safetensors", Saved(weights, notes))
            if better:
                self._save_best(Saved(weights, notes), last=step == steps)
            if due:
                self._save(Saved({**_prefixed("model", state), **_rest(model, optimizer, recent)}, notes))
                self.last_save = time.monotonic()
                self.save_seconds = self.last_save - started
        if stopped:
            raise self.stop.interrupted(stopped, f"after step {step} of {steps}", self.staging)

    def _save_best(self, saved: Saved, last: bool) -> None:
        self.best = self._criterion(saved.notes)
        path = self.staging / OTHER_WEIGHTS / f"{BEST}.safetensors"
        if not last:
            return write_saved(path, saved)
        with saving(self.staging):  # the final weights are the best: no second file
            remove(path)
            if path.parent.is_dir() and not any(path.parent.iterdir()):
                path.parent.rmdir()

    def _is_due(self, step: int) -> bool:
        if self.settings.checkpoint_every:
            return step % self.settings.checkpoint_every == 0
        return time.monotonic() - self.last_save >= max(MIN_SECONDS, self.save_seconds / MAX_SHARE)

    def _save(self, saved: Saved) -> None:
        broken = [n for n, t in saved.tensors.items() if t.is_floating_point() and not bool(t.isfinite().all())]
        if broken:
            raise UserError(
                f"{broken[0]} is not finite after step {saved.step}, so this step is not saved: lower --train.lr, "
                f"and start over with --overwrite"
            )
        with saving(self.staging):
            self.flush()
        folder = self.staging / CHECKPOINTS
        write_saved(folder / f"{step_name(saved.step)}.safetensors", saved)
        with saving(folder):
            for old in checkpoints_in(self.staging)[CHECKPOINTS_TO_KEEP:]:
                remove(old)


def _prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def _rest(model: nn.Module, optimizer: Any, losses: Tensor) -> dict[str, Tensor]:
    """The state besides the weights, on the CPU."""
    device = next(model.parameters()).device
    found = {"losses": losses, "random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found["random.cuda"] = torch.cuda.get_rng_state(device)
    if device.type == "mps":
        found["random.mps"] = torch.mps.get_rng_state()
    for number, state in optimizer.state_dict()["state"].items():
        found |= _prefixed(f"optimizer.{number}", state)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in found.items()}
