"""The model that comes with the package plans without training, data or network."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from atlas_wm import Planner, load_model
from atlas_wm.cli.app import main
from atlas_wm.errors import UserError
from atlas_wm.runs.shipped import FOLDER, NAMES, shipped, working_copy
from atlas_wm.tasks import get_task


def draw(task, state):
    return task.draw(state[None], 224)[0].permute(1, 2, 0).numpy()


def test_it_plans_to_goals_in_the_other_room():
    task, planner = get_task("tworoom"), Planner(load_model("demo"))
    env = task.make_env()
    pairs = [((60.0, 60.0), (170.0, 90.0)), ((160.0, 100.0), (60.0, 60.0))]  # the door is at (112, 49)
    reached = 0
    for start, goal in (np.array(pair) for pair in pairs):
        task.reset(env, start, goal)
        image = draw(task, goal)
        for _ in range(4):
            plan = planner.plan(draw(task, task.state(env)), image)
            for action in plan.actions:
                if not task.solved(task.state(env), goal):
                    env.step(action.astype(np.float32))
        reached += task.solved(task.state(env), goal)
    assert reached == 2


@pytest.mark.parametrize("name", NAMES)
def test_it_is_small_and_names_no_machine(name):
    files = {path.name: path for path in (FOLDER / name).iterdir()}
    tensors = {f"{name}.safetensors" for name in ("bank", "demonstrations", "model", "states")}
    assert set(files) == tensors | {"frames.webp", "README.md", "config.json", "normalizer.json"}
    assert sum(path.stat().st_size for path in files.values()) < 2.2e6
    config = json.loads(files["config.json"].read_text())
    assert config["data"]["path"] == "data/tworoom.lance"  # where `atlas collect tworoom --no-pixels` writes it
    assert "atlas demo" in files["README.md"].read_text()  # the command that made it


def test_a_folder_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shipped("demo") == FOLDER / "demo" and shipped("runs/demo") is None
    copy = working_copy(tmp_path / "mine")
    assert copy == tmp_path / "mine"
    (tmp_path / "demo").mkdir()
    assert shipped("demo") is None


def test_it_is_evaluated_on_demonstrations_of_any_kind(tmp_path, monkeypatch, dataset_path, capsys):
    """Its own are not needed: their states, by which episodes count as in or out of distribution, come with it."""
    monkeypatch.chdir(tmp_path)
    flags = "--offset 5 --budget 5 --episodes 2 --seeds 42 --iterations 1 --films 0 --workers 1 --policy model"
    main(["eval", "demo", "--data", str(dataset_path), *flags.split()])
    assert "OOD half" in capsys.readouterr().out


def test_results_go_to_a_copy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"data/tworoom\.lance"):
        main(["eval", "demo"])
    assert (tmp_path / "runs" / "pretrained-demo" / "model.safetensors").exists()


def test_two_processes_that_copy_it_at_once_do_not_disturb_each_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    copytree, copy = shutil.copytree, Path("runs") / "pretrained-demo"

    def beside_another(source, to):
        copytree(source, copy)  # the other process is done first
        return copytree(source, to)

    monkeypatch.setattr(shutil, "copytree", beside_another)
    assert working_copy(Path("demo")) == copy
    assert list(Path("runs").iterdir()) == [copy]


def test_a_copy_of_another_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    copy = working_copy(Path("demo"))
    assert working_copy(Path("demo")) == copy
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    with pytest.raises(UserError, match=r"pretrained-demo holds another model than demo .* rename or remove it"):
        working_copy(Path("demo"))
    weights.unlink()
    with pytest.raises(UserError, match="rename or remove it"):
        working_copy(Path("demo"))
