"""What training keeps an eye on: losses that are no numbers, latents that collapse, signals, loader processes."""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor

from atlas_wm.data.clips import ClipDataset
from atlas_wm.data.loader import EpochBatches
from atlas_wm.errors import Interrupted, UserError
from atlas_wm.models.geometry import effective_rank
from atlas_wm.runs.files import saving, write_json
from atlas_wm.runs.folder import NOT_FINITE
from atlas_wm.train.step import Update

log = logging.getLogger(__name__)
HEALTH = ("rank", "variance", "least_variance")
# Below these the latents lie on a line or in a point. Those of a task with two degrees of freedom, TwoRoom, have an
# effective rank of 2.2 to 2.5 in the demo, whatever their number of coordinates.
LEAST_RANK, LEAST_VARIANCE = 1.5, 0.01
NAMED = 5  # clips in a message; the file has them all
SIGNAL_FOLLOWS = 1.0  # seconds within which the system tells of a process whose connection has ended


class Recent:
    """Losses and gradient norms of the steps since the last report. They stay on the device until they are read, so
    that no step waits for it."""

    def __init__(self, terms: Sequence[str], training: ClipDataset, batches: EpochBatches, staging: Path | None):
        self.names = [*terms, "total", "gradient"]
        self.training, self.batches, self.staging = training, batches, staging
        self.rows: list[Tensor] = []

    def resume(self, rows: Tensor | None, device: torch.device) -> None:
        self.rows = [] if rows is None else list(rows.to(device))

    def add(self, update: Update) -> None:
        values = [*update.losses.terms.values(), update.losses.total, update.norm]
        self.rows.append(torch.stack([value.float() for value in values]))

    def read(self, step: int) -> Tensor:
        """(n, names) on the CPU, the last row of ``step``; one transfer. Raises at the first that is not finite."""
        rows = torch.stack(self.rows).cpu() if self.rows else torch.empty(0, len(self.names))
        broken = ~rows.isfinite()
        if bool(broken.any()):
            first = int(broken.any(dim=1).nonzero()[0])
            self._refuse(step - len(rows) + 1 + first, rows[first])
        return rows

    def report(self, step: int) -> tuple[dict[str, float], float]:
        """Means since the last report, by name, and the last gradient norm; starts anew."""
        rows = self.read(step)
        self.rows = []
        means = dict(zip(self.names, rows.mean(dim=0).tolist(), strict=True))
        means.pop("gradient")
        return {"total": means.pop("total"), **means}, float(rows[-1, -1])

    def _refuse(self, step: int, values: Tensor) -> NoReturn:
        """Name the step, the terms and the clips; which of the clips, where it is their numbers that are broken."""
        which = self.batches.of_step(step)
        batch = self.training.__getitems__(which)
        inputs = [t.flatten(1).isfinite().all(dim=1) for t in batch if t.is_floating_point()]
        whole = torch.stack(inputs).all(dim=0).tolist()
        clips, data = self.training.clips.take(torch.tensor(which).numpy()), self.training.data
        listed: list[dict[str, Any]] = [
            {"episode": int(e), "step": int(s), "row": int(data.offsets[e] + s), "finite": ok}
            for e, s, ok in zip(clips.episode, clips.start, whole, strict=True)
        ]
        broken = [name for name, value in zip(self.names, values, strict=True) if not value.isfinite()]
        worst = [clip for clip in listed if not clip["finite"]]
        shown = ", ".join(f"row {c['row']} (episode {c['episode']})" for c in (worst or listed)[:NAMED])
        more = len(worst or listed) - NAMED
        shown += f" and {more} more" if more > 0 else ""
        if self.staging is not None:
            record = dict(zip(self.names, map(str, values.tolist()), strict=True))
            with saving(self.staging):
                write_json(self.staging / NOT_FINITE, {"step": step, "values": record, "clips": listed})
            shown += f"; all in {self.staging / NOT_FINITE}"
        cause = "these clips hold numbers that are not finite" if worst else "clips of the batch"
        remedy = "mend the dataset" if worst else "lower --train.lr or the weight of the term"
        raise UserError(
            f"not finite at step {step}: {', '.join(broken)}; {cause}: {shown}. No checkpoint holds it. "
            f"{remedy.capitalize()}, and start over with --overwrite"
        )


class CollapseWatch:
    """How much of the latent space is in use, measured at validation; warns once."""

    def __init__(self) -> None:
        self.warned = False

    def look(self, latents: Sequence[Tensor]) -> dict[str, float]:
        """latents: batches (B, T, d)."""
        z = torch.cat([some.flatten(0, 1) for some in latents]).double().cpu()
        centred = z - z.mean(dim=0)
        covariance = centred.T @ centred / len(z)
        variance = covariance.diagonal()
        rank = effective_rank(torch.linalg.eigvalsh(covariance)) if bool(z.isfinite().all()) else float("nan")
        if not self.warned and (rank < LEAST_RANK or float(variance.mean()) < LEAST_VARIANCE):
            self.warned = True
            log.warning(
                "the latents collapse: effective rank %.1f of %d, mean variance %.2g (below %.1f or %g). Raise the "
                "weight that holds them apart (--objective.wemreg, .sigreg, or .std and .cov), or lower --train.lr",
                *(rank, z.shape[1], float(variance.mean()), LEAST_RANK, LEAST_VARIANCE),
            )
        return dict(zip(HEALTH, (rank, float(variance.mean()), float(variance.min())), strict=True))


class StopSignals:
    """SIGTERM and SIGINT are noted, for the run to save itself after the current step; the second acts at once."""

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            for number in (signal.SIGTERM, signal.SIGINT):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` and the like have it
                    self._before[number] = signal.signal(number, self._note) or signal.SIG_DFL
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            self.received = number
            signal.signal(number, self._before[number])
        elif number == signal.SIGTERM:  # a loader process, forked with this handler; Ctrl-C is its parent's affair
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def interrupted(self, number: int, where: str, staging: Path) -> Interrupted:
        name = signal.Signals(number).name
        return Interrupted(f"{name} {where}: saved in {staging}, the same command goes on from there", number)


@contextmanager
def dead_loaders_named() -> Iterator[None]:
    """A loader process that is killed surfaces as an error of the connection to it, or as a RuntimeError: raised by
    torch's handler of SIGCHLD, so anywhere in this process, also while the other is being dealt with."""
    try:
        try:
            yield
        except (RuntimeError, OSError, EOFError) as error:
            if not of_a_connection(error):
                raise
            time.sleep(SIGNAL_FOLLOWS)  # here it is expected, later it would end the program in a traceback
            raise dead_loader(error) from error
    except RuntimeError as error:
        if "DataLoader worker (pid" not in str(error):
            raise
        raise dead_loader(error) from error


def of_a_connection(error: BaseException) -> bool:
    """Raised in multiprocessing, Python's or torch's, through which the loader's processes are talked to."""
    deepest = list(walk_tb(error.__traceback__))[-1][0]
    return "multiprocessing" in Path(deepest.f_code.co_filename).parts


def dead_loader(error: BaseException) -> UserError:
    reason = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
    return UserError(
        f"a loader process died, often for want of memory ({reason}): the same command goes on from the last "
        f"checkpoint, also with fewer --train.workers"
    )
