"""What training writes down: metrics.csv and TensorBoard, the same numbers in both."""

import csv
from pathlib import Path
from types import TracebackType

from torch.utils.tensorboard import SummaryWriter

from atlas_wm.run_folder import METRICS


class MetricsLog:
    """One row per log step. Columns are fixed at the start; a value that a row lacks stays empty."""

    def __init__(self, folder: Path, columns: list[str]):
        self._file = (folder / METRICS).open("w", newline="")
        self._csv = csv.DictWriter(self._file, ["step", *columns])
        self._csv.writeheader()
        self._board = SummaryWriter(str(folder / "tensorboard"))

    def write(self, step: int, values: dict[str, float]) -> None:
        self._csv.writerow({"step": step, **{name: f"{value:.6g}" for name, value in values.items()}})
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._board.close()
