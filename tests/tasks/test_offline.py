"""Data without an environment: everything works that needs none, the rest says so in one line."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from atlas_wm import Planner, load_model
from atlas_wm.cli.app import main
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.errors import UserError
from atlas_wm.runs.folder import read_run
from atlas_wm.tasks import OfflineTask, get_task, task_id
from atlas_wm.tasks.tworoom import TwoRoom
from atlas_wm.train.loop import train

sys.path.append(str(Path(__file__).parent.parent / "data"))
from lerobot_layout import make_episodes, write_lerobot

FEW = ("--queries", "5", "--offset", "25", "--device", "cpu", "--workers", "1")
OFFLINE = {"state", "marginal", "rollout", "geometry"}


class Arm(OfflineTask):
    """Columns of other names."""

    name = "arm"
    action_size = 2
    image_column = "observation.images.top"
    state_columns = (("observation.state",),)


class Wide(Arm):
    action_size = 3


def make_run(folder: Path, config, task=None, *, states: bool = True) -> Path:
    episodes = make_episodes([40] * 6)
    if not states:
        for episode in episodes:
            del episode["observation.state"]
    data = write_lerobot(folder / "robot", episodes)
    return train(config, task or OfflineTask(), data, folder / "run", method="atlas", recipe="demo", device="cpu")


@pytest.fixture(scope="module")
def run(tiny_config, tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("offline"), tiny_config)


@pytest.fixture(scope="module")
def stateless(tiny_config, tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("stateless"), tiny_config, states=False)


def test_the_action_size_and_bounds_are_those_of_the_data(run):
    info, normalizer = read_run(run)
    actions = np.concatenate([e["action"] for e in make_episodes([40] * 6)])
    assert info.task == "offline" and info.action_size == 2
    assert normalizer.low is not None and normalizer.high is not None
    assert (np.array(normalizer.low) >= actions.min(axis=0)).all() and min(normalizer.high) > 1.5
    assert (np.array(normalizer.high) <= actions.max(axis=0)).all() and max(normalizer.low) < -1.5


def test_plans_in_python_and_on_the_command_line(run, tmp_path, capsys):
    first, last = make_episodes([40])[0]["observation.images.top"][[0, -1]]
    plan = Planner(load_model(run)).plan(first, last)
    assert plan.actions.shape == (25, 2) and plan.novelty is not None
    for name, image in (("a.png", first), ("b.png", last)):
        Image.fromarray(image).save(tmp_path / name)
    main(
        ["plan", str(run), "--frame", str(tmp_path / "a.png"), "--goal", str(tmp_path / "b.png"), "--device", "cpu"]
    )
    assert np.allclose(json.loads(capsys.readouterr().out)["actions"], plan.actions)


def diagnosed(run: Path, capsys) -> tuple[set[str], list[str]]:
    main(["diagnose", str(run), *FEW])
    said = capsys.readouterr()
    lines = [line for line in (said.err + said.out).splitlines() if ": no " in line]
    return {path.stem for path in (run / "diagnostics").glob("*.json")}, lines


@pytest.mark.slow
def test_diagnostics_that_need_an_environment_are_skipped_with_one_line_each(run, capsys):
    files, lines = diagnosed(run, capsys)
    assert files == OFFLINE
    skipped = {line.partition(": no ")[2].partition(":")[0] for line in lines}
    assert skipped == {"probe", "relational", "regret", "cases", "imagined"} and len(lines) == 5
    assert all("needs an environment, and the task offline has none" in line for line in lines)
    for name in ("marginal", "rollout"):
        result = json.loads((run / "diagnostics" / f"{name}.json").read_text())["result"]
        assert "no environment" in result["note"]
    assert len(result["per_query"]) == 5 and np.isfinite(result["median"]).all()


def test_rollout_error_compares_with_the_recorded_frames(run):
    """By hand: the latent of the frame five rows later, and the model's prediction of it."""
    import torch

    from atlas_wm.diagnose.diagnose import diagnose
    from atlas_wm.diagnose.queries import QuerySettings
    from atlas_wm.evaluate.protocol import Protocol, draw_starts

    settings = QuerySettings(queries=4, offset=25, seed=3)
    (file,) = diagnose([run], ["rollout"], settings=settings, device="cpu")
    result, model = json.loads(file.read_text())["result"], load_model(run)
    data = EpisodeData(read_run(run)[0].data.path, OfflineTask(), 32, 5)
    for number, row in enumerate(draw_starts(data, Protocol(25, episodes=4), 3)):
        chunk = model.normalizer.apply(torch.from_numpy(data.actions[row : row + 5])).flatten()[None, None, None]
        with torch.inference_mode():
            predicted = model.rollout(model.encode(data.frame(row)), chunk)[0, 0, 0]
            error = (predicted - model.encode(data.frame(row + 5))[0]).norm() / result["scale"]
        assert result["per_query"][number][0] == pytest.approx(error.item(), rel=1e-3)


def test_without_states_the_map_and_the_state_probe_are_skipped_too(stateless, capsys, caplog):
    files, lines = diagnosed(stateless, capsys)
    assert files == OFFLINE - {"geometry", "state"}
    assert any("no geometry" in line and "has no state column" in line for line in lines)
    assert len([line for line in lines if "no state:" in line and "which state probes need" in line]) == 1
    assert not (stateless / "states.safetensors").exists()
    (stateless / "bank.safetensors").unlink()
    main(["bank", str(stateless), "--device", "cpu"])
    assert (stateless / "bank.safetensors").exists() and "states.safetensors is not written" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["eval", "RUN", "--device", "cpu"],
            "atlas eval needs an environment, and the task offline has none: pass --task",
        ),
        (["collect", "offline", "--out", "x.h5"], "atlas collect needs an environment.*docs/guides/robot-data.md"),
        (["train", "offline", "--data", "nowhere"], r"there is no dataset nowhere \(.*\): pass --data$"),
    ],
)
def test_commands_that_need_an_environment_refuse(run, arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=f"atlas: {said}"):
        main([str(run) if word == "RUN" else word for word in arguments])
    assert not list(tmp_path.glob("x.h5*"))


def test_own_columns_are_named_by_a_class(tiny_config, tmp_path):
    run = make_run(tmp_path, tiny_config, Arm())
    assert read_run(run)[0].task == task_id(Arm()) == f"{__name__}:Arm"
    main(["diagnose", str(run), "--what", "marginal", *FEW, "--task", f"{__name__}:Arm"])
    with pytest.raises(UserError, match=r"column 'action' has shape \(240, 2\), arm needs \(rows, 3\)"):
        EpisodeData(tmp_path / "robot", Wide(), 32, 5)


@pytest.mark.usefixtures("in_this_process", "render_in_this_process")
def test_an_offline_run_can_be_evaluated_in_an_environment(tiny_config, tmp_path):
    """Recorded TwoRoom data as offline data, then TwoRoom itself."""
    from atlas_wm.data.collect import collect

    collect(TwoRoom(), tmp_path / "x.h5", 12, seed=1, workers=1)
    train(
        tiny_config, OfflineTask(), tmp_path / "x.h5", tmp_path / "run", method="atlas", recipe="demo", device="cpu"
    )
    few = ("--offset", "10", "--episodes", "2", "--seeds", "1", "--films", "0", "--device", "cpu")
    main(["eval", str(tmp_path / "run"), *few, "--task", "tworoom"])
    assert len(list((tmp_path / "run" / "evaluation").glob("*.json"))) == 1


def test_the_table_knows_it():
    assert isinstance(get_task("offline"), OfflineTask) and task_id(OfflineTask()) == "offline"
    with pytest.raises(UserError, match="has no environment: write a Task with one"):
        OfflineTask().make_env()
