"""Metrics of a run: metrics.csv and TensorBoard, with the same numbers."""

import csv
import io
import logging
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType

from torch.utils.tensorboard import SummaryWriter

from atlas_wm.runs.files import saving, write_atomically
from atlas_wm.runs.folder import METRICS

log = logging.getLogger(__name__)
OnMetrics = Callable[[int, dict[str, float]], None]  # the step and its row


class MetricsLog:
    """One row per report. Columns are fixed at the start; missing values stay empty."""

    def __init__(
        self,
        folder: Path,
        columns: list[str],
        after: int = 0,
        on_metrics: OnMetrics = lambda step, row: None,
    ):
        """after: the step of the checkpoint that a run resumes from. Later rows are removed: they come again.

        on_metrics: called after each row is written. Training goes on if it raises: the first exception is logged
        as a warning, later ones are not, and it is called again for the next row.
        """
        self.folder, self.on_metrics, self.warned = folder, on_metrics, False
        columns = ["step", *columns]
        with saving(folder):
            earlier = _rows_up_to(folder / METRICS, after)
            with write_atomically(folder / METRICS) as temporary, temporary.open("w", newline="") as file:
                writer = csv.DictWriter(file, columns, extrasaction="ignore")
                writer.writeheader()
                writer.writerows(earlier)
            self._file = (folder / METRICS).open("a", newline="")
            self._csv = csv.DictWriter(self._file, columns)
            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=after + 1 if after else None)

    def write(self, step: int, values: dict[str, float]) -> None:
        with saving(self.folder):
            self._csv.writerow({"step": step, **{name: f"{value:.6g}" for name, value in values.items()}})
            self._file.flush()
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
        try:
            self.on_metrics(step, dict(values))
        except Exception as error:
            if not self.warned:
                log.warning(
                    "on_metrics failed at step %d (%s: %s): training goes on, and %s has every row",
                    *(step, type(error).__name__, str(error).partition("\n")[0], self.folder / METRICS),
                )
            self.warned = True

    def flush(self) -> None:
        """Put all rows on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._board.flush()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.close()
            self._board.close()
        except OSError:
            if error is None:  # else it is the same full disk
                raise


class NoMetrics(nullcontext["NoMetrics"]):
    """For the processes that do not write."""

    def __enter__(self) -> "NoMetrics":
        return self

    def write(self, step: int, values: dict[str, float]) -> None: ...

    def flush(self) -> None: ...


def _rows_up_to(path: Path, step: int) -> list[dict[str, str]]:
    if not step or not path.exists():
        return []
    whole = path.read_bytes().rpartition(b"\n")[0].decode()  # the last line may be incomplete
    return [row for row in csv.DictReader(io.StringIO(whole)) if int(row["step"]) <= step]
