"""What `Planner.plan` takes for an image, and what it says of everything else."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from stable_worldmodel.data import get_format

import atlas_wm.images
from atlas_wm.config import PlanConfig
from atlas_wm.data.training_set import open_training_set
from atlas_wm.errors import UserError
from atlas_wm.plan.planner import Planner
from atlas_wm.runs.folder import read_run
from atlas_wm.runs.model import load_model

QUICK = PlanConfig(candidates=5, iterations=1, elites=2, horizon=2, execute=2)
IMAGE = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
GREY = np.repeat(IMAGE[..., :1], 3, axis=-1)
GOAL = 255 - IMAGE


@pytest.fixture
def planner(demo_model):
    return Planner(demo_model, QUICK)


def refusal(planner, name, value):
    with pytest.raises(UserError, match=f"^{name} must ") as caught:
        planner.plan(**{"frame": IMAGE, "goal": GOAL, name: value})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    return str(caught.value)


@pytest.fixture
def png(tmp_path):
    Image.fromarray(IMAGE).convert("RGBA").save(tmp_path / "now.png")
    return tmp_path / "now.png"


AS_TENSOR = torch.as_tensor(IMAGE)
WITH_REMEDY = {
    "floats in [0, 1]": (IMAGE / 255, IMAGE),
    "floats in [0, 255]": (IMAGE.astype(np.float32), IMAGE),
    "floats in [-1, 1]": (IMAGE / 127.5 - 1, IMAGE),
    "int64": (IMAGE.astype(np.int64), IMAGE),
    "big endian": (IMAGE.astype(">u2"), IMAGE),
    "bool": (IMAGE > 127, (IMAGE > 127) * np.uint8(255)),
    "float tensor with gradient": ((AS_TENSOR / 255).requires_grad_(), IMAGE),
    "bfloat16 tensor": (AS_TENSOR.bfloat16(), IMAGE),
    "colour first": (IMAGE.transpose(2, 0, 1), IMAGE),
    "colour first, tensor": (AS_TENSOR.permute(2, 0, 1), IMAGE),
    "transparent": (np.dstack([IMAGE, IMAGE[..., 0]]), IMAGE),
    "transparent, colour first": (np.dstack([IMAGE, IMAGE[..., 0]]).transpose(2, 0, 1), IMAGE),
    "a batch of one": (IMAGE[None], IMAGE),
    "several": (np.stack([IMAGE, GOAL]), IMAGE),
    "batches of batches": (IMAGE[None, None], IMAGE),
    "a batch, colour first, in [0, 1]": (torch.as_tensor(IMAGE / 255).permute(2, 0, 1)[None], IMAGE),
    "grey": (IMAGE[..., 0], GREY),
    "grey, one channel": (IMAGE[..., :1], GREY),
    "grey, one channel first, tensor": (AS_TENSOR[..., 0][None], GREY),
    "Pillow with transparency": (Image.fromarray(IMAGE).convert("RGBA"), IMAGE),
    "a dict": ({"pixels": IMAGE, "state": np.zeros(4)}, IMAGE),
}


@pytest.mark.parametrize("name", ["frame", "goal"])
@pytest.mark.parametrize("case", WITH_REMEDY)
def test_a_wrong_image_is_refused_with_code_that_puts_it_right(planner, name, case):
    """Pasted as it stands, as often as there is something wrong, it leads to the plan of the right image."""
    value, right = WITH_REMEDY[case]
    seen = []
    while (said := said_of(planner, name, value)) is not None:
        assert said.startswith(f"{name} must ") and said not in seen  # no circle
        seen.append(said)
        value = eval(re.search(r"`(.*?)`", said)[1], {name: value, "np": np, "torch": torch, "atlas_wm": atlas_wm})
    assert 1 <= len(seen) <= 3
    np.testing.assert_allclose(np.asarray(value, np.int64), right, atol=1)  # bfloat16 has 8 bits, 255 of them exact
    assert np.array_equal(
        planner.plan(**{"frame": IMAGE, "goal": GOAL, name: value}).actions,
        planner.plan(**{"frame": IMAGE, "goal": GOAL, name: np.asarray(value)}).actions,
    )


def said_of(planner, name, value):
    try:
        planner.plan(**{"frame": IMAGE, "goal": GOAL, name: value})
    except UserError as error:
        return str(error)
    return None


def test_a_path_is_refused_with_the_function_that_reads_it(planner, png):
    for path in (png, str(png)):
        said = refusal(planner, "goal", path)
        assert "the path" in said and "now.png" in said
        image = eval(re.search(r"`(.*?)`", said)[1], {"goal": path, "atlas_wm": atlas_wm})
        assert np.array_equal(image, IMAGE)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "not None: make the environment with render_mode='rgb_array'"),
        ({"state": np.zeros(4), "t": 3}, "a dict with the keys ['state', 't']: pass the image (none of these"),
        ({"left": IMAGE, "right": IMAGE}, "pass `frame['left']` or `frame['right']`"),
        ((IMAGE, {}), "a tuple of 2: pass a single image"),
        ([IMAGE] * 7, "a list of 7: pass a single image"),
        (print, "not <built-in function print> of type builtin_function_or_method"),
        (b"\x89PNG", "of type bytes"),
        (np.array(["a"]), "of type ndarray"),
        (3, "must be uint8 (0 to 255), not int64"),
        (np.uint8(3), "must have shape (height, width, 3), not ()"),
        (np.zeros((0, 32, 3), np.uint8), "not (0, 32, 3): it is empty"),
        (np.zeros((0, 32, 3)), "not float64: it is empty"),
        (np.full((32, 32, 3), np.nan), "not float64: it holds NaN or infinity"),
        (IMAGE * 100.0, "its values go from 0 to 25500, scale them to 0 (black) to 255 (white) first"),
        (IMAGE / 50.0 - 2, "its values go from -2 to 3.1, scale them"),
        (IMAGE * 1j, "not complex128: it holds complex numbers"),
        (np.zeros((32, 32, 7), np.uint8), "not (32, 32, 7): pass the result of env.render()"),
        (np.zeros(3, np.uint8), "not (3,): pass the result of env.render()"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_what_is_no_image_is_refused_by_name(planner, value, said):
    assert said in refusal(planner, "frame", value)


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, "1", None, True])
def test_a_seed_that_is_none_is_refused(planner, seed):
    with pytest.raises(UserError, match=r"^seed must be a whole number from 0 to"):
        planner.plan(IMAGE, GOAL, seed=seed)


def test_whatever_holds_the_same_image_gives_the_same_plan(planner):
    expected = planner.plan(IMAGE, GOAL, seed=3)
    unusual = np.asfortranarray(IMAGE)[::-1][::-1]
    unusual.flags.writeable = False
    for frame in (
        AS_TENSOR,
        AS_TENSOR.permute(1, 0, 2).contiguous().permute(1, 0, 2),
        unusual,
        Image.fromarray(IMAGE),
    ):
        assert np.array_equal(planner.plan(frame, GOAL, seed=np.int64(3)).actions, expected.actions)


def test_frames_for_a_batch_of_plans_are_refused_with_the_remedy_too(planner):
    frames = torch.as_tensor(IMAGE / 255).permute(2, 0, 1)[None]
    with pytest.raises(
        UserError, match=r"frames must be uint8 .*`\(frames \* 255\)\.round\(\)\.to\(torch\.uint8\)`"
    ):
        planner.prepare(frames)


# ---- sizes


def image_of(*shape):
    return np.zeros((*shape, 3), np.uint8)


@pytest.mark.parametrize(
    ("stored", "quiet", "messages"),
    [
        (None, [(32, 32), (224, 224), (101, 100)], {(48, 64): "is stretched", (16, 16): "is enlarged to 32×32"}),
        ((48, 64), [(48, 64), (480, 640), (36, 48)], {(64, 64): "had 48×64", (24, 32): "is enlarged"}),
        ((20, 20), [(20, 20), (32, 32)], {(10, 10): "is enlarged", (20, 30): "is stretched"}),
    ],
    ids=["unknown", "wide", "smaller than the model"],
)
def test_an_image_that_is_bent_or_blurred_as_no_training_frame_was_is_told_of_once(
    demo_model, run_folder, caplog, stored, quiet, messages
):
    info = read_run(run_folder)[0]
    demo_model.run = replace(info, data=replace(info.data, frame_size=stored))
    planner = Planner(demo_model, replace(QUICK, clip_actions=False))
    caplog.clear()  # it has no bank
    for shape in quiet:
        planner.plan(image_of(*shape), image_of(*shape))
    assert not caplog.records
    for shape, said in messages.items():
        caplog.clear()
        for _ in range(2):
            planner.plan(image_of(*shape), image_of(*shape))
        (record,) = caplog.records
        assert f"an image of {shape[0]}×{shape[1]} pixels" in record.message and said in record.message


def test_training_remembers_the_size_of_its_frames(task, tiny_config, dataset_path, tmp_path):
    rng = np.random.default_rng(0)
    with get_format("hdf5").open_writer(str(tmp_path / "wide.h5")) as writer:
        for _ in range(3):
            columns = {
                "pixels": rng.integers(0, 255, (20, 12, 16, 3), dtype=np.uint8),
                "action": rng.uniform(-1, 1, (20, 2)).astype(np.float32),
                "state": rng.uniform(0, 200, (20, 2)).astype(np.float32),
            }
            writer.write_episode({key: list(column) for key, column in columns.items()})
    assert open_training_set(tmp_path / "wide.h5", task, tiny_config).info.frame_size == (12, 16)
    assert open_training_set(dataset_path, task, tiny_config).info.frame_size is None  # they are drawn


@pytest.mark.parametrize("size", [[0, 5], [1, -1], [1, 10**400], [5], "32", 3])
def test_a_size_that_no_frame_has_is_refused(run_folder, tmp_path, size):
    run = Path(shutil.copytree(run_folder, tmp_path / "run"))
    settings = json.loads((run / "config.json").read_text())
    settings["data"]["frame_size"] = size
    (run / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=r"data\.frame_size must"):
        load_model(run)
