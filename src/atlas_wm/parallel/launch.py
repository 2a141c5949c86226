"""Several processes as one job: how they find one another under torchrun or SLURM, and how they end together."""

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import active_children
from threading import Event, Thread
from typing import TYPE_CHECKING, NamedTuple

from atlas_wm.errors import UserError

if TYPE_CHECKING:  # the command line asks for its place before torch is loaded
    from torch.distributed import Store

TIMEOUT = timedelta(hours=2)  # for one to wait for another: an evaluation's last episodes, a file of tokens
LOOK_EVERY, GRACE = 1.0, 10.0  # seconds
FAILED = "atlas-wm/failed"


class ProcessInfo(NamedTuple):
    """Which of a job's processes this is."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among those of its machine
    local_size: int = 1


def process_info() -> ProcessInfo:
    """As torchrun or, for processes of one ``srun``, SLURM says it."""
    env = os.environ
    if int(env.get("WORLD_SIZE", "1")) > 1:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        missing = [name for name in (*names, "MASTER_ADDR", "MASTER_PORT") if name not in env]
        if missing:
            raise UserError(
                f"WORLD_SIZE is {env['WORLD_SIZE']} but {', '.join(missing)} are not set: "
                f"start with torchrun (docs/guides/several-gpus.md), or unset WORLD_SIZE to run in one process"
            )
        return ProcessInfo(*(int(env[name]) for name in names))
    # Of the step, not of the job: a job's script runs once, whatever number of tasks it may start.
    if int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        here = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", "1"))  # such as 4(x2)
        rank, size, local = (int(env[name]) for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"))
        return ProcessInfo(rank, size, local, int(here[0]) if here else 1)
    return ProcessInfo()


def own_cores() -> int:
    """This process's share of its machine's cores."""
    return max(1, (os.cpu_count() or 1) // process_info().local_size)


@contextmanager
def processes() -> Iterator[None]:
    """All of a job's processes enter together and leave when all are done. Also a decorator: ``@processes()``.

    Where one fails the others end too, with status 1 and without a word: the first to fail says why. In a process
    that was started alone nothing happens.
    """
    here = process_info()
    if here.size == 1:
        yield
        return
    from atlas_wm.parallel.processes import wait_for_all

    store = _meet(here)
    watch = _Watch(store.clone())
    watch.start()
    try:
        _join(store, here)
        yield
        wait_for_all()
    except BaseException as error:
        watch.over.set()
        said = _to_say(error, store, here)
        if said is error:
            raise
        raise said from error
    finally:
        watch.over.set()


_store: "Store | None" = None  # one for the life of a process: a second meeting would read the first one's keys


def _meet(here: ProcessInfo) -> "Store":
    import torch.distributed as dist

    global _store
    if _store is None:
        if "MASTER_ADDR" not in os.environ:
            nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ["SLURM_NODELIST"]
            os.environ["MASTER_ADDR"] = first_node(nodes)
        # Every process of a step comes to the same port, and those of another step to another one.
        step = int(os.environ.get("SLURM_JOB_ID", "0")) + 1009 * int(os.environ.get("SLURM_STEP_ID", "0"))
        os.environ.setdefault("MASTER_PORT", str(15_000 + step % 10_000))
        _store, _, _ = next(dist.rendezvous("env://", here.rank, here.size, timeout=TIMEOUT))
    return _store


def first_node(nodes: str) -> str:
    """The first host of a SLURM node list: ``gpu[03-05,9],cpu1`` → ``gpu03``"""
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", nodes).split(",")[0]


def _join(store: "Store", here: ProcessInfo) -> None:
    import atexit

    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=here.rank, world_size=here.size, timeout=TIMEOUT)
    atexit.register(dist.destroy_process_group)


def _to_say(error: BaseException, store: "Store", here: ProcessInfo) -> BaseException:
    """What this process ends with: its error if it is the first to fail, else silence."""
    from torch.distributed import DistError

    try:
        first = store.add(FAILED, 1) == 1
        _linger(store, here)
        lost = isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
    except RuntimeError:  # the process that keeps the store is gone
        first = lost = True
    if not first:
        return SystemExit(1)
    if lost:
        return UserError("another process of this job is gone without a word: was it killed, for memory say?")
    if isinstance(error, UserError) and here.rank:
        return UserError(f"{error} (process {here.rank} of {here.size})")
    return error


def _linger(store: "Store", here: ProcessInfo) -> None:
    """The store may live in the main process: it stays until the others know."""
    until = time.monotonic() + GRACE / 2
    while here.rank == 0 and store.add(FAILED, 0) < here.size and time.monotonic() < until:
        time.sleep(0.05)


class _Watch(Thread):
    """Ends this process when another has failed, also out of a collective that would wait for it forever."""

    def __init__(self, store: "Store"):
        super().__init__(daemon=True)
        self.store, self.over = store, Event()

    def run(self) -> None:
        import _thread

        while not self.over.wait(LOOK_EVERY):
            try:
                failed = self.store.check([FAILED])
            except RuntimeError:  # the process that keeps the store is gone, or done
                failed = True
            if failed and not self.over.wait(LOOK_EVERY):
                _thread.interrupt_main()  # to leave with everything cleaned up
                if not self.over.wait(GRACE):
                    for child in active_children():
                        child.kill()
                    os._exit(1)
