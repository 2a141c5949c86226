"""Evaluation in a varied environment: what is varied, its goals, its own result."""

import shutil
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from atlas_wm.cli.app import main
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.errors import UserError
from atlas_wm.evaluate.env_batch import EnvBatch, EpisodeStart
from atlas_wm.evaluate.evaluate import evaluate
from atlas_wm.evaluate.protocol import Protocol
from atlas_wm.plan.planner import LatentNovelty, Novelty, is_flagged
from atlas_wm.report.table import beside_plain, plain_counterpart
from atlas_wm.runs.results import read_results
from atlas_wm.tasks import get_task
from atlas_wm.tasks.tworoom import TwoRoom
from atlas_wm.tasks.variation import list_variations, make_varied_env, parse_variation

PROTOCOL = Protocol(offset=15, budget=20, episodes=4, seeds=(8,))
MOVED = {"door.position": (150.0, 150.0, 150.0)}
DEFAULTS = {"door.position": (49.0, 49.0, 49.0), "agent.color": (255.0, 0.0, 0.0)}
OPTIONS = {"films": 0, "device": "cpu", "workers": 1}


def test_values_are_written_as_they_are_listed(task):
    listed = list_variations(task).splitlines()
    assert "door.position=49,49,49 (3 numbers from 0 to 223)" in listed and "wall.axis=1 (from 0 to 1)" in listed
    texts = [line.split(" ")[0] for line in listed]
    assert len(parse_variation(task, texts)) == len(listed)
    assert parse_variation(task, ["door.position=150"]) == {"door.position": [150, 150, 150]}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "dor.position=1",
            r"no variation 'dor.position'. Did you mean 'door.position'\? Variations: agent.color=255",
        ),
        ("door.position", "takes NAME=VALUE"),
        ("door.position=1,2", "door.position has 3 numbers, not 2"),
        ("door.position=1.5", "whole numbers from 0 to 223, not 1.5"),
        ("agent.radius=15", "numbers from 7 to 14, not 15"),
        ("agent.radius=wide", "must be numbers"),
        ("agent.radius=14", "the environment refuses these values"),  # too wide for the door
    ],
)
def test_what_does_not_fit_is_refused(task, text, said):
    with pytest.raises(UserError, match=said):
        parse_variation(task, [text])


class Bare(TwoRoom):
    def make_env(self):
        return gym.Env()


def test_an_environment_without_variations_is_named():
    with pytest.raises(UserError, match="no variation_space"):
        parse_variation(Bare(), ["a=1"])


@pytest.mark.parametrize(
    ("name", "text"),
    [("tworoom", "door.position=150"), ("pusht", "block.color=255,0,0"), ("cube", "cube.size=0.03")],
)
def test_every_reset_restores_the_variation(name, text):
    task = get_task(name)
    env, plain = make_varied_env(task, parse_variation(task, [text])), task.make_env()
    plain.reset(seed=3)
    state = task.state(plain)
    for _ in range(2):
        task.reset(env, state, state)
        task.reset(plain, state, state)
        if name == "cube":  # drawing takes a GPU
            sizes = [e.unwrapped.model.geom("object_0").size[0] for e in (env, plain)]
            assert sizes == pytest.approx([0.03, 0.02])
        else:
            assert (env.render() != plain.render()).any()


def test_the_goal_is_rendered_under_the_variation(dataset_path, task):
    data = EpisodeData(dataset_path, task, 32, 5)
    start = EpisodeStart(data.states[3], data.states[9], 10, "frame and goal")
    recorded = data.frames_of(np.array([3, 9])).numpy()
    seen = [EnvBatch(task, 32, variation=variation).step({0: start})[0] for variation in (MOVED, DEFAULTS)]
    assert np.array_equal(seen[1], recorded)
    moved = (seen[0] != recorded).any(axis=1)
    assert moved[0].any() and np.array_equal(moved[0], moved[1])  # the door, in both


def test_novelty_flags_what_is_above_99():
    assert is_flagged(Novelty(50, 99.5, 3, 0, 0)) and not is_flagged(LatentNovelty(99, 99, 99))


@pytest.fixture
def run(run_folder, tmp_path) -> Path:
    return Path(shutil.copytree(run_folder, tmp_path / "run"))


@pytest.mark.usefixtures("in_this_process")
def test_a_varied_evaluation_has_its_own_file_and_stands_beside_the_plain_one(run, capsys):
    (plain,) = evaluate(run, [PROTOCOL], **OPTIONS)
    (same,) = evaluate(run, [PROTOCOL], variation=DEFAULTS, **OPTIONS)
    for name in plain.policies:
        assert same.policies[name].episodes == plain.policies[name].episodes
    assert same.novel_plans == plain.novel_plans is not None
    flags = [
        "--offset",
        "15",
        "--budget",
        "20",
        "--episodes",
        "4",
        "--seeds",
        "8",
        "--films",
        "0",
        "--device",
        "cpu",
    ]
    main(["eval", str(run), *flags, "--policy", "model", "--vary", "door.position=150", "agent.speed=2"])
    said = " ".join(capsys.readouterr().out.split())
    results = read_results(run)
    assert len(results) == 3
    (name,) = (name for name in results if "door.position=150" in name)
    assert name.startswith("all_offset15_budget20_vary_door.position=150_150_150_agent.speed=2-")
    varied = results[name]
    assert varied.variation == {"door.position": (150, 150, 150), "agent.speed": (2,)}
    assert varied.model.episodes != plain.model.episodes
    line = beside_plain(varied, list(results.values()))
    assert line in said and line.startswith("vary door.position=150,150,150 agent.speed=2: success ")
    assert f"success {plain.model.success_mean:.1f} %, novelty flags {plain.novel_share:.1f} % of the plans" in line
    assert plain_counterpart(varied, list(results.values())) == plain
    assert plain_counterpart(replace(varied, weights="best"), list(results.values())) is None


def test_help_lists_the_variations(run_folder, capsys):
    main(["eval", str(run_folder), "--vary", "help"])
    assert "agent.radius=7 (from 7 to 14)" in capsys.readouterr().out
