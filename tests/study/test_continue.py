"""A second call of a study continues: what is done stays, what a change touches is redone, parts count."""

from dataclasses import replace

import pytest
from pretend import run

from atlas_wm.errors import UserError
from atlas_wm.study.records import Records
from atlas_wm.study.schedule import part_of, progress_of
from atlas_wm.study.study import Dataset, Evaluation, Study
from atlas_wm.study.units import units_of

STUDY = Study(methods=("atlas", "lewm"), recipes=("demo",), seeds=2, evaluations=(Evaluation(25), Evaluation(50)))


def test_a_second_call_runs_nothing_and_a_change_redoes_what_depends_on_it(tmp_path):
    first, states = run(STUDY, tmp_path)
    assert len(first.names) == len(set(first.names)) == len(states) and set(states.values()) == {"done"}
    assert run(STUDY, tmp_path)[0].names == []
    longer = replace(STUDY, evaluations=(Evaluation(25), Evaluation(50, episodes=7)))
    assert {n.rpartition(" ")[2] for n in run(longer, tmp_path)[0].names} == {"50", "tworoom", "report"}
    one_more = run(replace(longer, seeds=3), tmp_path)[0].names
    assert {"train atlas-3074", "train lewm-3074"} == {n for n in one_more if n.startswith("train")}
    assert "collect tworoom" not in one_more
    again = run(replace(longer, datasets={"tworoom": Dataset(episodes=9)}), tmp_path)[0].names
    assert "collect tworoom" in again and len([n for n in again if n.startswith("train")]) == 4


def test_datasets_and_weights_that_were_evaluated_may_be_deleted(tmp_path):
    study = replace(STUDY, evaluations=(*STUDY.evaluations, Evaluation(75, flags=("--cost", "temporal"))))
    run(study, tmp_path)
    large = [u.makes for u in units_of(study, tmp_path).values() if u.kind in ("collect", "train", "head")]
    for path in large:
        path.unlink()
    assert run(study, tmp_path)[0].names == []
    (tmp_path / "report" / "index.html").unlink()
    assert run(study, tmp_path)[0].names == ["report"]
    # Another evaluation needs the models: they are trained again, and evaluated again, since they may differ.
    one_more = replace(study, methods=("atlas",), evaluations=(*study.evaluations, Evaluation(100)))
    names = run(one_more, tmp_path)[0].names
    assert names[:3] == ["collect tworoom", "train atlas-3072", "train atlas-3073"]
    assert {n for n in names if n.startswith("eval atlas-3072")} == {
        "eval atlas-3072 25",
        "eval atlas-3072 50",
        "eval atlas-3072 75 cost temporal",
        "eval atlas-3072 100",
    }
    (tmp_path / "atlas-3072" / "evaluation").unlink()  # what was measured must be there
    assert "eval atlas-3072 25" in run(one_more, tmp_path)[0].names


def test_a_part_of_a_study_runs_with_what_it_needs_and_counts_as_done_in_the_whole(tmp_path):
    only = ["eval atlas-3073", "lewm-3072 25"]
    part = part_of(progress_of(units_of(STUDY, tmp_path).values(), Records(tmp_path)), only)
    assert list(part) == [
        "collect tworoom",
        "train atlas-3073",
        "train lewm-3072",
        "eval atlas-3073 25",
        "eval atlas-3073 50",
        "eval lewm-3072 25",
    ]
    assert sorted(run(STUDY, tmp_path, only=only)[0].names) == sorted(part)
    assert not set(part) & set(run(STUDY, tmp_path)[0].names)
    with pytest.raises(UserError, match=r"--only pusht: no unit.*--dry-run"):
        part_of(part, ["atlas", "pusht"])


def test_the_result_of_other_settings_is_removed_and_an_interrupted_one_is_not(tmp_path):
    study = replace(STUDY, seeds=1)
    run(study, tmp_path)
    (tmp_path / "atlas" / "checkpoint").touch()
    units, records = units_of(study, tmp_path), Records(tmp_path)
    records.write(units["train atlas"], "running")
    units["train atlas"].makes.unlink()  # an interrupted training has no weights yet
    assert records.why(units["train atlas"]) == "it was interrupted"
    records.clear(units["train atlas"])
    assert (tmp_path / "atlas" / "checkpoint").exists()
    other = units_of(replace(study, settings={"train.steps": 9}), tmp_path)["train atlas"]
    assert records.why(other) == "its settings changed"
    records.clear(other)
    assert not (tmp_path / "atlas").exists() and (tmp_path / "lewm").exists()


def test_what_a_command_completed_after_the_study_was_killed_is_done(tmp_path):
    study = replace(STUDY, seeds=1)
    run(study, tmp_path)
    units, records = units_of(study, tmp_path), Records(tmp_path)
    for name in ("collect tworoom", "train atlas", "eval lewm 25"):
        records.write(units[name], "running")
    assert run(study, tmp_path)[0].names == ["eval lewm 25", "diagnose tworoom", "report"]  # evaluations grow
    records.write(units["train atlas"], "running")
    units["train atlas"].makes.unlink()
    assert "train atlas" in run(study, tmp_path)[0].names
    records.write(units["train lewm"], "running")
    (tmp_path / "lewm" / "left").touch()
    records.clear(units["train lewm"])  # as when it has to run again: its command refuses a folder that exists
    assert not (tmp_path / "lewm").exists()


def test_a_folder_that_the_study_did_not_make_is_left_alone(tmp_path):
    (tmp_path / "atlas").mkdir()
    Records(tmp_path).clear(units_of(replace(STUDY, seeds=1), tmp_path)["train atlas"])
    assert (tmp_path / "atlas").exists()
