"""Runs units as SLURM jobs, through submitit. Units of one kind that are ready together are an array.

Units that share their work run as several tasks of one job, which find each other (parallel/launch.py).
"""

import logging
import signal
import subprocess
import time
from collections.abc import Sequence
from functools import partial
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
SHARED = ("try", "train", "eval", "diagnose")  # kinds that run in several processes
# What `--slurm` takes, and submitit's name for it.
OPTIONS = {
    "partition": "slurm_partition",
    "account": "slurm_account",
    "qos": "slurm_qos",
    "time": "slurm_time",
    "gpus_per_node": "gpus_per_node",
    "ntasks_per_node": "tasks_per_node",
    "cpus_per_task": "cpus_per_task",
    "mem": "slurm_mem",
    "constraint": "slurm_constraint",
}
COUNTS = ("time", "gpus_per_node", "ntasks_per_node", "cpus_per_task")


def read_options(options: str) -> dict[str, Any]:
    """Of ``--slurm``: ``partition=gpu,gpus_per_node=4``."""
    try:
        given = assignments([text for text in options.split(",") if text], "option of --slurm", OPTIONS)
    except UserError as error:
        raise UserError(f"--slurm: {error}. Options: {', '.join(OPTIONS)}") from error
    for name in COUNTS:
        value, least = given.get(name, "1"), 0 if name == "gpus_per_node" else 1
        if not value.isdecimal() or int(value) < least:
            raise UserError(f"--slurm: {name} must be a whole number of at least {least}, not {value!r}")
    return {name: int(value) if value.isdecimal() else value for name, value in given.items()}


class Command:
    """What each process of a job runs. A preempted or timed-out job is queued again, and the command resumes."""

    def __init__(self, arguments: Sequence[str], log: Path):
        self.arguments, self.log = list(arguments), log

    def __call__(self) -> None:
        # SIGUSR2 is for submitit, which queues the job again; SIGTERM follows, and training saves a checkpoint.
        # If submitit then ends this process, it waits for the command here.
        with (
            self.log.open("ab") as log,
            subprocess.Popen(
                self.arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=partial(signal.signal, signal.SIGUSR2, signal.SIG_IGN),
            ) as command,
        ):
            status = command.wait()
        if status in ENDED_BY_SLURM:  # it ends this process next, and may queue the job again
            time.sleep(KILL_SECONDS)
        if status:
            raise RuntimeError(f"exit status {status}: see {self.log}")

    def checkpoint(self) -> Any:
        import submitit

        return submitit.helpers.DelayedSubmission(Command(self.arguments, self.log))


class SlurmJob:
    def __init__(self, job: Any):
        self.job, self.tasks = job, [job.task(number) for number in range(job.num_tasks)]

    def _failed(self) -> bool:
        """Whether one of its processes did. Those that SLURM killed for it leave no result."""
        return any(task.done() and task.exception() is not None for task in self.tasks)

    def finished(self) -> bool:
        return bool(self.job.done()) or (self._failed() and not self._queued())

    def _queued(self) -> bool:
        """Waiting or running."""
        command = ["squeue", "--noheader", "--jobs", self.job.job_id]
        return bool(subprocess.run(command, capture_output=True).stdout.strip())

    def succeeded(self) -> bool:
        return not self._failed()

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
        given = read_options(options)
        self.gpus = given.get("gpus_per_node", 0)
        self.processes = max(1, given.get("ntasks_per_node", self.gpus))
        try:
            self.executor = submitit.AutoExecutor(folder=records.folder / "slurm", cluster="slurm")
        except RuntimeError as error:
            raise UserError(
                f"--slurm: {error}. Call it on a machine of the cluster, where sbatch is found"
            ) from error
        settings = {"timeout_min": 24 * 60, "name": "atlas", "slurm_array_parallelism": MOST_AT_ONCE}
        # The cores of a task: srun does not take them from the job in every version.
        cores = [f"--cpus-per-task={given['cpus_per_task']}"] if "cpus_per_task" in given else []
        settings["slurm_srun_args"] = ["--kill-on-bad-exit=1", *cores]
        self.executor.update_parameters(**settings, **{OPTIONS[name]: value for name, value in given.items()})

    def room(self) -> int:
        self.jobs = [job for job in self.jobs if not job.finished()]
        return MOST_AT_ONCE - len(self.jobs)

    def start(self, units: Sequence[Unit]) -> list[Job]:
        started: list[SlurmJob] = []
        for kind, group in groupby(units, key=lambda unit: unit.kind):
            self.executor.update_parameters(**self._share(kind))
            with self.executor.batch():
                jobs = [self.executor.submit(self._command(unit)) for unit in group]
            started += map(SlurmJob, jobs)
        self.jobs += started
        return list(started)

    def _share(self, kind: str) -> dict[str, int]:
        """Of a node: a unit that runs in one process uses at most one GPU."""
        processes, gpus = (self.processes, self.gpus) if kind in SHARED else (1, min(1, self.gpus))
        return {"tasks_per_node": processes} | ({"gpus_per_node": gpus} if gpus else {})

    def _command(self, unit: Unit) -> Command:
        return Command(atlas(unit), log_file(self.records.log(unit)).resolve())
