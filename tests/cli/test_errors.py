"""What the command line says when something is wrong: in the user's own words, and never a bare traceback."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from atlas_wm import __version__
from atlas_wm.cli.app import COMMANDS, main
from atlas_wm.cli.errors import setting_flags
from atlas_wm.cli.plan import PLAN_FLAGS, PlanFlags
from atlas_wm.config import PlanConfig
from atlas_wm.data.training_set import open_training_set
from atlas_wm.errors import UserError

MINE = """
from atlas_wm.methods import Method
from atlas_wm.config import ObjectiveConfig

def scaled(clips):
    return scale(clips) * 2

def scale(clips):
    return clips.z[99].mean()

def make(weight):
    return Method("mine", ObjectiveConfig(wemreg=weight))
"""


def failure(*arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code not in (0, None)
    return str(stopped.value.code)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module of the user's in the working directory, forgotten afterwards."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "wrong.py").write_text("from mine import make\nNAME = make(-1.0)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in ("mine", "wrong"):
        sys.modules.pop(name, None)


def test_the_version_is_said(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"atlas-wm {__version__}\n"


def test_a_reader_that_has_seen_enough_is_no_error():
    process = subprocess.Popen(
        [sys.executable, "-m", "atlas_wm", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(60) == 141  # as of other programs that SIGPIPE ends


@pytest.mark.parametrize("command", ["diagnose", "report"])
def test_a_command_about_runs_wants_one(command):
    assert f"name at least one run folder: atlas {command} RUN" in failure(command)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--train.batch", "1"], "atlas: --train.batch must be at least 2"),
        (["--plan.elites", "400"], "atlas: --plan.elites must lie between 2 and --plan.candidates (300), not 400"),
        (["--train.log-every", "0"], "atlas: --train.log-every must be positive"),
        (
            ["--model.encoder.image-size", "225"],
            "atlas: --model.encoder.image-size 225 is not a multiple of --model.encoder.patch-size 14",
        ),
        (["--objective.inverse", "1"], "atlas: --objective.inverse needs the head --model.inverse-hidden"),
    ],
)
def test_train_names_the_flags_it_was_given(arguments, said):
    assert failure("train", "tworoom", *arguments).startswith(said)


def test_eval_and_plan_name_their_own_flags(run_folder):
    run = str(run_folder)  # 40 candidates, 5 elites, 5 blocks
    said = failure("eval", run, "--replan-every", "9")
    assert said == "atlas: --replan-every must lie between 1 and plan.horizon (5), not 9"
    said = failure("eval", run, "--elites", "50")
    assert said == "atlas: --elites must lie between 2 and --candidates (40), not 50"
    said = failure("plan", run, "--frame", "a.png", "--goal", "b.png", "--iterations", "0")
    assert said == "atlas: --iterations must lie between 1 and 1e+06, not 0"


def test_fewer_candidates_than_elites_say_which_flag_to_add():
    with pytest.raises(UserError, match=r"--candidates 20 are fewer than the run's 30 elites: add --elites 2,"):
        PlanFlags(candidates=20).applied_to(PlanConfig())
    plan = PlanFlags(candidates=20, elites=4).applied_to(PlanConfig())
    assert (plan.candidates, plan.elites) == (20, 4)
    assert PlanFlags(candidates=100).applied_to(PlanConfig()).elites == 30


def test_the_flags_that_errors_name_are_there(capsys):
    for command, flags in (("train", setting_flags()), ("eval", PLAN_FLAGS)):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        shown = set(re.findall(r"--[a-z][\w.-]*", capsys.readouterr().out))
        assert set(flags.values()) <= shown


def test_settings_of_a_file_are_not_called_flags(run_folder, tmp_path):
    import json
    import shutil

    run = shutil.copytree(run_folder, tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    config["config"]["plan"]["elites"] = 1000
    (run / "config.json").write_text(json.dumps(config))
    said = failure("eval", str(run))
    assert "config.json.config.plan: plan.elites must lie between" in said and "--elites" not in said


def test_an_error_in_the_users_own_module_says_where(mine):
    said = failure("train", "tworoom", "--method", "wrong:NAME")
    assert "failed at wrong.py:2 → mine.py:12: SettingError: objective.wemreg must be >= 0" in said


def test_an_error_in_the_users_own_term_keeps_its_frames(mine):
    import torch

    from atlas_wm.losses.objective import ClipLatents, own_term

    z = torch.zeros(6, 4, 5)
    with pytest.raises(UserError, match=r"loss term mine:scaled failed at mine\.py:6 → mine\.py:9: IndexError"):
        own_term("mine:scaled", ClipLatents(z, z, z[:, 1:], torch.zeros(6, 3, 2)))


def test_an_error_in_the_users_own_task_keeps_its_frames(mine):
    from atlas_wm.parallel.workers import one_line

    sys.path.insert(0, "")
    import mine as module

    try:
        module.scale(module)
    except AttributeError as error:
        line = one_line(error)
    assert line.startswith("AttributeError: module 'mine' has no attribute 'z' (at ") and "mine.py:9)" in line


@pytest.mark.parametrize("way", ["flag", "environment"])
def test_debug_shows_the_whole_traceback(mine, capsys, monkeypatch, way):
    arguments = ["train", "tworoom", "--method", "wrong:NAME"]
    failure(*arguments)
    assert "Traceback" not in capsys.readouterr().err
    if way == "environment":
        monkeypatch.setenv("ATLAS_DEBUG", "1")
    said = failure(*arguments, *(["--debug"] if way == "flag" else []))
    shown = capsys.readouterr().err
    assert "wrong:NAME" in said and "Traceback" in shown and 'mine.py", line 12, in make' in shown


def test_a_run_remembers_its_data_from_any_folder(task, tiny_config, dataset_path, monkeypatch):
    monkeypatch.chdir(dataset_path.parent)
    info = open_training_set(dataset_path.name, task, tiny_config).info
    assert Path(info.path) == dataset_path.resolve()


def test_a_flag_before_the_command():
    said = failure("--device", "cpu", "eval", "demo")
    assert said == "atlas: '--device' comes before the command, flags come after it: `atlas --help` lists commands"


@pytest.mark.parametrize("arguments", [["eval"], ["train", "tworoom", "--train.lrr", "3"]])
def test_an_error_in_a_flag_points_to_the_help_of_its_command(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    said = capsys.readouterr()
    assert stopped.value.code == 2 and f"atlas {arguments[0]} --help" in said.out + said.err


def test_ctrl_c_is_said_in_one_line(monkeypatch, capsys):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setitem(COMMANDS, "methods", interrupted)
    with pytest.raises(SystemExit) as stopped:
        main(["methods"])
    assert stopped.value.code == 130 and capsys.readouterr().err == "\natlas: stopped by Ctrl-C\n"
    with pytest.raises(KeyboardInterrupt):
        main(["methods", "--debug"])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import absent_package", "no module absent_package in {} or among the installed packages"),
        ("import mine.deeper", "no module mine.deeper in {} or among the installed packages"),
        ("raise ModuleNotFoundError('please install it')", "ModuleNotFoundError: please install it"),
    ],
)
def test_what_a_module_of_yours_imports_is_not_installed(mine, source, message):
    Path("importing.py").write_text(source)
    said = failure("methods", "--plugin", "importing")
    failed = "atlas: module 'importing' cannot be imported, it failed at importing.py:1: "
    assert said == failed + message.format(Path.cwd())
