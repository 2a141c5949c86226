"""Demonstrations, recorded by worker processes in stable-worldmodel's formats.

Each episode is a function of (seed, its number) alone, so the set is the same for any number of workers.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from atlas_wm.data.dataset import EpisodeData
from atlas_wm.errors import UserError, unknown
from atlas_wm.run_folder import write_json
from atlas_wm.tasks import Task, get_task
from atlas_wm.tasks.base import import_harness
from atlas_wm.versions import versions

FORMATS = {".lance": "lance", ".h5": "hdf5", ".hdf5": "hdf5"}
Episode = dict[str, np.ndarray]  # each (steps, ...)
EPISODES_PER_JOB = 25

_worker_task: Task  # set once in each worker process
_worker_env: Any


def _start_worker(task_name: str) -> None:
    import torch

    global _worker_task, _worker_env
    torch.set_num_threads(1)  # environments in torch would otherwise fight over the cores
    _worker_task = get_task(task_name)
    _worker_env = _worker_task.make_env()


def _record_job(seed: int, numbers: list[int], pixels: bool) -> list[Episode]:
    return [record_episode(_worker_task, _worker_env, seed, number, pixels) for number in numbers]


def record_episode(task: Task, env: Any, seed: int, number: int, pixels: bool) -> Episode:
    """One demonstration: row t holds the state at t and the action taken there; the last action is NaN."""
    env_seed, policy_seed = np.random.SeedSequence([seed, number]).generate_state(2).tolist()
    policy = task.demonstrator(env, policy_seed)
    _, info = env.reset(seed=env_seed)
    rows: list[dict[str, np.ndarray]] = []
    done = False
    while True:
        row = task.columns(info)
        if pixels:
            row["pixels"] = env.render()
        row["action"] = np.full(task.action_size, np.nan, np.float32)
        rows.append(row)
        if done:
            return {column: np.stack([r[column] for r in rows]) for column in row}
        action = policy.get_action(info)
        row["action"] = np.asarray(action, np.float32)
        _, _, terminated, truncated, info = env.step(action)
        done = terminated or truncated


def collect(
    task: Task,
    out: Path,
    episodes: int,
    *,
    seed: int = 0,
    pixels: bool = True,
    workers: int | None = None,
    overwrite: bool = False,
    on_episodes: Callable[[int, int], None] = lambda episodes, rows: None,
) -> dict[str, Any]:
    """Record ``episodes`` demonstrations to ``out`` (.lance or .h5) and return the card written beside it."""
    if out.suffix not in FORMATS:
        raise unknown("dataset ending", out.suffix, FORMATS)
    if episodes < 1:
        raise UserError(f"--episodes must be at least 1, not {episodes}")
    if out.exists() and not overwrite:
        raise UserError(f"{out} exists already: choose another --out, or pass --overwrite to replace it")
    import_harness()
    from stable_worldmodel.data import get_format

    partial = out.with_name(out.stem + ".partial" + out.suffix)
    _remove(partial)
    out.parent.mkdir(parents=True, exist_ok=True)
    started = time.time()
    rows = 0

    def record() -> Iterator[dict[str, list[np.ndarray]]]:
        nonlocal rows
        jobs = [list(range(i, min(i + EPISODES_PER_JOB, episodes))) for i in range(0, episodes, EPISODES_PER_JOB)]
        with ProcessPoolExecutor(
            min(workers or os.cpu_count() or 1, len(jobs)),
            mp_context=get_context("spawn"),
            initializer=_start_worker,
            initargs=(task.name,),
        ) as pool:
            pending = [pool.submit(_record_job, seed, numbers, pixels) for numbers in jobs]
            for done, _ in enumerate(jobs):
                for episode in pending[done].result():
                    rows += len(episode["action"])
                    yield {column: list(values) for column, values in episode.items()}
                pending[done] = None  # type: ignore[call-overload]  # let the episodes go
                on_episodes(min((done + 1) * EPISODES_PER_JOB, episodes), rows)

    try:
        with get_format(FORMATS[out.suffix]).open_writer(partial, mode="overwrite") as writer:
            writer.write_episodes(record())
    except BaseException:
        _remove(partial)
        raise
    _remove(out)
    partial.rename(out)
    card = {
        "task": task.name,
        "demonstrator": task.demonstrator_settings(),
        "seed": seed,
        "episodes": episodes,
        "rows": rows,
        "pixels": pixels,
        "hash": EpisodeData(out, task, image_size=1, frameskip=1).content_hash(),
        "seconds": round(time.time() - started, 1),
        "versions": versions(),
    }
    write_json(card_path(out), card)
    return card


def card_path(out: Path) -> Path:
    return out.with_name(out.name + ".card.json")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
