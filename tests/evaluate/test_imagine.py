"""Imagined futures: the nearest training frames, their file, and films."""

import numpy as np
import pytest
import torch
from PIL import Image

from atlas_wm.cli.app import main
from atlas_wm.data.training_set import open_training_set_of
from atlas_wm.errors import UserError
from atlas_wm.evaluate.training_frames import TrainingFrames, open_training_frames
from atlas_wm.runs.bank_frames import load_frames, save_frames
from atlas_wm.runs.folder import BANK_FRAMES
from atlas_wm.runs.model import load_model


@pytest.fixture(scope="module")
def model(trained):
    return load_model(trained)


def test_a_latent_of_the_bank_finds_its_own_frame(model, trained):
    known = open_training_frames(model, trained)
    frames, distances = known.nearest(model.bank.points[:5])
    assert max(distances) < 1e-3
    with torch.inference_mode():
        assert torch.allclose(model.encode(frames), model.bank.points[:5], atol=1e-4)
    _, (far,) = known.nearest(model.bank.points[:1] + 100)
    assert far > 10  # training frames are 1 apart


def test_distances_are_in_units_of_the_training_frames():
    points = torch.tensor([[0.0], [2.0], [4.0], [6.0]])
    known = TrainingFrames(points, lambda which: torch.from_numpy(which))
    frames, distances = known.nearest(torch.tensor([[2.5], [9.0]]))
    assert frames.tolist() == [1, 3] and distances == [0.25, 1.5]


def test_frames_in_the_folder_replace_the_dataset(model, trained, tmp_path, monkeypatch):
    training_set = open_training_set_of(model.run, trained, None)
    count = len(model.bank.points)
    save_frames(training_set.sample_frames(count), tmp_path)
    assert torch.equal(load_frames(tmp_path, count), torch.cat(list(training_set.sample_frames(count))))
    with pytest.raises(UserError, match=r"no grid of .*--frames"):
        load_frames(tmp_path, 3 * count)
    with monkeypatch.context() as patch:
        patch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
        with pytest.raises(UserError, match="decompression bomb"):
            load_frames(tmp_path, count)
    (tmp_path / BANK_FRAMES).write_bytes(b"RIFF")
    with pytest.raises(UserError, match="cannot be read"):
        load_frames(tmp_path, count)
    assert load_frames(tmp_path / "elsewhere", count) is None


def test_the_shipped_model_has_the_frames_of_its_bank():
    model = load_model("demo")
    frames, distances = open_training_frames(model, "demo").nearest(model.bank.points[::300])
    with torch.inference_mode():
        assert torch.allclose(model.encode(frames), model.bank.points[::300], atol=1e-4)
    assert max(distances) < 1e-3


def frames_of(path) -> list[np.ndarray]:
    with Image.open(path) as film:
        return [np.asarray((film.seek(i), film.convert("RGB"))[1]) for i in range(film.n_frames)]


def test_a_film_from_a_row_shows_both_futures(trained, tmp_path, capsys):
    film = tmp_path / "both.gif"
    main(["plan", str(trained), "--row", "3", "--offset", "20", "--film", str(film), "--device", "cpu"])
    both = frames_of(film)
    assert '"actions"' in capsys.readouterr().out and 2 <= len(both) <= 6
    height = both[0].shape[0]
    assert height > 500 and both[0][-40:, :200].min() < 200  # the real frame is below


def test_a_film_from_images_shows_the_imagined_one(task, tmp_path):
    now, goal = (tmp_path / name for name in ("now.png", "goal.png"))
    for path, image in zip((now, goal), task.draw(np.array([[60.0, 60.0], [170.0, 90.0]]), 224), strict=True):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    main(["plan", "demo", "--frame", str(now), "--goal", str(goal), "--film", str(tmp_path / "film.gif")])
    film = frames_of(tmp_path / "film.gif")
    assert len(film) == 6 and film[0].shape[0] < 300
    assert len({image.tobytes() for image in film}) == 6


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--row", "3", "--goal", "x.png"], "name the start and the goal"),
        (["--frame", "x.png"], "name the start and the goal"),
        (["--row", "3", "--offset", "100000"], "do not lie in one episode"),
        (["--row", "3", "--film", "x.gif", "--weights", "best"], "leave --weights out"),
    ],
)
def test_what_a_film_needs(trained, flags, message):
    with pytest.raises(SystemExit, match=message):
        main(["plan", str(trained), *flags, "--device", "cpu"])
