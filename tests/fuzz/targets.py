"""What reads the files of others, each beside the valid files it reads. A target may refuse, by one UserError."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
import torch
from hostile import Mutator, changed_bytes, hostile_json, hostile_safetensors

from atlas_wm.config import DataInfo, EncoderConfig, ModelConfig, PredictorConfig, RunInfo
from atlas_wm.convert.lewm import read_checkpoint, to_lewm
from atlas_wm.convert.lewm_config import sizes
from atlas_wm.data.card import check_card
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.data.states import TrainingStates
from atlas_wm.data.training_set import open_training_set
from atlas_wm.diagnose.catalog import DIAGNOSTICS
from atlas_wm.diagnose.evaluated import find_evaluated
from atlas_wm.errors import UserError
from atlas_wm.models.temporal_head import TemporalHead
from atlas_wm.models.world_model import WorldModel
from atlas_wm.recipes import demo
from atlas_wm.report.page import SECTIONS, headlines, write_report
from atlas_wm.report.runs import Study, read_study, read_tries
from atlas_wm.report.section import data_warnings
from atlas_wm.report.style import Figure
from atlas_wm.report.tuning import tuning_section
from atlas_wm.rng import make_rng
from atlas_wm.runs.bank_frames import load_frames, save_frames
from atlas_wm.runs.folder import read_run
from atlas_wm.runs.model import load_model, save_model
from atlas_wm.tasks import get_task, get_task_of

EVIL = "from pathlib import Path\nPath('escaped').touch()\n"  # would leave a trace where it is imported

TRIES = """task,method,recipe,factor,weights,state,score,minutes,chosen
tworoom,atlas,demo+tuned,0.1,wemreg 0.02,done,0.91,1.5,True
tworoom,atlas,demo+tuned,1.0,wemreg 0.2,failed,,0.5,False
"""


class Target(NamedTuple):
    file: str  # that is made hostile, below the folder
    mutate: Mutator
    read: Callable[[Path], object]  # of the folder


def make_valid(folder: Path) -> None:
    """Every kind of file that is read, small and valid."""
    from made_up import make_run  # tests/report

    torch.manual_seed(0)
    config = demo("atlas")
    model = WorldModel(config.model, 2)
    data = DataInfo("tworoom.h5", "0" * 16, 2, 60, 10, 2)
    model.run = RunInfo("tworoom", "atlas", "demo", 2, config, data, "cpu")
    frames = torch.zeros(60, 3, 32, 32, dtype=torch.uint8).random_(256)
    model.build_bank([frames])
    actions = torch.zeros(10, 10)
    model.build_demonstrations([(torch.zeros(10, 3, 32, 32, dtype=torch.uint8).random_(256), actions, 0)])
    model.temporal_head = TemporalHead.initial(model.bank.points, make_rng(0))
    save_model(model, folder / "run")
    save_frames([frames], folder / "run")
    TrainingStates(np.zeros((60, 2), np.float32), ("state",), data.hash).write(folder / "run")
    make_run(folder / "made_up", "atlas", seeds=(42, 43))
    evaluation = json.loads((folder / "made_up/evaluation/all_offset50_budget75.json").read_text())
    evaluation["plan"] = {"candidates": 20, "iterations": 2, "elites": 4}
    evaluation["data"] = {"path": "tworoom.h5", "hash": "0" * 16}
    (folder / "made_up/evaluation/all_offset50_budget75.json").write_text(json.dumps(evaluation))
    rng = np.random.default_rng(0)
    with h5py.File(folder / "tworoom.h5", "w") as file:
        file["ep_len"], file["ep_offset"] = np.array([30, 30], np.int32), np.array([0, 30])
        file["action"] = rng.uniform(-1, 1, (60, 2)).astype(np.float32)
        file["state"] = rng.uniform(20, 200, (60, 2)).astype(np.float32)
        file["pixels"] = rng.integers(0, 255, (60, 16, 16, 3), dtype=np.uint8)
    opened = EpisodeData(folder / "tworoom.h5", get_task("tworoom"), 32, 5)
    card = {"task": "tworoom", "hash": opened.content_hash()}
    (folder / "tworoom.h5.card.json").write_text(json.dumps(card))
    encoder = EncoderConfig(image_size=28, width=16, depth=1, heads=1)
    predictor = PredictorConfig(width=16, depth=1, heads=2, mlp=16)
    small = WorldModel(ModelConfig(encoder, predictor, latent=16, hidden=16, action_hidden=16), 2)
    torch.save(to_lewm(small.state_dict()), folder / "weights.pt")
    (folder / "tuning.csv").write_text(TRIES)
    (folder / "evil.py").write_text(EVIL)


def read_states(folder: Path) -> None:
    TrainingStates.read(folder / "run", read_run(folder / "run")[0])


def load_run(folder: Path) -> None:
    model = load_model(folder / "run")
    assert model.run is not None
    get_task_of(model.run)


def read_report(folder: Path) -> None:
    """All but the drawing, which takes seconds."""
    study = read_study([folder / "made_up"])
    assert isinstance(study.groups, list)
    headlines(study)
    data_warnings(study)


def draw_tries(folder: Path) -> None:
    section = tuning_section(Study([], tries=read_tries(folder / "tuning.csv")))
    for block in section.blocks:
        if isinstance(block, Figure):
            assert block.inline


def draw_report(folder: Path) -> None:
    write_report([folder / "made_up"], folder / "page")


def open_data(folder: Path) -> None:
    data = EpisodeData(folder / "tworoom.h5", get_task("tworoom"), 32, 5)
    data.columns((("state",),))
    data.frames(np.array([0, 1]), np.array([0, 3]), 2)


def open_card(folder: Path) -> None:
    check_card(EpisodeData(folder / "tworoom.h5", get_task("tworoom"), 32, 5))
    open_training_set(folder / "tworoom.h5", get_task("tworoom"), demo("atlas"))


def import_checkpoint(folder: Path) -> None:
    sizes(read_checkpoint(folder / "weights.pt"), {}, get_task("tworoom"))


TARGETS = {
    "config": Target("run/config.json", hostile_json, load_run),
    "normalizer": Target("run/normalizer.json", hostile_json, load_run),
    "weights": Target("run/model.safetensors", hostile_safetensors, load_run),
    "bank": Target("run/bank.safetensors", hostile_safetensors, load_run),
    "bank frames": Target("run/frames.webp", changed_bytes, lambda folder: load_frames(folder / "run", 60)),
    "demonstrations": Target("run/demonstrations.safetensors", hostile_safetensors, load_run),
    "temporal head": Target("run/temporal_head.safetensors", hostile_safetensors, load_run),
    "states": Target("run/states.safetensors", hostile_safetensors, read_states),
    "report config": Target("made_up/config.json", hostile_json, read_report),
    "report evaluation": Target("made_up/evaluation/all_offset50_budget75.json", hostile_json, read_report),
    "report metrics": Target("made_up/metrics.csv", changed_bytes, read_report),
    "evaluation": Target(
        "made_up/evaluation/all_offset50_budget75.json",
        hostile_json,
        lambda folder: find_evaluated(folder / "made_up", 50, "0" * 16),
    ),
    "tries": Target("tuning.csv", changed_bytes, draw_tries),
    "dataset": Target("tworoom.h5", changed_bytes, open_data),
    "card": Target("tworoom.h5.card.json", hostile_json, open_card),
    "checkpoint": Target("weights.pt", changed_bytes, import_checkpoint),
}
# Each of these draws pages, in seconds.
SLOW = {
    f"page {what}": Target(f"made_up/diagnostics/{what}.json", hostile_json, draw_report) for what in DIAGNOSTICS
} | {
    "page config": Target("made_up/config.json", hostile_json, draw_report),
    "page evaluation": Target("made_up/evaluation/all_offset50_budget75.json", hostile_json, draw_report),
}
# One more: say here which file it reads. Evaluations: differences, ways, variations, score; tries: tuning.
assert len(SECTIONS) == 18


def attempt(folder: Path, target: Target, content: bytes) -> str | None:
    """Read the folder with this content in the target's file → the refusal, or None if it was accepted."""
    path = folder / target.file
    valid = path.read_bytes()
    path.write_bytes(content)
    try:
        target.read(folder)
    except UserError as error:
        said = str(error)
        assert len(said) < 2000, f"a refusal of {len(said)} characters: {said[:300]}"
        return said
    finally:
        path.write_bytes(valid)
        shutil.rmtree(folder / "page", ignore_errors=True)
        assert not (folder / "escaped").exists(), "code of a stranger was run"
    return None
