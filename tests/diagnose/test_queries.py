"""Shared queries: a function of data and settings alone; the first candidate is the demonstration."""

import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from atlas_wm.data.dataset import EpisodeData
from atlas_wm.diagnose.catalog import QuerySettings
from atlas_wm.diagnose.queries import Queries, candidate_actions, shared_queries
from atlas_wm.diagnose.simulate import Simulator, _futures
from atlas_wm.errors import UserError

SETTINGS = QuerySettings(queries=5, candidates=7, offset=30, seed=2)


class Here(Simulator):
    """Without processes; counts what it is asked."""

    def __init__(self):
        super().__init__(1)
        self.asked = Counter()

    def futures(self, task, starts, actions):
        self.asked["futures"] += 1
        env = task.make_env()
        return (_futures(task, env, s, a) for s, a in zip(starts, actions, strict=True))


def ask(data, settings=SETTINGS, file=None, others=(), simulator=None, tmp_path=None) -> Queries:
    file = file or tmp_path / "diagnostics" / "queries.npz"
    return shared_queries(data, settings, simulator or Here(), file, others, lambda done, total: None)


def same(a: Queries, b: Queries) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


@pytest.fixture(scope="module")
def asked(data, tmp_path_factory) -> Queries:
    return ask(data, tmp_path=tmp_path_factory.mktemp("queries"))


def test_any_number_of_workers_gives_the_same_queries(data, asked, simulator, tmp_path):
    assert same(ask(data, simulator=simulator, tmp_path=tmp_path), asked)


def test_shapes_and_goals(asked, data):
    assert asked.actions.shape == (5, 7, 5, 5, 2) and asked.states.shape == (5, 7, 5, 2)
    assert np.array_equal(asked.goal_rows, asked.rows + 30)
    episode = np.searchsorted(data.offsets, asked.rows, side="right")
    assert np.array_equal(episode, np.searchsorted(data.offsets, asked.goal_rows, side="right"))


@pytest.mark.parametrize("offset", [30, 3])  # longer than the candidates, and shorter
def test_the_first_candidate_is_the_demonstration_and_leads_along_its_states(data, offset, tmp_path):
    asked = ask(data, replace(SETTINGS, offset=offset, queries=40, candidates=2), tmp_path=tmp_path)
    for row, actions, states in zip(asked.rows, asked.actions[:, 0], asked.states[:, 0], strict=True):
        assert np.array_equal(actions.reshape(25, 2), data.actions[row : row + 25])
        np.testing.assert_allclose(states, data.states[row + 5 : row + 26 : 5], atol=1e-3)


def test_half_of_the_candidates_are_noise_like_the_data_and_half_are_other_demonstrations(data):
    rows = np.array([0, 3, 8])
    actions = candidate_actions(data, rows, replace(SETTINGS, candidates=200)).reshape(3, 200, 25, 2)
    np.testing.assert_allclose(actions[:, 1:100].mean(axis=(0, 1, 2)), np.nanmean(data.actions, axis=0), atol=0.3)
    np.testing.assert_allclose(actions[:, 1:100].std(axis=(0, 1, 2)), np.nanstd(data.actions, axis=0), rtol=0.1)
    known = {data.actions[row : row + 25].tobytes() for row in range(len(data.actions) - 24)}
    assert [[one.tobytes() in known for one in mine] for mine in actions] == [
        [True] + 99 * [False] + 100 * [True]
    ] * 3


def test_a_file_is_used_again_by_its_run_and_by_others(data, asked, tmp_path):
    first, mine = tmp_path / "a" / "queries.npz", tmp_path / "b" / "queries.npz"
    simulator = Here()
    assert same(ask(data, file=first, simulator=simulator), asked)
    assert same(ask(data, file=first, simulator=simulator), asked)
    assert same(ask(data, file=mine, others=[tmp_path / "none.npz", first], simulator=simulator), asked)
    assert simulator.asked["futures"] == 1
    shutil.rmtree(first.parent)
    assert same(ask(data, file=mine, simulator=simulator), asked) and simulator.asked["futures"] == 1


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9, 0.999])
def test_a_damaged_file_is_made_again(data, asked, tmp_path, keep):
    file, simulator = tmp_path / "queries.npz", Here()
    ask(data, file=file)
    whole = file.read_bytes()
    for damaged in (
        whole[: int(keep * len(whole))],
        bytes(np.frombuffer(whole, np.uint8) ^ (np.arange(len(whole)) == 150)),
    ):
        file.write_bytes(damaged)
        assert same(ask(data, file=file, simulator=simulator), asked)
        assert file.read_bytes()[:2] == b"PK" and len(file.read_bytes()) == len(whole)


def test_every_setting_and_the_data_give_queries_of_their_own(data, other_data, task, asked, tmp_path):
    other = {"queries": 3, "candidates": 4, "horizon": 2, "offset": 31, "seed": 9}
    assert set(other) == set(vars(SETTINGS))
    file = tmp_path / "queries.npz"
    keys = [ask(data, replace(SETTINGS, **{name: value}), file=file).key for name, value in other.items()]
    keys += [
        ask(EpisodeData(path, task, 32, skip), file=file).key for path, skip in ((other_data, 5), (data.path, 4))
    ]
    assert len({asked.key, *keys}) == 8
    assert ask(EpisodeData(data.path, task, 64, 5), file=file).key == asked.key  # images of another size


@pytest.mark.parametrize("bad", [{"queries": 0}, {"candidates": 1}, {"offset": 0}])
def test_settings_that_make_no_sense_are_refused(bad):
    with pytest.raises(UserError, match="at least"):
        QuerySettings(**bad)
