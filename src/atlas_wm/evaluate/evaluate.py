"""Evaluate a run: many episodes, several conditions, results as JSON in the run folder."""

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from atlas_wm.config import PlanConfig, RunInfo
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.data.render_check import check_rendering
from atlas_wm.errors import UserError
from atlas_wm.evaluate.env_batch import FILM_EVERY, EnvBatch, EpisodeEnd
from atlas_wm.evaluate.env_pool import EnvPool
from atlas_wm.evaluate.novelty import Draws, draw_and_label
from atlas_wm.evaluate.rollout import planning_policy, random_policy, record_of, replay_policy, run_episodes
from atlas_wm.evaluate.statistics import summarise
from atlas_wm.parallel.devices import peak_memory, pick_device
from atlas_wm.parallel.launch import own_cores, processes
from atlas_wm.parallel.processes import from_all, is_main, rank, world_size
from atlas_wm.parallel.workers import TIMEOUT, Died, Helpers, check_timeout
from atlas_wm.plan.planner import Planner, dtype_of
from atlas_wm.runs.card import write_card
from atlas_wm.runs.folder import read_run, weights_path, writable_folder
from atlas_wm.runs.model import load_model
from atlas_wm.runs.results import (
    FOLDER,
    EpisodeRecord,
    EvaluatedData,
    EvaluationResult,
    PolicyName,
    PolicyResult,
    Protocol,
)
from atlas_wm.runs.versions import versions
from atlas_wm.tasks import Task, get_task, get_task_of, task_id

log = logging.getLogger(__name__)
Precision = Literal["bf16", "float32"]
ENOUGH_ERRORS = 20  # episodes: if all of the first ones failed with an error, the others would too
PRECISIONS: dict[torch.dtype, Precision] = {torch.bfloat16: "bf16", torch.float32: "float32"}
# On the CPU episodes are planned one by one and processes share the work; a GPU plans many at once.
EPISODES_PER_JOB = {"cpu": 5, "mps": 20, "cuda": 100}


@dataclass(frozen=True)
class Setup:
    """Everything a worker process needs; small enough to send."""

    run: str
    task: str  # as get_task takes it
    data: str
    plan: PlanConfig
    device: str
    plain: bool = False
    precision: str = "auto"
    timeout: float = 0.0  # seconds an environment may take; 0: any time
    weights: str | None = None  # None: the final ones


@dataclass(frozen=True)
class Job:
    policy: PolicyName
    protocol: Protocol
    seed: int
    rows: tuple[int, ...]
    films: tuple[int, ...] = ()  # rows to film


@dataclass(frozen=True)
class JobResult:
    job: Job
    records: list[EpisodeRecord]
    films: dict[int, np.ndarray]  # row → (frames, H, W, 3) uint8, the goal last
    seconds: float
    planning_seconds: float
    peak_memory: int  # bytes
    precision: Precision | None = None  # of the search as it ran; None where nothing was planned
    plain: bool | None = None


class Worker:
    """One process's model and data, and the environments it plans for: its own, or those of an env pool."""

    def __init__(self, setup: Setup, env_pool: int = 0):
        info, _ = read_run(setup.run)
        task, size = get_task(setup.task), info.config.model.encoder.image_size
        # Two groups, so that one acts while the other is planned for. They are the same for any number of processes
        # from 2: on a GPU the rounding of a plan depends on its company.
        groups = [(env_pool + 1) // 2, env_pool // 2]
        self.env_batches: list[EnvBatch | EnvPool] = (
            [EnvPool(setup.task, size, count, setup.timeout) for count in groups if count]
            if env_pool
            else [EnvBatch(task, size, setup.timeout)]
        )
        self.data = EpisodeData(setup.data, task, size, info.config.model.frameskip)
        model = load_model(setup.run, setup.device, weights=setup.weights)
        self.planner = Planner(model, setup.plan, plain=setup.plain, dtype=dtype_of(setup.precision))

    def run(self, job: Job) -> JobResult:
        started, planned = time.perf_counter(), self.planner.seconds
        protocol, plans, budget = job.protocol, job.policy == "model", job.protocol.steps
        if plans:
            policy = planning_policy(self.planner, job.seed)
        elif job.policy == "random":
            policy = random_policy(self.env_batches[0].open(), job.seed)
        else:
            policy, budget = replay_policy(self.data), min(protocol.offset, budget)
        records, films = run_episodes(
            self.env_batches, self.data, policy, job.rows, protocol.offset, budget, render=plans, films=job.films
        )
        seconds, planning = time.perf_counter() - started, self.planner.seconds - planned
        result = JobResult(job, records, films, seconds, planning, peak_memory(self.planner.device))
        if not plans:
            return replace(result, records=[replace(record, plans=0) for record in records])
        plain = self.planner.plain  # which is in float32 whatever was asked for
        return replace(result, plain=plain, precision="float32" if plain else PRECISIONS[self.planner.dtype])

    def close(self) -> None:
        for envs in self.env_batches:
            envs.close()


def run_in_workers(
    setup: Setup, data: EpisodeData, jobs: list[Job], workers: int
) -> Generator[JobResult, None, None]:
    """Each worker process plans and steps whole episodes on one thread, so results do not depend on their number.

    Results as they come. The episodes of a process that died are run again, each alone, and one that dies alone
    is recorded as an error.
    """
    requests = deque[tuple[Any, ...]](("run", job) for job in jobs)
    with closing(Helpers(workers, Worker, setup)) as helpers, closing(helpers.each(requests)) as answers:
        for (_, job), answer in answers:
            if not isinstance(answer, Died):
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
    """This process plans, worker processes hold the environments."""
    with closing(Worker(setup, workers)) as worker:
        yield from map(worker.run, jobs)


@processes()
def evaluate(
    run: str | Path,
    protocols: list[Protocol],
    *,
    data_path: str | Path | None = None,
    task: Task | None = None,
    plan: PlanConfig | None = None,
    weights: str | None = None,
    random_floor: bool = True,
    replay_ceiling: bool = True,
    films: int = 4,
    workers: int | None = None,
    timeout: float = TIMEOUT,
    device: str = "auto",
    plain: bool = False,
    precision: str = "auto",
    environments: Literal["auto", "local", "remote"] = "auto",
    on_progress: Callable[[int, int, float], None] = lambda done, total, success: None,
) -> list[EvaluationResult]:
    """Run every condition and write ``evaluation/<condition>-<digest>.json`` (and films as .npz) into the run
    folder. Only a result with the same settings is replaced.

    ``task``: the one to evaluate on, if it is not the one that the run was trained on. ``weights``: others of the
    run than the final ones, such as ``best`` or ``step-2000``. ``random_floor``: also run uniformly random actions.
    ``replay_ceiling``: also run the actions of the demonstrations.
    ``films`` episodes of the first seed are filmed. ``on_progress(done, total, success so far)``. ``environments``:
    ``workers`` processes that plan and act (local: on a CPU), or that act beside this one, which plans (remote:
    on a GPU). ``timeout``: seconds an environment may take to begin an episode, or for the steps of one plan; an
    episode that takes longer, raises, or ends its process is recorded as an error and counts as not successful.
    Several processes (torchrun, srun) share the work, and the main one writes.
    """
    run = Path(run)
    info, _ = read_run(run)
    weights_path(run, weights)  # refused before the work begins
    where = pick_device(device)
    task = task or get_task_of(info)
    setup = Setup(
        str(run),
        task_id(task),
        str(data_path or info.data.path),
        plan or info.config.plan,
        str(where),
        plain,
        precision,
        check_timeout(timeout),
        weights,
    )
    data = EpisodeData(setup.data, task, info.config.model.encoder.image_size, info.config.model.frameskip)
    if data.task.action_size != info.action_size:
        raise UserError(
            f"{run} was trained with {info.action_size} action coordinates, {data.task.name} has "
            f"{data.task.action_size} now: retrain, or evaluate with the task it was trained on"
        )
    check_rendering(data)
    policies: list[PolicyName] = ["model"]
    policies += ["random"] if random_floor else []
    policies += ["replay"] if replay_ceiling else []
    draws = draw_and_label(run, info, data, protocols)
    jobs = _jobs(data, draws, policies, films, EPISODES_PER_JOB[where.type])

    place = writable_folder(run, FOLDER) if is_main() else run  # said before the work begins
    remote = environments == "remote" or (environments == "auto" and where.type != "cpu")
    most = min(data.task.max_env_processes, max(len(j.rows) for j in jobs)) if remote else len(jobs)
    workers = max(1, min(workers or own_cores(), most))
    results = _run(setup, data, jobs, run_beside_envs if remote else run_in_workers, workers, on_progress)

    work: dict[str, Any] = {"workers": workers, "processes": world_size()}
    work["environments"] = "remote" if remote else "local"
    work["written"] = datetime.now(UTC).isoformat(timespec="seconds")
    reports = []
    for protocol in protocols:
        these = [r for r in results if r.job.protocol == protocol]
        reports.append(_assemble(info, setup, data, draws, protocol, policies, these, **work))
        if is_main():
            reports[-1].write(place, dict(sorted(film for r in these for film in r.films.items())))
    if is_main():
        try:
            write_card(run)
        except UserError as error:  # an older file of results is damaged: these are written all the same
            log.warning("the model card stays as it was: %s", error)
    return reports


def _jobs(data: EpisodeData, draws: Draws, policies: Sequence[PolicyName], films: int, size: int) -> list[Job]:
    """Whole jobs are dealt out: on a GPU the rounding of a plan depends on its company."""
    jobs, size = [], min(size, data.task.most_at_once)
    for protocol, by_seed in draws.starts.items():
        for seed, starts in by_seed.items():
            rows = list(starts)
            filmed = _worth_filming(data, protocol, rows, films) if seed == protocol.seeds[0] else ()
            for policy in policies:
                for i in range(0, len(rows), size):
                    part = tuple(rows[i : i + size])
                    jobs.append(Job(policy, protocol, seed, part, filmed if policy == "model" else ()))
    return jobs


def _run(
    setup: Setup,
    data: EpisodeData,
    jobs: list[Job],
    run_jobs: Callable[[Setup, EpisodeData, list[Job], int], Generator[JobResult, None, None]],
    workers: int,
    on_progress: Callable[[int, int, float], None],
) -> list[JobResult]:
    """This process's share of the jobs, dealt out by kind and size → the results of all processes."""
    mine = sorted(jobs, key=lambda job: (job.policy, -len(job.rows)))[rank() :: world_size()]
    found: list[JobResult] = []
    total, successes, done, errors = sum(len(job.rows) for job in mine), [0, 0], 0, 0
    with closing(run_jobs(setup, data, mine, workers)) as coming:
        for result in coming:
            found.append(result)
            done += len(result.records)
            errors += sum(r.error is not None for r in result.records)
            if errors == done >= min(total, ENOUGH_ERRORS):
                first = result.records[0].error
                raise UserError(f"the first {done} episodes all failed with an error, nothing is written: {first}")
            if result.job.policy == "model":
                successes[0] += sum(r.success for r in result.records)
                successes[1] += len(result.records)
            on_progress(done, total, successes[0] / max(1, successes[1]))
    return [result for part in from_all(found) for result in part]


def _assemble(
    info: RunInfo,
    setup: Setup,
    data: EpisodeData,
    draws: Draws,
    protocol: Protocol,
    policies: Sequence[PolicyName],
    results: Sequence[JobResult],
    **work: Any,
) -> EvaluationResult:
    """The result of one condition, from the results of its jobs."""
    used = {r.precision for r in results if r.precision is not None}
    summaries = {name: _summary(name, protocol, draws, results) for name in policies}
    return EvaluationResult(
        task=setup.task,
        trained_task=info.task,
        method=info.method,
        recipe=info.recipe,
        protocol=replace(protocol, budget=protocol.steps),
        plan=setup.plan,
        precision="mixed" if len(used) > 1 else next(iter(used), None),
        plain=any(r.plain for r in results) if used else None,
        data=EvaluatedData(setup.data, data.content_hash()),
        novelty_bank=draws.bank,
        device=setup.device,
        film_every=FILM_EVERY,
        versions=versions(),
        weights=setup.weights,
        model=summaries["model"],
        random=summaries.get("random"),
        replay=summaries.get("replay"),
        **work,
    )


def _summary(policy: PolicyName, protocol: Protocol, draws: Draws, results: Sequence[JobResult]) -> PolicyResult:
    """What the jobs of one condition add up to for one policy."""
    these = [r for r in results if r.job.policy == policy]
    records = {
        seed: sorted((e for r in these if r.job.seed == seed for e in r.records), key=lambda e: e.row)
        for seed in protocol.seeds
    }
    planning: dict[str, Any] = {}
    if policy == "model":
        seconds, plans = sum(r.planning_seconds for r in these), sum(e.plans for r in these for e in r.records)
        planning = {
            "planning_seconds": seconds,
            "seconds_per_plan": seconds / plans if plans else None,
            "peak_memory": max(r.peak_memory for r in these),
        }
    wall_seconds = sum(r.seconds for r in these)
    return summarise(records, draws.starts[protocol], protocol.leave_out_solved, wall_seconds, **planning)


def _worth_filming(data: EpisodeData, protocol: Protocol, rows: list[int], count: int) -> tuple[int, ...]:
    """``count`` starts, from the one with the longest way to its goal to the median one."""
    way = [-data.task.distance(data.states[row], data.states[row + protocol.offset]) for row in rows]
    ranks = np.linspace(0, len(rows) // 2, min(count, len(rows))).round().astype(int)
    return tuple(rows[i] for i in np.argsort(way, kind="stable")[ranks])
