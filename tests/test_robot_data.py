"""docs/guides/robot-data.md, executed from start to end as a reader would."""

import json
import re
from pathlib import Path

import pytest

from tutorials import DOCS, read_blocks, run_block

PAGE = "guides/robot-data.md"


@pytest.mark.slow
def test_the_tutorial_works_as_written(working_directory, capsys):
    blocks = read_blocks(PAGE)
    assert [kind for kind, _ in blocks] == ["python", "python", "sh", "sh", "python"]
    task = blocks.pop(1)[1]
    assert len(task.splitlines()) <= 15
    Path("my_robot.py").write_text(task)
    for kind, text in blocks:
        run_block(kind, text)
    said = "".join(capsys.readouterr())
    assert "Traceback" not in said
    # The table on the page: what is measured without an environment, and what is skipped with a line.
    rows = re.findall(r"^\| ([a-z, ]+) \| (.*) \|$", (DOCS / PAGE).read_text(), re.MULTILINE)
    skipped = {name for names, what in rows if what.startswith("skipped") for name in names.split(", ")}
    measured = {names for names, what in rows if not what.startswith("skipped")} - {"diagnostic"}
    assert {file.stem for file in Path("runs/my_robot/diagnostics").glob("*.json")} == measured
    assert len(skipped) == 5 and all(f"no {name}: {name} needs an environment" in said for name in skipped)
    info = json.loads(Path("runs/my_robot/config.json").read_text())
    assert info["task"] == "my_robot:MyRobot" and info["action_size"] == 2
