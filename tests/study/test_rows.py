"""A study whose datasets have too few rows for an evaluation says so before it trains for hours."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from pretend import Pretend

from atlas_wm.data.clips import held_out_episodes
from atlas_wm.errors import UserError
from atlas_wm.recipes import recipe_config
from atlas_wm.study.records import Records
from atlas_wm.study.rows import check_rows
from atlas_wm.study.schedule import run_units
from atlas_wm.study.study import Dataset, Evaluation, Study
from atlas_wm.study.tries import start

LENGTHS = np.array([30, 60] * 20)  # rows of 40 episodes
PATH = "data/tworoom.h5"


@pytest.fixture(autouse=True)
def stored(monkeypatch):
    monkeypatch.setattr("atlas_wm.data.dataset.episode_lengths", lambda path: LENGTHS)


def study(dataset: Dataset | None = None, recipe: str = "demo", **evaluation) -> Study:
    dataset = dataset or Dataset(path=PATH)
    return Study(
        methods=("atlas",),
        recipes=(recipe,),
        datasets={"tworoom": dataset},
        evaluations=(Evaluation(**evaluation),),
        diagnostics=(),
    )


def check(described: Study, out) -> None:
    check_rows(start(described, out, Records(out)))


def held_out(offset: int, **settings) -> int:
    """Start rows of the episodes that the demo's run holds out."""
    train = replace(recipe_config("demo", "atlas", "tworoom").train, **settings)
    return int(np.maximum(LENGTHS - offset, 0)[held_out_episodes(len(LENGTHS), train)].sum())


def test_every_start_row_counts_and_not_one_more(tmp_path):
    rows = held_out(offset=20)
    check(study(offset=20, episodes=rows), tmp_path)
    with pytest.raises(UserError, match=rf"eval atlas 20 wants {rows + 1} .* has {rows} held out: .*\(episodes\)"):
        check(study(offset=20, episodes=rows + 1), tmp_path)
    everything = replace(study(offset=20, episodes=int(np.maximum(LENGTHS - 20, 0).sum())), part="all")
    check(everything, tmp_path)
    with pytest.raises(UserError, match=r"61 rows left in their episode; data/tworoom\.h5 has 0: record more"):
        check(replace(study(offset=61, episodes=1), part="all"), tmp_path)


def test_settings_of_the_split_count(tmp_path):
    rows = held_out(20, holdout=0.5, split_seed=3)
    settings = {"train.holdout": 0.5, "train.split_seed": 3}
    check(replace(study(offset=20, episodes=rows), settings=settings), tmp_path)
    with pytest.raises(UserError, match="held out"):
        check(replace(study(offset=20, episodes=rows + 1), settings=settings), tmp_path)


def test_episodes_of_their_own_all_count(tmp_path):
    apart = Dataset(episodes=9, eval_episodes=40)
    rows = int(np.maximum(LENGTHS - 20, 0).sum())
    check(study(apart, offset=20, episodes=rows), tmp_path)
    with pytest.raises(UserError, match=r"tworoom-evaluation.lance has .*\(eval_episodes\)"):
        check(study(apart, offset=20, episodes=rows + 1), tmp_path)


def test_it_is_asked_once_when_all_is_collected_and_ends_the_study(tmp_path):
    described = study(Dataset(episodes=40), offset=20, episodes=10**6)
    records, pretend = Records(tmp_path), Pretend()
    progress = start(described, tmp_path, records)
    with pytest.raises(UserError, match="wants 1000000"):
        run_units(progress, records, pretend, on_collected=partial(check_rows, progress))
    assert pretend.names == ["collect tworoom", "train atlas"]
    assert progress["train atlas"].job.stopped


def test_evaluations_that_are_done_are_not_asked_about(tmp_path):
    described = study(offset=20, episodes=10**6)
    run_units(start(described, tmp_path, Records(tmp_path)), Records(tmp_path), Pretend())
    check(described, tmp_path)
