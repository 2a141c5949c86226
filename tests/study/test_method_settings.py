"""Settings of one method reach its runs and its tries, and no other's."""

from dataclasses import replace
from pathlib import Path

import pytest
from pretend import run

from atlas_wm.cli.study import study
from atlas_wm.errors import UserError
from atlas_wm.study.estimate import estimate
from atlas_wm.study.study import Evaluation, Study, changed, read_study
from atlas_wm.study.tuning import Tuned, weights
from atlas_wm.study.units import units_of

FILE = """
recipes = ["demo"]
methods = ["atlas", "lewm+ood"]
settings = {"train.steps" = 50, "train.batch" = 8}
[method_settings."lewm+ood"]
"train.steps" = 70
"train.log_every" = 5
"""
STUDY = Study(methods=("atlas", "lewm"), recipes=("demo",), evaluations=(Evaluation(50),), diagnostics=())


def settings(command: tuple[str, ...]) -> str:
    return " ".join(command).partition("--train.seed ")[2].partition(" ")[2]


def test_they_come_after_those_of_all_methods(tmp_path):
    (tmp_path / "mine.toml").write_text(FILE)
    units = units_of(read_study(str(tmp_path / "mine.toml")), tmp_path)
    assert settings(units["train atlas"].command) == "--train.steps 50 --train.batch 8"
    assert settings(units["train lewm+ood"].command) == "--train.steps 70 --train.batch 8 --train.log-every 5"


def test_only_what_depends_on_them_runs_again(tmp_path):
    run(STUDY, tmp_path)
    pretend, states = run(replace(STUDY, method_settings={"lewm": {"train.steps": 5}}), tmp_path)
    assert pretend.names == ["train lewm", "eval lewm 50", "report"] and set(states.values()) == {"done"}


def test_tries_have_them_and_scale_their_weight(tmp_path):
    tuned = replace(STUDY, recipes=("demo+tuned",), tries=(0.1, 1.0), try_settings={"train.steps": 9})
    mine = replace(tuned, method_settings={"lewm": {"objective.sigreg": 7.0, "train.steps": 70, "train.batch": 4}})
    assert weights(mine, Tuned("tworoom", "lewm", "demo+tuned")) == {"sigreg": 7.0}
    assert weights(mine, Tuned("tworoom", "atlas", "demo+tuned")) == {"wemreg": 0.2}
    units = units_of(mine, tmp_path)
    tried = settings(units["try tworoom-lewm-demo-0.1"].command)
    assert tried == "--objective.sigreg 0.7 --train.steps 9 --train.batch 4"
    assert "--train.batch" not in units["try tworoom-atlas-demo-0.1"].command
    trained = settings(units["train lewm"].command)
    assert trained == "--objective.sigreg CHOSEN --train.steps 70 --train.batch 4"


def test_a_method_may_plan_with_a_head_that_others_do_not_have(tmp_path):
    temporal = Evaluation(50, flags=("--cost", "temporal"))
    mine = replace(STUDY, evaluations=(temporal,), method_settings={"lewm": {"plan.cost": "temporal"}})
    heads = [unit.name for unit in units_of(mine, tmp_path).values() if unit.kind == "head"]
    assert heads == ["head atlas"]  # the training of the other fits its own


def test_an_estimate_knows_them(tmp_path):
    mine = replace(STUDY, method_settings={"lewm": {"train.steps": 8}})
    units = units_of(mine, tmp_path)
    few, many = (estimate(units[f"train {m}"], mine, (), 2, False).seconds for m in ("lewm", "atlas"))
    assert few < many / 2


def test_they_go_with_a_method_that_is_left_out(tmp_path):
    (tmp_path / "mine.toml").write_text(FILE)
    described = read_study(str(tmp_path / "mine.toml"))
    assert changed(described, methods=("atlas",)).method_settings == {}
    assert changed(described, methods=("lewm+ood",)).method_settings == described.method_settings


WRONG = {
    "method_settings.pldm = {'train.steps' = 5}": "method_settings names pldm, which is none of the methods lewm",
    "method_settings.lewm = {'train.seed' = 5}": "method_settings.lewm cannot set train.seed",
    "method_settings.lewm = {'out' = 'x'}": "method_settings.lewm are .*not out",
    "method_settings.lewm = 5": r"method_settings.'lewm' must be dict",
    "method_settings.atlas = {'train.stepz' = 5}": r"atlas train .*--method atlas .*--train.stepz 5.* fails",
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_ones_are_refused_by_a_dry_run(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(f'recipes = ["demo"]\nmethods = ["lewm", "atlas"]\n{text}\n')
    with pytest.raises(UserError, match=WRONG[text]):
        study("mine.toml", dry_run=True)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]


def test_settings_of_all_methods_are_parsed_for_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    methods = 'methods = ["dino-wm", "atlas"]\nsettings = {"model.encoder.weights" = "w.pth"}'
    Path("mine.toml").write_text(f'recipes = ["demo"]\n{methods}\n')
    with pytest.raises(UserError, match=r"--method atlas .*--model.encoder.weights w.pth.* fails"):
        study("mine.toml", dry_run=True)
