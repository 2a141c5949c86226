"""Stages in processes of their own: many environments work while one planner plans for all of them."""

from functools import cached_property
from typing import Any

from atlas_wm.errors import UserError
from atlas_wm.evaluate.stage import Ending, Seen, Stage
from atlas_wm.parallel.workers import Died, Helper, end
from atlas_wm.tasks import get_task


class StageProcesses:
    """Several stages, each in its process, used like one: episode k is on stage k modulo their number.

    A process that dies is replaced. The episodes on it are lost: they end with an error, and somebody may try
    them again, each alone.
    """

    def __init__(self, task: str, image_size: int, count: int, timeout: float = 0.0):
        self._made_of = task, image_size, timeout
        self._processes = [self._start() for _ in range(count)]
        self._asked: list[list[int]] = [[] for _ in range(count)]  # episodes whose stage has not answered yet

    def _start(self) -> Helper:
        process = Helper(_make_stage, *self._made_of)
        process.ask("open")  # at once: importing takes seconds, in which the planner can be set up
        return process

    def _opened(self, process: Helper) -> Any:
        try:
            return process.answer()
        except Died as died:
            raise UserError(
                f"an environment of {self._made_of[0]} cannot be started, {died}: "
                "try fewer --workers if memory is short"
            ) from None

    @cached_property
    def _spaces(self) -> list[Any]:
        return [self._opened(process) for process in self._processes]

    def open(self) -> Any:
        return self._spaces[0]

    def ask(self, what: str, by_number: dict[int, Any], *arguments: Any) -> None:
        self.open()
        count = len(self._processes)
        for i, process in enumerate(self._processes):
            mine = {k: item for k, item in by_number.items() if k % count == i}
            self._asked[i] = list(mine)
            process.ask(what, mine, *arguments)

    def answer(self) -> Seen:
        """Waits for all of them. The order is that of the numbers, whatever the number of processes."""
        seen: Seen = {}
        for i, process in enumerate(self._processes):
            try:
                seen |= process.answer()
            except Died as died:
                seen |= {number: Ending.of_error(str(died), lost=True) for number in self._asked[i]}
                self._processes[i] = self._start()
                self._opened(self._processes[i])
        return dict(sorted(seen.items()))

    def close(self) -> None:
        end(self._processes)


def _make_stage(task: str, image_size: int, timeout: float) -> Stage:
    return Stage(get_task(task), image_size, timeout)
