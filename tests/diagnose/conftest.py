"""A run that was evaluated, and others beside it, diagnosed once, by the command line."""

import shutil
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import h5py
import pytest
from run_folders import OFFSET, PROTOCOL, SETTINGS, WANDERED, Diagnosed, change_json, change_weights, save_untrained

from atlas_wm.cli.app import main
from atlas_wm.config import EncoderConfig, ModelConfig, PlanConfig, PredictorConfig
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.diagnose import marginal
from atlas_wm.diagnose.simulate import Simulator
from atlas_wm.evaluate.evaluate import evaluate
from atlas_wm.models import probes
from atlas_wm.recipes import demo


@pytest.fixture(scope="session")
def data(dataset_path, task) -> EpisodeData:
    return EpisodeData(dataset_path, task, 32, 5)


@pytest.fixture(scope="session")
def simulator() -> Iterator[Simulator]:
    with Simulator(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def evaluated_run(trained, tmp_path_factory) -> Path:
    """Evaluated with another planner than its settings name."""
    folder = shutil.copytree(trained, tmp_path_factory.mktemp("diagnosed") / "evaluated")
    plan = PlanConfig(candidates=20, iterations=2, elites=4)
    evaluate(folder, [PROTOCOL], plan=plan, policies=("model", "replay"), films=0, workers=1, device="cpu")
    return folder


@pytest.fixture(scope="session")
def other_data(dataset_path, tmp_path_factory) -> Path:
    """The first 25 of the demonstrations."""
    path = tmp_path_factory.mktemp("other") / "few.h5"
    with h5py.File(dataset_path) as all_of_them, h5py.File(path, "w") as few:
        rows = int(all_of_them["ep_len"][:25].sum())
        for name, column in all_of_them.items():
            few[name] = column[:25] if name.startswith("ep_") else column[:rows]
    return path


@pytest.fixture(scope="session")
def diagnosed(evaluated_run, other_data, trained, task, tmp_path_factory) -> Diagnosed:
    folder = tmp_path_factory.mktemp("runs")
    changed = shutil.copytree(evaluated_run, folder / "changed")
    change_weights(changed, "predictor", 0.5)
    elsewhere = shutil.copytree(trained, folder / "elsewhere")
    change_json(elsewhere / "config.json", "data", "path", value=str(other_data))
    hash_ = EpisodeData(other_data, task, 32, 5).content_hash()
    change_json(elsewhere / "config.json", "data", "hash", value=hash_)
    collapsed = shutil.copytree(evaluated_run, folder / "collapsed")
    change_weights(collapsed, "projector", 0.0)
    encoder = EncoderConfig(kind="dinov2", image_size=8, patch_size=4, width=12, heads=3, depth=4)
    predictor = PredictorConfig(kind="patch", depth=1, heads=2, head_dim=4, mlp=16)
    dino = replace(demo("dino-wm"), model=ModelConfig(encoder, predictor), plan=PlanConfig(candidate_chunk=4))
    patches = save_untrained(folder / "patches", evaluated_run, dino)
    fast, predictor = demo("fast-wm"), replace(demo("fast-wm").model.predictor, prefixes=3)
    fast = replace(fast, model=replace(fast.model, predictor=predictor), plan=PlanConfig(horizon=3, execute=3))
    short = save_untrained(folder / "short", evaluated_run, fast)
    runs = evaluated_run, changed, elsewhere, collapsed, patches, short
    numbers = {"queries": SETTINGS.queries, "candidates": SETTINGS.candidates, "offset": OFFSET, "workers": 1}
    settings = [word for name, number in numbers.items() for word in (f"--{name}", str(number))]
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        redirect_stdout(StringIO()) as out,
        redirect_stderr(StringIO()) as said,
    ):
        monkeypatch.setattr(probes, "STEPS", 20)  # the real numbers take seconds per run
        monkeypatch.setattr(marginal, "EPISODES", WANDERED)
        main(["diagnose", *map(str, runs), *settings, "--device", "cpu"])
    return Diagnosed(*runs, out.getvalue().splitlines(), said.getvalue())
