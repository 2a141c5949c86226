"""Evaluate a run: many episodes, several conditions, results as JSON in the run folder."""

import time
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from atlas_wm.card import write_card
from atlas_wm.config import PlanConfig
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.device import peak_memory, pick_device
from atlas_wm.distributed import from_all, is_main, rank, world_size
from atlas_wm.errors import UserError
from atlas_wm.evaluate.processes import StageProcesses
from atlas_wm.evaluate.protocol import Protocol, draw_starts, training_rows
from atlas_wm.evaluate.rollout import EpisodeRecord, planning_policy, random_policy, run_episodes
from atlas_wm.evaluate.split import ood_labels, path_scores, state_bank
from atlas_wm.evaluate.stage import Stage
from atlas_wm.evaluate.statistics import summarise
from atlas_wm.launch import own_cores, processes
from atlas_wm.models.world_model import WorldModel
from atlas_wm.plan.planner import Planner, dtype_of
from atlas_wm.run_folder import read_run, write_json
from atlas_wm.tasks import get_task
from atlas_wm.versions import versions

NEIGHBOURS = 50  # of the k-NN novelty (Appendix idood)
# On the CPU episodes are planned one by one and processes share the work; a GPU plans many at once.
EPISODES_PER_JOB = {"cpu": 5, "mps": 20, "cuda": 100}


@dataclass(frozen=True)
class Setup:
    """Everything a worker process needs; small enough to send."""

    run: str
    data: str
    plan: PlanConfig
    device: str
    plain: bool = False
    precision: str = "auto"


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
        task, size = get_task(info.task), info.config.model.encoder.image_size
        # Two groups, so that one acts while the other is planned for. They are the same for any number of processes
        # from 2: on a GPU the rounding of a plan depends on its company.
        groups = [(stage_processes + 1) // 2, stage_processes // 2]
        self.stages: list[Stage | StageProcesses] = (
            [StageProcesses(info.task, size, count) for count in groups if count]
            if stage_processes
            else [Stage(task, size)]
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


_worker: Worker


def _start_worker(setup: Setup) -> None:
    global _worker
    torch.set_num_threads(1)  # as many workers as cores; also what makes results independent of their number
    _worker = Worker(setup)


def _run_job(job: Job) -> JobResult:
    return _worker.run(job)


def run_in_workers(setup: Setup, jobs: list[Job], workers: int) -> Generator[JobResult, None, None]:
    """Each worker process plans and steps whole episodes on one thread. Results as they come."""
    with ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=_start_worker, initargs=(setup,)
    ) as pool:
        try:
            yield from pool.map(_run_job, jobs)
        except BrokenProcessPool as error:
            raise UserError("a worker process died: if no error is shown above, try fewer --workers") from error


def run_beside_stages(setup: Setup, jobs: list[Job], workers: int) -> Generator[JobResult, None, None]:
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
    device: str = "auto",
    plain: bool = False,
    precision: str = "auto",
    stages: Literal["auto", "local", "remote"] = "auto",
    on_progress: Callable[[int, int, float], None] = lambda done, total, success: None,
) -> list[dict[str, Any]]:
    """Run every condition and write ``evaluation/<condition>.json`` (and films as .npz) into the run folder.

    ``films`` episodes of the first seed are filmed. ``on_progress(done, total, success so far)``. ``stages``:
    ``workers`` processes that plan and act (local: on a CPU), or that act beside this one, which plans (remote:
    on a GPU). Several processes (torchrun, srun) share the work, and the main one writes.
    """
    run = Path(run)
    info, _ = read_run(run)
    where = pick_device(device)
    setup = Setup(
        str(run), str(data_path or info.data.path), plan or info.config.plan, str(where), plain, precision
    )
    data = EpisodeData(
        setup.data, get_task(info.task), info.config.model.encoder.image_size, info.config.model.frameskip
    )
    if data.task.action_size != info.action_size:
        raise UserError(
            f"{run} was trained with {info.action_size} action coordinates, {data.task.name} has "
            f"{data.task.action_size} now: retrain, or evaluate with the task it was trained on"
        )
    policies = ("model", "random") if random_floor else ("model",)
    jobs, size = [], min(EPISODES_PER_JOB[where.type], data.task.most_at_once)
    novelty: dict[Protocol, dict[int, dict[int, tuple[float, bool]]]] = {p: {} for p in protocols}
    states = data.columns(data.task.novelty_columns)
    bank = state_bank(states[training_rows(data, info)])
    neighbours = min(NEIGHBOURS, len(bank.states))
    for protocol in protocols:
        for seed in protocol.seeds:
            starts = draw_starts(data, protocol, seed, info)
            scores = path_scores(states, starts, protocol.offset, bank, k=neighbours)
            rows = starts.tolist()
            labels = zip(scores.tolist(), ood_labels(scores).tolist(), strict=True)
            novelty[protocol][seed] = dict(zip(rows, labels, strict=True))
            filmed = _worth_filming(data, protocol, rows, films) if seed == protocol.seeds[0] else ()
            for policy in policies:
                for i in range(0, len(rows), size):
                    part = tuple(rows[i : i + size])
                    jobs.append(Job(policy, protocol, seed, part, filmed if policy == "model" else ()))

    remote = stages == "remote" or (stages == "auto" and where.type != "cpu")
    most = min(data.task.most_stages, max(len(j.rows) for j in jobs)) if remote else len(jobs)
    workers = max(1, min(workers or own_cores(), most))

    # Dealt out by kind and size. Whole jobs: on a GPU the rounding of a plan depends on its company.
    dealt = sorted(range(len(jobs)), key=lambda n: (jobs[n].policy, -len(jobs[n].rows)))
    mine = sorted(dealt[rank() :: world_size()])
    found: dict[int, JobResult] = {}
    total, successes, done = sum(len(jobs[n].rows) for n in mine), [0, 0], 0
    run_jobs = run_beside_stages if remote else run_in_workers
    with closing(run_jobs(setup, [jobs[n] for n in mine], workers)) as coming:
        for number, result in zip(mine, coming, strict=True):
            found[number] = result
            done += len(result.records)
            if result.job.policy == "model":
                successes[0] += sum(r.success for r in result.records)
                successes[1] += len(result.records)
            on_progress(done, total, successes[0] / max(1, successes[1]))
    by_number = {number: result for part in from_all(found) for number, result in part.items()}
    results = [by_number[number] for number in range(len(jobs))]

    reports = []
    for protocol in protocols:
        report: dict[str, Any] = {
            "task": info.task,
            "method": info.method,
            "recipe": info.recipe,
            "protocol": {**asdict(protocol), "budget": protocol.steps},
            "plan": asdict(setup.plan),
            "data": {"path": setup.data, "hash": data.content_hash()},
            "novelty_bank": {"states": len(bank.states), "neighbours": neighbours, "seed": 0},
            "device": setup.device,
            "stages": "remote" if remote else "local",
            "workers": workers,
            "processes": world_size(),
            "versions": versions(),
        }
        for policy in policies:
            these = [r for r in results if r.job.protocol == protocol and r.job.policy == policy]
            records = {seed: [e for r in these if r.job.seed == seed for e in r.records] for seed in protocol.seeds}
            report[policy] = summarise(records, novelty[protocol], protocol.leave_out_solved)
            report[policy]["seconds"] = sum(r.seconds for r in these)
        planning = sum(r.planning_seconds for r in results if r.job.protocol == protocol)
        report["model"] |= {
            "planning_seconds": planning,  # with several workers of all of them
            "seconds_per_plan": planning / max(1, report["model"]["plans"]),
            "peak_memory": max(r.peak_memory for r in results),
        }
        reports.append(report)
        if not is_main():
            continue
        name = protocol.name + setup.plan.replanning
        write_json(run / "evaluation" / f"{name}.json", report)
        filmed_frames: dict[str, Any] = {
            f"row{row}": film for r in results if r.job.protocol == protocol for row, film in r.films.items()
        }
        if filmed_frames:
            np.savez_compressed(run / "evaluation" / f"{name}.films.npz", **filmed_frames)
    if is_main():
        write_card(run)
    return reports


def _worth_filming(data: EpisodeData, protocol: Protocol, rows: list[int], count: int) -> tuple[int, ...]:
    """``count`` starts, from the one with the longest way to its goal to the median one."""
    way = [-data.task.distance(data.states[row], data.states[row + protocol.offset]) for row in rows]
    ranks = np.linspace(0, len(rows) // 2, min(count, len(rows))).round().astype(int)
    return tuple(rows[i] for i in np.argsort(way, kind="stable")[ranks])
