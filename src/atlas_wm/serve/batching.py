"""Requests of several clients are planned together, in one worker thread beside the event loop."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from atlas_wm.errors import UserError
from atlas_wm.plan.planner import Plan, Planner
from atlas_wm.rng import make_rng

log = logging.getLogger(__name__)

GPU_BATCH = 16


class Busy(UserError):
    """The queue is full, or the server is stopping."""


class Job(NamedTuple):
    """What one plan needs. It has its own random stream, so its plan does not depend on the rest of its batch."""

    frame: Tensor  # (1, 3, S, S) uint8, prepared
    goal: Tensor  # the same
    seed: int = 0
    rest: np.ndarray | None = None  # of the last plan


class Planned(NamedTuple):
    plan: Plan
    waiting: float  # seconds in the queue
    planning: float  # seconds of the whole batch


class _Waiting(NamedTuple):
    job: Job
    since: float
    answer: "asyncio.Future[Planned]"


class Batcher:
    """``await batcher.plan(job)``. A batch starts when it is full, when all ``clients()`` wait for it, or after
    ``max_wait``. Requests that came during the last batch also wait for its clients, who often ask again at once:
    otherwise the clients stay in two halves that wait for each other.

    ``max_batch``: None for 16 on a GPU and 1 on a CPU, where plans are computed one by one, and a batch would only
    delay the first of them.
    """

    def __init__(
        self,
        planner: Planner,
        *,
        clients: Callable[[], int],
        max_batch: int | None = None,
        max_wait: float,
        max_queue: int,
    ):
        self.planner, self.clients, self.max_wait = planner, clients, max_wait
        self.max_batch = max_batch or (1 if planner.device.type == "cpu" else GPU_BATCH)
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue(max_queue)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="planning")
        self._loop: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Plan once for each size of batch that is compiled, so that no client waits for that."""
        await asyncio.get_running_loop().run_in_executor(self._worker, self._warm_up)
        self._loop = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.wait({self._loop})
        self._worker.shutdown()

    async def plan(self, job: Job) -> Planned:
        answer: asyncio.Future[Planned] = asyncio.get_running_loop().create_future()
        try:
            self._queue.put_nowait(_Waiting(job, time.perf_counter(), answer))
        except asyncio.QueueFull:
            raise Busy(f"{self._queue.maxsize} requests are waiting already: try again later") from None
        return await answer

    async def _run(self) -> None:
        while True:
            batch = [w for w in await self._gather() if not w.answer.done()]  # done: its client has left
            if not batch:
                continue
            started = time.perf_counter()
            jobs = [w.job for w in batch]
            found = await asyncio.get_running_loop().run_in_executor(self._worker, self._plan, jobs)
            seconds = time.perf_counter() - started
            for waiting, plan in zip(batch, found, strict=True):
                if waiting.answer.done():
                    continue
                if isinstance(plan, Exception):
                    waiting.answer.set_exception(plan)
                else:
                    waiting.answer.set_result(Planned(plan, started - waiting.since, seconds))

    async def _gather(self) -> list[_Waiting]:
        batch = [await self._queue.get()]
        with suppress(TimeoutError):
            async with asyncio.timeout(self.max_wait):
                while len(batch) < min(self.max_batch, self.clients()):
                    batch.append(await self._queue.get())
        while len(batch) < self.max_batch and not self._queue.empty():
            batch.append(self._queue.get_nowait())
        return batch

    def _plan(self, jobs: Sequence[Job]) -> Sequence[Plan | Exception]:
        """If a batch fails, its requests are planned alone: only the one to blame gets the error."""
        try:
            return self.planner.plan_batch(
                torch.cat([job.frame for job in jobs]),
                torch.cat([job.goal for job in jobs]),
                [make_rng(job.seed) for job in jobs],
                [job.rest for job in jobs],
            )
        except Exception as error:
            if len(jobs) > 1:
                return [plan for job in jobs for plan in self._plan([job])]
            if not isinstance(error, UserError):
                log.exception("a plan failed")
                error = UserError("planning failed: see the server's log")
            return [error]

    def _warm_up(self) -> None:
        side = self.planner.model.config.encoder.image_size
        blank = torch.zeros(1, 3, side, side, dtype=torch.uint8)
        for size in range(1, 2 if self.planner.device.type == "cpu" else self.max_batch + 1):
            found = self._plan([Job(blank, blank)] * size)
            if isinstance(found[0], Exception):
                raise found[0]
