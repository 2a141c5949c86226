"""Runs units on this machine: one on each GPU, or several, or one on the CPUs."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from atlas_wm.study.records import Records
from atlas_wm.study.schedule import Job
from atlas_wm.study.units import Unit

STOP_SECONDS = 30  # to write a checkpoint
# What takes seconds to import, and most units need.
PRELOADED = ("atlas_wm.evaluate.evaluate", "atlas_wm.train.loop", "stable_worldmodel")


class LocalJob:
    def __init__(self, process: "subprocess.Popen[bytes]", gpu: int | None):
        self.process, self.gpu = process, gpu

    def finished(self) -> bool:
        return self.process.poll() is not None

    def succeeded(self) -> bool:
        return self.process.returncode == 0

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()


class LocalLauncher:
    """``gpus``: how many there are; each takes ``per_gpu`` units. Without any, ``per_gpu`` units share the CPUs.

    Units that run at once divide the cores: threads of several torch processes on one core wait for each other.
    """

    def __init__(self, records: Records, gpus: int, per_gpu: int):
        self.records = records
        self.slots: list[int | None] = [gpu for gpu in range(gpus) for _ in range(per_gpu)] or [None] * per_gpu
        self.jobs: list[LocalJob] = []
        self.threads = max(1, (os.cpu_count() or 1) // len(self.slots)) if len(self.slots) > 1 else None
        self.standby = start_standby(self.threads)

    def _free(self) -> list[int | None]:
        self.jobs = [job for job in self.jobs if not job.finished()]
        free = list(self.slots)
        for job in self.jobs:
            free.remove(job.gpu)
        return free

    def room(self) -> int:
        return len(self._free())

    def start(self, units: Sequence[Unit]) -> list[Job]:
        started = [LocalJob(self._process(unit, gpu), gpu) for unit, gpu in zip(units, self._free(), strict=False)]
        self.jobs += started
        return list(started)

    def _process(self, unit: Unit, gpu: int | None) -> "subprocess.Popen[bytes]":
        process, self.standby = self.standby, start_standby(self.threads)
        if process.poll() is not None:  # somebody killed it
            process = start_standby(self.threads)
        environment = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": visible_gpus()[gpu]}
        log = str(log_file(self.records.log(unit)))
        assert process.stdin is not None
        with process.stdin:
            process.stdin.write(
                json.dumps({"command": unit.command, "environment": environment, "log": log}).encode()
            )
        return process


def start_standby(threads: int | None) -> "subprocess.Popen[bytes]":
    """A process for the next unit, which imports modules meanwhile. It ends with this one."""
    command = [sys.executable, "-m", "atlas_wm.cli.standby", *PRELOADED]
    divided = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}  # read when torch is imported
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, env=divided | os.environ, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet)


def atlas(unit: Unit) -> list[str]:
    return [sys.executable, "-m", "atlas_wm", *unit.command]


def log_file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name.strip()]
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]
