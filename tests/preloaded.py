"""Processes forked from one that has imported everything but computed nothing. New ones import for seconds."""

import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
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
        blocked = signal.pthread_sigmask(signal.SIG_SETMASK, ())  # or the server would hand it to all processes
        forkserver.ensure_running()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        process._args = (dict(os.environ), blocked, process._target, *process._args)
        process._target = _run
        return ForkServerProcess._Popen(process)  # type: ignore[attr-defined]


class PreloadedContext(ForkServerContext):
    """In place of ``get_context("spawn")``: processes too get what is pickled, the present environment variables
    and blocked signals, and nothing else."""

    Process = _Process  # type: ignore[assignment]

    def __init__(self) -> None:
        self.set_forkserver_preload(MODULES)


def set_start_method(method: str, force: bool = False) -> None:
    """In place of ``multiprocessing.set_start_method``, which stable-worldmodel calls with "spawn" where it opens a
    Lance table: from then on, every loader process would import for seconds."""
    assert method == "spawn" and force
    multiprocessing.context._default_context._actual_context = PreloadedContext()  # type: ignore[attr-defined]


def run_script(script: Path, *arguments: str, said: Path, timeout: float = 300) -> None:
    """``python script arguments 2> said`` in the folder of the script. It must end well."""
    process = PreloadedContext().Process(target=_run_script, args=(str(script), arguments, str(said)))
    process.start()
    process.join(timeout)
    status = process.exitcode
    process.kill()  # if it is still running
    assert status == 0, said.read_text()


def _run_script(script: str, arguments: Sequence[str], said: str) -> None:
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    os.chdir(Path(script).parent)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def stop_forkserver() -> None:
    """At once: left alone, it waits for the loader processes of loaders that nobody has deleted."""
    server = forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)
    server._stop()


def _run(
    variables: dict[str, str], blocked: set[int], target: Callable[..., Any], *args: Any, **named: Any
) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    os.environ.clear()
    os.environ.update(variables)
    target(*args, **named)
