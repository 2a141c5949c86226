"""Without its extras the package loads a model and plans; what needs an extra names it in one line."""

import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

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
PLAN = """
import atlas_wm.losses
from atlas_wm import Planner, load_model
from atlas_wm.images import read_image

run, frame, goal = sys.argv[1:]
print(Planner(load_model(run)).plan(read_image(frame), read_image(goal)).actions.tolist())
"""
COMMAND = "from atlas_wm.cli.app import main; main(sys.argv[1:])"


@cache
def installed() -> dict[str, set[str]]:
    """Module → the packages that install it, in lower case."""
    return {module: {name.lower() for name in names} for module, names in packages_distributions().items()}


def modules_of_extras() -> set[str]:
    extras = set.union(*USER_EXTRAS.values())
    return {module for module, packages in installed().items() if packages & extras}


def without_extras(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_EXTRAS + code, ",".join(modules_of_extras()), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture
def images(task, tmp_path) -> list[str]:
    for name, state in (("now", [60, 60]), ("goal", [80, 70])):
        image = task.draw(np.array([state], np.float32), 224)[0].permute(1, 2, 0).numpy()
        Image.fromarray(image).save(tmp_path / f"{name}.png")
    return [str(tmp_path / "now.png"), str(tmp_path / "goal.png")]


def test_planning_needs_no_extra(trained, images):
    in_python = without_extras(PLAN, str(trained), *images)
    assert in_python.returncode == 0, in_python.stderr
    command = without_extras(COMMAND, "plan", str(trained), "--frame", images[0], "--goal", images[1])
    assert command.returncode == 0, command.stderr
    actions = json.loads(command.stdout)["actions"]
    assert np.array(actions).shape == (25, 2) and actions == json.loads(in_python.stdout)


@pytest.mark.parametrize(("command", "extra"), [("report", "report"), ("eval", "envs")])
def test_a_command_names_the_extra_it_needs(trained, command, extra):
    ended = without_extras(COMMAND, command, str(trained))
    assert ended.returncode == 1
    assert re.fullmatch(rf'atlas: .* is not installed: pip install "atlas-wm\[{extra}\]"\n', ended.stderr)


def test_every_module_is_in_the_extra_that_errors_name():
    for module, extra in EXTRAS.items():
        assert installed()[module] & USER_EXTRAS[extra], module
    assert {"stable_worldmodel", "h5py", "lance", "matplotlib", "pygame"} <= modules_of_extras()
    assert {module for format in ("lance", "hdf5") for module in MODULES[format]} <= set(EXTRAS)
