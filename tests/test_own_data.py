"""docs/guides/own-data.md, executed from start to end as a reader would."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIAL = Path(__file__).parent.parent / "docs" / "guides" / "own-data.md"


@pytest.mark.slow
def test_the_tutorial_works_as_written(tmp_path):
    blocks = re.findall(r"```(python|sh)\n(.*?)```", TUTORIAL.read_text(), re.DOTALL)
    assert [kind for kind, _ in blocks] == ["python", "sh", "python", "sh", "sh", "python"]
    (tmp_path / "pendulum_task.py").write_text(blocks[0][1])
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment["SDL_VIDEODRIVER"] = "dummy"
    for kind, text in blocks[1:]:
        command = ["bash", "-ec", text] if kind == "sh" else [sys.executable, "-c", text]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        last = done.stdout + done.stderr
    assert "Traceback" not in last
    results = list((tmp_path / "runs" / "pendulum" / "evaluation").glob("heldout_offset10*.json"))
    assert len(results) == 1
