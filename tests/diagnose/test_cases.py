"""Cases: the evaluation's own episodes, filmed; those on which runs differ come first."""

import base64
import io
import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from run_folders import OFFSET, PROTOCOL, evaluation_of

from atlas_wm.config import PlanConfig
from atlas_wm.diagnose.cases import _strip, choose_rows
from atlas_wm.diagnose.evaluated import evaluated, find_each_evaluated, find_evaluated
from atlas_wm.errors import UserError
from made_up_results import episode as made_up_episode
from made_up_results import evaluation, policy


def decoded(episode: dict) -> list[np.ndarray]:
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(frame)))) for frame in episode["frames"]]


@pytest.fixture(scope="module")
def shown(task):
    """How the environment shows a state."""
    env = task.make_env()

    def show(state: np.ndarray) -> np.ndarray:
        task.reset(env, state, state)
        return env.render()

    return show


@pytest.mark.slow
def test_filmed_episodes_repeat_what_the_evaluation_recorded(diagnosed, shown):
    """With its planner, which is not the run's: the last frame shows the state that was recorded then."""
    report = json.loads(evaluation_of(diagnosed.evaluated).read_text())
    recorded = {e["row"]: e for e in report["model"]["episodes"]["3"]}
    result = diagnosed.read("evaluated", "cases")["result"]
    assert len(result["episodes"]) == 4 and "note" not in result
    for episode in result["episodes"]:
        before = recorded[episode["row"]]
        assert [episode[key] for key in ("success", "steps", "novelty")] == [
            before[key] for key in ("success", "steps", "novelty")
        ]
        state = before["last_states"][episode["shown_steps"][-1] - episode["steps"] - 1]
        assert np.array_equal(decoded(episode)[-2], shown(np.array(state, np.float32)))


def test_episodes_that_ended_differently_are_reported(diagnosed):
    """The run with other weights was diagnosed beside the first one's evaluation."""
    mine, others = (diagnosed.read(run, "cases") for run in ("changed", "evaluated"))
    ends = [[(e["success"], e["steps"]) for e in one["result"]["episodes"]] for one in (mine, others)]
    assert [e["row"] for e in mine["result"]["episodes"]] == [e["row"] for e in others["result"]["episodes"]]
    other = sum(a != b for a, b in zip(*ends, strict=True))
    # Whether any did is up to rounding: a model of a few steps seldom arrives.
    note = mine["result"].get("note", "")
    assert note.startswith(f"{other} episodes ended differently") if other else not note


def test_pictures_decode_to_the_episode_from_start_to_end_and_its_goal(diagnosed, data, shown):
    for episode in diagnosed.read("evaluated", "cases")["result"]["episodes"]:
        *frames, goal = decoded(episode)
        steps = episode["shown_steps"]
        assert len(frames) == len(steps) <= 7
        assert steps[0] == 0 and steps == sorted(set(steps))
        assert episode["steps"] - 5 < steps[-1] <= episode["steps"]
        assert np.array_equal(frames[0], shown(data.states[episode["row"]]))
        assert np.array_equal(goal, shown(data.states[episode["row"] + OFFSET]))


@pytest.mark.parametrize(
    ("steps", "success", "taken"),
    [
        (1, True, [0, 1]),
        (5, True, [0, 5]),
        (12, True, [0, 5, 10, 12]),
        (32, False, [0, 5, 10, 15, 20, 25, 30]),
        (75, False, [0, 10, 25, 40, 50, 60, 75]),
        (73, True, [0, 10, 25, 40, 50, 60, 73]),
    ],
)
def test_the_steps_that_are_told_are_those_of_the_frames(steps, success, taken):
    """A film has a frame every five steps and at success, and the goal last; here its brightness is the step."""
    times = [t for t in range(steps + 1) if t % 5 == 0 or (success and t == steps)]
    film = np.stack([np.full((8, 8, 3), t, np.uint8) for t in (*times, 255)])
    strip = _strip(film, steps)
    brightness = [frame.max() for frame in decoded(strip)]
    assert brightness == [*strip["shown_steps"], 255]
    assert strip["shown_steps"] == taken


def write_evaluation(
    run, outcomes: dict[int, bool], *, data="d", novelty=lambda row: 0.0, episode=lambda row: row, **changes
) -> None:
    episodes = [
        made_up_episode(row, success, novelty=novelty(row), episode=episode(row))
        for row, success in outcomes.items()
    ]
    result = evaluation(policy({7: episodes, 8: episodes}), data=data, plan=PlanConfig(candidates=77))
    protocol = {name: changes.pop(name) for name in ("part", "budget", "leave_out_solved") if name in changes}
    if "offset" in changes:
        protocol |= {"offset": changes["offset"], "budget": changes.pop("offset") + 25}
    (run / "evaluation").mkdir(parents=True, exist_ok=True)
    replace(result, protocol=replace(result.protocol, **protocol), **changes).write(run / "evaluation", {})


def test_rows_on_which_runs_differ_come_first_then_failures_then_the_others(tmp_path):
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    write_evaluation(
        one, {10: True, 11: False, 12: True, 13: False, 14: True, 15: True, 16: True}, novelty=lambda row: row / 3
    )
    write_evaluation(two, {10: True, 11: True, 12: True, 13: False, 14: False, 15: True, 99: True})
    write_evaluation(three, {10: False}, data="another dataset")
    (tmp_path / "never evaluated").mkdir()
    runs = [one, two, three, tmp_path / "never evaluated"]
    assert choose_rows(runs, 50, "d", count=6) == [14, 11, 13, 15, 12, 10]
    assert choose_rows(runs, 50, "d", count=2) == [14, 11]
    assert choose_rows([one], 50, "d", count=9) == [13, 11, 16, 15, 14, 12, 10]


def test_a_second_row_of_a_demonstration_comes_after_all_other_demonstrations(tmp_path):
    outcomes = {10: False, 11: False, 12: True, 30: True, 31: False}
    write_evaluation(tmp_path, outcomes, novelty=lambda row: row / 3, episode=lambda row: row // 10)
    assert choose_rows([tmp_path], 50, "d", count=5) == [31, 11, 10, 30, 12]


def test_runs_without_a_common_start_cannot_be_set_side_by_side(tmp_path):
    write_evaluation(tmp_path / "one", {1: True})
    write_evaluation(tmp_path / "two", {2: True})
    with pytest.raises(UserError, match="no start row in common"):
        choose_rows([tmp_path / "one", tmp_path / "two"], 50, "d")


def test_of_several_evaluations_the_largest_counts_then_the_papers(tmp_path):
    write_evaluation(tmp_path, {1: True})
    write_evaluation(tmp_path, {2: True, 3: True}, part="heldout")
    write_evaluation(tmp_path, {4: True, 5: True}, budget=100)
    write_evaluation(tmp_path, {6: True, 7: True})
    write_evaluation(tmp_path, {8: True, 9: True}, leave_out_solved=True)
    write_evaluation(tmp_path, {10: True, 11: True, 12: True}, data="other")
    write_evaluation(tmp_path, {13: True, 14: True, 15: True}, offset=25)
    found = evaluated(tmp_path, 50, "d")
    assert [e.row for e in found.episodes] == [6, 7]
    assert (found.seed, found.budget, found.plan.candidates) == (7, 75, 77)
    assert find_evaluated(tmp_path, 33, "d") is None
    with pytest.raises(UserError, match=r"no evaluation at offset 33 .* `atlas eval .* --offset 33`"):
        evaluated(tmp_path, 33, "d")


def test_runs_side_by_side_are_seen_in_the_evaluation_that_both_have(tmp_path):
    """One of them was evaluated again on more episodes since."""
    one, two = tmp_path / "one", tmp_path / "two"
    for run in (one, two):
        write_evaluation(run, {1: True, 2: False})
    write_evaluation(two, {3: True, 4: True, 5: False})
    assert choose_rows([one, two], 50, "d") == [2, 1]
    assert [e.row for e in evaluated(two, 50, "d", [one, two]).episodes] == [1, 2]
    assert [e.row for e in evaluated(two, 50, "d").episodes] == [3, 4, 5]


def test_runs_side_by_side_are_seen_with_the_same_planner_whichever_was_evaluated_last(tmp_path):
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    plans = {cost: PlanConfig(cost=cost, candidates=77) for cost in ("terminal", "nearest", "temporal")}
    for run, costs in ((one, ("terminal", "nearest")), (two, ("nearest", "terminal"))):
        for day, cost in enumerate(costs):
            write_evaluation(run, {1: True}, plan=plans[cost], written=f"2026-01-0{1 + day}")
    write_evaluation(one, {1: True}, plan=plans["temporal"], written="2026-01-09")
    found = find_each_evaluated([one, two], 50, "d")
    assert len({each.plan.cost for each in found}) == 1
    write_evaluation(three, {1: True}, plan=replace(plans["nearest"], candidate_chunk=9), written="2026-01-01")
    found = find_each_evaluated([one, two, three], 50, "d")
    assert [each.plan.cost for each in found] == ["nearest"] * 3
    assert evaluated(one, 50, "d", [one, two, three]).plan.cost == "nearest"
    assert evaluated(one, 50, "d").plan.cost == "temporal"


def test_without_a_common_planner_each_run_is_seen_in_its_newest_evaluation(tmp_path):
    for day, (run, cost) in enumerate((("one", "terminal"), ("one", "nearest"), ("two", "temporal"))):
        write_evaluation(tmp_path / run, {1: True}, plan=PlanConfig(cost=cost), written=f"2026-01-0{1 + day}")
    found = find_each_evaluated([tmp_path / "one", tmp_path / "two"], 50, "d")
    assert [each.plan.cost for each in found] == ["nearest", "temporal"]


def test_an_evaluation_on_another_task_is_not_looked_at(tmp_path):
    write_evaluation(tmp_path, {1: True, 2: True}, task="moved:Moved")
    assert find_evaluated(tmp_path, 50, "d") is None


def test_a_real_evaluation_is_read_with_its_first_seed_and_planner(evaluated_run, data):
    found = evaluated(evaluated_run, OFFSET, data.content_hash())
    assert (found.seed, found.budget, len(found.episodes)) == (3, PROTOCOL.steps, 10)
    assert (found.plan.candidates, found.plan.iterations) == (20, 2)
