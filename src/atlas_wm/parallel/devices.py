"""Choice of the device, and its memory."""

import os
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock, get_ident

import torch

from atlas_wm.errors import UserError, unknown
from atlas_wm.parallel.launch import process_info

DEVICES = ("auto", "cpu", "cuda", "cuda:N", "mps")
MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")  # of Linux


def pick_device(name: str = "auto") -> torch.device:
    """``auto``: CUDA if there is a GPU, else MPS, else the CPU. With several processes, each gets its own GPU."""
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d{1,3})?", name):
        raise unknown("device", name, DEVICES)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no CUDA device; check `nvidia-smi`, or use --device cpu")
    if name.startswith("cuda:") and int(name[5:]) >= torch.cuda.device_count():
        raise UserError(f"--device {name}: this machine has {torch.cuda.device_count()} GPUs, numbered from 0")
    if name == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device mps: this machine has no MPS device; use --device cpu")
    return torch.device(name) if process_info().size == 1 else _own_device(name)


def _own_device(name: str) -> torch.device:
    """The device of one of several processes."""
    if name == "cpu":
        return torch.device(name)
    if name != "cuda":
        raise UserError(
            f"several processes cannot share the device {name}: use --device cuda or cpu, or one process"
        )
    gpus, here = torch.cuda.device_count(), process_info()
    alone = gpus == 1 and "SLURM_LOCALID" in os.environ  # SLURM may show each process only its own GPU
    index = 0 if alone else here.local_rank
    if index >= gpus:
        raise UserError(f"{here.local_size} processes on a machine with {gpus} GPUs: start one for each GPU")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


_lock = Lock()
_within: list[int] = []  # threads of this process that are in one_thread
_usual = 1  # torch's number before the first of them entered


@contextmanager
def one_thread() -> Iterator[None]:
    """Within, torch computes with one CPU thread. Rounding depends on the number of threads, and where other
    processes keep the cores busy, threads spend their time waiting for each other.

    Each thread of the process has its own number, but a new one begins with the number that was set last: if that
    was set here by another thread, it leaves with the usual one.
    """
    global _usual
    me = get_ident()
    with _lock:
        before = torch.get_num_threads()
        if not _within:
            _usual = before
        elif before == 1 and me not in _within:
            before = _usual
        _within.append(me)
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _lock:
            _within.remove(me)
            torch.set_num_threads(before)


def peak_memory(device: torch.device) -> int:
    """Peak bytes: of tensors on a CUDA device, elsewhere of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def machine_memory() -> int:
    """Bytes: what the machine has, or its container may use."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total, _container_limit() or total)


def free_memory(device: torch.device) -> int:
    """Bytes: on a CUDA device, elsewhere this process's share of the machine's or the container's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = machine_memory() // 2  # where the system does not tell
    if MEMINFO.exists():
        lines = MEMINFO.read_text().splitlines()
        free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    if limit := _container_limit():
        free = min(free, limit - int((CGROUP / "memory.current").read_text()))
    return free // process_info().local_size


def _container_limit() -> int | None:
    limit = CGROUP / "memory.max"
    allowed = limit.read_text().strip() if limit.exists() else "max"
    return None if allowed == "max" else int(allowed)
