"""The demo is resumed after anything that a user may have done to its runs."""

import shutil
from dataclasses import replace

import pytest

from atlas_wm.cli import demo_job as demo
from atlas_wm.evaluate.evaluate import evaluate
from atlas_wm.runs.results import Protocol, read_results


@pytest.mark.usefixtures("in_this_process")
def test_the_demo_keeps_its_results_when_a_run_was_evaluated_again(trained, tmp_path, monkeypatch, capsys):
    """`make demo`, the command it suggests, `make demo`: one run then has a larger evaluation of the condition."""
    (tmp_path / "tworoom.lance").mkdir()  # only looked for: the runs know their data
    for method in demo.METHODS:
        shutil.copytree(trained, tmp_path / method)
    protocol = Protocol(offset=10, budget=20, episodes=4, seeds=(42,), part="heldout")
    monkeypatch.setattr(demo, "PROTOCOLS", [protocol])
    monkeypatch.setattr(demo, "diagnose_with_progress", lambda *_: [])
    monkeypatch.setattr(demo, "write_report", lambda runs, out: out / "index.html")
    demo.run_demo(tmp_path, (3072,))
    first = (tmp_path / "results.md").read_text()
    assert (tmp_path / "films.png").exists() and "Replayed actions" in first
    evaluate(tmp_path / "atlas", [replace(protocol, episodes=6)], device="cpu")
    capsys.readouterr()
    demo.run_demo(tmp_path, (3072,))
    assert (tmp_path / "results.md").read_text() == first and (tmp_path / "films.png").exists()
    assert "planning" not in capsys.readouterr().out  # nothing is evaluated again
    assert sorted(len(read_results(tmp_path / method)) for method in demo.METHODS) == [1, 2]
