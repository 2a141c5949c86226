"""Training monitors: losses that are not finite, collapsing latents, signals, dead loader processes."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor

from atlas_wm.errors import Interrupted, UserError
from atlas_wm.models.geometry import effective_rank
from atlas_wm.runs.files import saving, write_json
from atlas_wm.runs.folder import NOT_FINITE
from atlas_wm.train.step import Update

log = logging.getLogger(__name__)
HEALTH = ("rank", "variance", "least_variance")
# Below these values the latents lie on a line or in a point. TwoRoom has two degrees of freedom: its latents have
# an effective rank of 2.2 to 2.5 in the demo, for any number of coordinates.
LEAST_RANK, LEAST_VARIANCE = 1.5, 0.01
MOST_NAMED = 5  # clips in a message; the file has all of them
SIGNAL_DELAY = 1.0  # seconds: the signal of a dead process arrives within this time after its connection breaks


class LossBuffer:
    """Losses and gradient norms of the steps since the last report. They stay on the device until they are read, so
    that no step waits for the device."""

    def __init__(
        self, terms: Sequence[str], clips_of_step: Callable[[int], list[dict[str, Any]]], staging: Path | None
    ):
        """``clips_of_step``: see TrainingSet. ``staging``: folder for the record of losses that are not finite."""
        self.names = [*terms, "total", "gradient"]
        self.clips_of_step, self.staging = clips_of_step, staging
        self.rows: list[Tensor] = []

    def restore(self, rows: Tensor | None, device: torch.device) -> None:
        self.rows = [] if rows is None else list(rows.to(device))

    def add(self, update: Update) -> None:
        values = [*update.losses.terms.values(), update.losses.total, update.norm]
        self.rows.append(torch.stack([value.float() for value in values]))

    def read(self, step: int) -> Tensor:
        """(n, names) on the CPU with one transfer; the last row is of ``step``. Raises at the first row that is not
        finite."""
        rows = torch.stack(self.rows).cpu() if self.rows else torch.empty(0, len(self.names))
        broken = ~rows.isfinite()
        if bool(broken.any()):
            first = int(broken.any(dim=1).nonzero()[0])
            self._fail(step - len(rows) + 1 + first, rows[first])
        return rows

    def report(self, step: int) -> tuple[dict[str, float], float]:
        """Means since the last report, by name, and the last gradient norm. Empties the buffer."""
        rows = self.read(step)
        self.rows = []
        means = dict(zip(self.names, rows.mean(dim=0).tolist(), strict=True))
        means.pop("gradient")
        return {"total": means.pop("total"), **means}, float(rows[-1, -1])

    def _fail(self, step: int, values: Tensor) -> NoReturn:
        """Name the step, the terms and the clips: the broken clips where the data are not finite, else all."""
        clips = self.clips_of_step(step)
        terms = [name for name, value in zip(self.names, values, strict=True) if not value.isfinite()]
        broken = [clip for clip in clips if not clip["finite"]]
        listed = ", ".join(f"row {c['row']} (episode {c['episode']})" for c in (broken or clips)[:MOST_NAMED])
        more = len(broken or clips) - MOST_NAMED
        listed += f" and {more} more" if more > 0 else ""
        if self.staging is not None:
            record = dict(zip(self.names, map(str, values.tolist()), strict=True))
            with saving(self.staging):
                write_json(self.staging / NOT_FINITE, {"step": step, "values": record, "clips": clips})
            listed += f"; all in {self.staging / NOT_FINITE}"
        cause = "these clips hold numbers that are not finite" if broken else "clips of the batch"
        remedy = "repair the dataset" if broken else "lower --train.lr or the weight of the term"
        raise UserError(
            f"not finite at step {step}: {', '.join(terms)}; {cause}: {listed}. No checkpoint contains this step. "
            f"{remedy.capitalize()}, and start over with --overwrite"
        )


class CollapseMonitor:
    """Measures at validation how much of the latent space is used. Warns once."""

    def __init__(self) -> None:
        self.warned = False

    def measure(self, latents: Sequence[Tensor]) -> dict[str, float]:
        """latents: batches (B, T, d)."""
        z = torch.cat([batch.flatten(0, 1) for batch in latents]).double().cpu()
        centred = z - z.mean(dim=0)
        covariance = centred.T @ centred / len(z)
        variance = covariance.diagonal()
        rank = effective_rank(torch.linalg.eigvalsh(covariance)) if bool(z.isfinite().all()) else float("nan")
        if not self.warned and (rank < LEAST_RANK or float(variance.mean()) < LEAST_VARIANCE):
            self.warned = True
            log.warning(
                "the latents collapse: effective rank %.1f of %d, mean variance %.2g (below %.1f or %g). Raise the "
                "weight of a regulariser (--objective.wemreg, .sigreg, or .std and .cov), or lower --train.lr",
                *(rank, z.shape[1], float(variance.mean()), LEAST_RANK, LEAST_VARIANCE),
            )
        return dict(zip(HEALTH, (rank, float(variance.mean()), float(variance.min())), strict=True))


class StopSignals:
    """Records SIGTERM and SIGINT, so that training saves a checkpoint after the current step. A second signal acts
    at once."""

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only here
            for number in (signal.SIGTERM, signal.SIGINT):
                if signal.getsignal(number) is not signal.SIG_IGN:  # ignored by `nohup` and the like
                    self._before[number] = signal.signal(number, self._record) or signal.SIG_DFL
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            self.received = number
            signal.signal(number, self._before[number])
        elif number == signal.SIGTERM:  # a forked loader process; its parent handles Ctrl-C
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def interrupted(self, number: int, where: str, staging: Path) -> Interrupted:
        name = signal.Signals(number).name
        return Interrupted(f"{name} {where}: saved in {staging}; run the same command again to resume", number)


@contextmanager
def name_dead_loaders() -> Iterator[None]:
    """Turn the errors that follow a killed loader process into one UserError. They are an error of the connection
    to it, or a RuntimeError that torch's SIGCHLD handler raises anywhere in this process, even during the other."""
    try:
        try:
            yield
        except (RuntimeError, OSError, EOFError) as error:
            if not is_connection_error(error):
                raise
            time.sleep(SIGNAL_DELAY)  # catch the RuntimeError here; later it would end the program in a traceback
            raise dead_loader(error) from error
    except RuntimeError as error:
        if "DataLoader worker (pid" not in str(error):
            raise
        raise dead_loader(error) from error


def is_connection_error(error: BaseException) -> bool:
    """Whether Python's or torch's multiprocessing, which connects loader processes, raised the error."""
    deepest = list(walk_tb(error.__traceback__))[-1][0]
    return "multiprocessing" in Path(deepest.f_code.co_filename).parts


def dead_loader(error: BaseException) -> UserError:
    reason = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
    return UserError(
        f"a loader process died, often because memory ran out ({reason}): run the same command again to resume "
        f"from the last checkpoint, if needed with fewer --train.workers"
    )
