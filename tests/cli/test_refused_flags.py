"""Flags with values that cannot be: one line, before any work."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from atlas_wm.cli.app import main
from atlas_wm.plan.planner import Planner


def failure(*arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert str(stopped.value.code).startswith("atlas: ")
    return str(stopped.value.code)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--films", "-1"), "--films must be at least 0"),
        (("--workers", "0"), "--workers at least 1"),
        (("--workers", "-1", "--policy", "model", "oracle"), "--workers at least 1"),
        (("--device", "cpu:foo"), "unknown device 'cpu:foo'. Did you mean 'cpu'?"),
        (("--device", "mps:1"), "unknown device 'mps:1'"),
        (("--seeds", "0-999999999"), "--seeds 0-999999999 are more than 10,000 seeds"),
        (("--seeds", "0-" + "9" * 30), "are more than 10,000 seeds"),
        (("--seeds", "46-42"), "--seeds 46-42 is an empty range: write it as 42-46"),
        (("--candidates", "1"), "--candidates must lie between 2 and 1e+06, not 1"),
    ],
)
def test_eval_refuses(run_folder, flags, said):
    assert said in failure("eval", str(run_folder), *flags)


def test_head_refuses_a_seed(run_folder):
    assert "seed must be a whole number" in failure("head", str(run_folder), "--seed", "-1")


@pytest.mark.parametrize(("row", "seed"), [("3", "-1"), ("-1", "0")])
def test_plan_refuses_a_row_and_a_seed(run_folder, row, seed):
    said = failure("plan", str(run_folder), "--row", row, "--offset", "5", "--seed", seed)
    assert ("seed must be" if seed == "-1" else "--row -1 and --offset 5 do not lie in one episode") in said


@pytest.fixture
def pictures(task, tmp_path, monkeypatch) -> list[str]:
    """--frame and --goal, and an empty working directory."""
    monkeypatch.chdir(tmp_path)
    for name, state in (("now", [60, 60]), ("goal", [80, 70])):
        image = task.draw(np.array([state], np.float32), 224)[0].permute(1, 2, 0).numpy()
        Image.fromarray(image).save(tmp_path / f"{name}.png")
    return ["--frame", "now.png", "--goal", "goal.png"]


def test_a_film_without_a_folder_is_refused_before_the_plan(pictures, monkeypatch):
    monkeypatch.setattr(Planner, "plan", lambda *_, **__: pytest.fail("planned"))
    said = failure("plan", "demo", *pictures, "--film", "nowhere/x.gif")
    assert "--film nowhere/x.gif: there is no folder nowhere" in said


def test_a_film_that_cannot_be_written_is_said(pictures):
    Path("x.gif").mkdir()
    assert "x.gif cannot be written (Is a directory)" in failure(
        "plan", "demo", *pictures, "--iterations", "1", "--film", "x.gif"
    )


def test_a_picture_that_is_too_large_is_refused(pictures, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert "now.png cannot be read as an image: Image size" in failure("plan", "demo", *pictures)


def test_the_task_of_a_packaged_model_may_be_named(pictures, capsys):
    main(["plan", "demo", *pictures, "--iterations", "1", "--task", "tworoom"])
    assert '"actions"' in capsys.readouterr().out
    assert "no run is of --task pusht" in failure("plan", "demo", *pictures, "--task", "pusht")


@pytest.mark.parametrize(
    ("command", "writer"), [("bank", "bank.write_bank"), ("head", "temporal_head.write_temporal_head")]
)
def test_what_is_added_to_a_packaged_model_goes_to_its_copy(tmp_path, monkeypatch, command, writer):
    written: list[Path] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"atlas_wm.train.{writer}", lambda run, *_: written.append(run))
    main([command, "demo"])
    assert written == [Path("runs/pretrained-demo")] and (written[0] / "model.safetensors").exists()
