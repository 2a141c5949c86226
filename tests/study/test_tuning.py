"""A tuned recipe gets the weight whose try has the best planning score, with as many tries for every method and on
episodes that no evaluation sees."""

import csv
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest
from pretend import Pretend, run

from atlas_wm.cli.app import main
from atlas_wm.cli.demo_job import Inline
from atlas_wm.config import ObjectiveConfig
from atlas_wm.data.clips import held_out_of
from atlas_wm.errors import UserError
from atlas_wm.methods import METHODS, Method
from atlas_wm.runs.folder import read_run
from atlas_wm.runs.results import read_results
from atlas_wm.study.records import Records
from atlas_wm.study.study import STUDIES, Dataset, Evaluation, Study
from atlas_wm.study.tries import last_score, start
from atlas_wm.study.tuning import Tuned, weight_settings, weights
from atlas_wm.study.units import units_of

STUDY = Study(
    methods=("atlas", "lewm"),
    recipes=("paper", "paper+tuned"),
    seeds=2,
    tries=(0.1, 1.0, 10.0),
    try_settings={"train.steps": 7},
    evaluations=(Evaluation(50),),
)


def flags(command) -> dict[str, str]:
    return dict(pairwise(command))


def test_every_method_has_as_many_tries_and_the_best_one_gives_the_weight_of_its_runs(tmp_path):
    pretend, states = run(STUDY, tmp_path)
    assert set(states.values()) == {"done"}
    commands = dict(pretend.commands)
    for method, weight, chosen in (("atlas", "wemreg", "0.3"), ("lewm", "sigreg", None)):  # 0.25 is the best
        tried = [flags(commands[f"try tworoom-{method}-paper-{factor}"]) for factor in ("0.1", "1", "10")]
        assert [float(t[f"--objective.{weight}"]) for t in tried] == pytest.approx(
            [factor * getattr(METHODS[method].objective, weight) for factor in STUDY.tries]
        )
        assert {t["--train.steps"] for t in tried} == {"7"}
        for seed in ("3072", "3073"):
            if chosen is None:  # the recipe's own weight, 0.09: the same run is not trained again
                assert f"train {method}-paper+tuned-{seed}" not in commands
                continue
            tuned, paper = (flags(commands[f"train {method}-{r}-{seed}"]) for r in ("paper+tuned", "paper"))
            assert (tuned["--objective." + weight], tuned["--recipe"]) == (chosen, "paper+tuned")
            assert not any(name.startswith("--objective") for name in paper) and "--train.steps" not in tuned
    rows = list(csv.DictReader((tmp_path / "tuning.csv").open()))
    assert [(r["method"], r["factor"], r["weights"]) for r in rows if r["chosen"] == "True"] == [
        ("atlas", "0.1", "wemreg 0.3"),
        ("lewm", "1.0", "sigreg 0.09"),
    ]
    assert [len([r for r in rows if r["method"] == m]) for m in STUDY.methods] == [3, 3]


def test_tries_and_evaluated_runs_have_different_data_and_evaluated_episodes_are_held_out(tmp_path):
    units = units_of(STUDY, tmp_path)
    data = {
        kind: {flags(u.command)["--data"] for u in units.values() if u.kind == kind} for kind in ("try", "train")
    }
    assert len(data["try"]) == len(data["train"]) == 1 and not data["try"] & data["train"]
    seeds = {u.command[u.command.index("--out") + 1]: flags(u.command).get("--seed") for u in units.values()
             if u.kind == "collect"}  # fmt: skip
    assert seeds == {min(data["train"]): None, min(data["try"]): "1"}
    for unit in units.values():  # the paper's split by clips holds no episode out
        assert unit.kind not in ("try", "train") or flags(unit.command)["--train.split"] == "episodes"
    every = units_of(replace(STUDY, part="all", recipes=("paper",)), tmp_path)
    assert "--train.split" not in every["train atlas-3072"].command


def test_the_regulariser_is_a_property_of_the_method():
    one = Tuned("tworoom", "pldm", "paper+tuned")
    study = replace(STUDY, methods=("pldm",))
    assert weights(study, one, 0.5) == {"std": 9.0, "std_t": 0.35, "cov": 6.0, "temporal": 0.1}
    assert weight_settings(study, one, 0.5)["objective.std-t"] == "0.35"
    given = replace(study, settings={"objective.std": 2})
    assert weights(given, one, 0.5)["std"] == 1.0
    for method in STUDIES["fair"].methods:
        assert weights(STUDIES["fair"], Tuned("tworoom", method, "paper+tuned"))
    mine = Method("", ObjectiveConfig(sigreg=0.1, extra={"my:term": 2.0}), regulariser=("my:term",))
    assert mine.regulariser_of(mine.objective) == {"my:term": 2.0}


def test_a_changed_try_redoes_what_depends_on_it(tmp_path):
    run(STUDY, tmp_path)
    assert run(STUDY, tmp_path)[0].names == []
    more = replace(STUDY, tries=(0.1, 1.0, 10.0, 100.0))  # which is worse: no run changes
    names = run(more, tmp_path)[0].names
    assert names == ["try tworoom-atlas-paper-100", "try tworoom-lewm-paper-100", "report"]
    better = replace(STUDY, tries=(0.1, 1.0, 10.0, 3.0))  # of LeWM: 0.27
    names = run(better, tmp_path)[0].names
    assert {n for n in names if n.startswith("train")} == {
        "train lewm-paper+tuned-3072",
        "train lewm-paper+tuned-3073",
    }
    assert {n.partition(" ")[2] for n in names if n.startswith("eval")} == {
        "lewm-paper+tuned-3072 50",
        "lewm-paper+tuned-3073 50",
    }
    assert run(replace(better, try_settings={"train.steps": 8}), tmp_path)[0].names == [
        *(f"try tworoom-{m}-paper-{f}" for m in ("atlas", "lewm") for f in ("0.1", "1", "10", "3")),
        "report",
    ]


def test_a_failed_try_is_not_chosen_and_is_tried_again(tmp_path):
    pretend, states = run(STUDY, tmp_path, **{"try tworoom-atlas-paper-0.1": 2})
    assert [n for n, s in states.items() if s != "done"] == ["try tworoom-atlas-paper-0.1"]
    assert states["train atlas-paper+tuned-3072"] == "done"  # the next best is the recipe's own weight
    assert "train atlas-paper+tuned-3072" not in pretend.names
    again, states = run(STUDY, tmp_path, **{"try tworoom-atlas-paper-0.1": 2})
    assert again.names == [*["try tworoom-atlas-paper-0.1"] * 2, "report"]
    later, states = run(STUDY, tmp_path)
    assert set(states.values()) == {"done"} and "train atlas-paper+tuned-3072" in later.names
    assert not any("lewm" in name for name in later.names)


ALIKE = replace(STUDY, methods=("lewm",), recipes=("paper+tuned", "paper"), seeds=1)  # chooses the recipe's weight


def test_a_tuned_run_with_the_weight_of_the_recipe_is_that_of_the_recipe(tmp_path):
    pretend, states = run(ALIKE, tmp_path)
    assert set(states.values()) == {"done"} and states["eval lewm-paper+tuned 50"] == "done"
    assert [n for n in pretend.names if n.startswith(("train", "eval"))] == [
        "train lewm-paper",
        "eval lewm-paper 50",
    ]
    report = dict(pretend.commands)["report"]
    assert report.count(str(tmp_path / "lewm-paper")) == 1 and str(tmp_path / "lewm-paper+tuned") not in report
    progress = start(ALIKE, tmp_path, Records(tmp_path))
    assert all(p.state == "done" for p in progress.values())
    alone = replace(ALIKE, recipes=("paper+tuned",))  # no other run that it could be
    assert "train lewm" in run(alone, tmp_path / "alone")[0].names


def test_a_part_gets_the_run_that_it_turns_out_to_be(tmp_path):
    pretend, states = run(ALIKE, tmp_path, only=["eval lewm-paper+tuned"])
    assert pretend.names[-2:] == ["train lewm-paper", "eval lewm-paper 50"]
    assert states["eval lewm-paper+tuned 50"] == "done" and states["report"] == "waiting"


def test_a_failed_run_blocks_those_that_are_the_same(tmp_path):
    _, states = run(ALIKE, tmp_path, **{"train lewm-paper": 2})
    assert {n for n, s in states.items() if s == "blocked"} >= {
        "train lewm-paper+tuned",
        "eval lewm-paper+tuned 50",
    }


def test_without_a_try_the_tuned_runs_are_blocked_and_the_others_go_on(tmp_path):
    _, states = run(replace(STUDY, seeds=1), tmp_path, **{"try tworoom-atlas": 6})
    assert {n for n, s in states.items() if s == "blocked"} == {
        "train atlas-paper+tuned",
        "eval atlas-paper+tuned 50",
    }
    assert states["report"] == states["train lewm-paper+tuned"] == states["train atlas-paper"] == "done"


def test_tries_without_a_planning_score_are_an_error(tmp_path):
    class NoScore(Pretend):
        def score(self, unit):
            return "nan"

    with pytest.raises(UserError, match="no try of atlas on tworoom has a planning score"):
        run(STUDY, tmp_path, NoScore())


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"tries": (0.1, 0.1)}, "different factors"),
        ({"tries": (-1.0,)}, "above 0"),
        ({"methods": ("dino-wm",)}, "dino-wm has no regulariser to tune"),
        ({"datasets": {"tworoom": Dataset(path="a.h5")}}, r"paper\+tuned needs another dataset.*try_path"),
        ({"recipes": ("papre+tuned",)}, "unknown recipe 'papre'"),
    ],
)
def test_what_cannot_be_tuned_is_refused(changes, what):
    with pytest.raises(UserError, match=what):
        replace(STUDY, **changes)


def test_tries_may_not_use_the_evaluated_dataset():
    with pytest.raises(UserError, match="try_path must not be path"):
        Dataset(path="data/a.h5", try_path="data/../data/a.h5")
    mine = replace(STUDY, datasets={"tworoom": Dataset(path="a.h5", try_path="b.h5")})
    data = {(u.kind, flags(u.command).get("--data")) for u in units_of(mine, Path("out")).values()}
    assert {("try", "b.h5"), ("train", "a.h5")} <= data and not any(kind == "collect" for kind, _ in data)


def test_dry_run_shows_tries_and_what_they_decide(tmp_path, capsys):
    main(["study", "fair", "--tasks", "tworoom", "--seeds", "1", "--out", str(tmp_path / "out"), "--dry-run"])
    printed = " ".join(capsys.readouterr().out.split())
    assert len(re.findall(r"run try ", printed)) == 30 and "--objective.wemreg CHOSEN" in printed
    assert "run train atlas-paper+tuned (its tries choose the weight; " in printed
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process", "few_frames_in_banks")
def test_no_evaluated_episode_is_one_of_the_tries(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("atlas_wm.cli.study.make_launcher", lambda records, *_: Inline(records, print))
    (tmp_path / "mine.toml").write_text(
        "methods = ['lewm']\nrecipes = ['demo+tuned']\ndiagnostics = []\ntries = [0.5, 2]\n"
        "settings = {'train.steps' = 4, 'train.batch' = 8, 'train.validate-every' = 4}\n"
        "[datasets.tworoom]\nepisodes = 12\npixels = false\nformat = 'h5'\n"
        "[[evaluations]]\noffset = 25\nepisodes = 2\nseeds = [42]\n"
        "flags = ['--candidates', '8', '--elites', '3', '--films', '0', '--workers', '1', '--policy', 'model']\n"
    )
    out = tmp_path / "out"
    main(["study", str(tmp_path / "mine.toml"), "--out", str(out)])
    (chosen,) = [row for row in csv.DictReader((out / "tuning.csv").open()) if row["chosen"] == "True"]
    printed = capsys.readouterr().out
    assert f"tworoom lewm demo+tuned: {chosen['weights']} ({float(chosen['factor']):g} times" in printed
    info = read_run(out / "lewm")[0]
    assert f"sigreg {info.config.objective.sigreg:g}" == chosen["weights"]
    (row,) = csv.DictReader((out / "study.csv").open())
    assert float(row["score"]) == last_score(out / "lewm")

    def episodes(name: str) -> list[bytes]:
        with h5py.File(out / name) as file:
            starts, lengths = file["ep_offset"][:], file["ep_len"][:]
            return [file["action"][s : s + n].tobytes() for s, n in zip(starts, lengths, strict=True)]

    (result,) = read_results(out / "lewm").values()
    evaluated = {e.episode for mine in result.model.episodes.values() for e in mine}
    assert evaluated <= set(np.flatnonzero(held_out_of(info, 12)).tolist())
    mine, tried = episodes("tworoom.h5"), episodes("tworoom-tries.h5")
    assert len(tried) == 12 and not {mine[number] for number in evaluated} & set(tried)
    for factor in ("0.5", "2"):
        assert read_run(out / "tries" / f"tworoom-lewm-demo-{factor}")[0].data.path.endswith("tworoom-tries.h5")
