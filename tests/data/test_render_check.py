"""Before training and evaluation, stored frames are compared with what the installed environment draws."""

import logging
from functools import partial

import pytest
from other_drawings import Offline, OtherColour

from atlas_wm.data import render_check
from atlas_wm.data.collect import record_episode
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.data.render_check import check_rendering
from atlas_wm.evaluate.evaluate import evaluate
from atlas_wm.evaluate.protocol import Protocol
from atlas_wm.tasks.pusht import PushT
from atlas_wm.tasks.tworoom import TwoRoom
from atlas_wm.train.loop import train


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """Path by task and ending."""
    from stable_worldmodel.data import get_format

    folder, paths = tmp_path_factory.mktemp("data"), {}
    for task in (TwoRoom(), PushT()):
        task.max_episode_steps = 60
        env = task.make_env()
        episodes = [record_episode(task, env, seed=2, number=number, pixels=True) for number in range(2)]
        for ending, name in ((".h5", "hdf5"), (".lance", "lance")):
            path = paths[task.name, ending] = folder / f"{task.name}{ending}"
            with get_format(name).open_writer(path) as writer:
                writer.write_episodes([{c: list(values) for c, values in e.items()} for e in episodes])
    return paths


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, logger="atlas_wm")
    return lambda level: [r.getMessage() for r in caplog.records if r.levelno == level]


@pytest.mark.parametrize("size", [32, 224])
@pytest.mark.parametrize("ending", [".h5", ".lance"])  # lossless, and JPEG
@pytest.mark.parametrize("task", [TwoRoom(), PushT()], ids=lambda task: task.name)
def test_the_environment_the_data_came_from_gives_no_warning(
    task, ending, size, datasets, said, render_in_this_process
):
    check_rendering(EpisodeData(datasets[task.name, ending], task, size, 5))
    assert said(logging.WARNING) == said(logging.INFO) == []


def test_another_colour_gives_one_warning_with_its_size(datasets, said):
    check_rendering(EpisodeData(datasets["tworoom", ".lance"], OtherColour(), 224, 5))
    (warning,) = said(logging.WARNING)
    assert "tworoom.lance" in warning and "rows 16, 48, 80" in warning
    assert "grey levels" in warning and "% of the pixels" in warning


def test_an_environment_that_cannot_be_made_gives_a_line(datasets, said):
    check_rendering(EpisodeData(datasets["tworoom", ".h5"], Offline(), 32, 5))
    (line,) = said(logging.INFO)
    assert "not compared" in line and "there is only data" in line and said(logging.WARNING) == []


def test_an_environment_that_hangs_gives_a_line(datasets, said, monkeypatch):
    monkeypatch.setattr(render_check, "TIME_LIMIT", 0.2)
    check_rendering(EpisodeData(datasets["tworoom", ".h5"], TwoRoom(), 32, 5))
    (line,) = said(logging.INFO)
    assert "not compared" in line and "longer than" in line


def test_frames_that_are_drawn_from_states_need_no_comparison(dataset_path, task, said, monkeypatch):
    monkeypatch.setattr(render_check, "_render_in_subprocess", None)
    check_rendering(EpisodeData(dataset_path, task, 32, 5))
    assert said(logging.INFO) == []


class Compared(BaseException):
    pass


def test_training_and_evaluation_compare_first(datasets, tiny_config, trained, task, tmp_path, monkeypatch):
    def drawn(*asked):
        raise Compared

    monkeypatch.setattr(render_check, "_render_in_subprocess", drawn)
    data = datasets["tworoom", ".h5"]
    for start in (
        partial(train, tiny_config, task, data, tmp_path / "run", method="atlas", recipe="demo", device="cpu"),
        partial(evaluate, trained, [Protocol(offset=5, episodes=1)], data_path=data),
    ):
        with pytest.raises(Compared):
            start()
