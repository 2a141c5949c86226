"""What is wrong with a study is said before its first unit runs, not when the last one does."""

import io
from pathlib import Path

import pytest
from pretend import run
from rich.console import Console

from atlas_wm.cli.app import main
from atlas_wm.cli.study import Shown, study
from atlas_wm.errors import UserError
from atlas_wm.study.records import Records
from atlas_wm.study.study import Dataset, Evaluation, Study, read_study
from atlas_wm.study.units import units_of

WRONG = {
    "tasks = ['tworom']": "unknown task 'tworom'.*tworoom",
    "settings = {'train.seed' = 5}": "seeds is the number of training seeds",
    "settings = {'out' = 'x'}": "not out",
    "settings.train.seed = 5": "seeds is the number of training seeds",
    "settings.train = 5": "not train",
    "settings = {'train.stepz' = 5}": r"atlas train .*--train.stepz 5.* fails",
    "settings = {'train.steps' = '10k'}": r"--train.steps 10k.* fails",
    "diagnostics = ['rolout']": r"atlas diagnose .*rolout.* fails",
    "evaluations = [{offset = 0}]": "offset",
    "evaluations = [{episodes = 0}]": "episodes",
    "evaluations = [{seeds = []}]": "seed",
    "evaluations = [{flags = ['--cots', 'nearest']}]": r"atlas eval .*--cots nearest.* fails",
    "evaluations = [{flags = ['--cost', 'neerest']}]": r"atlas eval .*neerest.* fails \(.*nearest",
    "evaluations = [{flags = ['--cost', 'temporal']}]\nhead = ['--stepz', '3']": r"atlas head .*--stepz 3.* fails",
    "datasets.tworoom.path = 'nowhere.h5'": "there is no dataset nowhere.h5",
    "datasets.tworoom = {path = 'a.h5', eval_path = './a.h5'}": "which models are trained on",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_study_is_refused_by_a_dry_run(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(f'recipes = ["demo"]\nmethods = ["atlas"]\n{text}\n')
    with pytest.raises(UserError, match=WRONG[text]):
        study("mine.toml", dry_run=True)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]


def test_every_flag_of_a_right_one_is_parsed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(
        "recipes = ['demo', 'demo+tuned']\nsettings = {'train.log_every' = 5, 'plan.clip_actions' = false}\n"
        "evaluations = [{flags = ['--cost=nearest', '--replan-every', '1']}]\n"
    )
    study("mine.toml", dry_run=True)
    assert "--train.log-every 5 --plan.no-clip-actions" in capsys.readouterr().out


def test_settings_need_no_quotes(tmp_path):
    quoted = tmp_path / "quoted.toml"
    quoted.write_text(
        'settings = {"train.steps" = 5, "model.encoder.image-size" = 64}\ntry_settings = {"train.steps" = 2}\n'
        '[method_settings]\nlewm = {"objective.sigreg" = 0.03, "train.batch" = 8}\n'
    )
    plain = tmp_path / "plain.toml"
    plain.write_text(
        "settings.train.steps = 5\ntry_settings = {train.steps = 2}\n[settings.model]\nencoder.image-size = 64\n"
        "[method_settings.lewm]\nobjective.sigreg = 0.03\ntrain.batch = 8\n"
    )
    assert read_study(str(plain)) == read_study(str(quoted))
    assert read_study(str(plain)).settings == {"train.steps": 5, "model.encoder.image-size": 64}


def test_a_cost_may_be_named_after_an_equals_sign(tmp_path):
    described = Study(methods=("atlas",), recipes=("demo",), evaluations=(Evaluation(flags=("--cost=temporal",)),))
    assert "head atlas" in units_of(described, tmp_path)


def test_a_weight_in_the_settings_is_what_the_tries_scale(tmp_path):
    for name in ("objective.std_t", "objective.std-t"):
        described = Study(
            methods=("pldm",),
            recipes=("demo+tuned",),
            settings={name: 5.0},
            tries=(0.1,),
            datasets={"tworoom": Dataset(episodes=3)},
        )
        command = units_of(described, tmp_path)["try tworoom-pldm-demo-0.1"].command
        assert command[command.index("--objective.std-t") + 1] == "0.5"


def test_a_dataset_that_nothing_will_read_may_be_gone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "recipes = ['demo']\nmethods = ['atlas']\ndiagnostics = []\ndatasets.tworoom.path = 'gone.h5'\n"
    (tmp_path / "mine.toml").write_text(text)
    run(read_study("mine.toml"), Path("runs/mine"))
    study("mine.toml", dry_run=True)


def test_brackets_in_what_the_user_writes_are_printed(tmp_path, capsys, monkeypatch):
    """Rich takes them for styles."""
    monkeypatch.chdir(tmp_path)
    Path("s.toml").write_text('methods = ["atlas"]\nleft_out = {"pldm" = "diverges [see notes] [/tmp/log]"}\n')
    main(["study", "s.toml", "--out", "runs/[/a]", "--dry-run"])
    printed = capsys.readouterr().out
    assert "'pldm=diverges [see notes] [/tmp/log]' > 'runs/[/a]/units/report.log'" in printed
    progress, console = {}, Console(force_terminal=True, file=io.StringIO())
    console.print(Shown(console, lambda: progress, Records(Path("runs/[/a]"))).table())
    assert "logs in runs/[/a]/units" in console.file.getvalue()
