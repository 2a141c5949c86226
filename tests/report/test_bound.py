"""The planning bound is shown for the costs that it covers."""

import pytest
from made_up import change, make_run

from atlas_wm.report.planning import regret_section
from atlas_wm.report.runs import read_study
from atlas_wm.report.section import Notice


def shown(*runs):
    section = regret_section(read_study(runs))
    notes = [block.text for block in section.blocks if isinstance(block, Notice)]
    return [row["method"] for block in section.blocks for row in getattr(block, "data", [])], notes


def test_no_bound_is_shown_for_the_cost_temporal(tmp_path):
    atlas, lewm = make_run(tmp_path / "a", "atlas"), make_run(tmp_path / "b", "lewm")
    assert shown(atlas, lewm) == (["ATLAS", "LeWM"], [])
    change(lewm / "evaluation/all_offset25_budget50.json", "plan", "cost", value="temporal")
    methods, notes = shown(atlas, lewm)
    assert len(methods) == 2 and notes == [
        "The paper's bounds do not cover plans with the cost temporal, such as those evaluated of b."
    ]
    change(lewm / "config.json", "config", "plan", "cost", value="temporal")
    methods, notes = shown(atlas, lewm)
    assert methods == ["ATLAS"] and notes == [
        "The paper's bounds do not cover plans with the cost temporal, so none is shown for b."
    ]
    assert shown(lewm)[0] == []


@pytest.mark.parametrize("cost", ["nearest", "my_model:Gentle"])
def test_the_bound_is_said_to_be_for_the_choice_by_the_end(tmp_path, cost):
    runs = [make_run(tmp_path / name, name) for name in ("atlas", "lewm", "fast-wm")]
    change(runs[0] / "config.json", "config", "plan", "cost", value=cost)
    change(runs[1] / "evaluation/all_offset25_budget50.json", "plan", "cost", value=cost)
    methods, (note,) = shown(*runs)
    assert len(methods) == 3 and note == (
        "Regret and bound are for the choice by the predicted end. They do not cover plans with the cost "
        f"{cost}, such as those of atlas, lewm."
    )
