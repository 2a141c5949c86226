"""Data that cannot be used: one line with the file, the column and the remedy, and nothing left behind."""

import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from synthetic import columns, write_h5

from atlas_wm.cli.app import main
from atlas_wm.data.card import card_path, check_card
from atlas_wm.data.collect import record_episode
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.diagnose.frozen_run import FrozenRun
from atlas_wm.errors import UserError
from atlas_wm.runs.files import read_json, write_json
from atlas_wm.tasks.tworoom import TwoRoom

pytestmark = pytest.mark.usefixtures("render_in_this_process")


def refusal(folder: Path, *arguments: str) -> str:
    """What a command says that must stop, in one line, without touching anything in ``folder``."""
    before = sorted(folder.rglob("*"))
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    said = str(stopped.value.code)
    assert said.startswith("atlas: ") and "\n" not in said and len(said) < 600
    assert sorted(folder.rglob("*")) == before
    return said


def train_refusal(data: Path, *more: str, task: str = "tworoom") -> str:
    out = ("--data", data, "--out", data.parent / "run")
    return refusal(data.parent, "train", task, "--recipe", "demo", "--device", "cpu", *out, *more)


def stored(rows: int = 60) -> dict[str, np.ndarray]:
    return columns(rows, state=2, goal_state=2)


@pytest.fixture(scope="module")
def whole(task, tmp_path_factory):
    """Two episodes with frames in every format."""
    from stable_worldmodel.data import get_format

    folder, env = tmp_path_factory.mktemp("whole"), task.make_env()
    episodes = [record_episode(task, env, seed=0, number=n, pixels=True) for n in (0, 2)]
    for name, path in (("hdf5", "x.h5"), ("lance", "x.lance"), ("folder", "images"), ("video", "videos")):
        with get_format(name).open_writer(folder / path) as writer:
            writer.write_episodes([{c: list(values) for c, values in e.items()} for e in episodes])
    return folder


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("missing", ["action", "state"])
def test_a_missing_column(missing, tmp_path):
    some = stored()
    del some[missing]
    said = train_refusal(write_h5(tmp_path / "x.h5", [60], some))
    assert "x.h5 has no column" in said and repr(missing) in said and "docs/guides/own-data.md" in said
    assert "goal_state" in said  # what it has


def test_no_pixels_where_they_are_needed(tmp_path):
    some = columns(60, state=7)
    del some["pixels"]
    path = write_h5(tmp_path / "x.h5", [30, 30], some)
    said = train_refusal(path, "--train.steps", "1", "--train.batch", "4", task="pusht")
    assert "x.h5" in said and "no 'pixels' column" in said and "atlas collect pusht --pixels" in said


@pytest.mark.parametrize(
    ("pixels", "found"),
    [
        (np.zeros((60, 32, 32, 3), np.float32), "float32 of shape (32, 32, 3)"),
        (np.zeros((60, 3, 32, 32), np.uint8), "uint8 of shape (3, 32, 32)"),
        (np.zeros((60, 32, 32, 1), np.uint8), "uint8 of shape (32, 32, 1)"),
    ],
)
def test_pixels_that_are_no_images(pixels, found, tmp_path):
    said = train_refusal(
        write_h5(tmp_path / "x.h5", [30, 30], stored() | {"pixels": pixels}),
        *("--train.steps", "1", "--train.batch", "4"),
    )
    assert f"x.h5: column 'pixels' holds {found}, not uint8 (height, width, 3): convert it" in said


@pytest.mark.parametrize("lengths", [[15, 15, 15, 15], []])
def test_no_episode_as_long_as_a_clip(lengths, tmp_path):
    said = train_refusal(write_h5(tmp_path / "x.h5", lengths, stored()))
    assert "x.h5: no episode has the 16 rows of a clip" in said and "collect longer ones" in said


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_states_that_are_not_finite(value, tmp_path):
    some = stored()
    some["state"][[41, 50], 1] = value
    said = train_refusal(write_h5(tmp_path / "x.h5", [30, 30], some))
    assert "x.h5: column 'state' is NaN or infinite in 2 of 60 rows, first in row 41 (episode 1, step 11)" in said
    assert "again without these episodes" in said


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_actions_may_be_missing_in_the_last_row_of_an_episode_only(value, tmp_path):
    some = stored()
    some["action"][[29, 59]] = np.nan
    some["action"][[7, 8], 0] = value
    said = train_refusal(write_h5(tmp_path / "x.h5", [30, 30], some))
    assert "x.h5: column 'action' is NaN or infinite in 2 of 60 rows, first in row 7 (episode 0, step 7)" in said
    assert "only the last row" in said


def test_actions_that_do_not_fit_the_task(tmp_path):
    said = train_refusal(write_h5(tmp_path / "x.h5", [30, 30], stored()), task="cube")
    assert "x.h5: column 'action' has shape (60, 2), cube needs (rows, 5): pass" in said


def test_columns_that_are_words(tmp_path):
    path = write_h5(tmp_path / "x.h5", [30, 30], stored())
    with h5py.File(path, "a") as file:
        del file["state"]
        file["state"] = ["left"] * 60
    assert "x.h5: column 'state' must hold numbers" in train_refusal(path)


def test_a_column_that_ends_before_its_episodes(tmp_path):
    some = stored()
    some["state"] = some["state"][:50]
    said = train_refusal(write_h5(tmp_path / "x.h5", [30, 30], some))
    assert "x.h5: column 'state' has 50 rows, its episodes reach to row 59" in said and "collect it again" in said


def cut_hdf5(folder: Path) -> Path:
    halve(folder / "x.h5")
    return folder / "x.h5"


def cut_lance(folder: Path) -> Path:
    for part in (folder / "x.lance" / "data").iterdir():
        halve(part)
    return folder / "x.lance"


def empty_lance(folder: Path) -> Path:
    shutil.rmtree(folder / "x.lance")
    (folder / "x.lance").mkdir()
    return folder / "x.lance"


def cut_column(folder: Path) -> Path:
    halve(folder / "images" / "action.npz")
    return folder / "images"


def cut_image(folder: Path) -> Path:
    for image in (folder / "images" / "pixels").iterdir():
        halve(image)
    return folder / "images"


def no_images(folder: Path) -> Path:
    for image in (folder / "images" / "pixels").iterdir():
        image.unlink()
    return folder / "images"


def cut_video(folder: Path) -> Path:
    for video in (folder / "videos" / "pixels").iterdir():
        halve(video)
    return folder / "videos"


def short_video(folder: Path) -> Path:
    shutil.copy(folder / "videos" / "pixels" / "ep_0.mp4", folder / "videos" / "pixels" / "ep_1.mp4")
    return folder / "videos"


DAMAGES = [cut_hdf5, cut_lance, empty_lance, cut_column, cut_image, no_images, cut_video, short_video]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files(damage, whole, tmp_path):
    path = damage(Path(shutil.copytree(whole, tmp_path / "data")))
    said = train_refusal(path, *("--train.steps", "9", "--train.batch", "8", "--train.split", "clips"))
    assert str(path) in said and "cannot be read" in said and "download or collect it again" in said


@pytest.mark.slow
@pytest.mark.parametrize("damage", [cut_image, short_video])
def test_damage_that_a_loader_process_meets_is_one_line_too(damage, whole, tmp_path):
    path = damage(Path(shutil.copytree(whole, tmp_path / "data")))
    more = ("--train.steps", "9", "--train.batch", "8", "--train.split", "clips", "--train.workers", "1")
    assert f"atlas: {path}: column 'pixels' cannot be read" in train_refusal(path, *more)


@pytest.mark.parametrize("name", ["x.h5", "x.lance", "x.txt", "x"])
@pytest.mark.parametrize("content", ["", "these are no episodes"])
def test_files_that_are_no_dataset(name, content, tmp_path):
    (tmp_path / name).write_text(content)
    said = train_refusal(tmp_path / name)
    assert str(tmp_path / name) in said and ("cannot be read" in said or "is not a dataset" in said)


def test_a_folder_that_is_no_dataset(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "notes.txt").write_text("nothing")
    assert "x is not a dataset: expected" in train_refusal(tmp_path / "x")


def eval_refusal(run: Path, *more: str) -> str:
    return refusal(run.parent, "eval", run, "--device", "cpu", "--workers", "1", "--episodes", "3", *more)


def test_evaluating_a_run_on_actions_of_another_size(run_folder, tmp_path):
    path = write_h5(tmp_path / "x.h5", [80], columns(80, action_size=5, state=2, goal_state=2))
    said = eval_refusal(run_folder, "--data", str(path))
    assert "x.h5: column 'action' has shape (80, 5), tworoom needs (rows, 2)" in said


def test_evaluating_a_run_whose_task_has_changed(run_folder, tmp_path):
    """A task of one's own may have got another action size since the run was trained."""
    run = Path(shutil.copytree(run_folder, tmp_path / "run"))
    write_json(run / "config.json", read_json(run / "config.json") | {"action_size": 3})
    said = eval_refusal(run)
    assert str(run) in said and "3 action coordinates" in said and "tworoom now has 2" in said and "train" in said


def test_an_offset_longer_than_every_episode(run_folder, dataset_path):
    said = eval_refusal(run_folder, "--offset", "500")
    assert str(dataset_path) in said and "500" in said and "lower --offset" in said


def test_novelty_that_cannot_be_measured(run_folder, tmp_path):
    """A column that training does not read and evaluation does."""
    some = columns(80, state=2, goal_state=2)
    some["goal_state"][5] = np.nan
    said = eval_refusal(run_folder, "--data", str(write_h5(tmp_path / "x.h5", [80], some)))
    assert "x.h5: column 'goal_state' is NaN or infinite in 1 of 80 rows, first in row 5" in said


def test_a_dataset_of_another_task(dataset_path, tmp_path, run_folder):
    path, card = (shutil.copy(p, tmp_path) for p in (dataset_path, card_path(dataset_path)))
    write_json(Path(card), read_json(Path(card)) | {"task": "pusht"})
    refused = "tworoom.h5 is a dataset of pusht, not of tworoom: pass the --data of this"
    assert refused in train_refusal(Path(path)) and refused in eval_refusal(run_folder, "--data", path)
    film = ("--row", "3", "--film", tmp_path / "film.gif", "--device", "cpu")
    assert refused in refusal(run_folder.parent, "plan", run_folder, "--data", path, *film)
    with pytest.raises(UserError, match=refused):
        FrozenRun(run_folder, None, path, torch.device("cpu"))
    for strange in ("my_task:MyTask", ["pusht"], None):
        write_json(Path(card), {"task": strange})
        check_card(EpisodeData(path, TwoRoom(), 32, 5))


@pytest.mark.parametrize("path", [".", ""])
def test_the_working_directory_is_no_dataset(path, working_directory):
    with pytest.raises(UserError, match="is not a dataset: expected"):
        EpisodeData(path, TwoRoom(), 32, 5)


def test_a_part_for_training_that_is_empty_names_the_flag(tmp_path):
    path = write_h5(tmp_path / "x.h5", [30, 30], stored())
    said = train_refusal(path, "--train.holdout", "0.99")
    assert "lower --train.holdout 0.99" in said


def test_a_weight_decay_below_0(tmp_path):
    assert "--train.weight-decay must lie between 0 and" in train_refusal(
        tmp_path / "x.h5", "--train.weight-decay", "-1"
    )
