"""Imagined: the evaluation's own episodes, failures and successes, with what the model expected of them."""

import json

import pytest
import torch
from run_folders import evaluation_of
from test_cases import decoded

from atlas_wm.config import PlanConfig
from atlas_wm.diagnose.cases import cases
from atlas_wm.diagnose.evaluated import Evaluated
from atlas_wm.diagnose.frozen_run import FrozenRun
from atlas_wm.diagnose.imagined import EACH, SHOWN, choose_episodes, imagined
from atlas_wm.plan.planner import Planner
from made_up_results import episode as made_up_episode


def test_failures_and_successes_are_shown_the_longest_first():
    made = [made_up_episode(row=i, success=i % 2 == 0, steps=10 + i) for i in range(8)]
    assert [e.row for e in choose_episodes(made)] == [7, 5, 6, 4]
    assert EACH == 2


def test_episodes_repeat_what_the_evaluation_recorded(diagnosed):
    report = json.loads(evaluation_of(diagnosed.evaluated).read_text())
    recorded = {e["row"]: e for e in report["model"]["episodes"]["3"]}
    result = diagnosed.read("evaluated", "imagined")["result"]
    assert result["episodes"]
    for episode in result["episodes"]:
        before = recorded[episode["row"]]
        assert (episode["success"], episode["steps"]) == (before["success"], before["steps"])
        count = len(episode["shown_steps"])
        assert count <= SHOWN and count == len(episode["distances"]) == len(episode["real"])
        assert all(distance >= 0 for distance in episode["distances"])
        images = decoded({"frames": [*episode["imagined"], *episode["real"], episode["goal"]]})
        assert {image.shape for image in images[:count]} == {(32, 32, 3)}  # as the model sees them
        assert {image.shape for image in images[count:-1]} == {(96, 96, 3)}


class Planned(Exception):
    pass


@pytest.mark.parametrize("repeat", [lambda *args: cases(*args, [0], 10), lambda *args: imagined(*args, 10)])
def test_repeated_episodes_leave_out_the_same_demonstrations_as_evaluated_ones(trained, monkeypatch, repeat):
    def plan_batch(planner, frames, goals, rngs, rests, left_out):
        raise Planned(left_out)

    monkeypatch.setattr(Planner, "plan_batch", plan_batch)
    run = FrozenRun(trained, None, None, torch.device("cpu"))
    for start, expected in (("retrieval", [int(run.groups[0])]), ("zero", [-1])):
        evaluation = Evaluated(3, 20, PlanConfig(start=start), "auto", False, [made_up_episode(0, success=False)])
        with pytest.raises(Planned) as planned:
            repeat(run, evaluation)
        assert planned.value.args == (expected,)
