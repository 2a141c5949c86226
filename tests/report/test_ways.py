"""Ways to plan: one row for each, against the paper's, and out of the main figure."""

import json

import pytest
from made_up import make_run

from atlas_wm.config import PlanConfig
from atlas_wm.report.page_table import Table
from atlas_wm.report.runs import read_study
from atlas_wm.report.style import Figure
from atlas_wm.report.success import main_section
from atlas_wm.report.ways import way_name, ways_section
from atlas_wm.runs.results import PolicyResult, Protocol
from made_up_results import episode, evaluation, policy

PLANS = {
    "temporal": {"cost": "temporal", "execute": 1, "start": "retrieval"},
    "nearest": {"cost": "nearest", "execute": 1},
}


@pytest.fixture
def study(tmp_path):
    """At offset 50 every plan of the paper's fails, and those of the others all succeed."""
    run = make_run(tmp_path / "run", "atlas", seeds=(42,))
    path = run / "evaluation/all_offset50_budget75.json"
    plain = json.loads(path.read_text())

    def outcome(success: bool, steps: int) -> dict:
        episodes = [
            {**e, "success": success, "steps": steps, "row": i, "episode": i}
            for i, e in enumerate(plain["model"]["episodes"]["42"])
        ]
        rate = {"success_mean": 100.0 * success, "success_by_seed": {"42": 100.0 * success}}
        return {**plain["model"], "episodes": {"42": episodes}, **rate}

    path.write_text(json.dumps({**plain, "model": outcome(False, 75), "replay": outcome(True, 50)}))
    for name, plan in PLANS.items():
        other = {**plain, "plan": {**plain["plan"], **plan}, "model": outcome(True, 20)}
        other |= {"random": None, "replay": None}
        (run / f"evaluation/{name}.json").write_text(json.dumps(other))
    return read_study([run])


def test_each_plan_is_compared_with_the_papers_on_the_same_episodes(study):
    figure, table = ways_section(study).blocks
    assert isinstance(figure, Figure) and [p.title for p in figure.panels] == [
        "ATLAS, offset 50, budget 75, all episodes"
    ]
    assert isinstance(table, Table)
    shown = [dict(zip(table.header, row, strict=True)) for row in table.rows]
    assert [row["Plan"] for row in shown] == [
        "terminal (the paper's)",
        "nearest, replanned every 1",
        "temporal, replanned every 1, retrieval",
    ]
    assert [row["Against the first, points"] for row in shown] == ["–", *["+100.0 [+51.0, +100.0]"] * 2]
    assert [row["Won, lost"] for row in shown] == ["–", "4, 0", "4, 0"]
    assert [row["Steps"] for row in shown] == ["75.0", "20.0", "20.0"]
    assert [row["Of replayed actions, %"] for row in shown] == ["0.0", "100.0", "100.0"]  # also where not replayed
    assert table.best == {(1, "Success, %"), (2, "Success, %")}


def test_episodes_solved_at_the_start_are_in_no_number_if_the_protocol_leaves_them_out(tmp_path):
    """Of four episodes two are solved at the start. Of the others the paper's plans reach none, nearest one,
    replayed actions both."""

    def outcome(*reached: int) -> PolicyResult:
        episodes = [episode(k, k < 2 or k in reached, episode=k, solved_at_start=k < 2) for k in range(4)]
        return policy({42: episodes}, {"": {42: 50.0 * len(reached)}})

    run = make_run(tmp_path / "run", "atlas", seeds=(42,))
    protocol = Protocol(50, 75, 4, (42,), leave_out_solved=True)
    data = read_study([run]).runs[0].data_hash
    for plan, reached in ((PlanConfig(), ()), (PlanConfig(cost="nearest", execute=1), (2,))):
        result = evaluation(outcome(*reached), replay=outcome(2, 3), data=data, protocol=protocol, plan=plan)
        result.write(run / "evaluation", {})
    (table,) = (b for b in ways_section(read_study([run])).blocks if isinstance(b, Table))
    keys = ("success_percent", "difference", "won", "lost", "of_replayed_percent")
    assert [tuple(record[key] for key in keys) for record in table.data] == [
        (0, None, None, None, 0),
        (50, 50, 1, 0, 50),
    ]


def test_the_main_figure_shows_one_of_them(study):
    (figure,) = (b for b in main_section(study).blocks if isinstance(b, Figure))
    assert [p.title.partition(",")[0] for p in figure.panels] == ["offset 25", "offset 50"]


def test_one_way_needs_no_section(tmp_path):
    assert ways_section(read_study([make_run(tmp_path / "run", "atlas", seeds=(42,))])).blocks == []


def test_names_say_what_differs_from_the_paper():
    assert way_name(PlanConfig()) == way_name(PlanConfig(iterations=3)) == "terminal (the paper's)"
    assert way_name(PlanConfig(start="retrieval")) == "terminal, retrieval"
    assert way_name(PlanConfig(cost="my:Cost", execute=2)) == "my:Cost, replanned every 2"
