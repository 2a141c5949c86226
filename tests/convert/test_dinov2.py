"""DINO-WM's frozen encoder: weights from a file, and tokens computed once for each frame."""

from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from atlas_wm.config import EncoderConfig, ModelConfig, PlanConfig, PredictorConfig, RunConfig, TrainConfig
from atlas_wm.convert.dinov2 import load_dinov2
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.data.token_cache import TokenCache, worth_caching, write_tokens
from atlas_wm.errors import UserError
from atlas_wm.methods import METHODS
from atlas_wm.models.encoders import ViTEncoder
from atlas_wm.plan.planner import Planner
from atlas_wm.rng import make_rng
from atlas_wm.runs.folder import WEIGHTS, read_run
from atlas_wm.runs.model import load_model
from atlas_wm.train.loop import train

SMALL = EncoderConfig(kind="dinov2", image_size=8, patch_size=4, width=12, depth=2, heads=3)


def random_weights(config: EncoderConfig, path, seed=0):
    """As a published file: every tensor drawn, LayerScale included."""
    encoder = ViTEncoder(config)
    state = {k: torch.randn(v.shape, generator=make_rng(seed)) / 4 for k, v in encoder.vit.state_dict().items()}
    save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)
    return state


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_weights_come_from_a_local_file(tmp_path, suffix):
    state = random_weights(SMALL, tmp_path / f"dino{suffix}")
    encoder = ViTEncoder(SMALL)
    load_dinov2(encoder, str(tmp_path / f"dino{suffix}"))
    torch.testing.assert_close(dict(encoder.vit.state_dict()), state, rtol=0, atol=0)


def test_the_original_naming_and_another_grid_are_read(tmp_path):
    """The original files carry a mask token and positions for 518 pixels a side."""
    state = random_weights(replace(SMALL, image_size=16), tmp_path / "w.pth")
    torch.save(state | {"mask_token": torch.zeros(1, 12)}, tmp_path / "w.pth")
    encoder = ViTEncoder(SMALL)
    load_dinov2(encoder, str(tmp_path / "w.pth"))
    assert encoder.vit.pos_embed.shape == (1, 5, 12)
    torch.testing.assert_close(encoder.vit.cls_token, state["cls_token"])


def test_tokens_are_those_of_timms_dinov2(tmp_path):
    """The encoder of the paper's size, weights from timm's own model: the same normed patch tokens."""
    theirs = timm.create_model("vit_small_patch14_dinov2", pretrained=False, img_size=224, num_classes=0).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.05, generator=make_rng(1))
    save_file(theirs.state_dict(), tmp_path / "w.safetensors")
    encoder = ViTEncoder(METHODS["dino-wm"].encoder).eval()
    load_dinov2(encoder, str(tmp_path / "w.safetensors"))
    frames = torch.randint(256, (2, 3, 224, 224), generator=make_rng(2), dtype=torch.uint8)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    pixels = (frames / 255 - mean[:, None, None]) / std[:, None, None]
    with torch.no_grad():
        expected = theirs.forward_features(pixels)[:, 1:]
        tokens = encoder(frames).patches
    assert tokens.shape == (2, 256, 384)
    torch.testing.assert_close(tokens, expected, atol=1e-4, rtol=1e-4)


def write(path, content: bytes):
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: folder / "absent.safetensors",
        lambda folder: write(folder / "w.safetensors", b"not weights"),
        lambda folder: write(folder / "w.pth", b"not weights"),
        lambda folder: torch.save({"model": [1, 2]}, folder / "l.pth") or folder / "l.pth",
        lambda folder: random_weights(replace(SMALL, width=24), folder / "o.pth") and folder / "o.pth",
    ],
    ids=["absent", "damaged safetensors", "damaged pth", "no tensors", "other sizes"],
)
def test_bad_weights_give_one_line_that_names_file_and_remedy(tmp_path, make):
    path = make(tmp_path)
    with pytest.raises(UserError) as error:
        load_dinov2(ViTEncoder(SMALL), str(path))
    assert str(path) in str(error.value) and "--model.encoder.weights" in str(error.value)
    assert "\n" not in str(error.value)


def test_no_weights_and_no_hub_say_what_to_fetch(monkeypatch):
    def offline(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    with pytest.raises(UserError, match=r"vit_small_patch14_dinov2.*--model\.encoder\.weights FILE"):
        load_dinov2(ViTEncoder(SMALL), None)


def dino_run(weights, **settings) -> RunConfig:
    base = METHODS["dino-wm"].run_config
    encoder = replace(SMALL, image_size=32, patch_size=8, weights=str(weights))
    return replace(
        base,
        model=ModelConfig(encoder, PredictorConfig(kind="patch", depth=1, heads=2, head_dim=4, mlp=16)),
        train=replace(base.train, steps=4, batch=8, split="episodes", log_every=1, **settings),
        plan=PlanConfig(candidates=12, iterations=2, elites=4, candidate_chunk=5),
    )


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "dino.safetensors"
    random_weights(replace(SMALL, image_size=32, patch_size=8), path)
    return path


def test_training_from_kept_tokens_is_training_from_frames(tmp_path, dataset_path, task, weights):
    """The file holds float16, so losses agree to that; it is gone afterwards, and the encoder is as it came."""
    losses = {}
    for keep in ("always", "never"):
        config = dino_run(weights, cache_tokens=keep)
        seen = []
        out = train(
            config,
            task,
            dataset_path,
            tmp_path / keep,
            method="dino-wm",
            recipe="test",
            device="cpu",
            on_encoded=lambda done, total, seen=seen: seen.append((done, total)),
        )
        assert bool(seen) == (keep == "always") and all(done <= total for done, total in seen)
        losses[keep] = np.genfromtxt(out / "metrics.csv", delimiter=",", names=True)["total"]
        names = {path.name for path in out.iterdir()}
        assert {"config.json", "model.safetensors"} <= names and "tokens.f16" not in names
        model = load_model(out)
        before = ViTEncoder(config.model.encoder)
        load_dinov2(before, str(weights))
        torch.testing.assert_close(model.encoder.state_dict(), before.state_dict(), rtol=0, atol=0)
    np.testing.assert_allclose(losses["always"], losses["never"], rtol=2e-3)

    # The run stands alone: it plans without the file it came from.
    weights.unlink()
    frame = np.random.default_rng(0).integers(0, 256, (224, 224, 3), dtype=np.uint8)
    plan = Planner(load_model(tmp_path / "never")).plan(frame, 255 - frame)
    assert plan.actions.shape == (25, 2) and np.isfinite(plan.actions).all() and plan.latents.shape == (5, 16, 12)
    assert read_run(tmp_path / "never")[0].config.model.encoder.weights == str(weights)


def test_a_run_that_goes_on_encodes_nothing_again(tmp_path, dataset_path, task, weights):
    config = dino_run(weights, cache_tokens="always", checkpoint_every=1)
    given = {"method": "dino-wm", "recipe": "test", "device": "cpu"}
    whole = train(config, task, dataset_path, tmp_path / "whole", **given)

    def stop(progress) -> None:
        if progress.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, task, dataset_path, tmp_path / "run", on_progress=stop, **given)
    seen: list[int] = []
    run = train(
        config, task, dataset_path, tmp_path / "run", on_encoded=lambda done, total: seen.append(done), **given
    )
    assert not seen and not (run / "tokens.f16").exists()
    torch.testing.assert_close(load_file(run / WEIGHTS), load_file(whole / WEIGHTS), rtol=0, atol=0)


def test_a_token_file_holds_every_row_and_travels_to_loader_processes(tmp_path, dataset_path, task):
    import pickle

    data = EpisodeData(dataset_path, task, 32, 5)
    shape = (len(data.actions), 4, 3)

    def encode(frames):  # a token for each quarter of the image
        return torch.nn.functional.adaptive_avg_pool2d(frames.float(), 2).flatten(2).mT / 255

    file = pickle.loads(pickle.dumps(write_tokens(data, encode, shape, tmp_path / "t")))
    assert isinstance(file, TokenCache)
    for row in (0, len(data.actions) // 2, len(data.actions) - 1):
        torch.testing.assert_close(file.read(np.array([[row]]))[0, 0], encode(data.frame(row))[0].half())


def test_tokens_are_kept_where_that_saves_work_and_fits(tmp_path):
    assert worth_caching((100, 4, 3), 101, tmp_path)
    assert not worth_caching((100, 4, 3), 100, tmp_path)
    assert not worth_caching((10**12, 256, 384), 10**14, tmp_path)


def test_the_recipe_of_the_paper():
    config = METHODS["dino-wm"].run_config
    assert config.train == TrainConfig(lr=5e-4, weight_decay=0.0) and config.train.epochs == 10
    assert config.model.latent_shape == (256, 384)
