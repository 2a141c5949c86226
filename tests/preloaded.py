"""Processes forked from one that has imported everything but computed nothing. New ones import for seconds."""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

MODULES = [
    "atlas_wm.train.loop",
    "atlas_wm.evaluate.evaluate",
    "atlas_wm.diagnose.simulate",
    "stable_worldmodel",
    "h5py",
]


def forkserver_context() -> ForkServerContext:
    context = get_context("forkserver")
    context.set_forkserver_preload(MODULES)
    return context


class _Process(ForkServerProcess):
    @staticmethod
    def _Popen(process: Any) -> Any:
        process._args = (dict(os.environ), process._target, *process._args)
        process._target = _run
        return ForkServerProcess._Popen(process)  # type: ignore[attr-defined]


class PreloadedContext(ForkServerContext):
    """In place of ``get_context("spawn")``: processes too get what is pickled and the present environment
    variables, and nothing else."""

    Process = _Process  # type: ignore[assignment]

    def __init__(self) -> None:
        self.set_forkserver_preload(MODULES)


def set_start_method(method: str, force: bool = False) -> None:
    """In place of ``multiprocessing.set_start_method``, which stable-worldmodel calls with "spawn" where it opens a
    Lance table: from then on, every loader process would import for seconds."""
    assert method == "spawn" and force
    multiprocessing.context._default_context._actual_context = PreloadedContext()  # type: ignore[attr-defined]


def stop_forkserver() -> None:
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def _run(variables: dict[str, str], target: Callable[..., Any], *args: Any, **named: Any) -> None:
    os.environ.clear()
    os.environ.update(variables)
    target(*args, **named)
