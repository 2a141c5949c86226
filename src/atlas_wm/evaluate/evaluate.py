"""Evaluate a run: many episodes, several conditions, results as JSON in the run folder."""

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from atlas_wm.card import write_card
from atlas_wm.config import PlanConfig
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.data.render_check import check_rendering
from atlas_wm.device import peak_memory, pick_device
from atlas_wm.distributed import from_all, is_main, rank, world_size
from atlas_wm.errors import UserError
from atlas_wm.evaluate.processes import StageProcesses
from atlas_wm.evaluate.protocol import Protocol, draw_starts, training_rows
from atlas_wm.evaluate.rollout import EpisodeRecord, planning_policy, random_policy, run_episodes
from atlas_wm.evaluate.split import StateBank, ood_labels, path_scores, state_bank
from atlas_wm.evaluate.stage import Ending, Stage
from atlas_wm.evaluate.statistics import summarise
from atlas_wm.launch import own_cores, processes
from atlas_wm.models.world_model import WorldModel
from atlas_wm.plan.planner import Planner, dtype_of
from atlas_wm.run_folder import RunInfo, read_run, writable_folder, write_atomically, write_json, writing
from atlas_wm.tasks import get_task, get_task_of, task_id
from atlas_wm.versions import versions
from atlas_wm.workers import TIMEOUT, Died, Helpers, check_timeout

log = logging.getLogger(__name__)
ENOUGH_ERRORS = 20  # episodes: if all of the first ones failed with an error, the others would too
NEIGHBOURS = 50  # of the k-NN novelty (Appendix idood)
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


@dataclass(frozen=True)
class Job:
    policy: str  # "model" or "random"
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


class Worker:
    """One process's model and data, and the stages it plans for: a stage of its own, or others in processes."""

    def __init__(self, setup: Setup, stage_processes: int = 0):
        info, _ = read_run(setup.run)
        task, size = get_task(setup.task), info.config.model.encoder.image_size
        # Two groups, so that one acts while the other is planned for. They are the same for any number of processes
        # from 2: on a GPU the rounding of a plan depends on its company.
        groups = [(stage_processes + 1) // 2, stage_processes // 2]
        self.stages: list[Stage | StageProcesses] = (
            [StageProcesses(setup.task, size, count, setup.timeout) for count in groups if count]
            if stage_processes
            else [Stage(task, size, setup.timeout)]
        )
        self.data = EpisodeData(setup.data, task, size, info.config.model.frameskip)
        model = WorldModel.load(setup.run, setup.device)
        self.planner = Planner(model, setup.plan, plain=setup.plain, dtype=dtype_of(setup.precision))

    def run(self, job: Job) -> JobResult:
        started, planned = time.perf_counter(), self.planner.seconds
        plans = job.policy == "model"
        policy = (
            planning_policy(self.planner, job.seed) if plans else random_policy(self.stages[0].open(), job.seed)
        )
        records, films = run_episodes(
            self.stages,
            self.data,
            policy,
            job.rows,
            job.protocol.offset,
            job.protocol.steps,
            look=plans,
            films=job.films,
        )
        seconds, planning = time.perf_counter() - started, self.planner.seconds - planned
        return JobResult(job, records, films, seconds, planning, peak_memory(self.planner.device))

    def close(self) -> None:
        for stage in self.stages:
            stage.close()


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
                ending = Ending.of_error(str(answer), lost=True)
                record = EpisodeRecord.of(data, job.rows[0], job.protocol.offset, ending, plans=0)
                yield JobResult(job, [record], {}, 0.0, 0.0, 0)


def run_beside_stages(
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
    plan: PlanConfig | None = None,
    random_floor: bool = True,
    films: int = 4,
    workers: int | None = None,
    timeout: float = TIMEOUT,
    device: str = "auto",
    plain: bool = False,
    precision: str = "auto",
    stages: Literal["auto", "local", "remote"] = "auto",
    on_progress: Callable[[int, int, float], None] = lambda done, total, success: None,
) -> list[dict[str, Any]]:
    """Run every condition and write ``evaluation/<condition>.json`` (and films as .npz) into the run folder.

    ``films`` episodes of the first seed are filmed. ``on_progress(done, total, success so far)``. ``stages``:
    ``workers`` processes that plan and act (local: on a CPU), or that act beside this one, which plans (remote:
    on a GPU). ``timeout``: seconds an environment may take to begin an episode, or for the steps of one plan; an
    episode that takes longer, raises, or ends its process is recorded as an error and counts as not successful.
    Several processes (torchrun, srun) share the work, and the main one writes.
    """
    run = Path(run)
    info, _ = read_run(run)
    where = pick_device(device)
    task = get_task_of(info)
    setup = Setup(
        str(run),
        task_id(task),
        str(data_path or info.data.path),
        plan or info.config.plan,
        str(where),
        plain,
        precision,
        check_timeout(timeout),
    )
    data = EpisodeData(setup.data, task, info.config.model.encoder.image_size, info.config.model.frameskip)
    if data.task.action_size != info.action_size:
        raise UserError(
            f"{run} was trained with {info.action_size} action coordinates, {data.task.name} has "
            f"{data.task.action_size} now: retrain, or evaluate with the task it was trained on"
        )
    check_rendering(data)
    policies = ("model", "random") if random_floor else ("model",)
    draws = _draw(data, info, protocols)
    jobs = _jobs(data, draws, policies, films, EPISODES_PER_JOB[where.type])

    place = writable_folder(run, "evaluation") if is_main() else run  # said before the work begins
    remote = stages == "remote" or (stages == "auto" and where.type != "cpu")
    most = min(data.task.most_stages, max(len(j.rows) for j in jobs)) if remote else len(jobs)
    workers = max(1, min(workers or own_cores(), most))
    results = _run(setup, data, jobs, run_beside_stages if remote else run_in_workers, workers, on_progress)

    work = {"stages": "remote" if remote else "local", "workers": workers, "processes": world_size()}
    reports = []
    for protocol in protocols:
        these = [r for r in results if r.job.protocol == protocol]
        reports.append(_report(info, setup, data, draws, protocol, policies, these) | work)
        if is_main():
            films_of = {f"row{row}": film for r in these for row, film in r.films.items()}
            _write(place, protocol.name + setup.plan.replanning, reports[-1], films_of)
    if is_main():
        try:
            write_card(run)
        except UserError as error:  # an older file of results is damaged: these are written all the same
            log.warning("the model card stays as it was: %s", error)
    return reports


@dataclass(frozen=True)
class Draws:
    """The start rows of every condition and seed, each with its novelty and whether it is OOD."""

    starts: dict[Protocol, dict[int, dict[int, tuple[float, bool]]]]  # protocol → seed → row
    bank: StateBank
    neighbours: int


def _draw(data: EpisodeData, info: RunInfo, protocols: Sequence[Protocol]) -> Draws:
    states = data.columns(data.task.novelty_columns)
    bank = state_bank(states[training_rows(data, info)])
    neighbours = min(NEIGHBOURS, len(bank.states))
    starts: dict[Protocol, dict[int, dict[int, tuple[float, bool]]]] = {protocol: {} for protocol in protocols}
    for protocol in protocols:
        for seed in protocol.seeds:
            rows = draw_starts(data, protocol, seed, info)
            scores = path_scores(states, rows, protocol.offset, bank, k=neighbours)
            labels = zip(scores.tolist(), ood_labels(scores).tolist(), strict=True)
            starts[protocol][seed] = dict(zip(rows.tolist(), labels, strict=True))
    return Draws(starts, bank, neighbours)


def _jobs(data: EpisodeData, draws: Draws, policies: Sequence[str], films: int, size: int) -> list[Job]:
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


def _report(
    info: RunInfo,
    setup: Setup,
    data: EpisodeData,
    draws: Draws,
    protocol: Protocol,
    policies: Sequence[str],
    results: Sequence[JobResult],
) -> dict[str, Any]:
    """What the jobs of one condition add up to."""
    report: dict[str, Any] = {
        "task": info.task,
        "method": info.method,
        "recipe": info.recipe,
        "protocol": {**asdict(protocol), "budget": protocol.steps},
        "plan": asdict(setup.plan),
        "data": {"path": setup.data, "hash": data.content_hash()},
        "novelty_bank": {"states": len(draws.bank.states), "neighbours": draws.neighbours, "seed": 0},
        "device": setup.device,
        "versions": versions(),
    }
    for policy in policies:
        these = [r for r in results if r.job.policy == policy]
        records = {
            seed: sorted((e for r in these if r.job.seed == seed for e in r.records), key=lambda e: e.row)
            for seed in protocol.seeds
        }
        report[policy] = summarise(records, draws.starts[protocol], protocol.leave_out_solved)
        report[policy]["seconds"] = sum(r.seconds for r in these)
    planning = sum(r.planning_seconds for r in results)
    report["model"] |= {
        "planning_seconds": planning,  # with several workers of all of them
        "seconds_per_plan": planning / max(1, report["model"]["plans"]),
        "peak_memory": max(r.peak_memory for r in results),
    }
    return report


def _write(folder: Path, name: str, report: dict[str, Any], films: dict[str, Any]) -> None:
    with writing(folder):
        if films:
            with write_atomically(folder / f"{name}.films.npz") as temporary, temporary.open("wb") as out:
                np.savez_compressed(out, **films)
        write_json(folder / f"{name}.json", report)


def _worth_filming(data: EpisodeData, protocol: Protocol, rows: list[int], count: int) -> tuple[int, ...]:
    """``count`` starts, from the one with the longest way to its goal to the median one."""
    way = [-data.task.distance(data.states[row], data.states[row + protocol.offset]) for row in rows]
    ranks = np.linspace(0, len(rows) // 2, min(count, len(rows))).round().astype(int)
    return tuple(rows[i] for i in np.argsort(way, kind="stable")[ranks])
