"""Collected sets do not depend on workers or format."""

import json

import numpy as np
import pytest

from atlas_wm.data import collect as module
from atlas_wm.data.card import card_path
from atlas_wm.data.collect import collect, record_episode, usual_workers
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.errors import UserError
from atlas_wm.tasks import get_task


def test_one_worker_and_two_record_the_same_set(task, dataset_path, tmp_path, spawned_workers):
    card = collect(task, tmp_path / "one.lance", 60, seed=5, pixels=False, workers=1)
    assert card["hash"] == json.loads(card_path(dataset_path).read_text())["hash"]
    one, two = (EpisodeData(p, task, 32, 5) for p in (tmp_path / "one.lance", dataset_path))
    assert np.array_equal(one.states, two.states)
    assert np.array_equal(one.actions, two.actions, equal_nan=True)


def test_processes_that_render_with_one_gpu_are_few(monkeypatch):
    monkeypatch.setattr(module, "own_cores", lambda: 16)
    assert usual_workers(get_task("cube"), pixels=True) == 6
    assert usual_workers(get_task("cube"), pixels=False) == usual_workers(get_task("pusht"), pixels=True) == 16
    monkeypatch.setattr(module, "own_cores", lambda: 2)
    assert usual_workers(get_task("cube"), pixels=True) == 2


def test_a_row_holds_the_action_taken_there_and_the_last_row_none(task):
    env = task.make_env()
    episode = record_episode(task, env, seed=0, number=3, pixels=False)
    task.reset(env, episode["state"][0], episode["goal_state"][0])
    for step, action in enumerate(episode["action"][:-1]):
        assert np.array_equal(task.state(env), episode["state"][step])
        env.step(action)
    assert not episode["action"][-1].any()


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["h5", "lance"])
def test_an_interrupted_collection_goes_on_from_its_whole_episodes(task, dataset_path, tmp_path, ending):
    def stop(episodes: int, rows: int) -> None:
        raise KeyboardInterrupt

    out, said = tmp_path / f"x.{ending}", []
    with pytest.raises(KeyboardInterrupt):
        collect(task, out, 60, seed=5, pixels=False, workers=1, on_episodes=stop)
    assert not out.exists()
    card = collect(task, out, 60, seed=5, pixels=False, workers=1, say=said.append)
    assert said == ["resuming after 25 complete episodes of an interrupted call"]
    assert card["hash"] == json.loads(card_path(dataset_path).read_text())["hash"] and card["episodes"] == 60
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"x.{ending}", f"x.{ending}.card.json"]


def test_a_damaged_or_different_rest_is_not_continued(task, tmp_path):
    said = []
    (tmp_path / "x.h5.partial").mkdir()
    (tmp_path / "x.h5.partial" / "notes.json").write_text("torn")
    collect(task, tmp_path / "x.h5", 2, pixels=False, workers=1, say=said.append)
    assert len(said) == 1 and "starting over" in said[0]
    assert EpisodeData(tmp_path / "x.h5", task, 32, 5).lengths.shape == (2,)


def test_an_existing_set_is_not_overwritten_unasked(task, dataset_path):
    with pytest.raises(UserError, match="--overwrite"):
        collect(task, dataset_path, 2)


def test_an_unknown_ending_names_the_known_ones(task, tmp_path):
    with pytest.raises(UserError, match=r"\.lance"):
        collect(task, tmp_path / "x.zip", 2)


def test_a_file_that_is_no_dataset_gives_one_clear_line(task, tmp_path):
    (tmp_path / "broken.h5").write_bytes(b"not hdf5")
    with pytest.raises(UserError, match=r"broken\.h5 cannot be read"):
        EpisodeData(tmp_path / "broken.h5", task, 32, 5)


def test_a_missing_column_is_named(task, tmp_path):
    import h5py

    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["ep_len"], file["ep_offset"] = np.array([20]), np.array([0])
        file["action"] = np.zeros((20, 2), np.float32)
    with pytest.raises(UserError, match="no column 'pos_agent' or 'state'"):
        EpisodeData(tmp_path / "x.h5", task, 32, 5)


def test_damaged_frames_name_the_file_and_the_remedy(task, tmp_path):
    collect(task, tmp_path / "x.lance", 2, seed=1, pixels=True, workers=1)
    data = EpisodeData(tmp_path / "x.lance", task, 32, 5)
    for part in (tmp_path / "x.lance" / "data").rglob("*.lance"):
        part.write_bytes(part.read_bytes()[:200])
    with pytest.raises(UserError, match=r"x\.lance: column 'pixels' cannot be read.*collect it again"):
        data.frames(np.array([0]), np.array([0]), 1)


def test_a_task_of_the_wrong_action_size_is_refused(dataset_path):
    from atlas_wm.tasks.tworoom import TwoRoom

    class Wide(TwoRoom):
        action_size = 3

    with pytest.raises(UserError, match="column 'action' has shape"):
        EpisodeData(dataset_path, Wide(), 32, 5)


@pytest.mark.parametrize(("flag", "value"), [("workers", -1), ("workers", 0), ("seed", -1)])
def test_a_number_that_makes_no_sense_is_refused(task, tmp_path, flag, value):
    with pytest.raises(UserError, match=rf"--{flag} must be at least \d, not {value}"):
        collect(task, tmp_path / "x.h5", 2, **{flag: value})


@pytest.mark.parametrize("column", ["state", "action"])
def test_an_episode_with_numbers_that_no_dataset_may_contain_has_failed(task, tmp_path, monkeypatch, column):
    def broken(task, env, seed, number, pixels):
        episode = record_episode(task, env, seed, number, pixels)
        episode[column][3] = np.nan if number == 1 else episode[column][3]
        return episode

    monkeypatch.setattr(module, "record_episode", broken)
    recorder = module.Recorder(task, 0, module.partial_of(tmp_path / "x.h5").encode)
    whole, failed = recorder.record(0, [0, 1], pixels=False)
    recorder.close()
    assert isinstance(whole, dict) and failed == f"ValueError: column {column!r} is NaN or infinite"


class Pool:
    """Answers in a given order. The first request of several episodes dies with its process."""

    count = 2

    def __init__(self):
        self.asked, self.waiting, self.died = [], [], False

    def each(self, requests):
        while requests:
            *_, numbers, _ = request = requests.popleft()
            self.asked.append(numbers)
            self.waiting.append(len(requests))
            if len(numbers) > 1 and not self.died:
                self.died = True
                yield request, module.WorkerDied("killed")
            else:
                yield request, [{"number": n} for n in numbers]


def test_episodes_of_a_process_that_died_are_recorded_next():
    """So that what follows can be written, and memory does not fill with it."""
    pool, jobs = Pool(), [[2 * n, 2 * n + 1] for n in range(100)]
    recorded = module._recorded(pool, 0, False, jobs)
    assert next(recorded) == [{"number": 0}, {"number": 1}]
    assert pool.asked == [[0, 1], [0], [1]]
    assert [e["number"] for episodes in recorded for e in episodes] == list(range(2, 200))
    assert max(pool.waiting) <= module.JOBS_AHEAD * pool.count + 2


def test_a_column_that_lance_cannot_name_is_refused_at_the_first_episodes(tmp_path):
    episode = {"action": np.zeros((3, 2), np.float32), "observation.more": np.zeros((3, 2))}
    with pytest.raises(UserError, match=r"column 'observation\.more': use --out NAME\.h5"):
        module.partial_of(tmp_path / "x.lance").append([episode])


def test_states_that_cannot_be_drawn_are_announced(tmp_path, monkeypatch):
    """Their moments are still worth recording."""
    said: list[str] = []

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "WorkerPool", stop)
    with pytest.raises(KeyboardInterrupt):
        collect(get_task("pusht"), tmp_path / "x.h5", 2, pixels=False, say=said.append)
    assert said == ["--no-pixels: pusht cannot be drawn from states, so no model can be trained on this dataset"]
