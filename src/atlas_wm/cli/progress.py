"""Progress with an ETA: a bar in a terminal, a line now and then in a log file."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

SECONDS_BETWEEN_LINES = 15.0


class Bar:
    """``with Bar("train atlas", "steps") as bar: bar.update(done, total, "loss 0.1")``"""

    def __init__(self, title: str, unit: str):
        from atlas_wm.parallel.launch import process_info

        self.title, self.unit = title, unit
        self._console = Console(stderr=True, quiet=process_info().rank > 0)  # one of several processes speaks
        self._started = self._line = time.monotonic()
        self._bar: Progress | None = None
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[unit]}"),
                TimeElapsedColumn(),
                TextColumn("ETA"),
                TimeRemainingColumn(),
                TextColumn("[dim]{task.fields[note]}"),
                console=self._console,
            )
            self._task = self._bar.add_task(title, total=None, note="", unit=unit)

    def rename(self, title: str, unit: str) -> None:
        """Another part of the job begins: count from 0 again."""
        self.title, self.unit = title, unit
        self._started = self._line = time.monotonic()
        if self._bar is not None:
            self._bar.reset(self._task, description=title, total=None, note="", unit=unit)

    def update(self, done: int, total: int, note: str = "", left: float | None = None) -> None:
        """left: seconds, where the job knows better, such as one that did not begin at 0."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, note=note)
            return
        now = time.monotonic()
        if done < total and now - self._line < SECONDS_BETWEEN_LINES:
            return
        self._line = now
        elapsed = now - self._started
        left = elapsed / max(done, 1) * (total - done) if left is None else left
        line = f"{self.title}: {done}/{total} {self.unit}, {elapsed:.0f} s, ETA {left:.0f} s  {note}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """A line above the bar."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> "Bar":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
