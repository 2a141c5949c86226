"""The report of tries, of success against the planning score, and of what training took."""

import csv
from pathlib import Path

import pytest
from made_up import change, make_run

from atlas_wm.errors import UserError
from atlas_wm.report.differences import differences_section
from atlas_wm.report.page_table import Table
from atlas_wm.report.runs import Study, read_study, read_tries
from atlas_wm.report.section import Notice
from atlas_wm.report.style import Figure
from atlas_wm.report.success import main_section
from atlas_wm.report.tuning import score_section, tuning_section

TRIES = """task,method,recipe,factor,weights,state,score,minutes,chosen
tworoom,atlas,paper+tuned,0.1,wemreg 0.3,done,0.93,1.5,True
tworoom,atlas,paper+tuned,1.0,wemreg 3,done,0.91,1.5,False
tworoom,atlas,paper+tuned,10.0,wemreg 30,failed,,0.2,False
tworoom,lewm,paper+tuned,0.1,sigreg 0.009,done,0.81,1.5,False
tworoom,lewm,paper+tuned,1.0,sigreg 0.09,done,0.88,1.5,True
tworoom,lewm,paper+tuned,10.0,sigreg 0.9,done,0.85,1.5,False
"""


@pytest.fixture
def tries(tmp_path) -> Path:
    (tmp_path / "tuning.csv").write_text(TRIES)
    return tmp_path / "tuning.csv"


def only(section, kind):
    (found,) = [block for block in section.blocks if isinstance(block, kind)]
    return found


def test_every_try_is_drawn_and_listed_with_the_chosen_one(tries, tmp_path):
    section = tuning_section(Study([], tries=read_tries(tries)))
    table = only(section, Table)
    chosen = [row for row in table.rows if row[-1] == "chosen"]
    assert [row[:4] for row in chosen] == [
        ["ATLAS", "0.1", "wemreg 0.3", "0.930"],
        ["LeWM", "1", "sigreg 0.09", "0.880"],
    ]
    (drawn,) = only(section, Figure).inline
    for text in ("ATLAS", "LeWM", "planning score", ">0.1<", ">10<"):
        assert text in drawn
    table.write(tmp_path)
    assert len(list(csv.DictReader((tmp_path / "tuning.csv").open()))) == 6
    notices = [block.text for block in section.blocks if isinstance(block, Notice)]
    assert len(notices) == 2 and "ATLAS: wemreg 0.3, the chosen weight, is at the edge" in notices[0]
    assert "the try with wemreg 30 failed" in notices[1]


def test_a_close_choice_is_told_of(tries):
    tries.write_text(TRIES.replace("0.91", "0.925").replace("0.85,", "0.8705,"))
    notices = [b.text for b in tuning_section(Study([], tries=read_tries(tries))).blocks if isinstance(b, Notice)]
    close = [text for text in notices if "Longer tries may choose another" in text]
    assert "wemreg 3 are within 0.01 of the chosen wemreg 0.3" in close[0]
    assert "sigreg 0.9 are within 0.01 of the chosen sigreg 0.09" in close[1] and len(close) == 2


def test_without_tries_there_is_no_section():
    assert not tuning_section(Study([])).blocks


DAMAGED = ["", "task,method\na,b\n", TRIES.replace("0.93", "inf"), TRIES.replace(",0.1,", ",0,")]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_table_is_refused(tries, text):
    tries.write_text(text)
    with pytest.raises(UserError, match=r"--tuning .*tuning\.csv cannot be read"):
        read_tries(tries)


def test_success_against_the_score_has_a_point_for_every_run(tmp_path):
    runs = [make_run(tmp_path / f"{m}-{s}", m, seed=s, seeds=(42,)) for m in ("atlas", "lewm") for s in (1, 2, 3)]
    for i, run in enumerate(runs):  # success falls from run to run, the score rises
        (run / "metrics.csv").write_text(
            f"step,total,clips_per_second,val_score\n100,1,64,0.5\n300,1,128,0.{60 + i}\n"
        )
        path = run / "evaluation/all_offset50_budget75.json"
        change(path, "model", "success_mean", value=90.0 - i)
        change(path, "model", "success_by_seed", value={"42": 90.0 - i})
    section = score_section(read_study(runs))
    table = only(section, Table)
    assert table.rows[0] == ["atlas-1", "0.600", "90.0"] and len(table.rows) == 6
    (drawn,) = only(section, Figure).inline
    assert "6 runs, Spearman -1.00" in drawn and "success at offset 50, %" in drawn
    few = only(score_section(read_study(runs[:4])), Figure).inline[0]
    assert "Spearman" not in few and "4 runs" in few
    success = only(main_section(read_study(runs)), Table)
    rows = [dict(zip(success.header, row, strict=True)) for row in success.rows]
    of = {row["Policy"]: row["Steps, min"] for row in rows}
    assert of["ATLAS (3 runs)"] == "6.7"  # 100 steps of 128 clips at 64 clips/s, 200 at 128
    assert of["Random actions"] == "–"


def test_runs_without_a_speed_or_a_score_have_neither_column_nor_point(tmp_path):
    run = make_run(tmp_path / "atlas", "atlas", seeds=(42,))
    (run / "metrics.csv").write_text("step,total\n100,1\n")
    study = read_study([run])
    assert not score_section(study).blocks
    assert "Steps, min" not in only(main_section(study), Table).header


def test_a_tuned_recipe_has_a_row_of_its_own_even_with_the_same_weights(tmp_path):
    runs = [
        make_run(tmp_path / f"{r}-{s}", "lewm", seed=s, seeds=(42,)) for r in ("paper", "tuned") for s in (1, 2)
    ]
    for run in runs[2:]:
        change(run / "config.json", "recipe", value="paper+tuned")
    labels = [group.label for group in read_study(runs).groups]
    assert labels == ["LeWM, paper (2 runs)", "LeWM, paper+tuned (2 runs)"]


def test_where_the_weight_of_the_recipe_was_chosen_its_runs_are_compared_as_tuned_ones(tries, tmp_path):
    paper = [make_run(tmp_path / f"{m}-{s}", m, seed=s, seeds=(42,)) for m in ("atlas", "lewm") for s in (1, 2)]
    tuned = [make_run(tmp_path / f"tuned-{s}", "atlas", seed=s, seeds=(42,)) for s in (1, 2)]
    for run in tuned:
        change(run / "config.json", "recipe", value="paper+tuned")
    study = read_study([*paper, *tuned])
    study.tries = read_tries(tries)
    success, differences = only(main_section(study), Table), only(differences_section(study), Table)
    labels = {row[success.header.index("Policy")] for row in success.rows}
    assert {f"{m}, {r} (2 runs)" for m in ("ATLAS", "LeWM") for r in ("paper", "paper+tuned")} <= labels
    compared = {row[differences.header.index("Compared")] for row in differences.rows}
    assert compared == {
        "ATLAS against LeWM, paper",
        "ATLAS against LeWM, paper+tuned",
        "ATLAS, paper+tuned against paper",
    }
    notes = [block.text for block in tuning_section(study).blocks if isinstance(block, Notice)]
    assert "LeWM: the recipe's own weight was chosen. Its runs are those of paper." in notes[0]
    assert len(study.runs) == 6  # other sections show each run once
