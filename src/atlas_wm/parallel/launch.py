"""Several processes as one job: they rendezvous under torchrun or SLURM, and fail together."""

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import active_children
from threading import Event, Thread
from typing import TYPE_CHECKING, NamedTuple

from atlas_wm.errors import Interrupted, UserError

if TYPE_CHECKING:  # the command line calls process_info before torch is loaded
    from torch.distributed import Store

TIMEOUT = timedelta(hours=2)  # of a collective: one process may wait for the last episodes of another
POLL_SECONDS, GRACE_SECONDS = 1.0, 10.0
FAILED_KEY = "atlas-wm/failed"


class ProcessInfo(NamedTuple):
    """The rank of this process in its job."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # on its machine
    local_size: int = 1


def process_info() -> ProcessInfo:
    """From the variables of torchrun or, for the processes of one ``srun``, of SLURM."""
    env = os.environ
    if _number("WORLD_SIZE", "1") > 1:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        missing = [name for name in (*names, "MASTER_ADDR", "MASTER_PORT") if name not in env]
        if missing:
            raise UserError(
                f"WORLD_SIZE is {env['WORLD_SIZE']} but {', '.join(missing)} are not set: "
                f"start with torchrun (docs/guides/several-gpus.md), or unset WORLD_SIZE to run in one process"
            )
        return ProcessInfo(*map(_number, names))
    # Variables of the step, not of the job: a job's script runs once, however many tasks it starts.
    if _number("SLURM_STEP_NUM_TASKS", "1") > 1:
        here = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", "1"))  # such as 4(x2)
        rank, size, local = map(_number, ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"))
        return ProcessInfo(rank, size, local, int(here[0]) if here else 1)
    return ProcessInfo()


def _number(name: str, default: str = "") -> int:
    """The value of an environment variable."""
    value = os.environ.get(name, default)
    if not value.isdecimal():
        raise UserError(f"the environment variable {name} must be a number, not {value!r}: correct it, or unset it")
    return int(value)


def own_cores() -> int:
    """This process's share of its machine's cores, and at most those that it may use."""
    share = (os.cpu_count() or 1) // process_info().local_size
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else share
    return max(1, min(share, usable))


@contextmanager
def processes() -> Iterator[None]:
    """All processes of a job enter together and leave when all are done. Also a decorator: ``@processes()``.

    If one fails, the others exit silently with status 1; only the first to fail reports its error. After a signal,
    all exit with its status. With a single process this does nothing.
    """
    here = process_info()
    if here.size == 1:
        yield
        return
    from atlas_wm.parallel.processes import wait_for_all

    store = _rendezvous(here)
    watchdog = _FailureWatchdog(store.clone())
    watchdog.start()
    try:
        _init_process_group(store, here)
        yield
        wait_for_all()
    except BaseException as error:
        watchdog.done.set()
        reported = _error_to_raise(error, store, here)
        if reported is error:
            raise
        raise reported from error
    finally:
        watchdog.done.set()


_store: "Store | None" = None  # one per process: a second rendezvous would read the keys of the first


def _rendezvous(here: ProcessInfo) -> "Store":
    import torch.distributed as dist

    global _store
    if _store is None:
        if "MASTER_ADDR" not in os.environ:
            nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ["SLURM_NODELIST"]
            os.environ["MASTER_ADDR"] = first_node(nodes)
        # All processes of a step compute the same port; another step gets another port.
        step = int(os.environ.get("SLURM_JOB_ID", "0")) + 1009 * int(os.environ.get("SLURM_STEP_ID", "0"))
        os.environ.setdefault("MASTER_PORT", str(15_000 + step % 10_000))
        _store, _, _ = next(dist.rendezvous("env://", here.rank, here.size, timeout=TIMEOUT))
    return _store


def first_node(nodes: str) -> str:
    """The first host of a SLURM node list: ``gpu[03-05,9],cpu1`` → ``gpu03``"""
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", nodes).split(",")[0]


def _init_process_group(store: "Store", here: ProcessInfo) -> None:
    import atexit

    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        return
    shared = here.local_size > torch.cuda.device_count()  # NCCL refuses two processes on one GPU
    backend = "gloo" if shared else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=here.rank, world_size=here.size, timeout=TIMEOUT)
    atexit.register(dist.destroy_process_group)


def _error_to_raise(error: BaseException, store: "Store", here: ProcessInfo) -> BaseException:
    """The error itself in the first process that fails, a silent exit in the others."""
    from torch.distributed import DistError

    try:
        first = store.add(FAILED_KEY, 1) == 1
        _wait_for_others(store, here)
        lost = isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
    except RuntimeError:  # the process that hosts the store is gone
        first = lost = True
    if not first:
        return SystemExit(error.code if isinstance(error, Interrupted) else 1)
    if lost:
        return UserError(
            "another process of this job died without a message: did the system kill it (out of memory)?"
        )
    if isinstance(error, UserError) and here.rank:
        return UserError(f"{error} (process {here.rank} of {here.size})")
    return error


def _wait_for_others(store: "Store", here: ProcessInfo) -> None:
    """The main process may host the store: it stays until the others have read it."""
    deadline = time.monotonic() + GRACE_SECONDS / 2
    while here.rank == 0 and store.add(FAILED_KEY, 0) < here.size and time.monotonic() < deadline:
        time.sleep(0.05)


class _FailureWatchdog(Thread):
    """Ends this process when another has failed, even inside a collective call that would never return."""

    def __init__(self, store: "Store"):
        super().__init__(daemon=True)
        self.store, self.done = store, Event()

    def run(self) -> None:
        import _thread

        while not self.done.wait(POLL_SECONDS):
            try:
                failed = self.store.check([FAILED_KEY])
            except RuntimeError:  # the process that hosts the store is gone or done
                failed = True
            if failed and not self.done.wait(POLL_SECONDS):
                _thread.interrupt_main()  # so that it cleans up
                if not self.done.wait(GRACE_SECONDS):
                    for child in active_children():
                        child.kill()
                    os._exit(1)
