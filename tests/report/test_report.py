"""Tables and images from what a run left on disk."""

import csv
import json
from itertools import combinations_with_replacement
from pathlib import Path

import numpy as np
import pytest
from made_up import change, make_run
from matplotlib.figure import Figure
from PIL import Image
from scipy import stats

from atlas_wm.errors import UserError
from atlas_wm.evaluate.evaluate import evaluate
from atlas_wm.methods import METHODS
from atlas_wm.report import films as films_module
from atlas_wm.report import naming
from atlas_wm.report.films import film_gif, film_strips, read_films
from atlas_wm.report.page_table import Table
from atlas_wm.report.runs import read_study
from atlas_wm.report.table import markdown, row_rate, success_rows, write_csv
from atlas_wm.report.training import curve_panels, settings_section, training_curves
from atlas_wm.runs.files import write_json
from atlas_wm.runs.films import films_path
from atlas_wm.runs.results import EvaluationResult, PolicyResult, Protocol
from atlas_wm.tasks import TASKS
from made_up_results import episode, evaluation, policy


def outcome(rates: dict[int, float], planned: bool = True) -> PolicyResult:
    return policy({seed: [episode()] * 5 for seed in rates}, dict.fromkeys(("", "id", "ood"), rates), planned)


def report(method: str, offset: int, rates: dict[int, float]) -> EvaluationResult:
    floor, ceiling = (outcome(dict.fromkeys(rates, value), planned=False) for value in (20.0, 99.0))
    return evaluation(outcome(rates), floor, ceiling, method=method, offset=offset)


def test_several_runs_have_an_interval_over_training_seeds_and_one_run_does_not():
    """Means 62, 60 and 58 with no spread over demonstrations: 60 ± t₂ · 2/√3. One run: over its evaluation seeds,
    divided by their number as in the paper."""
    runs = [report("atlas", 50, {42: rate + 5, 43: rate - 5}) for rate in (62.0, 60.0, 58.0)]
    counts = [[e.success for mine in r.model.episodes.values() for e in mine] for r in runs]
    assert all(map(all, counts))  # 1 demonstration, always solved: its interval is that of Wilson
    (row,) = (r for r in success_rows(runs) if r["policy"] == "ATLAS")
    half, least = stats.t.ppf(0.975, 2) * 2 / np.sqrt(3), 100 / (1 + 1.96**2)
    assert row["high"] == pytest.approx(min(100, 60 + np.hypot(half, 40)), abs=0.01)
    assert row["low"] == pytest.approx(60 - np.hypot(half, 60 - least), abs=0.01)
    assert (row["success_percent"], row["std"], row["std_over"], row["runs"]) == (60.0, None, None, 3)
    (alone,) = (r for r in success_rows(runs[:1]) if r["policy"] == "ATLAS")
    assert (alone["success_percent"], alone["std"], alone["std_over"]) == (62.0, 5.0, "evaluation seeds")
    assert (alone["low"], alone["high"], alone["runs"]) == (None, None, 1)
    assert row_rate(alone).text == "62.0 ± 5.0" and row_rate(row).text == "60.0 [{low:.1f}, {high:.1f}]".format(
        **row
    )
    assert f"60.0 % [{row['low']:.1f}, {row['high']:.1f}]" in markdown(success_rows(runs))


def test_the_spread_of_one_run_is_that_of_the_paper():
    """Its table has 50.80 ± 0.68 over five seeds of 200 episodes: of rates in steps of 0.5 only divided by 5."""
    rates = [step / 2 for step in range(96, 108)]
    found = [five for five in combinations_with_replacement(rates, 5) if sum(five) == 5 * 50.8]
    assert {0.68} & {round(float(np.std(five)), 2) for five in found}
    assert not {0.68} & {round(float(np.std(five, ddof=1)), 2) for five in found}
    five = next(five for five in found if round(float(np.std(five)), 2) == 0.68)
    (row,) = (r for r in success_rows([report("atlas", 50, dict(enumerate(five)))]) if r["policy"] == "ATLAS")
    assert row_rate(row).text == "50.8 ± 0.7" and row["std"] == 0.68


def test_seconds_per_plan_is_planning_time_of_what_plans(tmp_path):
    """Not the wall time, which here is 100 s, and nothing for actions that nobody planned."""
    rows = {r["policy"]: r for r in success_rows([report("atlas", 50, {42: 90.0, 43: 80.0})])}
    assert {name: row["seconds_per_plan"] for name, row in rows.items()} == {
        "Random actions": None,
        "ATLAS": 0.5,
        "Replayed actions": None,
    }
    run = make_run(tmp_path / "run", "atlas", seeds=(42,))
    facts = next(
        row
        for table in settings_section(read_study([run])).blocks
        if isinstance(table, Table)
        for row in table.rows
        if row[0] == "seconds per plan"
    )
    assert facts[1] == "0.5, 0.5"  # of its two conditions


def test_the_table_has_a_line_for_each_policy_and_a_column_for_each_condition(tmp_path):
    reports = [
        report("lewm", 25, {42: 90.0}),
        report("atlas", 25, {42: 99.0}),
        report("atlas", 50, {42: 95.0}),
    ]
    lines = markdown(success_rows(reports)).splitlines()
    assert lines[0] == "| success | episodes | offset 25, budget 50 | offset 50, budget 75 |"
    assert lines[2:] == [
        "| Random actions | 5 | 20.0 % | 20.0 % |",
        "| LeWM | 5 | 90.0 % | – |",
        "| ATLAS | 5 | 99.0 % | 95.0 % |",
        "| Replayed actions | 5 | 99.0 % | 99.0 % |",
        "| already solved at the start |  | 10.0 % | 10.0 % |",
    ]
    write_csv(reports, tmp_path / "r.csv")
    assert [r["success_percent"] for r in csv.DictReader((tmp_path / "r.csv").open())][1] == "90.0"


def test_runs_with_the_same_folder_name_are_told_apart_by_the_folder_above(tmp_path, monkeypatch):
    runs = [make_run(tmp_path / name, "atlas", seeds=(42,)) for name in ("one/run", "two/run", "other")]
    change(runs[1] / "config.json", "config", "train", "lr", value=1e-3)
    monkeypatch.chdir(tmp_path)
    study = read_study([*runs, Path("other")])
    assert [run.name for run in study.runs] == ["one/run", "two/run", "other"]
    assert [group.label for group in study.groups] == ["ATLAS, one/run (2 runs)", "ATLAS, two/run"]
    table = next(b for b in settings_section(study).blocks if isinstance(b, Table))
    assert table.header == ["", "one/run", "two/run", "other"]
    assert ["batch size, learning rate", "128, 5e-05", "128, 0.001", "128, 5e-05"] in table.rows


def test_the_settings_list_the_weights_of_all_loss_terms_and_nothing_else(tmp_path):
    runs = [make_run(tmp_path / name, "atlas", seeds=(42,)) for name in ("usual", "own")]
    for run, extra in zip(runs, ({}, {"my_terms:Smooth": 0.25}), strict=True):
        change(run / "config.json", "config", "objective", "ema_decay", value=0.996)
        change(run / "config.json", "config", "objective", "extra", value=extra)
    table = next(b for b in settings_section(read_study(runs)).blocks if isinstance(b, Table))
    usual = "prediction 1, wemreg 3, relational 0.1"
    assert ["loss weights", usual, f"{usual}, my_terms:Smooth 0.25"] in table.rows


def test_a_folder_of_runs_is_not_a_run(tmp_path):
    run = make_run(tmp_path / "study/run", "atlas", seeds=(42,))
    make_run(tmp_path / "study/tries/run", "atlas", seeds=(42,))
    folder = tmp_path / "study"
    with pytest.raises(
        UserError, match=rf"{folder} is a folder of runs, not a run: .* `atlas report {folder}/\*/`"
    ):
        read_study([folder])
    (folder / "report").mkdir()
    (folder / "report/index.html").write_text("")
    with pytest.raises(UserError, match=f"open {folder}/report/index.html, or "):
        read_study([folder])
    assert [one.folder for one in read_study(sorted(folder.iterdir())).runs] == [run]


@pytest.fixture(scope="module")
def filmed(run_folder) -> Path:
    """An evaluation with two films."""
    options = {"films": 2, "policies": ("model",), "workers": 1, "device": "cpu"}
    (result,) = evaluate(run_folder, [Protocol(20, 30, 4, (9,))], **options)
    return run_folder / "evaluation" / f"{result.name}.json"


def test_the_planning_score_is_drawn_beside_the_losses(tmp_path):
    panels = curve_panels(read_study([make_run(tmp_path / "run", "atlas")]))
    assert [panel.title for panel in panels][-2:] == ["OOD-recovery: distortion", "Planning score"]
    axes = Figure().subplots()
    panels[-1].draw(axes)
    (line,) = axes.get_lines()
    assert line.get_xdata().tolist() == list(range(1000, 8001, 1000)) and axes.get_yscale() == "linear"


@pytest.mark.slow
def test_pictures_are_made_from_a_run(filmed, run_folder, tmp_path):
    training_curves([run_folder], tmp_path / "curves.png")
    assert "2 of the 2 episodes" in film_strips([filmed] * 2, tmp_path / "films.png")
    film_gif(filmed, tmp_path / "episode.gif")
    for name in ("curves.png", "films.png"):
        assert np.asarray(Image.open(tmp_path / name)).std() > 5  # not blank
    assert Image.open(tmp_path / "episode.gif").n_frames >= 2


@pytest.mark.slow
def test_films_of_other_episodes_are_left_out_or_their_absence_is_explained(filmed, tmp_path):
    ours = read_films(filmed)
    other = tmp_path / "evaluation" / filmed.name
    write_json(other, json.loads(filmed.read_text()))
    row, film = next(iter(ours.items()))
    np.savez(films_path(other), **{f"row{row}": film})
    assert "1 of the 1 episodes" in film_strips([filmed, other], tmp_path / "films.png")
    np.savez(films_path(other), **{f"row{1 + max(ours)}": film})
    said = film_strips([filmed, other], tmp_path / "films.png")
    assert "have no start row in common" in said and not (tmp_path / "films.png").exists()


@pytest.mark.slow
def test_captions_tell_the_steps_at_which_frames_were_taken(filmed, monkeypatch, tmp_path):
    """Whatever the model's frameskip: of a film that was taken every 7 steps, they are multiples of 7."""
    drawn = []
    monkeypatch.setattr(films_module, "strips_panel", lambda title, strips: drawn.extend(strips))
    monkeypatch.setattr(films_module.Figure, "write", lambda *_: None)
    file = tmp_path / "evaluation" / filmed.name
    for every in (5, 7):
        write_json(file, {**json.loads(filmed.read_text()), "film_every": every})
        film = np.zeros((30 // every + 2 + bool(30 % every), 8, 8, 3), np.uint8)
        (row,) = [e["row"] for e in json.loads(file.read_text())["model"]["episodes"]["9"] if e["steps"] == 30][:1]
        np.savez(films_path(file), **{f"row{row}": film})
        film_strips([file], tmp_path / "films.png", columns=20)
        assert drawn[-1].shown_steps == sorted({*range(0, 31, every), 30})


def test_every_method_and_task_has_a_name_and_every_method_its_own_colour():
    assert set(naming.METHODS) == set(METHODS) and set(naming.TASKS) == set(TASKS)
    assert len({style.colour for style in naming.METHODS.values()}) == len(METHODS)
