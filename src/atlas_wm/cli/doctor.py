"""``atlas doctor``: tries what this machine can do, and names what to install where something fails"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional

from atlas_wm.cli.arguments import by_default
from atlas_wm.cli.show import DataTask, check_dataset
from atlas_wm.errors import UserError
from atlas_wm.runs.versions import MODULES, install_command, to_install
from atlas_wm.task_table import TASKS, WITH_ENV

Status = Literal["ok", "warn", "missing"]

SECONDS = 50.0  # for all that is tried in other processes
LOW_MEMORY, LOW_DISK = 4.0, 10.0  # GiB
ONLY_FOR = {"video": " (only for video datasets)"}
FORMATS = {  # name → modules it reads and writes with, and the command that installs them
    name: (modules, install_command(*modules) + ONLY_FOR.get(name, "")) for name, modules in MODULES.items()
}
ENVIRONMENTS = {TASKS[name].spec.rpartition(":")[2]: name for name in WITH_ENV}  # class → task
NO_ANSWER, WAIT = "no answer", "try again when the machine is idle"
INSTALL_ENVS = install_command("stable_worldmodel")


def doctor(
    data: Positional[Annotated[str | None, by_default("check this machine", "[DATA]")]] = None,
    /,
    task: DataTask = None,
) -> None:
    """Check this machine (device, renderer, environments, dataset formats, package versions), or a dataset.

    Every check that fails comes with the command that fixes it. Takes up to a minute.

    With a dataset it prints what is wrong with it: NaN, actions outside the bounds, copies of episodes, black
    frames and more, each with the number of rows or episodes and what to do. The exit status is 1 if the dataset
    cannot be trained on. `atlas show DATA` puts the same on a page.

        atlas doctor
        atlas doctor data/tworoom.lance
        atlas doctor my_robot/ --task my_task:MyRobot

    Args:
        data: Dataset to check instead of the machine: a path, or a URL (docs/guides/own-data.md).
        task: Task of the dataset: tworoom, pusht, cube, offline, or your own as module:Class.
    """
    if data is not None:
        check_dataset(data, task)
    elif task is not None:
        raise UserError("--task needs a dataset: atlas doctor DATA --task TASK")
    else:
        print_doctor()


@dataclass(frozen=True)
class Check:
    """One row of the table."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def diagnose_machine() -> list[Check]:
    """All checks, within a minute. A check that fails is a row: nothing is raised."""
    deadline = time.monotonic() + SECONDS
    light = Probe(_TRY_LIGHT)
    rows: list[Check] = []
    for name, check in (
        ("Python", check_python),
        ("cores", check_cores),
        ("memory", check_memory),
        ("device", check_device),
        ("precision", check_precision),
        ("packages", check_packages),
        ("disk", check_disk),
        ("OMP_WAIT_POLICY", check_wait_policy),
        ("renderer", check_renderer),
    ):
        rows += _guarded(name, check)
    can_draw = any(row.name == "renderer" and row.status == "ok" for row in rows)
    cube = Probe(_TRY_CUBE_FRAME if can_draw else _TRY_CUBE)
    for name in ENVIRONMENTS:
        probe = cube if name == "Cube" else light
        rows += _guarded(f"env {name}", partial(environment_row, name, probe, deadline))
    return rows + _guarded("formats", partial(format_rows, light, deadline))


def print_doctor() -> list[Check]:
    """The table on the terminal; the rows are returned."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    rows = diagnose_machine()
    table = Table("", "what", "found", "what to do", title="What this machine can do", title_justify="left")
    marks = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "missing": "[red]missing[/]"}
    for row in rows:
        table.add_row(marks[row.status], escape(row.name), escape(row.detail), escape(row.remedy))
    Console().print(table)
    return rows


def _guarded(name: str, check: Callable[[], Check | Iterable[Check]]) -> list[Check]:
    try:
        found = check()
        return [found] if isinstance(found, Check) else list(found)
    except Exception as error:
        detail = f"the check failed: {type(error).__name__}: {error}"
        return [Check(name, "missing", detail, "reinstall: make setup, or pip install -r requirements.lock")]


# The machine


def check_python() -> Check:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Check("Python", "ok", found)


def check_cores() -> Check:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Check("cores", "ok", f"{usable} of {os.cpu_count()}")


def check_memory() -> Check:
    from atlas_wm.parallel.devices import machine_memory

    gib = machine_memory() / 2**30
    if gib < LOW_MEMORY:
        return Check("memory", "warn", f"{gib:.1f} GiB", "use fewer --workers: each takes about 1 GiB")
    return Check("memory", "ok", f"{gib:.1f} GiB")


def check_device() -> Check:
    import torch

    from atlas_wm.parallel.devices import pick_device

    kind = pick_device("auto").type
    if kind == "cuda":
        cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return Check("device", "ok", ", ".join(f"{c.name} ({c.total_memory / 2**30:.0f} GiB)" for c in cards))
    if kind == "mps":
        return Check("device", "ok", "MPS (Apple)")
    hint = "fine for `atlas demo`; the paper's recipe wants a CUDA card: check `nvidia-smi`"
    return Check("device", "warn", "CPU only", hint)


def check_precision() -> Check:
    import torch

    from atlas_wm.parallel.devices import pick_device

    device = pick_device("auto")
    if device.type == "cuda":
        supported = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        ones = torch.ones(2, 2, dtype=torch.bfloat16, device=device)
        supported = bool((ones @ ones == 2).all())
    if supported:
        return Check("precision", "ok", f"float32 and bfloat16 on {device.type}")
    return Check("precision", "warn", f"float32 only on {device.type}", "use float32; bfloat16 needs a newer card")


def check_disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    if free < LOW_DISK:
        return Check(
            "disk", "warn", f"{free:.1f} GiB free here", "free some: a frame is 5 KB in Lance, 150 KB in HDF5"
        )
    return Check("disk", "ok", f"{free:.0f} GiB free here")


def check_wait_policy() -> Check:
    policy = os.environ.get("OMP_WAIT_POLICY", "")
    if policy.upper() == "PASSIVE":
        return Check("OMP_WAIT_POLICY", "ok", "PASSIVE: idle threads sleep")
    hint = "export OMP_WAIT_POLICY=PASSIVE (the atlas command does): spinning threads slow two runs at once tenfold"
    return Check("OMP_WAIT_POLICY", "warn", policy or "not set", hint)


def check_renderer() -> Check:
    from atlas_wm.tasks import rendering

    if find_spec("mujoco") is None:
        return Check("renderer", "missing", "MuJoCo is not installed: no Cube", INSTALL_ENVS)
    backend = rendering.pick_renderer()
    if backend is not None:
        return Check("renderer", "ok", f"MuJoCo draws Cube with {backend}")
    reasons = "; ".join(f"{b}: {rendering.try_renderer(b)}" for b in rendering.candidates())
    return Check("renderer", "missing", f"no frames of Cube ({reasons})", rendering.remedy())


# The packages


def find_lock() -> Path | None:
    """requirements.lock of the checkout this package runs from; an installed package has none."""
    root = Path(__file__).resolve().parents[3]
    lock = root / "requirements.lock"
    return lock if lock.exists() and (root / "pyproject.toml").exists() else None


def check_packages() -> Iterable[Check]:
    """One row for all that are as locked, and one for each that is not."""
    lock = find_lock()
    if lock is None:
        yield Check("packages", "warn", "no requirements.lock beside the package: versions are not compared")
        return
    locked = list(read_lock(lock))
    same = 0
    for name, wanted in locked:
        install = f"pip install {name}=={wanted}"
        try:
            found = version(name)
        except PackageNotFoundError:
            yield Check(f"package {name}", "missing", f"not installed; tested with {wanted}", install)
            continue
        if found.split("+")[0] == wanted.split("+")[0]:  # +cu130 and the like say where it was built
            same += 1
        else:
            yield Check(f"package {name}", "warn", f"{found}; tested with {wanted}", install)
    yield Check("packages", "ok" if same == len(locked) else "warn", f"{same} of {len(locked)} as in {lock.name}")


def read_lock(lock: Path) -> Iterable[tuple[str, str]]:
    """(name, version) of each line that is meant for this machine."""
    from packaging.markers import Marker

    for line in lock.read_text().splitlines():
        requirement, _, marker = line.split("#")[0].partition(";")
        pinned = re.fullmatch(r"\s*([\w.-]+)(?:\[[^\]]*\])?\s*==\s*(\S+)\s*", requirement)
        if pinned and (not marker.strip() or Marker(marker.strip()).evaluate()):
            yield pinned[1], pinned[2]


# What only another process can be trusted with: each line it prints is one finding

_HEAD = """
import importlib, json, warnings
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)

def find(name, look):
    try:
        found = look()
    except Exception as error:
        found = dict(error=f"{type(error).__name__}: {error}")
    print(json.dumps({name: found}), flush=True)

def use(env, draw=True):
    env.reset(seed=0)
    env.step(env.action_space.sample())
    return dict(frame=list(env.render().shape) if draw else None)

def absent(module):
    try:
        importlib.import_module(module)
    except Exception:
        return True

def formats():
    from stable_worldmodel.data import list_formats
    return dict(listed=list_formats(), absent={n: [m for m in ms if absent(m)] for n, ms in FORMATS.items()})
"""
_TRY_LIGHT = f"""{_HEAD}
FORMATS = { ({name: modules for name, (modules, _) in FORMATS.items()})!r}
import stable_worldmodel
find("formats", formats)
from atlas_wm.tasks import get_task
for name, task in {[(name, task) for name, task in ENVIRONMENTS.items() if name != "Cube"]!r}:
    find(name, lambda: use(get_task(task).make_env()))
"""
_TRY_CUBE = f"""{_HEAD}
from atlas_wm.tasks.cube import Cube
find("Cube", lambda: use(Cube().make_env(), draw=False))
"""
_TRY_CUBE_FRAME = _TRY_CUBE.replace("draw=False", "draw=True")


class Probe:
    """A process under way that prints its findings, each a line of JSON {name: finding}."""

    def __init__(self, code: str):
        self._found: dict[str, Any] = {}
        self._error = ""
        self._process: subprocess.Popen[str] | None = None
        env = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except OSError as error:
            self._error = str(error)

    def finding(self, name: str, deadline: float) -> tuple[dict[str, Any], str]:
        """(what it found, "") or ({}, why it found nothing)."""
        if self._process is not None:
            self._wait(self._process, deadline)
            self._process = None
        found = self._found.get(name, {"error": self._error})
        return ({}, found["error"]) if "error" in found else (found, "")

    def _wait(self, process: subprocess.Popen[str], deadline: float) -> None:
        try:
            out, err = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
            lines = err.strip().splitlines()
            failed = lines and process.returncode == 1  # a traceback; other ends leave no reason behind
            self._error = lines[-1] if failed else f"ended with status {process.returncode}"
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
            self._error = f"{NO_ANSWER} within {SECONDS:.0f} s"
        for line in out.splitlines():
            if line.startswith("{"):
                self._found |= json.loads(line)


def environment_row(name: str, probe: Probe, deadline: float) -> Check:
    found, error = probe.finding(name, deadline)
    label = f"env {name}"
    if error:
        remedy = WAIT if NO_ANSWER in error else to_install(error, INSTALL_ENVS)
        return Check(label, "missing", error, remedy)
    if found["frame"] is None:
        return Check(label, "warn", "reset and step work; no frames", "see renderer")
    height, width, _ = found["frame"]
    return Check(label, "ok", f"reset, step and a frame of {width}×{height}")


def format_rows(probe: Probe, deadline: float) -> Iterable[Check]:
    found, error = probe.finding("formats", deadline)
    for name, (_, install) in FORMATS.items():
        label = f"format {name}"
        if error:
            remedy = WAIT if NO_ANSWER in error else to_install(error, INSTALL_ENVS)
            yield Check(label, "missing", f"stable-worldmodel does not load: {error}", remedy)
        elif found["absent"][name]:
            status: Status = "warn" if name == "video" else "missing"
            yield Check(label, status, f"needs {', '.join(found['absent'][name])}", install)
        elif name not in found["listed"]:
            yield Check(label, "missing", "unknown to stable-worldmodel", install)
        else:
            yield Check(label, "ok", "can be read and written")
