"""Collection survives a kill at any moment, and two that write to one place do not spoil each other's set."""

import json
import os
import signal
from pathlib import Path

import h5py
import numpy as np
import pytest

from atlas_wm.data import collect as collect_module
from atlas_wm.data import writers
from atlas_wm.data.card import card_path
from atlas_wm.data.collect import collect
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.errors import UserError
from atlas_wm.tasks.tworoom import TwoRoom
from preloaded import forkserver_context

EPISODES = 6


class Pairs(TwoRoom):
    """Recorded two episodes at a time."""

    episodes_per_job = 2


class Here:
    """What worker processes record, without them."""

    def __init__(self, count, make, task, timeout, encode):
        self.count, self.recorder = count, make(task, 0, encode)

    def start(self, count): ...

    def each(self, requests):
        while requests:
            what, *given = requests.popleft()
            yield (what, *given), getattr(self.recorder, what)(*given)

    def close(self):
        self.recorder.close()


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    monkeypatch.setattr(collect_module, "WorkerPool", Here)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collect_module, "WorkerPool", Here)
        return collect(Pairs(), tmp_path_factory.mktemp("whole") / "x.h5", EPISODES, seed=3, pixels=False)


# What follows runs in a process of its own, which dies at a moment.


def die(*_) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_after(calls: int, whole):
    left = iter(range(calls))
    return lambda *given, **named: whole(*given, **named) if next(left, None) is not None else die()


def while_a_part_is_written() -> None:
    whole, left = np.savez, iter(range(2))

    def savez(file, **columns):
        if next(left, None) is not None:
            return whole(file, **columns)
        file.write(b"PK half of it")
        file.flush()
        die()

    np.savez = savez


def while_the_file_is_open() -> None:
    h5py.Dataset.__setitem__ = die_after(5, h5py.Dataset.__setitem__)


def while_lance_appends() -> None:
    writers.lance_column = die_after(3 * 5, writers.lance_column)  # in the sixth episode of three columns


def before_it_has_its_card() -> None:
    whole = Path.rename

    def rename(self, target):
        whole(self, target)
        die()

    Path.rename = rename


def run(out: Path, moment) -> None:
    collect_module.WorkerPool = Here
    moment()
    collect(Pairs(), out, EPISODES, seed=3, pixels=False)


def wait_within(reached, may_end, out: Path) -> None:
    collect_module.WorkerPool = Here

    def hold(*_) -> None:
        reached.set()
        may_end.wait()

    collect(Pairs(), out, EPISODES, seed=3, pixels=False, on_episodes=hold)


def process(target, *arguments):
    return forkserver_context().Process(target=target, args=arguments)


# The promises


@pytest.mark.parametrize(
    ("ending", "moment", "said"),
    [
        ("h5", while_a_part_is_written, "resuming after 4 complete episodes"),
        ("h5", while_the_file_is_open, "resuming after 6 complete episodes"),
        ("h5", before_it_has_its_card, "was already complete when an earlier call was interrupted"),
        ("lance", while_lance_appends, "resuming after 4 complete episodes"),
        ("lance", before_it_has_its_card, "was already complete when an earlier call was interrupted"),
    ],
)
def test_killed_at_a_bad_moment_the_same_call_goes_on_to_the_same_set(tmp_path, undisturbed, ending, moment, said):
    out, heard = tmp_path / f"x.{ending}", []
    killed = process(run, out, moment)
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    card = collect(Pairs(), out, EPISODES, seed=3, pixels=False, say=heard.append)
    assert len(heard) == 1 and said in heard[0]
    assert (card["hash"], card["episodes"]) == (undisturbed["hash"], EPISODES)
    assert json.loads(card_path(out).read_text())["hash"] == EpisodeData(out, TwoRoom(), 1, 1).content_hash()
    assert sorted(p.name for p in tmp_path.iterdir()) == [out.name, card_path(out).name]


def test_two_processes_do_not_collect_into_one_place(tmp_path, undisturbed):
    out, context = tmp_path / "x.h5", forkserver_context()
    reached, may_end = context.Event(), context.Event()
    first = process(wait_within, reached, may_end, out)
    first.start()
    assert reached.wait(60)
    with pytest.raises(UserError, match=rf"x\.h5\.partial is being collected by process {first.pid}: wait for it"):
        collect(Pairs(), out, EPISODES, seed=3, pixels=False)
    may_end.set()
    first.join()
    assert first.exitcode == 0 and json.loads(card_path(out).read_text())["hash"] == undisturbed["hash"]


def test_a_damaged_part_costs_what_comes_after_it_and_no_more(tmp_path, undisturbed):
    out, heard = tmp_path / "x.h5", []
    killed = process(run, out, while_the_file_is_open)
    killed.start()
    killed.join()
    (tmp_path / "x.h5.partial" / "000001.npz").write_bytes(b"torn")
    card = collect(Pairs(), out, EPISODES, seed=3, pixels=False, say=heard.append)
    assert heard == ["resuming after 2 complete episodes of an interrupted call"]
    assert card["hash"] == undisturbed["hash"]


def test_a_set_that_lacks_episodes_is_refused(tmp_path, monkeypatch):
    whole = collect_module.Partial.append
    monkeypatch.setattr(collect_module.Partial, "append", lambda self, episodes: whole(self, episodes[1:]))
    with pytest.raises(UserError, match="contains 3 episodes, but 6 were recorded"):
        collect(Pairs(), tmp_path / "x.lance", EPISODES, seed=3, pixels=False)
    assert not (tmp_path / "x.lance").exists()


def test_fewer_than_an_interrupted_call_left_are_not_silently_more(tmp_path):
    killed = process(run, tmp_path / "x.h5", while_the_file_is_open)
    killed.start()
    killed.join()
    with pytest.raises(UserError, match="contains 6 episodes of an interrupted call, more than --episodes 4"):
        collect(Pairs(), tmp_path / "x.h5", 4, seed=3, pixels=False)
