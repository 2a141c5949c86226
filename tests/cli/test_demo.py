"""The demo continues after anything that a user may have done to its runs."""

import shutil

import pytest

from atlas_wm.cli.demo_job import run_demo
from atlas_wm.evaluate.evaluate import evaluate
from atlas_wm.runs.results import Protocol, read_results
from atlas_wm.study.records import Records
from atlas_wm.study.study import STUDIES, Evaluation, Study
from atlas_wm.study.units import units_of


@pytest.mark.usefixtures("in_this_process")
def test_the_demo_keeps_its_results_when_a_run_was_evaluated_again(trained, tmp_path, monkeypatch, capsys):
    """`make demo`, the command it suggests, `make demo`: one run then has a larger evaluation of the condition."""
    flags = ("--device", "cpu")
    evaluations = (
        Evaluation(10, 20, 4, (42,), flags),
        Evaluation(60, 20, 4, (42,), (*flags, "--start", "retrieval")),
    )
    study = Study(methods=("lewm", "atlas"), recipes=("demo",), evaluations=evaluations, diagnostics=())
    monkeypatch.setitem(STUDIES, "demo", study)
    (tmp_path / "tworoom.lance").mkdir()  # only looked for: the runs know their data
    for unit in units_of(study, tmp_path).values():
        if unit.kind == "train":
            shutil.copytree(trained, unit.makes.parent)
        if unit.kind in ("collect", "train"):
            Records(tmp_path).write(unit, "done")
    run_demo(tmp_path, 1)
    first, printed = (tmp_path / "results.md").read_text(), capsys.readouterr().out
    assert (tmp_path / "films.png").exists() and "Replayed actions" in first and "start retrieval" in first
    assert "3 of 8 steps are done" in printed and "planning held-out episodes with atlas 10" in printed
    evaluate(tmp_path / "atlas", [Protocol(10, 20, 6, (42,), "heldout")], device="cpu")
    capsys.readouterr()
    run_demo(tmp_path, 1)
    assert (tmp_path / "results.md").read_text() == first and (tmp_path / "films.png").exists()
    assert "planning" not in capsys.readouterr().out  # nothing is evaluated again
    assert sorted(len(read_results(tmp_path / method)) for method in study.methods) == [2, 3]
