"""The 2×2 ablation: the conditions that most arms have."""

import pytest
from made_up import make_run

from atlas_wm.report.ablation import ablation_section
from atlas_wm.report.page_table import Table
from atlas_wm.report.runs import read_study
from atlas_wm.report.section import Notice

ARMS = ("lewm", "lewm+ood", "wemreg", "atlas")
NEAR, FAR = "all_offset25_budget50.json", "all_offset50_budget75.json"


@pytest.fixture
def runs(tmp_path):
    return {arm: make_run(tmp_path / arm, arm, seeds=(42, 43)) for arm in ARMS}


def table(runs) -> Table:
    (block,) = ablation_section(read_study(list(runs.values()))).blocks
    assert isinstance(block, Table)
    return block


def test_it_has_every_condition_of_all_four_arms(runs):
    found = table(runs)
    assert [row[:2] for row in found.rows] == [
        [f"offset {offset}, all episodes".replace(",", f", budget {offset + 25},"), regulariser]
        for offset in (25, 50)
        for regulariser in ("SIGReg", "WEMReg")
    ]
    assert [record["arm"] for record in found.data] == [*ARMS, *ARMS]
    for row, arms in zip(found.rows, (ARMS[:2], ARMS[2:]) * 2, strict=True):
        for cell, arm in zip(row[2:], arms, strict=True):
            (rate,) = (r for r in found.data if r["arm"] == arm and r["condition"] == row[0])
            assert cell.endswith(f": {rate['success_percent']:.1f} ± {rate['std']:.1f}")
    columns = found.header[2:]
    for first in (0, 2):  # the highest of the four is bold
        rates = {(first + i, c): found.data[2 * first + 2 * i + j]["success_percent"]
                 for i in (0, 1) for j, c in enumerate(columns)}  # fmt: skip
        assert {place for place in rates if place in found.best} == {max(rates, key=rates.__getitem__)}


def test_a_condition_that_one_arm_lacks_is_left_out(runs):
    (runs["wemreg"] / "evaluation" / FAR).unlink()
    found = table(runs)
    assert len(found.rows) == 2 and found.note.startswith("Condition: offset 25, budget 50, all episodes.")
    (runs["lewm"] / "evaluation" / NEAR).unlink()  # now each condition has three
    found = table(runs)
    assert [row[0][:9] for row in found.rows] == ["offset 25"] * 2 + ["offset 50"] * 2
    assert found.rows[0][2] == "LeWM: not measured" and found.rows[3][2] == "WEMReg alone: not measured"


def test_two_arms_share_a_condition_that_is_not_that_of_the_summary(runs):
    for arm in ("lewm", "atlas"):
        (runs[arm] / "evaluation" / FAR).unlink()
    for arm in ("lewm+ood", "wemreg"):
        (runs[arm] / "evaluation" / NEAR).unlink()
        (runs[arm] / "evaluation" / FAR).unlink()
    found = table(runs)
    assert [row[1].partition(":")[0] for row in found.rows] == ["LeWM", "WEMReg alone"] and len(found.data) == 2


def test_arms_that_share_no_condition_are_a_notice(runs):
    two = {arm: runs[arm] for arm in ("lewm", "atlas")}
    (two["lewm"] / "evaluation" / FAR).unlink()
    (two["atlas"] / "evaluation" / NEAR).unlink()
    for shown, expected in ((two, "Evaluate LeWM and ATLAS alike."), ({"lewm": two["lewm"]}, "Missing: lewm+ood,")):
        (notice,) = ablation_section(read_study(list(shown.values()))).blocks
        assert isinstance(notice, Notice) and expected in notice.text
