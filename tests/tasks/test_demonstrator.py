"""Demonstrators have settings: typed, checked, on the card, and the same for your own tasks."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest

from atlas_wm.cli.app import main
from atlas_wm.data import collect as module
from atlas_wm.data.collect import collect
from atlas_wm.errors import UserError
from atlas_wm.settings import as_text, require
from atlas_wm.tasks import OfflineTask, get_task
from atlas_wm.tasks.tworoom import TwoRoom


@dataclass(frozen=True)
class Walk:
    style: Literal["calm", "wild"] = "calm"
    speed: tuple[float, float] = (1.0, 2.0)
    rest: int | None = None
    loud: bool = False

    def __post_init__(self):
        require(self.speed[0] <= self.speed[1], "speed must be a range")


class Walker(OfflineTask):
    name = "walker"
    demonstrator_config = Walk()


def test_values_are_read_by_their_declared_type():
    changed = Walker().with_demonstrator(["style=wild", "speed=0.5,3", "rest=4", "loud=True"])
    assert changed.demonstrator_config == Walk("wild", (0.5, 3.0), 4, True)
    assert type(changed.demonstrator_config.speed[1]) is float
    assert changed.with_demonstrator(["rest=none"]).demonstrator_config.rest is None
    assert Walker().demonstrator_config == Walk()  # the task itself is unchanged


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("stile=wild", "no setting 'stile'. Did you mean 'style'"),
        ("style=loud", "style must be 'calm' or 'wild', not 'loud'"),
        ("speed=1", r"speed must be tuple\[float, float\]"),
        ("speed=2,1", "speed must be a range"),
        ("speed=1,nan", "must be float"),
        ("rest=1.5", "rest must be int"),
        ("wild", "NAME=VALUE, not 'wild'"),
    ],
)
def test_a_bad_setting_is_named_and_all_settings_are_listed(text, what):
    listed = r"Settings: style=calm \(or wild\), speed=1.0,2.0, rest=None, loud=False"
    with pytest.raises(UserError, match=f"--demonstrator of walker: .*{what}.*{listed}"):
        Walker().with_demonstrator([text])


def test_a_setting_given_twice_or_of_a_task_without_any_is_refused():
    with pytest.raises(UserError, match="style is given twice"):
        Walker().with_demonstrator(["style=calm", "style=wild"])
    with pytest.raises(UserError, match="offline has no settings"):
        OfflineTask().with_demonstrator(["style=calm"])


@pytest.mark.parametrize("name", ["tworoom", "pusht", "cube"])
def test_the_listed_settings_can_be_given_back(name):
    task = get_task(name)
    given = [text.partition(" (")[0] for text in as_text(task.demonstrator_config).split(", ")]
    assert task.with_demonstrator(given).demonstrator_config == task.demonstrator_config


def test_the_command_passes_them_on_and_lists_them(monkeypatch, capsys):
    passed = []
    monkeypatch.setattr(
        module, "collect", lambda task, *_, **__: passed.append(task) or {"episodes": 0, "rows": 0, "hash": ""}
    )
    main(
        ["collect", "cube", "--demonstrator", "targets=many", "action_noise=0.2", "--demonstrator", "min_norm=0.3"]
    )
    config = passed[0].demonstrator_config
    assert (config.targets, config.action_noise, config.min_norm) == ("many", 0.2, 0.3)
    capsys.readouterr()
    main(["collect", "cube", "--demonstrator", "help"])
    assert capsys.readouterr().out.splitlines()[0] == "targets=one (or many)" and len(passed) == 1


def test_the_card_holds_them_and_other_ones_do_not_resume(monkeypatch, tmp_path):
    def recorded(pool, seed, pixels, jobs):
        for numbers in jobs:
            yield [
                {name: np.zeros((3, 2), np.float32) for name in ("state", "goal_state", "action")} for _ in numbers
            ]

    def stop(episodes, rows):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_recorded", recorded)
    monkeypatch.setattr(module.WorkerPool, "start", lambda *_: None)
    monkeypatch.setattr(TwoRoom, "episodes_per_job", 1)
    calm, out, said = TwoRoom().with_demonstrator(["action_noise=0.5"]), tmp_path / "x.h5", []
    with pytest.raises(KeyboardInterrupt):
        collect(calm, out, 2, pixels=False, on_episodes=stop)
    collect(TwoRoom(), out, 2, pixels=False, say=said.append)
    assert "recorded with other settings" in said[0]
    card = collect(calm, out, 2, pixels=False, overwrite=True)
    assert card["demonstrator"] == {
        "policy": "stable_worldmodel two_room ExpertPolicy",
        "action_noise": 0.5,
        "action_repeat_prob": 0.05,
    }
