"""Metrics of a run: metrics.csv and TensorBoard, with the same numbers."""

import csv
import io
import os
from pathlib import Path
from types import TracebackType

from torch.utils.tensorboard import SummaryWriter

from atlas_wm.runs.files import saving, write_atomically
from atlas_wm.runs.folder import METRICS


class MetricsLog:
    """One row per report. Columns are fixed at the start; missing values stay empty."""

    def __init__(self, folder: Path, columns: list[str], after: int = 0):
        """after: the step of the checkpoint that a run resumes from. Later rows are removed: they come again."""
        self.folder, columns = folder, ["step", *columns]
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


def _rows_up_to(path: Path, step: int) -> list[dict[str, str]]:
    if not step or not path.exists():
        return []
    whole = path.read_bytes().rpartition(b"\n")[0].decode()  # the last line may be incomplete
    return [row for row in csv.DictReader(io.StringIO(whole)) if int(row["step"]) <= step]
