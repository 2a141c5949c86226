"""docs/guides/own-data.md, executed from start to end as a reader would."""

import pytest

from tutorials import read_blocks, run_block


@pytest.mark.slow
def test_the_tutorial_works_as_written(working_directory, render_in_this_process, monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    blocks = read_blocks("guides/own-data.md")
    assert [kind for kind, _ in blocks] == ["python", "sh", "python", "sh", "sh", "python"]
    (working_directory / "pendulum_task.py").write_text(blocks[0][1])
    for kind, text in blocks[1:]:
        run_block(kind, text)
    results = list((working_directory / "runs" / "pendulum" / "evaluation").glob("heldout_offset10*.json"))
    assert len(results) == 1
