"""Each finding is found in a dataset that has it, and not in a clean one."""

import json

import numpy as np
import pytest
from lerobot_layout import make_episodes, write_lerobot
from other_drawings import OtherColour
from synthetic import write_h5

from atlas_wm.config import ModelConfig
from atlas_wm.data.card import card_path
from atlas_wm.data.findings import InspectedData, findings, open_to_inspect, trainable
from atlas_wm.errors import UserError
from atlas_wm.tasks.tworoom import TwoRoom

LENGTHS = [40] * 8 + [25] * 4
ROWS = sum(LENGTHS)


def made(pixels: bool = True) -> dict[str, np.ndarray]:
    """Clean TwoRoom episodes: the dot moves by its actions, and frames are those of the environment."""
    rng = np.random.default_rng(0)
    action = rng.uniform(-1, 1, (ROWS, 2)).astype(np.float32)
    starts = [s + np.cumsum(a, axis=0) - a for s, a in zip(rng.uniform(40, 80, (len(LENGTHS), 2)),
              np.split(5 * action, np.cumsum(LENGTHS)[:-1]), strict=True)]  # fmt: skip
    columns = {"action": action, "pos_agent": np.clip(np.concatenate(starts), 25, 95).astype(np.float32)}
    if pixels:
        columns["pixels"] = TwoRoom().draw(columns["pos_agent"], 96).permute(0, 2, 3, 1).numpy()
    return columns


@pytest.fixture(scope="module")
def clean():
    return made()


@pytest.fixture
def look(tmp_path, clean, render_in_this_process):
    """Findings of the clean columns after a change; without frames unless the test is about them."""

    def found(change=lambda columns: None, lengths=LENGTHS, pixels=False, task="tworoom"):
        columns = {name: values.copy() for name, values in clean.items() if pixels or name != "pixels"}
        change(columns)
        path = write_h5(tmp_path / "x.h5", lengths, columns, compression="gzip")
        return findings(open_to_inspect(path, task))

    return found


def only(found, level):
    (finding,) = found
    assert finding.level == level and finding.remedy
    return finding.text, finding.remedy


@pytest.mark.parametrize("pixels", [False, True])
def test_a_clean_dataset_has_none(look, pixels):
    assert look(pixels=pixels) == []


def test_nan_and_infinity_are_errors(look):
    def change(columns):
        columns["action"][7:10, 1] = np.nan
        columns["pos_agent"][50] = np.inf

    found = look(change)
    assert {f.level for f in found} == {"error"} and not trainable(found)
    assert any(f"'action' is NaN or infinite in 3 of {ROWS} rows, first in row 7" in f.text for f in found)
    assert any(
        "'pos_agent' is NaN or infinite in 1 of" in f.text and "(episode 1, step 10)" in f.text for f in found
    )


def test_the_last_action_of_an_episode_may_be_nan(look):
    assert look(lambda c: c["action"].__setitem__(np.cumsum(LENGTHS) - 1, np.nan)) == []


def test_constant_coordinates(look):
    text, _ = only(look(lambda c: c["action"].__setitem__((slice(None), 1), 0.25)), "warning")
    assert "1 of 2 action coordinates are constant" in text and "number 1 is always 0.25" in text


def test_actions_outside_the_bounds(look):
    text, remedy = only(look(lambda c: c["action"].__setitem__((45, 0), 1.5)), "warning")
    assert (
        f"1 of {ROWS - len(LENGTHS)} actions" in text
        and "1.5 in coordinate 0 of row 45 (episode 1, step 5)" in text
    )
    assert "action_bounds" in remedy


def test_copies_of_episodes(look):
    def change(columns):
        for values in columns.values():
            values[40:80] = values[:40]

    copies, variants = look(change)
    assert copies.level == "warning" and "1 of 12 episodes repeat" in copies.text
    assert "episode 1 those of episode 0" in copies.text and "variants" in variants.text


def test_variants_of_demonstrations(look):
    def change(columns):
        rng = np.random.default_rng(1)
        for first in (40, 80):
            columns["action"][first : first + 40] = np.clip(
                columns["action"][:40] + rng.normal(0, 0.02, (40, 2)), -1, 1
            )

    text, remedy = only(look(change), "warning")
    assert "3 of 12 episodes are variants" in text and "episodes 0, 1, 2" in text
    assert "--train.split groups" in remedy


def test_short_episodes(look):
    lengths = [*LENGTHS[:-1], 15, 10]
    text, remedy = only(look(lengths=lengths), "note")
    assert "2 of 13 episodes are shorter than a training clip of 16 rows" in text and "episode 11 with 15" in text
    assert "--model.frameskip" in remedy


def test_no_clip_at_all_is_an_error(look):
    text, remedy = only(look(lengths=[10] * (ROWS // 10)), "error")
    assert "no episode has the 16 rows of a clip" in text and "collect longer ones" in remedy


def test_too_few_clips_for_a_batch(look):
    text, remedy = only(look(lengths=LENGTHS[:4]), "warning")
    assert "do not fill one batch of 128" in text and "--train.batch" in remedy


def test_black_frames(look):
    found = look(lambda c: c["pixels"].__setitem__(slice(0, 160), 0), pixels=True)
    black = next(f for f in found if "sampled frames are black" in f.text)
    assert not any("identical" in f.text for f in found)
    assert black.level == "warning" and "of 400" in black.text
    found = look(lambda c: c["pixels"].fill(0), pixels=True)
    assert any("400 of 400 sampled frames are black" in f.text and f.level == "error" for f in found)


def test_frames_of_one_colour(look):
    found = look(lambda c: c["pixels"].__setitem__(slice(0, 160), 128), pixels=True)
    assert any("sampled frames are of one colour" in f.text for f in found)


def test_a_camera_that_stopped(look):
    def change(columns):
        columns["pixels"][:160] = columns["pixels"][::40][:4].repeat(40, axis=0)

    assert any(
        "are identical while the state changed" in f.text and f.level == "warning"
        for f in look(change, pixels=True)
    )


def test_an_agent_that_stands_still_is_no_finding(look):
    def change(columns):
        for name in ("pixels", "pos_agent"):
            columns[name][:160] = columns[name][::40][:4].repeat(40, axis=0)

    assert look(change, pixels=True) == []


def test_frames_that_the_environment_draws_otherwise(tmp_path, clean, render_in_this_process):
    path = write_h5(tmp_path / "x.h5", LENGTHS, clean, compression="gzip")
    text, remedy = only(findings(InspectedData(path, OtherColour())), "warning")
    assert "renders other frames than the stored ones" in text and "install the versions" in remedy


def test_frames_that_are_neither_stored_nor_drawn(look):
    def change(columns):
        columns["state"] = np.random.default_rng(0).uniform(0, 500, (ROWS, 7))

    text, remedy = only(look(change, task="pusht"), "error")
    assert "has no 'pixels' column" in text and "atlas collect pusht --pixels" in remedy


def test_data_that_does_not_match_its_card(look, tmp_path):
    card = card_path(tmp_path / "x.h5")
    card.write_text(json.dumps({"task": "tworoom", "hash": "0", "failed": {"3": "it hung"}}))
    error, note = look(task=None)
    assert error.level == "error" and "does not match its card" in error.text
    assert note.level == "note" and "number 3: 'it hung'" in note.text


def test_a_lerobot_dataset_needs_no_task(tmp_path):
    path = write_lerobot(tmp_path / "robot", make_episodes([50] * 6), stored="image")
    data = open_to_inspect(path)
    assert data.task.name == "offline" and data.frameskip == ModelConfig().frameskip
    text, _ = only(findings(data), "note")
    assert "64×48 pixels, not square" in text


def test_errors_name_the_remedy(tmp_path, clean):
    with pytest.raises(UserError, match=r"there is no dataset .*atlas collect TASK --out"):
        open_to_inspect(tmp_path / "nothing.h5")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="is a run folder: `atlas report` shows it"):
        open_to_inspect(tmp_path / "run")
    columns = {"action": clean["action"], "pos_agent": clean["pos_agent"]}
    path = write_h5(tmp_path / "x.h5", LENGTHS, columns)
    with pytest.raises(UserError, match="no card that names its task: pass --task tworoom"):
        open_to_inspect(path)
    with pytest.raises(UserError, match=r"needs .rows, 5.: pass the --data of this task, or the task of this data"):
        open_to_inspect(path, "cube")
    card_path(path).write_text(json.dumps({"task": ["tworoom"]}))
    with pytest.raises(UserError, match="names a task outside this package"):
        open_to_inspect(path)
    card_path(path).write_text(json.dumps({"task": "os:system"}))
    with pytest.raises(UserError, match=r"names a task outside this package, 'os:system'.*pass --task"):
        open_to_inspect(path)
