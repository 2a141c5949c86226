"""A real SLURM of one machine: a study whose job is queued again while it trains, and training in two processes."""

import csv
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atlas_wm.cli.app import main
from atlas_wm.errors import UserError
from atlas_wm.runs.results import read_results
from atlas_wm.study.records import Records
from atlas_wm.study.schedule import Job
from atlas_wm.study.slurm import SlurmLauncher, read_options
from atlas_wm.study.study import read_study
from atlas_wm.study.units import Unit, units_of

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch")
CONFIG = """
ClusterName=test
SlurmctldHost={host}
AuthType=auth/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPort={port}
SlurmdPort={next_port}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
KillWait=2
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
GresTypes=gpu
NodeName={host} CPUs={cores} Gres=gpu:2 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES State=UP
"""
GPUS = "Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n"  # that SLURM believes in, and torch does not find
STUDY = """
methods = ["atlas"]
recipes = ["demo"]
seeds = 2
diagnostics = []
evaluations = []
settings = {{"train.steps" = 30, "train.batch" = 8, "train.validate-every" = 15, "train.checkpoint-every" = 3}}
[datasets.tworoom]
path = "{data}"
"""


GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "several-gpus.md"
FLAGS = "--train.steps 4 --train.batch 9 --train.log-every 1 --train.validate-every 4 --device cpu "
FLAGS += "--model.encoder.depth 1 --model.predictor.depth 1 --model.predictor.dropout 0"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A controller and a node, started for these tests and ended after them."""
    if os.geteuid() != 0 or not all(map(shutil.which, PROGRAMS)):
        pytest.skip("needs root and Debian's packages slurm-wlm and munge")
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "spool").mkdir()
    (folder / "state").mkdir()
    host = subprocess.run(["hostname", "-s"], capture_output=True, text=True, check=True).stdout.strip()
    port = 20_000 + os.getpid() % 20_000
    facts = {"folder": folder, "host": host, "cores": os.cpu_count(), "port": port, "next_port": port + 1}
    (folder / "slurm.conf").write_text(CONFIG.format(**facts))
    (folder / "gres.conf").write_text(GPUS)
    patch = pytest.MonkeyPatch()
    patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    patch.setenv("OMP_NUM_THREADS", "1")  # with which weights are compared
    munged = subprocess.run(["munge", "-n"], capture_output=True).returncode != 0
    if munged:
        Path("/run/munge").mkdir(exist_ok=True)
        shutil.chown("/run/munge", "munge", "munge")
        subprocess.run(["su", "-s", "/bin/sh", "munge", "-c", "/usr/sbin/munged"], check=True)
    try:
        for program in (["slurmctld"], ["slurmd", "-N", host]):
            subprocess.run(program, check=True, timeout=30)
        wait_for(lambda: "idle" in slurm("sinfo", "-h", "-o", "%T"), "the node is not idle", 30)
        yield
    finally:
        for name in ("slurmd", "slurmctld"):
            stop(folder / f"{name}.pid")
        if munged:
            stop(Path("/run/munge/munged.pid"))
        patch.undo()


def stop(pid_file: Path) -> None:
    if pid_file.exists():
        subprocess.run(["kill", pid_file.read_text().strip()], check=False)


def slurm(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout


def wait_for(condition, what: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.usefixtures("few_frames_in_banks")
def test_a_job_that_is_killed_and_queued_again_ends_with_the_same_weights(tmp_path, cluster, dataset_path):
    (tmp_path / "mine.toml").write_text(STUDY.format(data=dataset_path))
    flags = ["--out", str(tmp_path / "there"), "--slurm", "cpus_per_task=1,mem=0"]
    command = [sys.executable, "-m", "atlas_wm", "study", str(tmp_path / "mine.toml"), *flags]
    there = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    records = Records(tmp_path / "there").folder / "slurm"
    partial = tmp_path / "there" / "atlas-3072.partial"
    wait_for(lambda: any(partial.glob("checkpoints/*")) or there.poll() is not None, "no checkpoint")
    jobs = slurm("squeue", "-h", "-o", "%i %t").splitlines()
    running = [line.split()[0] for line in jobs if line.endswith(" R")]
    assert any("_0" in job for job in running), (jobs, there.poll())  # the trainings are an array
    job = next(job for job in running if job.endswith("_0"))
    subprocess.run(["scontrol", "requeue", job], check=True)
    wait_for(lambda: f"{job} PD" in slurm("squeue", "-h", "-o", "%i %t"), "it is not queued again", 60)
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], check=True)  # not in two minutes
    printed, _ = there.communicate(timeout=240)
    assert there.returncode == 0, printed
    starts = [text for file in records.glob("*_0_0_log.out") for text in file.read_text().splitlines()]
    assert sum("Starting" in text for text in starts) > 1, starts
    study_units = units_of(read_study(str(tmp_path / "mine.toml")), tmp_path / "there")
    command = list(study_units["train atlas-3072"].command)
    command[command.index("--out") + 1] = str(tmp_path / "here")
    torch.set_num_threads(1)
    main(command)
    weights = [(tmp_path / run / "model.safetensors").read_bytes() for run in ("here", "there/atlas-3072")]
    assert weights[0] == weights[1]


TWO = """
methods = ["atlas"]
recipes = ["demo"]
diagnostics = []
[settings]
"train.steps" = 40
"train.batch" = 9
"train.log-every" = 1
"train.validate-every" = 40
"train.checkpoint-every" = 1000
"model.encoder.depth" = 1
"model.predictor.depth" = 1
"model.predictor.dropout" = 0.0
[datasets.tworoom]
path = "{data}"
[[evaluations]]
episodes = 4
seeds = [42]
flags = ["--candidates", "8", "--elites", "3", "--films", "0"]
"""


@pytest.mark.slow
@pytest.mark.usefixtures("few_frames_in_banks")
def test_a_preempted_job_of_two_processes_saves_resumes_and_ends_as_one_process(tmp_path, cluster, dataset_path):
    """submitit asks SLURM for SIGUSR2 before the time of a job is over."""
    (tmp_path / "two.toml").write_text(TWO.format(data=dataset_path))
    flags = ["--out", str(tmp_path / "there"), "--slurm", "gpus_per_node=2,cpus_per_task=1,mem=0"]
    command = [sys.executable, "-m", "atlas_wm", "study", str(tmp_path / "two.toml"), *flags]
    there = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    run, alone = tmp_path / "there" / "atlas", tmp_path / "alone"
    losses = tmp_path / "there" / "atlas.partial" / "metrics.csv"

    def trains() -> bool:
        return there.poll() is not None or (losses.exists() and losses.read_text().count("\n") > 3)

    wait_for(trains, "it does not train", 240)
    (job,) = slurm("squeue", "-h", "-o", "%i").split()
    subprocess.run(["scancel", "--signal=USR2", job], check=True)
    wait_for(lambda: f"{job} PD" in slurm("squeue", "-h", "-o", "%i %t"), "it is not queued again", 60)
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], check=True)
    printed, _ = there.communicate(timeout=400)
    assert there.returncode == 0 and "attempt 2" not in printed, printed
    log = next((tmp_path / "there" / "units").glob("train*.log")).read_text()
    assert "SIGTERM after step" in log and "died" not in log, log

    torch.set_num_threads(1)
    units = units_of(read_study(str(tmp_path / "two.toml")), tmp_path / "there")
    command = list(units["train atlas"].command)
    command[command.index("--out") + 1] = str(alone)
    main(command)
    expected = metrics(alone)
    assert len(expected) == 40 and metrics(run) == [pytest.approx(row, rel=2e-2) for row in expected]  # float32
    shutil.rmtree(alone)
    shutil.copytree(run, alone, ignore=shutil.ignore_patterns("evaluation"))
    (unit,) = (unit for unit in units.values() if unit.kind == "eval")
    main(["eval", str(alone), *unit.command[2:], "--workers", "1"])
    (shared,), (by_one,) = (read_results(folder).values() for folder in (run, alone))
    episodes = [[policy.episodes for policy in result.policies.values()] for result in (shared, by_one)]
    assert len(episodes[0]) == 3 and episodes[0] == episodes[1]


def started(tmp_path: Path, monkeypatch, script: str, *kinds: str) -> list[Job]:
    """Jobs whose processes run a script, not atlas."""
    monkeypatch.setattr("atlas_wm.study.slurm.atlas", lambda unit: ["sh", "-c", script])
    launcher = SlurmLauncher(Records(tmp_path), "gpus_per_node=2,cpus_per_task=1,mem=0")
    return launcher.start([Unit(kind, kind, (), tmp_path, (), kind) for kind in kinds])


@pytest.mark.slow
def test_units_that_share_their_work_have_a_process_for_each_gpu(tmp_path, cluster, monkeypatch):
    kinds = ("collect", "train", "eval", "report")
    script = "echo $SLURM_PROCID of $SLURM_STEP_NUM_TASKS, $(echo $CUDA_VISIBLE_DEVICES | tr , ' ' | wc -w) GPUs"
    jobs = started(tmp_path, monkeypatch, script, *kinds)
    wait_for(lambda: all(job.finished() for job in jobs), "they do not end")
    assert all(job.succeeded() for job in jobs)
    for kind in kinds:
        lines = sorted((tmp_path / "units" / f"{kind}.log").read_text().splitlines())
        alone = kind in ("collect", "report")
        assert lines == (["0 of 1, 1 GPUs"] if alone else ["0 of 2, 2 GPUs", "1 of 2, 2 GPUs"]), kind


@pytest.mark.slow
def test_a_process_that_fails_ends_the_others_and_fails_the_unit(tmp_path, cluster, monkeypatch):
    (job,) = started(tmp_path, monkeypatch, "test $SLURM_PROCID = 0 && exec sleep 600; exit 3", "train")
    wait_for(job.finished, "it does not end", 60)
    assert not job.succeeded() and not slurm("squeue", "-h")


def scripts() -> list[str]:
    """Those of the guide, for a machine of two cores without a GPU."""
    found = re.findall(r"```sh\n(#!/bin/bash\n.*?)```", GUIDE.read_text(), re.DOTALL)
    smaller = {"--nodes 2": "--nodes 1", "node 4": "node 2", "--train.workers 6": "--train.workers 0"}
    smaller |= {"--cpus-per-task 32": "--cpus-per-task 2", "--cpus-per-task 8": "--cpus-per-task 1"}
    smaller |= {
        "#SBATCH --gpus-per-node 2\n": "",
        "--recipe paper": f'--recipe demo {FLAGS} --data "$1" --out "$2"',
    }
    for there, here in smaller.items():
        found = [text.replace(there, here) for text in found]
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("few_frames_in_banks")
def test_the_scripts_of_the_guide_train_in_two_processes(tmp_path, cluster, dataset_path):
    by_srun, by_torchrun = scripts()
    assert "srun --kill-on-bad-exit=1 atlas train" in by_srun and "torchrun --nnodes" in by_torchrun
    torch.set_num_threads(1)
    where = ["--data", str(dataset_path), "--out", str(tmp_path / "alone")]
    main(["train", "tworoom", "--recipe", "demo", *FLAGS.split(), *where])
    alone = load_file(tmp_path / "alone" / "model.safetensors")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # of atlas and torchrun
    for name, text in {"srun": by_srun, "torchrun": by_torchrun}.items():
        (tmp_path / f"{name}.sh").write_text(text)
        run, log = tmp_path / name, tmp_path / f"{name}.log"
        command = ["sbatch", "--output", str(log), f"{run}.sh", str(dataset_path), str(run)]
        subprocess.run(command, env={**os.environ, "PATH": path}, check=True)
        wait_for(lambda: not slurm("squeue", "-h"), "it does not end", 240)  # sbatch --wait looks every 30 s
        assert (run / "model.safetensors").exists(), log.read_text()
        together = load_file(run / "model.safetensors")
        assert any(not together[key].equal(value) for key, value in alone.items())  # sums of two parts are rounded
        losses, expected = (metrics(folder) for folder in (run, tmp_path / "alone"))
        assert len(expected) == 4 and losses == [pytest.approx(row, rel=5e-3) for row in expected]
        # Adam takes rounding for a direction where the gradient is nearly 0: a few numbers differ by a step.
        for key in (key for key in alone if alone[key].ndim > 1):
            assert (together[key] - alone[key]).norm() < 2e-2 * alone[key].norm(), key


def metrics(run: Path) -> list[dict[str, float]]:
    rows = list(csv.DictReader((run / "metrics.csv").open(newline="")))
    return [
        {name: float(row[name]) for name in ("step", "total", "prediction", "wemreg", "grad_norm")} for row in rows
    ]


def test_without_a_cluster_the_error_names_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="where sbatch is found"):
        SlurmLauncher(Records(tmp_path), "partition=gpu")
    with pytest.raises(UserError, match=r"no option of --slurm 'partion'.*partition"):
        SlurmLauncher(Records(tmp_path), "partion=gpu")
    for name in ("cpus_per_task", "ntasks_per_node", "time"):
        with pytest.raises(UserError, match=f"{name} must be a whole number of at least 1, not '0'"):
            read_options(f"{name}=0")
    assert read_options("gpus_per_node=0") == {"gpus_per_node": 0}
    with pytest.raises(UserError, match=r"gpus_per_node must be a whole number of at least 0, not 'a100:4'"):
        SlurmLauncher(Records(tmp_path), "gpus_per_node=a100:4")
