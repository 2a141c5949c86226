"""Demonstrations, recorded by worker processes in stable-worldmodel's formats.

Each episode is a function of (seed, its number) alone, so the set is the same for any number of workers.
"""

import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from atlas_wm.data.dataset import EpisodeData
from atlas_wm.errors import UserError, unknown
from atlas_wm.run_folder import read_json, write_json
from atlas_wm.tasks import Task, task_id
from atlas_wm.tasks.base import import_harness
from atlas_wm.versions import versions

FORMATS = {".lance": "lance", ".h5": "hdf5", ".hdf5": "hdf5"}
Episode = dict[str, np.ndarray]  # each (steps, ...)

_worker_task: Task  # set once in each worker process
_worker_env: Any


def _start_worker(task: Task) -> None:
    import torch

    global _worker_task, _worker_env
    torch.set_num_threads(1)  # environments in torch would otherwise fight over the cores
    _worker_task = task
    _worker_env = _worker_task.make_env()


def _record_job(seed: int, numbers: list[int], pixels: bool) -> list[Episode]:
    return [record_episode(_worker_task, _worker_env, seed, number, pixels) for number in numbers]


def record_episode(task: Task, env: Any, seed: int, number: int, pixels: bool) -> Episode:
    """One demonstration: row t holds the state at t and the action taken there.

    No action is taken in the last row. It holds zeros, which no clip uses: Lance refuses to append NaN.
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
        row["action"] = np.zeros(task.action_size, np.float32)
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
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Record ``episodes`` demonstrations to ``out`` (.lance or .h5) and return the card written beside it.

    The set grows under a name with ``.partial`` in it. Interrupted, its whole episodes stay there, and the same
    call goes on behind them.
    """
    if out.suffix not in FORMATS:
        raise unknown("dataset ending", out.suffix, FORMATS)
    if episodes < 1:
        raise UserError(f"--episodes must be at least 1, not {episodes}")
    if out.exists() and not overwrite:
        raise UserError(f"{out} exists already: choose another --out, or pass --overwrite to replace it")
    import_harness()
    from stable_worldmodel.data import get_format

    partial = out.with_name(out.stem + ".partial" + out.suffix)
    notes = partial.with_name(partial.name + ".json")
    made_by = {"task": task_id(task), "demonstrator": task.demonstrator_settings(), "seed": seed, "pixels": pixels}
    lengths = _kept(partial, notes, made_by, say)[:episodes]
    started, rows, kept = time.time(), sum(lengths), len(lengths)
    write_json(notes, made_by)
    size = task.episodes_per_job
    jobs = [list(range(i, min(i + size, episodes))) for i in range(kept, episodes, size)]
    if jobs:
        pool = ProcessPoolExecutor(
            min(workers or os.cpu_count() or 1, len(jobs)),
            mp_context=get_context("spawn"),
            initializer=_start_worker,
            initargs=(task,),
        )
        try:
            pending = [pool.submit(_record_job, seed, numbers, pixels) for numbers in jobs]
            for number, job in enumerate(jobs):
                recorded = pending[number].result()
                pending[number] = None  # type: ignore[call-overload]  # let the episodes go
                with get_format(FORMATS[out.suffix]).open_writer(partial, mode="append") as writer:
                    writer.write_episodes([{c: list(values) for c, values in e.items()} for e in recorded])
                rows += sum(len(e["action"]) for e in recorded)
                on_episodes(job[-1] + 1, rows)
        except BrokenProcessPool as error:
            raise UserError(
                "a recording process died (out of memory?): run the command again to go on from the last whole "
                "episode, with fewer --workers if it happens again"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)
    _remove(out)
    partial.rename(out)
    notes.unlink()
    data = EpisodeData(out, task, image_size=1, frameskip=1)
    card = {
        **made_by,
        "episodes": len(data.lengths),
        "rows": len(data.actions),
        "hash": data.content_hash(),
        "seconds": round(time.time() - started, 1),
        "versions": versions(),
    }
    write_json(card_path(out), card)
    return card


def _kept(partial: Path, notes: Path, made_by: dict[str, Any], say: Callable[[str], None]) -> list[int]:
    """Lengths of the whole episodes an interrupted call left; if they were made another way, none stay."""
    if not partial.exists():
        return []
    from stable_worldmodel.data import load_dataset

    try:
        if read_json(notes) != json.loads(json.dumps(made_by)):
            raise UserError("it was recorded with other settings")
        lengths = [int(n) for n in load_dataset(str(partial.resolve())).lengths]
    except Exception as error:  # whatever a damaged file makes its library raise
        say(f"{partial} is left from an interrupted call but cannot be continued ({error}): starting over")
        _remove(partial)
        return []
    say(f"{len(lengths)} whole episodes are left from an interrupted call: going on from there")
    return lengths


def card_path(out: Path) -> Path:
    return out.with_name(out.name + ".card.json")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
