"""Real processes that are forked, so that torch is loaded once for all of them."""

import os
import socket
import sys
import traceback
from collections.abc import Callable


def fork(size: int, work: Callable[[], object], slurm: bool = False) -> list[int]:
    """The work in ``size`` processes, with the environment variables of torchrun or SLURM; the status of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    own = ("RANK", "LOCAL_RANK")
    if slurm:
        shared = {"SLURM_STEP_NUM_TASKS": size, "SLURM_STEP_TASKS_PER_NODE": f"{size}(x1)", "SLURM_NTASKS": size}
        shared |= {"SLURM_NODELIST": "localhost", "SLURM_JOB_ID": port}  # which gives the port
        own = ("SLURM_PROCID", "SLURM_LOCALID")
    children = []
    for rank in range(size):
        child = os.fork()
        if not child:
            os.environ |= {name: str(value) for name, value in {**shared, **dict.fromkeys(own, rank)}.items()}
            os._exit(_status(work))  # to take the interpreter down would take seconds
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _status(work: Callable[[], object]) -> int:
    try:
        work()
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stderr.flush()
    return 0
