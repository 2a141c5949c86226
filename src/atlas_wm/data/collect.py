"""Record demonstrations in worker processes, in stable-worldmodel's formats.

Each episode is a function of (seed, episode number), so the dataset does not depend on the number of workers.
"""

import json
import re
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

from atlas_wm.data.card import card_path
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.data.encoding import Episode, FrameEncoder, encode_images
from atlas_wm.data.moments import moments_of
from atlas_wm.data.partial import FORMATS, Partial, partial_of
from atlas_wm.data.remote import as_url
from atlas_wm.errors import UserError, short, unknown
from atlas_wm.parallel.launch import own_cores
from atlas_wm.parallel.workers import (
    TIMEOUT,
    WorkerDied,
    WorkerPool,
    check_timeout,
    one_line,
    startup_limit,
    time_limit,
)
from atlas_wm.runs.files import read_json, write_json, writing
from atlas_wm.runs.versions import check_modules, to_install, versions
from atlas_wm.settings import to_dict
from atlas_wm.tasks import Task, task_id
from atlas_wm.tasks.base import import_harness

JOBS_AHEAD = 4  # for each process: how many are recorded, at most, while the first one is not done
ENOUGH_ERRORS = 20  # episodes: collection stops if the first ones all failed


class Recorder:
    """The environment of one worker process. It is made again after a failure."""

    def __init__(self, task: Task, timeout: float, encode: FrameEncoder):
        self.task, self.timeout, self.encode = task, timeout, encode
        self.env: Any = None
        import_harness()

    def record(self, seed: int, numbers: list[int], pixels: bool) -> list[Episode | str]:
        """The episodes with these numbers, frames encoded; for one that failed, the error message instead."""
        return [self._record_one(seed, number, pixels) for number in numbers]

    def _record_one(self, seed: int, number: int, pixels: bool) -> Episode | str:
        try:
            with time_limit(startup_limit(self.timeout)):
                self.env = self.env or self.task.make_env()
            with time_limit(self.timeout):
                episode = record_episode(self.task, self.env, seed, number, pixels)
            _check_finite(self.task, episode)
            return encode_images(episode, self.encode)
        except UserError:
            raise
        except Exception as error:
            self.close()
            return one_line(error)

    def close(self) -> None:
        if self.env is not None:
            with suppress(Exception):
                self.env.close()
            self.env = None


def record_episode(task: Task, env: Any, seed: int, number: int, pixels: bool) -> dict[str, np.ndarray]:
    """One demonstration: row t holds the state at t and the action taken there.

    The last row has no action. It is filled with zeros, which no clip uses; Lance cannot append NaN.
    """
    env_seed, policy_seed = np.random.SeedSequence([seed, number]).generate_state(2).tolist()
    policy = task.demonstrator(env, policy_seed)
    _, info = env.reset(seed=env_seed)
    rows: list[dict[str, np.ndarray]] = []
    done = False
    while True:
        row = task.columns(env, info)
        if pixels:
            row["pixels"] = env.render()
        row["action"] = np.zeros(task.action_size or env.action_space.shape, np.float32)
        rows.append(row)
        if done:
            return {column: np.stack([r[column] for r in rows]) for column in row}
        action = policy.get_action(info)
        row["action"] = np.asarray(action, np.float32)
        _, _, terminated, truncated, info = env.step(action)
        done = terminated or truncated or getattr(policy, "finished", False)


def _check_finite(task: Task, episode: dict[str, np.ndarray]) -> None:
    """Raise on an episode that no dataset may contain: see EpisodeData."""
    for name in (task.action_column, *(column for columns in task.state_columns for column in columns)):
        values = episode.get(name)
        if values is not None and values.dtype.kind == "f" and not np.isfinite(values).all():
            raise ValueError(f"column {name!r} is NaN or infinite")


def usual_workers(task: Task, pixels: bool) -> int:
    """One process per core, or fewer where those that render get in each other's way."""
    cores = own_cores()
    return cores if task.most_collectors is None or not pixels else min(cores, task.most_collectors)


def collect(
    task: Task,
    out: Path,
    episodes: int,
    *,
    seed: int = 0,
    pixels: bool = True,
    workers: int | None = None,
    timeout: float = TIMEOUT,
    overwrite: bool = False,
    on_episodes: Callable[[int, int], None] = lambda episodes, rows: None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Record ``episodes`` demonstrations to ``out`` (.lance or .h5) and return the card written next to it.

    Episodes are first stored in the folder ``out.partial``, which one process at a time may use. After an
    interruption the same call resumes from the complete episodes there. An episode whose environment raises, kills
    its process or takes longer than ``timeout`` seconds is left out, and the card says why.
    """
    task.require_env(
        "atlas collect", "record episodes with your robot and pass them as --data (docs/guides/robot-data.md)"
    )
    if url := as_url(out):
        raise UserError(f"--out {url} is a URL: collect to a local path, then upload the dataset and its card")
    if out.suffix not in FORMATS:
        raise unknown("dataset ending", out.suffix, FORMATS)
    if out.suffix == ".lance" and not re.fullmatch(r"[A-Za-z0-9._-]+", out.stem):
        raise UserError(f"--out {short(str(out))}: the name of a Lance table has only letters, digits, _, - and .")
    for name, value, least in (("episodes", episodes, 1), ("seed", seed, 0), ("workers", workers, 1)):
        if value is not None and value < least:
            raise UserError(f"--{name} must be at least {least}, not {value}")
    if not pixels and type(task).draw is Task.draw:
        say(f"--no-pixels: {task.name} cannot be drawn from states, so no model can be trained on this dataset")
    partial = partial_of(out)
    if not partial.card.exists():
        _check_free(out, overwrite)
    try:
        check_modules(partial.format)
    except ImportError as error:
        raise UserError(f"{out} cannot be written ({error}): {to_install(error, 'see `atlas doctor`')}") from error
    check_timeout(timeout)
    started, size = time.time(), task.episodes_per_job
    pool = WorkerPool(workers or usual_workers(task, pixels), Recorder, task, timeout, partial.encode)
    with writing(out.parent), partial.opened(), closing(pool):
        pool.start(-(-episodes // size))
        import_harness()  # takes seconds, here and in the processes at the same time
        config = task.demonstrator_config
        demonstrator = task.demonstrator_settings() | ({} if config is None else to_dict(config))
        made_by = {"task": task_id(task), "demonstrator": demonstrator, "seed": seed, "pixels": pixels}
        card = partial.adopt(card_path(out))
        if card is not None and _matches(card, made_by, episodes):
            say(f"{out} was already complete when an earlier call was interrupted: only its card was missing")
            return card
        _check_free(out, overwrite)
        partial.card.unlink(missing_ok=True)
        lengths, failed = _recover(partial, made_by, say)
        recorded_numbers = islice((n for n in count() if n not in failed), len(lengths))
        first = max(recorded_numbers, default=-1) + 1  # to record
        if first > episodes:
            raise UserError(
                f"{partial.folder} contains {first} episodes of an interrupted call, more than --episodes "
                f"{episodes}: raise --episodes, or delete the folder to start over"
            )
        failed, rows = {f: why for f, why in failed.items() if f < first}, sum(lengths)
        jobs = [list(range(i, min(i + size, episodes))) for i in range(first, episodes, size)]
        write_json(partial.notes, {**made_by, "failed": failed})
        with closing(_recorded(pool, seed, pixels, jobs)) as finished:
            for numbers, recorded in zip(jobs, finished, strict=True):
                failed |= {n: e for n, e in zip(numbers, recorded, strict=True) if isinstance(e, str)}
                if len(failed) == numbers[-1] + 1 >= min(episodes, ENOUGH_ERRORS):
                    partial.clear()
                    raise UserError(f"the first {len(failed)} episodes all failed, nothing is written: {failed[0]}")
                whole = [e for e in recorded if not isinstance(e, str)]
                # Notes first, so that after a kill every episode is either recorded, noted as failed or repeated.
                write_json(partial.notes, {**made_by, "failed": failed})
                if whole:
                    partial.append(whole)
                rows += sum(len(e["action"]) for e in whole)
                on_episodes(numbers[-1] + 1, rows)
        partial.assemble()
        data = EpisodeData(partial.data, task, image_size=1, frameskip=1)
        if len(data.lengths) != episodes - len(failed):
            raise UserError(
                f"{partial.folder} contains {len(data.lengths)} episodes, but {episodes - len(failed)} were "
                f"recorded: another process wrote to it; delete it and collect again"
            )
        if failed:
            n, why = next(iter(failed.items()))
            say(f"{len(failed)} of {episodes} episodes failed and are left out, the first is number {n}: {why}")
        card = {
            **made_by,
            "failed": failed,
            "episodes": len(data.lengths),
            "rows": len(data.actions),
            "hash": data.content_hash(),
            "moments": _moments(data, say),
            "seconds": round(time.time() - started, 1),
            "versions": versions(),
        }
        partial.publish(card, card_path(out))
    return card


def _moments(data: EpisodeData, say: Callable[[str], None]) -> dict[str, Any]:
    try:
        return {name: moment._asdict() for name, moment in moments_of(data).items()}
    except Exception as error:  # of a task of the user; the episodes are recorded by now
        say(f"the card has no moments, because those of the task {data.task.name} cannot be computed: {error}")
        return {}


def _check_free(out: Path, overwrite: bool) -> None:
    if out.exists() and not overwrite:
        raise UserError(f"{out} exists already: choose another --out, or pass --overwrite to replace it")


def _matches(card: dict[str, Any], made_by: dict[str, Any], episodes: int) -> bool:
    same = all(card.get(name) == value for name, value in json.loads(json.dumps(made_by)).items())
    return same and card["episodes"] + len(card["failed"]) == episodes


def _recorded(
    pool: WorkerPool, seed: int, pixels: bool, jobs: list[list[int]]
) -> Generator[list[Episode | str], None, None]:
    """The episodes of each job, in order. The episodes of a process that died are recorded again at once, one per
    job."""
    ahead: dict[int, Episode | str] = {}  # recorded out of order
    waiting = (("record", seed, numbers, pixels) for numbers in jobs)
    requests = deque[tuple[Any, ...]](islice(waiting, JOBS_AHEAD * pool.count))
    with closing(pool.each(requests)) as finished:
        for numbers in jobs:
            while not set(numbers) <= set(ahead):
                (*_, mine, _), answer = next(finished)
                if not isinstance(answer, WorkerDied):
                    ahead |= zip(mine, answer, strict=True)
                elif len(mine) > 1:
                    requests.extendleft(("record", seed, [number], pixels) for number in reversed(mine))
                else:
                    ahead[mine[0]] = str(answer)
            requests.extend(islice(waiting, 1))
            yield [ahead.pop(number) for number in numbers]


def _recover(
    partial: Partial, made_by: dict[str, Any], say: Callable[[str], None]
) -> tuple[list[int], dict[int, str]]:
    """Lengths of the complete episodes of an interrupted call, and by number the errors of failed ones.

    Episodes that were recorded with other settings are removed.
    """
    if not partial.notes.exists():
        partial.clear()
        return [], {}
    try:
        noted = read_json(partial.notes)
        failed = {int(number): str(why) for number, why in noted.pop("failed").items()}
        if noted != json.loads(json.dumps(made_by)):
            raise UserError("it was recorded with other settings")
        lengths = partial.recover()
    except Exception as error:  # libraries raise many kinds on damaged files
        say(f"{partial.folder} of an interrupted call cannot be resumed ({error}): starting over")
        partial.clear()
        return [], {}
    if lengths:
        say(f"resuming after {len(lengths)} complete episodes of an interrupted call")
    return lengths, failed
