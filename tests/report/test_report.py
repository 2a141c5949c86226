"""Tables and pictures from what a run left on disk."""

import csv

import numpy as np
import pytest
from PIL import Image

from atlas_wm.report.films import film_gif, film_strips
from atlas_wm.report.table import markdown, success_rows, write_csv
from atlas_wm.report.training import training_curves


def result(rates: dict[str, float], solved: float = 10.0) -> dict:
    return {
        "success_mean": float(np.mean(list(rates.values()))),
        "success_by_seed": rates,
        "solved_at_start": solved,
        "plans": 4,
        "seconds": 2.0,
        "episodes": {seed: [{}] * 5 for seed in rates},
    }


def report(method: str, offset: int, rates: dict[str, float], floor: float = 20.0) -> dict:
    return {
        "method": method,
        "protocol": {"offset": offset, "budget": offset + 25},
        "model": result(rates),
        "random": result(dict.fromkeys(rates, floor)),
    }


def test_the_spread_is_over_runs_where_there_are_several():
    rows = success_rows(
        [report("atlas", 50, {"42": 90.0, "43": 80.0}), report("atlas", 50, {"42": 100.0, "43": 90.0})]
    )
    atlas = next(r for r in rows if r["policy"] == "ATLAS")
    assert (atlas["success_percent"], atlas["std"], atlas["std_over"], atlas["episodes"]) == (90.0, 5.0, "runs", 20)
    alone = success_rows([report("atlas", 50, {"42": 90.0, "43": 80.0})])[-1]
    assert (alone["success_percent"], alone["std"], alone["std_over"]) == (85.0, 5.0, "evaluation seeds")
    assert alone["seconds_per_plan"] == 0.5


def test_the_table_has_a_line_for_each_policy_and_a_column_for_each_condition(tmp_path):
    reports = [
        report("lewm", 25, {"42": 90.0}),
        report("atlas", 25, {"42": 99.0}),
        report("atlas", 50, {"42": 95.0}),
    ]
    lines = markdown(reports).splitlines()
    assert lines[0] == "| success | offset 25, budget 50 | offset 50, budget 75 |"
    assert lines[2:] == [
        "| Random actions | 20.0 % | 20.0 % |",
        "| LeWM | 90.0 % | – |",
        "| ATLAS | 99.0 % | 95.0 % |",
        "| already solved at the start | 10.0 % | 10.0 % |",
    ]
    write_csv(reports, tmp_path / "r.csv")
    assert [r["success_percent"] for r in csv.DictReader((tmp_path / "r.csv").open())][1] == "90.0"


@pytest.mark.slow
def test_pictures_are_made_from_a_run(run_folder, tmp_path):
    from atlas_wm.evaluate.evaluate import evaluate
    from atlas_wm.evaluate.protocol import Protocol

    protocol = Protocol(20, 30, 4, (9,))
    evaluate(run_folder, [protocol], films=2, random_floor=False, workers=1, device="cpu")
    training_curves([run_folder], tmp_path / "curves.png")
    film_strips([run_folder, run_folder], protocol.name, tmp_path / "films.png")
    film_gif(run_folder, protocol.name, tmp_path / "episode.gif")
    for name in ("curves.png", "films.png"):
        assert np.asarray(Image.open(tmp_path / name)).std() > 5  # not blank
    assert Image.open(tmp_path / "episode.gif").n_frames >= 2
