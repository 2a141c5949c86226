"""Environments in worker processes: many environments act while one planner plans for all of them."""

from functools import cached_property
from typing import Any

from atlas_wm.errors import UserError
from atlas_wm.evaluate.env_batch import Asked, EnvBatch, EpisodeEnd, Observations
from atlas_wm.parallel.workers import WorkerDied, WorkerProcess, stop
from atlas_wm.tasks import get_task
from atlas_wm.tasks.variation import NO_VARIATION, Variation


class EnvPool:
    """Several env batches, each in its own process, with the interface of one. Slot k is in batch k modulo their
    number.

    A process that dies is replaced. Its episodes are lost: they end with an error, and the caller may run them
    again, each alone.
    """

    def __init__(
        self, task: str, image_size: int, count: int, timeout: float = 0.0, variation: Variation = NO_VARIATION
    ):
        self._made_of = task, image_size, timeout, dict(variation)  # which can be sent to a process
        self._processes = [self._start() for _ in range(count)]
        self._asked: list[list[int]] = [[] for _ in range(count)]  # slots asked for in each process

    def _start(self) -> WorkerProcess:
        process = WorkerProcess(_make_env_batch, *self._made_of)
        process.ask("open")  # now: imports take seconds, while the planner is set up
        return process

    def _opened(self, process: WorkerProcess) -> Any:
        try:
            return process.answer()
        except WorkerDied as died:
            raise UserError(
                f"an environment of {self._made_of[0]} cannot be started, {died}: "
                "try fewer --workers if memory is short"
            ) from None

    @cached_property
    def _spaces(self) -> list[Any]:
        return [self._opened(process) for process in self._processes]

    def open(self) -> Any:
        return self._spaces[0]

    def ask(self, asked: Asked) -> None:
        self.open()
        count = len(self._processes)
        for i, process in enumerate(self._processes):
            mine = {slot: item for slot, item in asked.items() if slot % count == i}
            self._asked[i] = list(mine)
            process.ask("step", mine)

    def answer(self) -> Observations:
        """Wait for all processes. The observations are in the order of the slots."""
        observed: Observations = {}
        for i, process in enumerate(self._processes):
            try:
                observed |= process.answer()
            except WorkerDied as died:
                observed |= {slot: EpisodeEnd.of_error(str(died), lost=True) for slot in self._asked[i]}
                self._processes[i] = self._start()
                self._opened(self._processes[i])
        return dict(sorted(observed.items()))

    def close(self) -> None:
        stop(self._processes)


def _make_env_batch(task: str, image_size: int, timeout: float, variation: Variation) -> EnvBatch:
    return EnvBatch(get_task(task), image_size, timeout, variation)
