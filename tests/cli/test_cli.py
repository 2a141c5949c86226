"""The command line as users meet it, mistakes included."""

import json
import re
import shlex

import numpy as np
import pytest
from PIL import Image

from atlas_wm.cli.app import COMMANDS, main
from atlas_wm.cli.evaluate import parse_seeds
from atlas_wm.cli.train import recipe_defaults
from atlas_wm.recipes import demo


def failure(*arguments: str) -> str:
    """What a command that cannot be carried out says."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code not in (0, None)
    return str(stopped.value.code)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "unknown command 'trian'. Did you mean 'train'?"),
        (["train", "tworom"], "unknown task 'tworom'. Did you mean 'tworoom'?"),
        (["train", "tworoom", "--method", "altas"], "unknown method 'altas'. Did you mean 'atlas'?"),
        (["train", "tworoom", "--recipe", "dmeo"], "unknown recipe 'dmeo'. Did you mean 'demo'?"),
        (["train", "tworoom", "--data", "nowhere.h5"], "there is no dataset nowhere.h5"),
        (["train", "tworoom", "--train.batch", "1"], "train.batch must be at least 2"),
        (["eval", "nowhere"], "there is no run folder nowhere"),
        (["collect", "tworoom", "--out", "x.zip"], "unknown dataset ending '.zip'"),
        (["collect", "tworoom", "--out", "my data.lance"], "'my data.lance': the name of a Lance table has only"),
        (["collect", "tworoom", "--out", "x.h5", "--episodes", "0"], "--episodes must be at least 1"),
    ],
)
def test_mistakes_get_one_clear_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = failure(*arguments)
    assert said.startswith("atlas: ") and message in said and "\n" not in said
    assert list(tmp_path.rglob("*.partial")) == []


def test_an_unknown_flag_gets_the_nearest_one(capsys):
    with pytest.raises(SystemExit):
        main(["train", "tworoom", "--train.lrr", "1"])
    shown = "".join(capsys.readouterr())
    assert "--train.lrr" in shown and "--train.lr " in shown


def test_cuda_asked_for_and_absent(dataset_path, tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    said = failure(
        *("train", "tworoom", "--device", "cuda", "--recipe", "demo"),
        *("--data", str(dataset_path), "--out", str(tmp_path / "x")),
    )
    assert "no CUDA device" in said and "--device cpu" in said
    assert list(tmp_path.iterdir()) == []


def test_flags_change_the_recipe_they_stand_beside():
    assert recipe_defaults(["train", "tworoom", "--recipe", "demo", "--method", "lewm"]) == demo("lewm")
    assert recipe_defaults(["train", "tworoom", "--recipe=demo"]) == demo("atlas")


def test_the_papers_recipe_points_to_the_one_that_plans_better(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    for method, recipe, told in (("atlas", "paper", 1), ("atlas", "tuned", 0), ("lewm", "paper", 0)):
        caplog.clear()
        with caplog.at_level("INFO", "atlas_wm"):
            failure("train", "tworoom", "--method", method, "--recipe", recipe, "--data", "nowhere.h5")
        assert caplog.text.count("on tworoom, --recipe tuned plans better") == told


@pytest.mark.parametrize(("text", "seeds"), [("42-44", (42, 43, 44)), ("7", (7,)), ("1,5", (1, 5))])
def test_seeds_as_range_and_list(text, seeds):
    assert parse_seeds(text) == seeds


def test_bad_seeds_are_refused(run_folder):
    assert "--seeds must look like" in failure("eval", str(run_folder), "--seeds", "a-b")


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as stopped:
        main([])
    text = capsys.readouterr().out
    assert not stopped.value.code and all(re.search(rf"^    {name} +[A-Z]", text, re.M) for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_shows_an_example(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert f"\n    atlas {command}" in capsys.readouterr().out


def test_plan_prints_actions_as_json(run_folder, task, tmp_path, capsys):
    for name, state in (("now", [60, 60]), ("goal", [80, 70])):
        image = task.draw(np.array([state], np.float32), 224)[0].permute(1, 2, 0).numpy()
        Image.fromarray(image).save(tmp_path / f"{name}.png")
    main(["plan", str(run_folder), "--frame", str(tmp_path / "now.png"), "--goal", str(tmp_path / "goal.png")])
    answer = json.loads(capsys.readouterr().out)
    assert np.array(answer["actions"]).shape == (25, 2) and np.isfinite(answer["actions"]).all()
    assert answer["cost"] >= 0 and answer["start_cost"] > 0


def test_pictures_that_are_none_are_named(run_folder, tmp_path):
    (tmp_path / "x.png").write_text("no image")
    said = failure("plan", str(run_folder), "--frame", str(tmp_path / "x.png"), "--goal", str(tmp_path / "x.png"))
    assert re.search(r"x\.png cannot be read as an image", said)
    assert "there is no image" in failure("plan", str(run_folder), "--frame", "none.png", "--goal", "none.png")


def test_the_commands_that_collect_suggests_can_be_pasted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["collect", "tworoom", "--episodes", "2", "--no-pixels", "--out", "my data.h5", "--workers", "1"])
    (last,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("look at it"))
    shown, trained = (text.partition("atlas ")[2] for text in last.split("; "))
    assert shlex.split(shown) == ["show", "my data.h5"]
    assert shlex.split(trained)[-2:] == ["--data", "my data.h5"]
    main(shlex.split(shown))
    assert "my data.h5.html in a browser" in capsys.readouterr().out


@pytest.mark.usefixtures("few_frames_in_banks")
def test_train_then_eval_from_the_command_line(dataset_path, tmp_path, capsys):
    out = tmp_path / "run"
    small = ["--train.steps", "3", "--train.batch", "8", "--plan.candidates", "20", "--plan.iterations", "2"]
    main(
        [
            *("train", "tworoom", "--recipe", "demo", "--method", "lewm+ood", "--device", "cpu"),
            *("--data", str(dataset_path), "--out", str(out), "--plan.elites", "4", *small),
        ]
    )
    main(
        [
            "eval",
            str(out),
            "--part",
            "heldout",
            "--offset",
            "10",
            "--episodes",
            "3",
            "--seeds",
            "1",
            "--workers",
            "1",
        ]
    )
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("LeWM + OOD-recovery", "Random actions", "Replayed actions"))
    assert "LeWM + OOD-recovery: 95 % interval" in shown
    assert len(list((out / "evaluation").glob("heldout_offset10_budget35-*.json"))) == 1
