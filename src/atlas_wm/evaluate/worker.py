"""The jobs of an evaluation and the processes that run them."""

import time
from collections import deque
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch

from atlas_wm.config import PlanConfig
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.errors import UserError
from atlas_wm.evaluate.env_batch import EnvBatch, EpisodeEnd
from atlas_wm.evaluate.env_pool import EnvPool
from atlas_wm.evaluate.oracle import Oracle
from atlas_wm.evaluate.own_demonstrations import leave_out_own
from atlas_wm.evaluate.rollout import (
    oracle_policy,
    planning_policy,
    random_policy,
    record_of,
    replay_policy,
    run_episodes,
)
from atlas_wm.parallel.devices import peak_memory
from atlas_wm.parallel.workers import WorkerDied, WorkerPool, one_line
from atlas_wm.plan.planner import LatentNovelty, Novelty, Planner, dtype_of, is_flagged
from atlas_wm.plugins import import_plugin
from atlas_wm.runs.folder import read_run
from atlas_wm.runs.model import load_model
from atlas_wm.runs.results import EpisodeRecord, PolicyName, Protocol
from atlas_wm.tasks import get_task
from atlas_wm.tasks.variation import Variation

Precision = Literal["bf16", "float32"]
PRECISIONS: dict[torch.dtype, Precision] = {torch.bfloat16: "bf16", torch.float32: "float32"}


@dataclass(frozen=True)
class Setup:
    """Everything a worker process needs, small enough to pickle."""

    run: str
    task: str  # as get_task takes it
    data: str
    plan: PlanConfig
    device: str
    plain: bool = False
    precision: str = "auto"
    timeout: float = 0.0  # seconds an environment may take; 0: no limit
    weights: str | None = None  # None: the final ones
    variation: Variation = field(default_factory=dict)
    plugins: tuple[str, ...] = ()  # modules of the user's own classes, which the main process has imported
    groups: np.ndarray | None = None  # of demonstrations (own_demonstrations.py), to leave out an episode's own


@dataclass(frozen=True)
class Job:
    policy: PolicyName
    protocol: Protocol
    seed: int
    rows: tuple[int, ...]
    films: tuple[int, ...] = ()  # start rows of the episodes to film


@dataclass(frozen=True)
class JobResult:
    job: Job
    records: list[EpisodeRecord]
    films: dict[int, np.ndarray]  # row → (frames, H, W, 3) uint8, the goal last
    seconds: float
    planning_seconds: float
    peak_memory: int  # bytes
    precision: Precision | None = None  # that the search used; None if the policy does not plan
    plain: bool | None = None
    novel_plans: int | None = None  # plans that novelty flags; None if it was not measured


class Worker:
    """The model and data of one process, and the environments it plans for: its own, or an env pool's."""

    def __init__(self, setup: Setup, env_pool: int = 0):
        for module in setup.plugins:
            import_plugin(module)
        info, _ = read_run(setup.run)
        task, size = get_task(setup.task), info.config.model.encoder.image_size
        # Two groups: one acts while the other is planned for. The groups are the same for any number of processes
        # from 2 on, because on a GPU the rounding of a plan depends on the batch it is planned in.
        groups = [(env_pool + 1) // 2, env_pool // 2]
        self.env_batches: list[EnvBatch | EnvPool] = (
            [EnvPool(setup.task, size, count, setup.timeout, setup.variation) for count in groups if count]
            if env_pool
            else [EnvBatch(task, size, setup.timeout, setup.variation)]
        )
        self.setup = setup
        self.data = EpisodeData(setup.data, task, size, info.config.model.frameskip)
        model = load_model(setup.run, setup.device, weights=setup.weights)
        self.planner = Planner(model, setup.plan, plain=setup.plain, dtype=dtype_of(setup.precision))
        self.left_out = leave_out_own(self.planner, self.data, setup.groups)

    def run(self, job: Job) -> JobResult:
        if job.policy == "oracle":
            return self._run_oracle(job)
        started, planned = time.perf_counter(), self.planner.seconds
        protocol, plans, budget = job.protocol, job.policy == "model", job.protocol.steps
        if plans:
            novelties: list[Novelty | LatentNovelty | None] = []
            policy = planning_policy(self.planner, job.seed, novelties.append, self.left_out)
        elif job.policy == "random":
            policy = random_policy(self.env_batches[0].open(), job.seed, self.planner.model.normalizer)
        else:
            policy, budget = replay_policy(self.data), min(protocol.offset, budget)
        records, films = run_episodes(
            self.env_batches,
            self.data,
            policy,
            job.rows,
            protocol.offset,
            budget,
            observe=None if not plans else "frame and goal" if self.setup.variation else "frame",
            films=job.films,
            at_once=self.data.task.most_at_once,
        )
        seconds, planning = time.perf_counter() - started, self.planner.seconds - planned
        result = JobResult(job, records, films, seconds, planning, peak_memory(self.planner.device))
        if not plans:
            return replace(result, records=[replace(record, plans=0) for record in records])
        plain = self.planner.plain  # always float32
        novel = None if None in novelties else sum(is_flagged(n) for n in novelties if n)
        return replace(
            result, novel_plans=novel, plain=plain, precision="float32" if plain else PRECISIONS[self.planner.dtype]
        )

    def _run_oracle(self, job: Job) -> JobResult:
        """One episode. An environment that fails in the search ends it, as one that fails while it acts."""
        setup, (row,), offset = self.setup, job.rows, job.protocol.offset
        started, planning = time.perf_counter(), 0.0
        try:
            with closing(
                Oracle(get_task(setup.task), self.planner.model, setup.plan, setup.timeout, setup.variation)
            ) as oracle:
                policy = oracle_policy(oracle, job.seed)
                records, _ = run_episodes(
                    self.env_batches, self.data, policy, [row], offset, job.protocol.steps, observe="state"
                )
                planning = oracle.seconds
        except UserError:
            raise
        except Exception as error:
            records = [record_of(self.data, row, offset, EpisodeEnd.of_error(one_line(error)), plans=0)]
        seconds = time.perf_counter() - started
        return JobResult(job, records, {}, seconds, planning, peak_memory(self.planner.device))

    def close(self) -> None:
        for envs in self.env_batches:
            envs.close()


def run_in_workers(
    setup: Setup, data: EpisodeData, jobs: list[Job], workers: int
) -> Generator[JobResult, None, None]:
    """Each worker process plans and steps whole episodes on one thread, so results do not depend on their number.

    Yields results in the order they finish. The episodes of a process that died run again, one per job. An episode
    that then dies again is recorded as an error.
    """
    requests = deque[tuple[Any, ...]](("run", job) for job in jobs)
    with closing(WorkerPool(workers, Worker, setup)) as pool, closing(pool.each(requests)) as answers:
        for (_, job), answer in answers:
            if not isinstance(answer, WorkerDied):
                yield answer
            elif len(job.rows) > 1:
                requests.extend(("run", replace(job, rows=(row,))) for row in job.rows)
            else:
                ending = EpisodeEnd.of_error(str(answer), lost=True)
                record = record_of(data, job.rows[0], job.protocol.offset, ending, plans=0)
                yield JobResult(job, [record], {}, 0.0, 0.0, 0)


def run_beside_envs(
    setup: Setup, data: EpisodeData, jobs: list[Job], workers: int
) -> Generator[JobResult, None, None]:
    """This process plans; worker processes hold the environments."""
    with closing(Worker(setup, workers)) as worker:
        yield from map(worker.run, jobs)
