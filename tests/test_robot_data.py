"""docs/guides/robot-data.md, executed from start to end as a reader would."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIAL = Path(__file__).parent.parent / "docs" / "guides" / "robot-data.md"


@pytest.mark.slow
def test_the_tutorial_works_as_written(tmp_path):
    blocks = re.findall(r"```(python|sh)\n(.*?)```", TUTORIAL.read_text(), re.DOTALL)
    assert [kind for kind, _ in blocks] == ["python", "python", "sh", "sh", "python"]
    task = blocks.pop(1)[1]
    assert len(task.splitlines()) <= 15
    (tmp_path / "my_robot.py").write_text(task)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    said = ""
    for kind, text in blocks:
        command = ["bash", "-ec", text] if kind == "sh" else [sys.executable, "-c", text]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        said += done.stdout + done.stderr
    assert "Traceback" not in said
    # The table on the page: what is measured without an environment, and what is skipped with a line.
    rows = re.findall(r"^\| ([a-z, ]+) \| (.*) \|$", TUTORIAL.read_text(), re.MULTILINE)
    skipped = {name for names, what in rows if what.startswith("skipped") for name in names.split(", ")}
    measured = {names for names, what in rows if not what.startswith("skipped")} - {"diagnostic"}
    assert {file.stem for file in (tmp_path / "runs/my_robot/diagnostics").glob("*.json")} == measured
    assert len(skipped) == 4 and all(f"no {name}: {name} needs an environment" in said for name in skipped)
    info = json.loads((tmp_path / "runs/my_robot/config.json").read_text())
    assert info["task"] == "my_robot:MyRobot" and info["action_size"] == 2
