"""Processes forked from one that has imported everything but computed nothing. New ones import for seconds."""

import os
from collections.abc import Callable, Sequence
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


class PreloadedContext:
    """For worker processes, in place of ``get_context("spawn")``: they too get what is pickled and the present
    environment variables, and nothing else."""

    def __init__(self) -> None:
        self.Pipe = forkserver_context().Pipe

    def Process(self, *, target: Callable[..., Any], args: Sequence[Any], daemon: bool) -> ForkServerProcess:
        return forkserver_context().Process(target=_run, args=(dict(os.environ), target, *args), daemon=daemon)


def stop_forkserver() -> None:
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def _run(variables: dict[str, str], target: Callable[..., Any], *args: Any) -> None:
    os.environ.clear()
    os.environ.update(variables)
    target(*args)
