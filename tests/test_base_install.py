"""Without its extras the package loads a model and plans; what needs an extra names it in one line."""

import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from atlas_wm.runs.versions import EXTRAS, MODULES

PYPROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
USER_EXTRAS = {
    name: {re.match(r"[\w.-]+", requirement)[0].lower() for requirement in requirements}
    for name, requirements in PYPROJECT["optional-dependencies"].items()
    if name in EXTRAS.values()
}
WITHOUT_EXTRAS = """
import sys

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else self.finder.find_spec(name, path, target)

hidden = set(sys.argv.pop(1).split(","))
sys.meta_path[:] = map(Hiding, sys.meta_path)
"""
PLAN_AND_COMMANDS = """
import io, json
from contextlib import redirect_stderr, redirect_stdout

import atlas_wm.losses
from atlas_wm import Planner, load_model
from atlas_wm.cli.app import main
from atlas_wm.images import read_image

def command(*arguments):
    status = 0
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            main(list(arguments))
        except SystemExit as end:  # the interpreter prints it and ends with status 1
            status = end.code
    return {"status": status, "out": out.getvalue(), "err": err.getvalue()}

run, frame, goal = sys.argv[1:]
plan = Planner(load_model(run)).plan(read_image(frame), read_image(goal))
found = {"python": plan.actions.tolist(), "plan": command("plan", run, "--frame", frame, "--goal", goal)}
print(json.dumps(found | {name: command(name, run) for name in ("report", "eval")}))
"""


@cache
def installed() -> dict[str, set[str]]:
    """Module → the packages that install it, in lower case."""
    return {module: {name.lower() for name in names} for module, names in packages_distributions().items()}


def modules_of_extras() -> set[str]:
    extras = set.union(*USER_EXTRAS.values())
    return {module for module, packages in installed().items() if packages & extras}


@pytest.fixture(scope="module")
def without_extras(trained, task, tmp_path_factory) -> dict[str, Any]:
    """What a process prints in which no extra can be imported."""
    folder = tmp_path_factory.mktemp("images")
    for name, state in (("now", [60, 60]), ("goal", [80, 70])):
        image = task.draw(np.array([state], np.float32), 224)[0].permute(1, 2, 0).numpy()
        Image.fromarray(image).save(folder / f"{name}.png")
    command = [sys.executable, "-c", WITHOUT_EXTRAS + PLAN_AND_COMMANDS, ",".join(modules_of_extras())]
    arguments = [str(path) for path in (trained, folder / "now.png", folder / "goal.png")]
    ended = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_planning_needs_no_extra(without_extras):
    assert without_extras["plan"]["status"] == 0, without_extras["plan"]["err"]
    actions = json.loads(without_extras["plan"]["out"])["actions"]
    assert np.array(actions).shape == (25, 2) and actions == without_extras["python"]


@pytest.mark.parametrize(("command", "extra"), [("report", "report"), ("eval", "envs")])
def test_a_command_names_the_extra_it_needs(without_extras, command, extra):
    ended = without_extras[command]
    assert ended["out"] == ended["err"] == ""
    assert re.fullmatch(rf'atlas: .* is not installed: pip install "atlas-wm\[{extra}\]"', ended["status"])


def test_every_module_is_in_the_extra_that_errors_name():
    for module, extra in EXTRAS.items():
        assert installed()[module] & USER_EXTRAS[extra], module
    assert {"stable_worldmodel", "h5py", "lance", "matplotlib", "pygame"} <= modules_of_extras()
    assert {module for format in ("lance", "hdf5") for module in MODULES[format]} <= set(EXTRAS)
