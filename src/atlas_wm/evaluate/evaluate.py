"""Evaluate a run: draw start rows, run episodes, assemble one result per condition, write it to the run folder."""

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np

from atlas_wm.config import PlanConfig, RunInfo
from atlas_wm.data.card import check_task
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.data.render_check import check_rendering
from atlas_wm.errors import UserError, unknown
from atlas_wm.evaluate.env_batch import FILM_EVERY
from atlas_wm.evaluate.novelty import Draws, draw_and_label
from atlas_wm.evaluate.oracle import EPISODES as ORACLE_EPISODES
from atlas_wm.evaluate.oracle import oracle_plan
from atlas_wm.evaluate.own_demonstrations import demonstration_groups
from atlas_wm.evaluate.statistics import failure_auroc, summarise
from atlas_wm.evaluate.worker import Job, JobResult, Setup, run_beside_envs, run_in_workers
from atlas_wm.parallel.devices import pick_device
from atlas_wm.parallel.launch import own_cores, processes
from atlas_wm.parallel.processes import from_all, is_main, rank, world_size
from atlas_wm.parallel.workers import TIMEOUT, check_timeout
from atlas_wm.plugins import loaded_modules
from atlas_wm.runs.card import write_card
from atlas_wm.runs.folder import (
    DEMONSTRATIONS,
    TEMPORAL_HEAD,
    read_bank,
    read_run,
    weights_path,
    writable_folder,
)
from atlas_wm.runs.results import (
    FOLDER,
    POLICIES,
    USUAL_POLICIES,
    EvaluatedData,
    EvaluationResult,
    PolicyName,
    PolicyResult,
    Protocol,
)
from atlas_wm.runs.versions import versions
from atlas_wm.tasks import Task, get_task_of, task_id
from atlas_wm.tasks.variation import NO_VARIATION, Variation

log = logging.getLogger(__name__)
OnProgress = Callable[[int, int, float | None], None]  # episodes done, of how many, success of plans so far
PLANNING: tuple[PolicyName, ...] = ("model", "oracle")
ENOUGH_ERRORS = 20  # episodes: evaluation stops if the first ones all failed with an error
# A CPU plans episodes one by one in several processes; a GPU plans many in one batch.
EPISODES_PER_JOB = {"cpu": 5, "mps": 20, "cuda": 100}


@processes()
def evaluate(
    run: str | Path,
    protocols: list[Protocol],
    *,
    data_path: str | Path | None = None,
    task: Task | None = None,
    plan: PlanConfig | None = None,
    weights: str | None = None,
    variation: Variation = NO_VARIATION,
    policies: Sequence[PolicyName] = USUAL_POLICIES,
    oracle_episodes: int = ORACLE_EPISODES,
    oracle_candidates: int | None = None,
    oracle_iterations: int | None = None,
    films: int = 4,
    workers: int | None = None,
    timeout: float = TIMEOUT,
    device: str = "auto",
    plain: bool = False,
    precision: str = "auto",
    environments: Literal["auto", "local", "remote"] = "auto",
    command: Sequence[str] = (),
    on_progress: OnProgress = lambda done, total, success: None,
    on_oracle: OnProgress = lambda done, total, success: None,
) -> list[EvaluationResult]:
    """Run every condition and write ``evaluation/<condition>-<digest>.json`` (and films as .npz) to the run folder.
    A result is only replaced by one with the same settings.

    ``task``: default the run's. ``weights``: others of the run than the final ones, such as ``best`` or
    ``step-2000``. ``variation``: of the environment (tasks/variation.py); goals are rendered under it.
    ``policies``: the model and what to compare it with on the same episodes: ``random``, uniformly
    random actions; ``replay``, the actions of the demonstrations; ``oracle``, the planner's search in the true
    environment (evaluate/oracle.py), for ``oracle_episodes`` of each seed. ``films``: how many episodes of the
    first seed to film. ``on_progress(done, total, success rate of plans)``, and ``on_oracle`` for its
    episodes, which run last. ``environments``: local, ``workers`` processes plan and act (the default on a CPU),
    or remote, they act while this process plans (on a GPU). ``timeout``: seconds to start an episode or to
    execute one plan. An episode that takes longer, raises or kills its process is recorded as an error and
    counts as failed. ``command``: what the results say that they come from. Several processes (torchrun, srun)
    share the episodes, and the main one writes.
    """
    if films < 0 or (workers is not None and workers < 1):
        raise UserError(f"--films must be at least 0 and --workers at least 1, not {films} and {workers}")
    run = Path(run)
    info, _ = read_run(run)
    weights_path(run, weights)  # refused before the work begins
    task = task or get_task_of(info)
    task.require_env(
        "atlas eval", "pass --task with a task that has one, or measure the model with `atlas diagnose`"
    )
    policies = _in_order(policies)
    where = pick_device(device)
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
        dict(variation),
        loaded_modules((*info.config.model.own_parts.values(), *(plan or info.config.plan).own_parts.values())),
    )
    searched = oracle_plan(setup.plan, oracle_candidates, oracle_iterations) if "oracle" in policies else None
    data = _open_data(run, info, setup, task)
    draws = draw_and_label(run, info, data, protocols)
    if setup.plan.start == "retrieval":
        setup = replace(setup, groups=_groups(run, info, data, draws))
    jobs = _jobs(data, draws, [p for p in policies if p != "oracle"], films, EPISODES_PER_JOB[where.type])
    simulated = _oracle_jobs(draws, oracle_episodes) if searched is not None else []
    folder = writable_folder(run, FOLDER) if is_main() else run  # fails before the work starts

    head = _file_hash(run / TEMPORAL_HEAD) if setup.plan.cost == "temporal" else None
    known = _file_hash(run / DEMONSTRATIONS) if setup.plan.start == "retrieval" else None
    remote = environments == "remote" or (environments == "auto" and where.type != "cpu")
    most = min(task.max_env_processes, task.most_at_once, max(len(j.rows) for j in jobs)) if remote else len(jobs)
    cores = workers or own_cores()
    workers = max(1, min(cores, most))
    results = _run(setup, data, jobs, run_beside_envs if remote else run_in_workers, workers, on_progress)
    if searched is not None:
        on_oracle(0, len(simulated), None)
        here = replace(setup, plan=searched, device="cpu")
        results += _run(here, data, simulated, run_in_workers, min(cores, len(simulated)), on_oracle)

    work: dict[str, Any] = {"workers": workers, "processes": world_size(), "command": tuple(command)}
    work |= {"environments": "remote" if remote else "local", "temporal_head": head, "demonstrations": known}
    work["written"] = datetime.now(UTC).isoformat(timespec="seconds")
    reports = [_assemble(info, setup, data, draws, p, policies, results, searched, **work) for p in protocols]
    if is_main():
        _write(run, folder, dict(zip(protocols, reports, strict=True)), results)
    return reports


def _open_data(run: Path, info: RunInfo, setup: Setup, task: Task) -> EpisodeData:
    """The evaluated dataset, checked against the run and against what the environment renders."""
    data = EpisodeData(setup.data, task, info.config.model.encoder.image_size, info.config.model.frameskip)
    check_task(data)
    size = data.actions.shape[1]
    if size != info.action_size:
        raise UserError(
            f"{run} was trained with {info.action_size} action coordinates, {task.name} now has {size}: "
            f"retrain, or evaluate with the task it was trained on"
        )
    check_rendering(data)
    return data


def _groups(run: Path, info: RunInfo, data: EpisodeData, draws: Draws) -> np.ndarray | None:
    """Of demonstrations, so that no episode retrieves its own. Says how many are concerned."""
    groups, stored = demonstration_groups(data, info), read_bank(run, DEMONSTRATIONS) or {}
    if groups is None or "episodes" not in stored:
        return None
    starts = np.array([row for by_seed in draws.starts.values() for rows in by_seed.values() for row in rows])
    is_stored = np.isin(np.arange(len(groups)), stored["episodes"].numpy())
    known = np.isin(groups[data.locate(starts)[0]], groups[is_stored])
    if known.any():
        log.info(
            "start retrieval: %d of %d evaluated episodes, or variants of them, are among the demonstrations of "
            "the run: their searches leave these out",
            *(known.sum(), len(known)),
        )
    return groups


def _file_hash(path: Path) -> str | None:
    return sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else None


def _jobs(data: EpisodeData, draws: Draws, policies: Sequence[PolicyName], films: int, size: int) -> list[Job]:
    """Jobs are never split: on a GPU the rounding of a plan depends on the batch it is planned in."""
    jobs = []
    for protocol, by_seed in draws.starts.items():
        for seed, starts in by_seed.items():
            rows = list(starts)
            filmed = _rows_to_film(data, protocol, rows, films) if seed == protocol.seeds[0] else ()
            for policy in policies:
                for i in range(0, len(rows), size):
                    part = tuple(rows[i : i + size])
                    jobs.append(Job(policy, protocol, seed, part, filmed if policy == "model" else ()))
    return jobs


def _in_order(policies: Sequence[PolicyName]) -> list[PolicyName]:
    for name in policies:
        if name not in POLICIES:
            raise unknown("policy", name, POLICIES)
    if "model" not in policies:
        raise UserError("--policy needs model, with which the others are compared: add it")
    return [name for name in POLICIES if name in policies]


def _oracle_jobs(draws: Draws, episodes: int) -> list[Job]:
    """One episode each, spread over the starts of every condition and seed."""
    if episodes < 1:
        raise UserError(f"--oracle-episodes must be at least 1, not {episodes}")
    jobs = []
    for protocol, by_seed in draws.starts.items():
        for seed, starts in by_seed.items():
            rows = list(starts)
            spread = np.linspace(0, len(rows) - 1, min(episodes, len(rows))).round().astype(int)
            jobs += [Job("oracle", protocol, seed, (rows[i],)) for i in spread]
    return jobs


def _run(
    setup: Setup,
    data: EpisodeData,
    jobs: list[Job],
    run_jobs: Callable[[Setup, EpisodeData, list[Job], int], Generator[JobResult, None, None]],
    workers: int,
    on_progress: OnProgress,
) -> list[JobResult]:
    """Run this process's share of the jobs, balanced by policy and size → the results of all processes.

    Random actions come first: whether the environment takes any is known before plans are made.
    """
    ordered = sorted(jobs, key=lambda job: (job.policy != "random", job.policy, -len(job.rows)))
    mine = ordered[rank() :: world_size()]
    found: list[JobResult] = []
    total, successes, done, errors = sum(len(job.rows) for job in mine), [0, 0], 0, 0
    with closing(run_jobs(setup, data, mine, workers)) as finished:
        for result in finished:
            found.append(result)
            done += len(result.records)
            errors += sum(r.error is not None for r in result.records)
            if errors == done >= min(total, ENOUGH_ERRORS):
                first = result.records[0].error
                raise UserError(f"the first {done} episodes all failed with an error, nothing is written: {first}")
            if result.job.policy in PLANNING:
                successes[0] += sum(r.success for r in result.records)
                successes[1] += len(result.records)
            on_progress(done, total, successes[0] / successes[1] if successes[1] else None)
    return [result for part in from_all(found) for result in part]


def _assemble(
    info: RunInfo,
    setup: Setup,
    data: EpisodeData,
    draws: Draws,
    protocol: Protocol,
    policies: Sequence[PolicyName],
    results: Sequence[JobResult],
    searched: PlanConfig | None,
    **work: Any,
) -> EvaluationResult:
    """The result of one condition, from the results of its jobs."""
    results = [r for r in results if r.job.protocol == protocol]
    used = {r.precision for r in results if r.precision is not None}
    summaries = {name: _summary(name, protocol, draws, results) for name in policies}
    model, oracle = summaries["model"], summaries.get("oracle")
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
        model=model,
        random=summaries.get("random"),
        replay=summaries.get("replay"),
        oracle=oracle,
        oracle_plan=searched,
        variation={name: tuple(values) for name, values in setup.variation.items()},
        novel_plans=_novel_plans(results),
        remaining_auroc=failure_auroc(model, "remaining"),
        risk_auroc=failure_auroc(model, "risk"),
        share_of_oracle=model.share_of(oracle, protocol.leave_out_solved) if oracle else None,
        **work,
    )


def _novel_plans(results: Sequence[JobResult]) -> int | None:
    counts = [r.novel_plans for r in results if r.job.policy == "model" and any(e.plans for e in r.records)]
    return None if None in counts else sum(count for count in counts if count)


def _write(
    run: Path, folder: Path, reports: Mapping[Protocol, EvaluationResult], results: Sequence[JobResult]
) -> None:
    """Write each condition's result and films, and update the model card."""
    for protocol, report in reports.items():
        films = [film for r in results if r.job.protocol == protocol for film in r.films.items()]
        report.write(folder, dict(sorted(films)))
    try:
        write_card(run)
    except UserError as error:  # an older result file is damaged
        log.warning("the model card is not updated: %s", error)


def _summary(policy: PolicyName, protocol: Protocol, draws: Draws, results: Sequence[JobResult]) -> PolicyResult:
    """The result of one policy, from the jobs of one condition."""
    these = [r for r in results if r.job.policy == policy]
    records = {
        seed: sorted((e for r in these if r.job.seed == seed for e in r.records), key=lambda e: e.row)
        for seed in protocol.seeds
    }
    planning: dict[str, Any] = {}
    if policy in PLANNING:
        seconds, plans = sum(r.planning_seconds for r in these), sum(e.plans for r in these for e in r.records)
        planning = {
            "planning_seconds": seconds,
            "seconds_per_plan": seconds / plans if plans else None,
            "peak_memory": max(r.peak_memory for r in these),
        }
    wall_seconds = sum(r.seconds for r in these)
    return summarise(records, draws.starts[protocol], protocol.leave_out_solved, wall_seconds, **planning)


def _rows_to_film(data: EpisodeData, protocol: Protocol, rows: list[int], count: int) -> tuple[int, ...]:
    """``count`` starts that are not solved, from the one farthest from its goal to the median one."""
    unsolved = [row for row in rows if not data.task.solved(data.states[row], data.states[row + protocol.offset])]
    rows = unsolved or rows
    nearness = [-data.task.distance(data.states[row], data.states[row + protocol.offset]) for row in rows]
    ranks = np.linspace(0, len(rows) // 2, min(count, len(rows))).round().astype(int)
    return tuple(rows[i] for i in np.argsort(nearness, kind="stable")[ranks])
