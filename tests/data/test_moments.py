"""Moments are those of the actions taken and of the task's own quantities, on the card and in one table."""

import json
import time

import numpy as np
import pytest

from atlas_wm.data.card import card_path
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.data.moments import Moment, moments, moments_of, moments_table
from atlas_wm.tasks.cube import Cube
from atlas_wm.tasks.pusht import PushT


def test_the_last_row_of_an_episode_is_no_action():
    actions = np.array([[3.0, 4.0], [99.0, 99.0], [0.0, 0.0], [3.0, 4.0], [99.0, 99.0]], np.float32)
    found = moments(PushT(), np.array([2, 3]), actions, np.arange(35.0).reshape(5, 7))
    assert found["action mean"].here == pytest.approx((2, 8 / 3), rel=1e-5)
    assert found["action std"].here == pytest.approx((2**0.5, 32**0.5 / 3), rel=1e-5)
    assert found["|action| 50, 90, 99 %"].here == (5, 5, 5)
    assert found["episode length"] == Moment((2.5,), "rows", (125.0,))
    assert found["agent velocity mean"] == Moment((19, 20), "px/s", (-2.9, 2.5))
    assert found["block angle std"].ratio == pytest.approx((98**0.5 / 1.76,), rel=1e-5)


def test_the_card_of_a_collected_set_has_them(dataset_path, task):
    data = EpisodeData(dataset_path, task, 32, 5)
    stored = json.loads(card_path(dataset_path).read_text())["moments"]
    assert stored == json.loads(json.dumps({name: m._asdict() for name, m in moments_of(data).items()}))
    assert stored["agent mean"]["here"] == pytest.approx(data.states[:, :2].mean(0).tolist(), rel=1e-4)
    assert stored["episode length"]["here"] == pytest.approx([data.lengths.mean()], rel=1e-5)
    lines = moments_table(stored).splitlines()
    assert lines[0].split() == ["this", "dataset"]  # nothing is published for TwoRoom
    assert [line.split("  ")[0] for line in lines[-2:]] == ["agent mean [px]", "agent std [px]"]


def test_cube_names_the_positions_of_cube_and_gripper():
    found = moments(Cube(), np.array([3]), np.zeros((3, 5), np.float32), np.ones((3, 28)))
    assert [name for name in found if name.endswith("mean")] == ["action mean", "cube mean", "gripper mean"]
    assert len(found["cube std"].here) == 3 and found["cube std"].unit == "m"


def test_the_table_is_aligned_and_compares_what_can_be_compared():
    table = moments_table(
        {
            "action mean": {"here": [0.01], "unit": "", "published": [0.02]},
            "action std": {"here": [0.3, 0.1], "unit": "", "published": [0.2, 0.2]},
            "agent std": {"here": [1234.5], "unit": "px", "published": None},
        }
    )
    assert table.splitlines() == [
        "                this dataset  published  ratio",
        "action mean     0.01          0.02",
        "action std      0.3, 0.1      0.2, 0.2   1.50, 0.50",
        "agent std [px]  1234",
    ]


def test_of_a_wide_state_the_table_shows_a_part():
    card = {f"state_{i} std": {"here": [1.0], "unit": "", "published": None} for i in range(50)}
    lines = moments_table(card).splitlines()
    assert len(lines) == 26 and lines[-1] == "26 more are on the card"


def test_a_million_rows_take_a_moment():
    rng = np.random.default_rng(0)
    lengths = np.full(8000, 125)
    actions, states = rng.normal(size=(10**6, 2)).astype(np.float32), rng.normal(size=(10**6, 7))
    started = time.process_time()
    found = moments(PushT(), lengths, actions, states)
    assert time.process_time() - started < 5
    assert found["action std"].here == pytest.approx((1, 1), abs=0.01)
