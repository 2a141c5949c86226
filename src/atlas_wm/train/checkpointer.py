"""Checkpoints: all that a run is after some step, in files that are whole, checked, and hold nothing but numbers.

    checkpoints/step-00001200.safetensors   weights, optimiser, random states, losses since the last report
    checkpoints/step-00001200.sha256        its checksum, written last; `sha256sum -c` reads it too
    weights/best.safetensors                weights of the best validation; every k steps: step-….safetensors

Clip order, directions and learning rate are functions of (seed, step), so the step stands for them.
"""

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from atlas_wm.config import RunInfo, TrainConfig
from atlas_wm.errors import UserError
from atlas_wm.rng import TrainRng, make_rng
from atlas_wm.runs.files import LOCK, saving, write_atomically
from atlas_wm.runs.folder import CHECKPOINTS, read_run
from atlas_wm.settings import to_dict
from atlas_wm.train.monitors import StopSignals

log = logging.getLogger(__name__)
KEPT = 2  # checkpoints: should the last one be damaged, there is another
SECONDS, SHARE = 60.0, 0.01  # between checkpoints, and of the time they may take
ROOM = 2**20  # bytes for the small files beside a large one
WEIGHTS, BEST = "weights", "best"
FREE = {
    "train.workers",
    "train.cache_frames",
    "train.checkpoint_every",
    "train.save_every",
    "plan.clip_actions",
}  # settings that do not change what is learnt


class Saved(NamedTuple):
    tensors: dict[str, Tensor]
    notes: dict[str, Any]  # step, and what else is to be known

    @property
    def step(self) -> int:
        return int(self.notes["step"])

    def part(self, prefix: str) -> dict[str, Tensor]:
        """``model`` → the tensors named ``model.…``, without it."""
        return {n.partition(".")[2]: t for n, t in self.tensors.items() if n.partition(".")[0] == prefix}


class Damaged(Exception):
    """A file that is not what was written."""


def write_saved(path: Path, saved: Saved) -> None:
    """Whole or not at all: first the tensors, then their checksum, each on the disk before it gets its name."""
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
        raise Damaged("its content does not fit its checksum")
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])  # as the format has it
        return Saved(safetensors.torch.load(data), json.loads(header["__metadata__"]["notes"]))
    except (SafetensorError, ValueError, KeyError) as error:
        raise Damaged(f"it was not written by training: {error}") from error


def checksum_of(path: Path) -> Path:
    return path.with_suffix(".sha256")


def check_room(folder: Path, needed: int, what: str = "a checkpoint") -> None:
    free = shutil.disk_usage(folder).free
    if free < needed + ROOM:
        raise UserError(
            f"the disk of {folder} has {free / 1e6:,.0f} MB left, {what} needs {needed / 1e6:,.0f} MB: free some "
            f"space, and the same command goes on from what was saved last"
        )


def bytes_needed(model: nn.Module, settings: TrainConfig, steps: int) -> int:
    """The most that a run has on the disk at once, but for metrics and tokens."""
    weights = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    checkpoint = weights + 2 * trained  # Adam's two moments
    exported = 3 + (steps // settings.save_every if settings.save_every else 0)  # the result, the best, a new best
    return (KEPT + 1) * checkpoint + exported * weights  # one more while it is written


def previous(staging: Path, info: RunInfo, overwrite: bool) -> Saved | None:
    """Where an interrupted run stopped. None: start at the beginning, in a folder that is empty."""
    found = checkpoints_in(staging)
    if found:
        obstacle = what_differs(staging, info)
        if obstacle is None:
            saved = last_good(found)
            if saved is not None:
                _sweep(staging)
                return saved
            obstacle = "none of its checkpoints is whole"
        if not overwrite:
            raise UserError(
                f"{staging} holds an interrupted run that cannot go on, because {obstacle}: go on with what it was "
                f"started with, give --overwrite to start over, or choose another --out"
            )
    with saving(staging):
        for path in staging.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()
    return None


def checkpoints_in(staging: Path) -> list[Path]:
    """Those that were written to the end, the last first."""
    found = (staging / CHECKPOINTS).glob("step-*.sha256")
    return [path.with_suffix(".safetensors") for path in sorted(found, reverse=True)]


def last_good(found: list[Path]) -> Saved | None:
    """The last of some checkpoints, the last first, that is whole; those after it, which are not, are removed."""
    for place, path in enumerate(found):
        try:
            saved = read_saved(path)
        except Damaged as error:
            older = "the one before it is used" if place + 1 < len(found) else "it is the last one"
            log.warning("%s is damaged (%s): %s", path, error, older)
            continue
        with saving(path.parent):
            for later in found[:place]:
                remove(later)
        return saved
    return None


def _sweep(staging: Path) -> None:
    """Remove what a process that was killed while it wrote has left."""
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
    """Why a run cannot go on as ``info``, None if it can. Other devices and versions are only mentioned."""
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
            "%s was begun on another device or with other versions: rounding may differ from there", staging
        )
    return None


def _facts(info: RunInfo) -> dict[str, Any]:
    """What decides which weights come out, by name."""

    def leaves(prefix: str, value: Any) -> dict[str, Any]:
        if isinstance(value, dict) and value:
            return {k: v for name, part in value.items() for k, v in leaves(f"{prefix}.{name}", part).items()}
        return {prefix.removeprefix("."): value}

    facts = {"task": info.task, "method": info.method, "recipe": info.recipe, "hash of the data": info.data.hash}
    return facts | {name: value for name, value in leaves("", to_dict(info.config)).items() if name not in FREE}


class Checkpointer:
    """Brings back the state a run goes on from, and saves it while it is trained: rank 0 writes, all ranks read."""

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
        """flush: whatever else has to be on the disk before a checkpoint; notes: kept in every one.

        In several processes, which must stop at the same step, ``agree`` gives all of them the main one's number.
        """
        self.staging, self.settings, self.saved, self.stop = staging, settings, saved, stop
        self.flush, self.notes, self.rank, self.agree = flush, notes, rank, agree
        self.step = saved.step if saved else 0
        self.cost, self.mark = 0.0, time.monotonic()
        self.best = self._best()

    def _best(self) -> float:
        try:
            return float(read_saved(self.staging / WEIGHTS / f"{BEST}.safetensors").notes["val_total"])
        except Damaged:
            return float("inf")

    def restore(self, model: nn.Module, optimizer: Any) -> Tensor | None:
        """The weights and the optimiser's state, in place, before the first update. Returns the losses since the
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
            group["lr"] = rate  # loading puts a copy there, and a captured step would go on to fill the original
        return self.saved.tensors["losses"]

    def restore_random(self, device: torch.device) -> None:
        """The random states, after the loader has started, which draws from them. Rank 0 wrote its own; the others
        must not drop the same units as it does."""
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
        validation: float | None,
    ) -> None:
        """Save what is due after a step, and end the run if a signal asked for it.

        losses: those since the last report, on the CPU; raises where one is not finite, before anything is saved.
        """
        stopped = self.stop.received
        if self.agree is not None:
            stopped = 0 if step % self.settings.log_every else self.agree(stopped)
        keep = self.settings.save_every and step % self.settings.save_every == 0
        better = validation is not None and validation < self.best
        due = bool(stopped) or step == steps or self._is_due(step)
        if self.rank == 0 and (due or keep or better):
            started = time.monotonic()
            recent = losses()
            weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
            notes = {"step": step, "val_total": validation, **self.notes}
            if keep and step < steps:
                write_saved(self.staging / WEIGHTS / f"step-{step:08}.safetensors", Saved(weights, notes))
            if better:
                self._keep_best(Saved(weights, notes), last=step == steps)
            if due:
                self._save(Saved({**_prefixed("model", weights), **_rest(model, optimizer, recent)}, notes))
                self.mark = time.monotonic()
                self.cost = self.mark - started
        if stopped:
            raise self.stop.interrupted(stopped, f"after step {step} of {steps}", self.staging)

    def _keep_best(self, saved: Saved, last: bool) -> None:
        self.best = float(saved.notes["val_total"])
        path = self.staging / WEIGHTS / f"{BEST}.safetensors"
        if not last:
            return write_saved(path, saved)
        with saving(self.staging):  # the result itself: no need of it twice
            remove(path)
            if path.parent.is_dir() and not any(path.parent.iterdir()):
                path.parent.rmdir()

    def _is_due(self, step: int) -> bool:
        if self.settings.checkpoint_every:
            return step % self.settings.checkpoint_every == 0
        return time.monotonic() - self.mark >= max(SECONDS, self.cost / SHARE)

    def _save(self, saved: Saved) -> None:
        broken = [n for n, t in saved.tensors.items() if t.is_floating_point() and not bool(t.isfinite().all())]
        if broken:
            raise UserError(
                f"{broken[0]} is not finite after step {saved.step}, which is not saved: lower --train.lr, and "
                f"start over with --overwrite"
            )
        with saving(self.staging):
            self.flush()
        folder = self.staging / CHECKPOINTS
        write_saved(folder / f"step-{saved.step:08}.safetensors", saved)
        with saving(folder):
            for old in checkpoints_in(self.staging)[KEPT:]:
                remove(old)


def _prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def _rest(model: nn.Module, optimizer: Any, losses: Tensor) -> dict[str, Tensor]:
    """All but the weights, on the CPU."""
    device = next(model.parameters()).device
    found = {"losses": losses, "random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found["random.cuda"] = torch.cuda.get_rng_state(device)
    if device.type == "mps":
        found["random.mps"] = torch.mps.get_rng_state()
    for number, state in optimizer.state_dict()["state"].items():
        found |= _prefixed(f"optimizer.{number}", state)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in found.items()}
