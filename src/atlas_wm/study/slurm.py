"""Runs units as SLURM jobs, through submitit. Units of one kind that are ready together are an array."""

import logging
import signal
import subprocess
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from atlas_wm.errors import UserError
from atlas_wm.settings import assignments
from atlas_wm.study.local import atlas, log_file
from atlas_wm.study.records import Records
from atlas_wm.study.schedule import Job
from atlas_wm.study.units import Unit

MOST_AT_ONCE = 1000  # jobs
ENDED_BY_SLURM = (-signal.SIGTERM, 128 + signal.SIGTERM)
KILL_SECONDS = 120  # longer than SLURM waits between SIGTERM and SIGKILL
# What `--slurm` takes, and submitit's name for it.
OPTIONS = {
    "partition": "slurm_partition",
    "account": "slurm_account",
    "qos": "slurm_qos",
    "time": "slurm_time",
    "gpus_per_node": "gpus_per_node",
    "cpus_per_task": "cpus_per_task",
    "mem": "slurm_mem",
    "constraint": "slurm_constraint",
}


class Command:
    """What a job runs. A preempted or timed-out job is queued again, and the command resumes."""

    def __init__(self, arguments: Sequence[str], log: Path):
        self.arguments, self.log = list(arguments), log

    def __call__(self) -> None:
        with self.log.open("ab") as log:
            done = subprocess.run(self.arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        if done.returncode in ENDED_BY_SLURM:  # it ends this process next, and may queue the job again
            time.sleep(KILL_SECONDS)
        if done.returncode:
            raise RuntimeError(f"exit status {done.returncode}: see {self.log}")

    def checkpoint(self) -> Any:
        import submitit

        return submitit.helpers.DelayedSubmission(Command(self.arguments, self.log))


class SlurmJob:
    def __init__(self, job: Any):
        self.job = job

    def finished(self) -> bool:
        return bool(self.job.done())

    def succeeded(self) -> bool:
        return self.job.exception() is None

    def stop(self) -> None:
        self.job.cancel()


class SlurmLauncher:
    def __init__(self, records: Records, options: str):
        try:
            import submitit
        except ImportError as error:
            raise UserError('--slurm needs submitit: pip install "atlas-wm[slurm]"') from error
        logging.getLogger("submitit").setLevel(logging.ERROR)  # it warns at every look at a cluster without sacct
        self.records, self.jobs = records, list[SlurmJob]()
        try:
            given = assignments([text for text in options.split(",") if text], "option of --slurm", OPTIONS)
        except UserError as error:
            raise UserError(f"--slurm: {error}. Options: {', '.join(OPTIONS)}") from error
        numbers = {name: int(value) if value.isdigit() else value for name, value in given.items()}
        try:
            self.executor = submitit.AutoExecutor(folder=records.folder / "slurm", cluster="slurm")
        except RuntimeError as error:
            raise UserError(
                f"--slurm: {error}. Call it on a machine of the cluster, where sbatch is found"
            ) from error
        settings = {"timeout_min": 24 * 60, "name": "atlas", "slurm_array_parallelism": MOST_AT_ONCE}
        self.executor.update_parameters(**settings, **{OPTIONS[name]: value for name, value in numbers.items()})

    def room(self) -> int:
        self.jobs = [job for job in self.jobs if not job.finished()]
        return MOST_AT_ONCE - len(self.jobs)

    def start(self, units: Sequence[Unit]) -> list[Job]:
        started: list[SlurmJob] = []
        for _, group in groupby(units, key=lambda unit: unit.kind):
            with self.executor.batch():
                jobs = [self.executor.submit(self._command(unit)) for unit in group]
            started += map(SlurmJob, jobs)
        self.jobs += started
        return list(started)

    def _command(self, unit: Unit) -> Command:
        return Command(atlas(unit), log_file(self.records.log(unit)).resolve())
