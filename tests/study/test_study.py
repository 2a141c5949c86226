"""A study derives its commands, runs them where there is room, and survives failures."""

import csv
import io
import re
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from pretend import Job, Pretend, run
from rich.console import Console

from atlas_wm.cli.app import main
from atlas_wm.cli.demo_job import Inline
from atlas_wm.cli.study import Shown, ended_by_sigterm
from atlas_wm.errors import Interrupted, UserError
from atlas_wm.study import local
from atlas_wm.study.estimate import estimate, together
from atlas_wm.study.local import LocalLauncher
from atlas_wm.study.records import Records
from atlas_wm.study.schedule import progress_of, run_units
from atlas_wm.study.study import STUDIES, Dataset, Evaluation, Study, changed, read_study
from atlas_wm.study.units import Unit, units_of

STUDY = Study(methods=("atlas", "lewm"), recipes=("demo",), seeds=2, evaluations=(Evaluation(25), Evaluation(50)))
FILE = """
methods = ["atlas"]
recipes = ["demo"]
seeds = 3
settings = {"train.steps" = 50}
[datasets.tworoom]
episodes = 10
pixels = false
[[evaluations]]
offset = 25
seeds = [1, 2]
flags = ["--cost", "nearest"]
"""


def test_a_file_says_what_a_study_compares(tmp_path):
    (tmp_path / "mine.toml").write_text(FILE)
    study = read_study(str(tmp_path / "mine.toml"))
    assert (study.methods, list(study.training_seeds)) == (("atlas",), [3072, 3073, 3074])
    units = units_of(study, tmp_path / "out")
    assert [u.kind for u in units.values()] == ["collect", *["train"] * 3, *["eval"] * 3, "diagnose", "report"]
    train, test = units["train atlas-3073"].command, units["eval atlas-3073 25 cost nearest"].command
    assert " ".join(train).endswith("atlas-3073 --train.seed 3073 --train.steps 50")
    assert " ".join(test).endswith("--part heldout --offset 25 --episodes 200 --seeds 1,2 --cost nearest")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("methods = ['atlsa']", "unknown method 'atlsa'"),
        ("recipe = ['demo']", "unknown setting in .* 'recipe'.*recipes"),
        ("seeds = 0", "at least 1"),
        ("tasks = []", "at least one"),
        ("tasks = ['tworoom', 'tworoom']", "twice"),
        ("[datasets.pusht]\nepisodes = 3", "none of the tasks tworoom"),
        ("[datasets.tworoom]\nepisodes = 0", "at least 1"),
        ("recipes = ['tuned']\nmethods = ['lewm']", "no --recipe tuned for lewm on tworoom"),
        ("[datasets.tworoom]\neval_episodes = -1", "eval_episodes must be at least 1"),
        ("[datasets.tworoom]\neval_episodes = 5\neval_path = 'a.h5'", "give one of them"),
        ("[datasets.tworoom]\neval_demonstrator = ['a=1']", "which is 0"),
        ("[datasets.tworoom]\npath = 'a.h5'\neval_path = 'a.h5'", "which models are trained on"),
        ("part = 'some'", "'heldout' or 'all'"),
        ("mark = 0.0", "above 0"),
        ("seeds = ", "TOML"),
    ],
)
def test_a_bad_file_is_refused_with_its_reason(tmp_path, text, what):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(UserError, match=what):
        read_study(str(tmp_path / "mine.toml"))


def test_a_name_that_does_not_exist_is_refused():
    with pytest.raises(UserError, match=r"unknown study 'ablatoin'.*ablation"):
        read_study("ablatoin")
    with pytest.raises(UserError, match=r"gone\.toml cannot be read"):
        read_study("gone.toml")


RESULTS = sorted(map(str, (Path(__file__).parents[2] / "docs" / "results").glob("*.toml")))


@pytest.mark.parametrize("name", [*STUDIES, *RESULTS])
def test_units_stand_after_what_they_need_and_have_names_of_their_own(name, tmp_path):
    units = list(units_of(changed(read_study(name), seeds=2), tmp_path).values())
    seen: set[str] = set()
    for unit in units:
        assert set(unit.needs) <= seen
        seen.add(unit.name)
    assert len({u.command for u in units}) == len({u.key for u in units}) == len(units)
    assert len({Records(tmp_path).log(u) for u in units}) == len(units)


def test_folders_are_named_by_what_differs(tmp_path):
    def trained(study: Study) -> list[str]:
        return [u.makes.parent.name for u in units_of(study, tmp_path).values() if u.kind == "train"]

    assert trained(replace(STUDY, seeds=1)) == ["atlas", "lewm"]
    assert trained(STUDY) == ["atlas-3072", "atlas-3073", "lewm-3072", "lewm-3073"]
    two = Study(("tworoom", "pusht"), ("atlas",), ("demo", "small"))
    assert trained(two)[:2] == ["tworoom-atlas-demo", "tworoom-atlas-small"]


def test_your_own_task_is_named_where_it_is_imported_and_its_data_is_not_collected(tmp_path):
    mine = Study(("my_task:Mine",), ("atlas",), ("demo",), datasets={"my_task:Mine": Dataset("data/mine.h5")})
    units = units_of(mine, tmp_path)
    assert [u.kind for u in units.values()] == ["train", "eval", "eval", "diagnose", "report"]
    for unit in units.values():
        assert ("my_task:Mine" in unit.command) == (unit.kind != "report")
    assert "data/mine.h5" in units["train atlas"].command


APART = Dataset(episodes=20, demonstrator=("action_noise=3",), eval_episodes=7, format="h5")


def test_evaluations_may_have_demonstrations_of_their_own(tmp_path):
    units = units_of(replace(STUDY, seeds=1, datasets={"tworoom": APART}), tmp_path)
    path = str(tmp_path / "tworoom-evaluation.h5")
    collect, test = units["collect tworoom for evaluation"], units["eval atlas 50"]
    assert " ".join(collect.command).endswith(f"--episodes 7 --out {path} --seed 2")
    assert set(test.needs) == {"train atlas", "collect tworoom", collect.name}
    assert collect.name not in units["train atlas"].needs
    assert test.command[2:4] == ("--data", path) and "--part" not in test.command
    as_paper = units_of(replace(STUDY, seeds=1, part="all", datasets={"tworoom": APART}), tmp_path)
    assert "collect tworoom for evaluation" not in as_paper and "--data" not in as_paper["eval atlas 50"].command
    theirs = Dataset("data/mine.h5", eval_path="data/other.h5")
    units = units_of(replace(STUDY, seeds=1, datasets={"tworoom": theirs}), tmp_path)
    assert not [u for u in units.values() if u.kind == "collect"]
    assert "data/other.h5" in units["eval atlas 50"].command


def test_another_evaluation_dataset_evaluates_again_and_trains_nothing(tmp_path):
    study = replace(STUDY, seeds=1, datasets={"tworoom": APART})
    run(study, tmp_path)
    more = replace(study, datasets={"tworoom": replace(APART, eval_episodes=9)})
    names = run(more, tmp_path)[0].names
    assert "collect tworoom for evaluation" in names and "eval lewm 25" in names
    assert (
        not [n for n in names if n.startswith(("train", "collect tworoom for t"))]
        and "collect tworoom" not in names
    )


def test_a_temporal_cost_gets_its_head_first_and_other_costs_do_not_wait_for_it(tmp_path):
    ways = (Evaluation(25), Evaluation(50, flags=("--cost", "temporal")))
    units = units_of(replace(STUDY, seeds=1, evaluations=ways, head=("--steps", "9")), tmp_path)
    assert units["head atlas"].command == ("head", str(tmp_path / "atlas"), "--steps", "9")
    trained = ("train atlas", "collect tworoom")
    assert units["head atlas"].needs == trained and units["eval atlas 25"].needs == trained
    assert units["eval atlas 50 cost temporal"].needs == (*trained, "head atlas")
    by_setting = replace(STUDY, seeds=1, settings={"plan.cost": "temporal"}, evaluations=(Evaluation(25),))
    assert units_of(by_setting, tmp_path)["eval atlas 25"].needs == trained  # training fits it
    by_setting = replace(by_setting, head=("--steps", "9"))
    assert "head atlas" in units_of(by_setting, tmp_path)["eval atlas 25"].needs
    assert not [u for u in units_of(STUDY, tmp_path).values() if u.kind == "head"]


def test_every_way_to_plan_is_evaluated_on_the_same_episodes(tmp_path):
    units = units_of(changed(STUDIES["planning"], tasks=("pusht",)), tmp_path)
    evaluated = [u.command for u in units.values() if u.kind == "eval"]
    assert len(evaluated) == 15 and all("pusht-evaluation.lance" in c[3] for c in evaluated)
    assert sum("--policy" not in c for c in evaluated) == 3  # floor and ceiling once for each offset
    assert sum("head atlas" in u.needs for u in units.values() if u.kind == "eval") == 6


def test_a_failed_unit_is_tried_once_more(tmp_path):
    pretend, states = run(STUDY, tmp_path, train_atlas_3072=0, **{"train lewm-3072": 1})
    assert pretend.names.count("train lewm-3072") == 2 and set(states.values()) == {"done"}


def test_one_failed_run_does_not_stop_the_others_and_the_report_leaves_it_out(tmp_path):
    pretend, states = run(STUDY, tmp_path, **{"train lewm-3072": 2})
    assert pretend.names.count("train lewm-3072") == 2
    assert [n for n, s in states.items() if s == "failed"] == ["train lewm-3072"]
    assert {n for n, s in states.items() if s == "blocked"} == {"eval lewm-3072 25", "eval lewm-3072 50"}
    commands = dict(pretend.commands)
    for gathers in ("diagnose tworoom", "report"):
        assert str(tmp_path / "lewm-3072") not in commands[gathers]
        assert str(tmp_path / "lewm-3073") in commands[gathers]
    later, states = run(STUDY, tmp_path)  # the next call tries it again
    assert set(states.values()) == {"done"} and "train atlas-3072" not in later.names
    assert str(tmp_path / "lewm-3072") in dict(later.commands)["report"]


def test_without_data_nothing_else_runs(tmp_path):
    pretend, states = run(STUDY, tmp_path, collect=2)
    assert pretend.names == ["collect tworoom"] * 2
    assert set(states.values()) == {"failed", "blocked"}


@pytest.mark.usefixtures("heard_interrupts")
def test_an_interruption_stops_what_runs(tmp_path):
    """Ctrl-C, or SIGTERM, as a job scheduler or `kill` sends it."""

    class Endless(Job):
        def finished(self):
            return False

    class Launcher(Pretend):
        def start(self, units):
            self.jobs = [Endless(True) for _ in units]
            return self.jobs

    before = signal.getsignal(signal.SIGTERM)
    for number in (signal.SIGINT, signal.SIGTERM):
        launcher, records = Launcher(), Records(tmp_path)
        units = units_of(STUDY, tmp_path)
        progress = progress_of(units.values(), records)
        with pytest.raises(KeyboardInterrupt) as stopped, ended_by_sigterm():
            run_units(progress, records, launcher, partial(signal.raise_signal, number))
        assert launcher.jobs and all(job.stopped for job in launcher.jobs)
        assert records.why(units["collect tworoom"]) == "it was interrupted"
    assert isinstance(stopped.value, Interrupted) and stopped.value.code == 128 + signal.SIGTERM
    assert "run the same command again to resume" in str(stopped.value)
    assert signal.getsignal(signal.SIGTERM) == before


def test_on_this_machine_units_are_processes_with_a_gpu_and_a_log(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-7")
    monkeypatch.setattr(local, "PRELOADED", ("json", "no_such_module"))  # neither takes seconds
    launcher = LocalLauncher(Records(tmp_path), gpus=2, per_gpu=1)
    units = [Unit(n, "eval", (n,), tmp_path, (), n) for n in ("--version", "nonsense")]
    assert launcher.room() == 2
    jobs = launcher.start(units)
    assert [job.gpu for job in jobs] == [0, 1]
    deadline = time.monotonic() + 60
    while not all(job.finished() for job in jobs) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [job.succeeded() for job in jobs] == [True, False] and launcher.room() == 2
    assert "atlas-wm" in Records(tmp_path).log(units[0]).read_text()
    assert "unknown command 'nonsense'" in Records(tmp_path).log(units[1]).read_text()
    launcher.standby.stdin.close()  # as when the study ends: nothing is left behind
    assert launcher.standby.wait(60) == 0


@pytest.mark.parametrize(
    ("gpus", "per_gpu", "given", "expected"),
    [(0, 2, None, "4"), (2, 8, None, "1"), (0, 2, "3", "3"), (1, 1, None, None)],
)
def test_units_that_run_at_once_divide_the_cores_unless_the_user_says_otherwise(
    tmp_path, monkeypatch, gpus, per_gpu, given, expected
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    started = []
    monkeypatch.setattr(local.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(local.subprocess, "Popen", lambda command, env, **_: started.append(env))
    LocalLauncher(Records(tmp_path), gpus, per_gpu)
    assert [env.get("OMP_NUM_THREADS") for env in started] == [expected]


def test_estimates_come_from_units_of_the_same_kind_where_there_are_some(tmp_path):
    progress = progress_of(units_of(STUDY, tmp_path).values(), Records(tmp_path))
    unit = progress["train lewm-3072"].unit
    guess = estimate(unit, STUDY, progress.values(), cores=2, gpu=False)
    assert guess.seconds is not None and 100 < guess.seconds < 400  # 800 steps of the demo on two cores: 170 s
    done = progress["train atlas-3072"]
    done.state, done.seconds = "done", 7.0
    assert estimate(unit, STUDY, progress.values(), cores=2, gpu=False).seconds == 7.0
    done = progress["train lewm-3073"]  # the same method
    done.state, done.seconds = "done", 3.0
    assert estimate(unit, STUDY, progress.values(), cores=2, gpu=False).seconds == 3.0


def test_the_time_of_all_units_is_that_of_those_that_run_at_once(tmp_path):
    units = units_of(STUDY, tmp_path)
    seconds = {u: {"collect": 5.0, "train": 10.0, "eval": 1.0}.get(u.kind, 0.5) for u in units.values()}
    assert together(seconds, 1) == sum(seconds.values()) == 5 + 4 * 10 + 8 * 1 + 2 * 0.5
    assert together(seconds, 2) == 5 + 2 * 10 + 4 * 1 + 2 * 0.5
    assert together(seconds, 1000) == 5 + 10 + 1 + 2 * 0.5
    trained = {u: s for u, s in seconds.items() if u.kind not in ("collect", "train")}  # those are done
    assert together(trained, 4) == 2 * 1 + 2 * 0.5 and together({}, 4) == 0


@pytest.mark.parametrize(
    ("frames", "format", "expected"),
    [(False, "h5", 40), (True, "h5", 6240), (True, "lance", 4440)],  # bytes per row: docs/notes/data-loading.md
)
def test_a_dataset_with_frames_is_estimated_with_them(tmp_path, frames, format, expected):
    study = replace(STUDY, datasets={"tworoom": Dataset(episodes=100, pixels=frames, format=format)})
    guess = estimate(units_of(study, tmp_path)["collect tworoom"], study, (), cores=2, gpu=False)
    assert guess.bytes == 100 * 62 * expected
    assert (guess.seconds is None) == frames  # how fast it draws TwoRoom was not measured


def test_a_dry_run_counts_the_gpus_that_are_there_or_that_slurm_gives(tmp_path, capsys, monkeypatch):
    command = ["study", "ablation", "--out", str(tmp_path / "out"), "--dry-run"]
    said = {}
    for gpus in ("", "0", "0,1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        main(command)
        said[gpus] = " ".join(capsys.readouterr().out.split())
    main([*command, "--slurm", "gpus_per_node=2,cpus_per_task=8"])
    said["slurm"] = " ".join(capsys.readouterr().out.split())
    assert "on 1 GPU: about" in said["0"] and "one after the other" in said["0"]
    assert "on 2 GPUs: about" in said["0,1"] and "with 2 at a time" in said["0,1"]
    assert "train atlas (new; about 10 min" in said["slurm"] and "every job at once" in said["slurm"]
    assert "train atlas (new; no estimate" not in said[""] and "no estimate for 8 of them" in said[""]
    assert f"> {tmp_path / 'out' / 'units' / 'eval_lewm+ood_25.log'}" in said[""]
    with pytest.raises(SystemExit, match="gpus_per_node must be a whole number of at least 0"):
        main([*command, "--slurm", "gpus_per_node=a100:4"])


@pytest.mark.parametrize("width", [80, 130])
def test_the_log_of_what_runs_or_failed_is_named(tmp_path, width):
    records = Records(tmp_path)
    progress = progress_of(units_of(STUDY, tmp_path).values(), records)
    console = Console(width=width, force_terminal=True, file=io.StringIO())
    shown = Shown(console, lambda: progress, records)
    progress["collect tworoom"].state, progress["train atlas-3072"].state = "done", "running"
    progress["train lewm-3072"].state = "failed"
    console.print(shown.table())
    printed = console.file.getvalue()
    assert "train_atlas-3072.log" in printed and "train_lewm-3072.log" in printed
    assert "collect_tworoom.log" not in printed and "train_atlas-3073.log" not in printed
    plain = Console(width=width, file=io.StringIO())
    lines = Shown(plain, lambda: progress, records)
    lines.states.clear()
    lines.update()
    (line,) = (line for line in plain.file.getvalue().splitlines() if line.startswith("running"))
    assert line.endswith(f"; log {tmp_path / 'units' / 'train_atlas-3072.log'}")


def test_dry_run_prints_commands_and_writes_nothing(tmp_path, capsys):
    main(["study", "ablation", "--tasks", "tworoom", "--seeds", "2", "--out", str(tmp_path / "out"), "--dry-run"])
    printed = capsys.readouterr().out
    assert "train lewm+ood-3073 (new" in printed
    assert "27 of 27 units to run" in printed and not (tmp_path / "out").exists()
    command = ["study", "ablation", "--tasks", "tworoom", "--out", str(tmp_path / "out"), "--dry-run"]
    main([*command, "--only", "eval lewm+ood 25"])
    assert "3 of 3 units to run" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process", "few_frames_in_banks")
def test_from_nothing_to_a_report(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("atlas_wm.cli.study.make_launcher", lambda records, *_: Inline(records, print))
    (tmp_path / "mine.toml").write_text(
        "methods = ['atlas']\nrecipes = ['demo']\ndiagnostics = []\nmark = 100.0\n"
        "settings = {'train.steps' = 8, 'train.batch' = 8, 'train.validate-every' = 8}\n"
        "head = ['--steps', '3', '--frames', '50']\n"
        "[datasets.tworoom]\nepisodes = 12\npixels = false\nformat = 'h5'\neval_episodes = 6\n"
        + "".join(
            "[[evaluations]]\noffset = 25\nepisodes = 2\nseeds = [42]\n"
            "flags = ['--candidates', '8', '--elites', '3', '--films', '0', '--workers', '1', '--cost', "
            f"'{cost}']\n"
            for cost in ("terminal", "temporal")
        )
    )
    out = tmp_path / "out"
    main(["study", str(tmp_path / "mine.toml"), "--out", str(out)])
    first = capsys.readouterr().out
    assert "0 of 7 units are done" in first and (out / "report" / "index.html").exists()
    assert re.search(r"time: collect \d+ s, train \d+ s, head \d+ s, eval \d+ s, report \d+ s; together", first)
    rows = list(csv.DictReader((out / "study.csv").open()))
    reached = all(float(row["success"]) == 100 for row in rows)
    assert ("not reached by tworoom atlas demo 3072 at offset 25" in first) != reached
    assert (out / "tworoom.h5").exists() and (out / "tworoom-evaluation.h5").exists()
    assert [row["cost"] for row in rows] == ["terminal", "temporal"]
    assert ",".join(rows[0].values()).startswith("tworoom,atlas,demo,3072,25,50,terminal,zero,5,")
    assert 0 < float(rows[0]["steps"]) <= 50 and float(rows[0]["ms_per_plan"]) > 0 and rows[0]["replay"] == "100.0"
    for large in ("tworoom.h5", "atlas/model.safetensors", "atlas/temporal_head.safetensors"):
        (out / large).unlink()
    main(["study", str(tmp_path / "mine.toml"), "--out", str(out)])
    assert "7 of 7 units are done" in capsys.readouterr().out
    text = (tmp_path / "mine.toml").read_text()
    (tmp_path / "mine.toml").write_text(text.replace("offset = 25\nepisodes = 2", "offset = 25\nepisodes = 1", 1))
    main(["study", str(tmp_path / "mine.toml"), "--out", str(out), "--only", "cost terminal"])
    assert "1 of 4 units are done" in capsys.readouterr().out and (out / "atlas" / "model.safetensors").exists()
    (row,) = csv.DictReader((out / "study.csv").open())  # the other evaluation was of weights that are gone
    assert (row["cost"], row["episodes"]) == ("terminal", "1")
