"""Run folders that were diagnosed, and changes to them."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from atlas_wm.config import RunConfig
from atlas_wm.diagnose.catalog import QuerySettings
from atlas_wm.evaluate.protocol import Protocol
from atlas_wm.models.world_model import WorldModel
from atlas_wm.runs.folder import read_run
from atlas_wm.runs.model import save_model

OFFSET = 20
WANDERED = 20  # episodes of random actions, of 10 frames each
SETTINGS = QuerySettings(queries=4, candidates=6, offset=OFFSET)
PROTOCOL = Protocol(OFFSET, budget=32, episodes=10, seeds=(3, 4))


def evaluation_of(run: Path) -> Path:
    """The file of its only evaluation."""
    (file,) = run.glob("evaluation/*.json")
    return file


def change_json(file: Path, *keys: str, value: object) -> None:
    whole = part = json.loads(file.read_text())
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    file.write_text(json.dumps(whole))


def change_weights(run: Path, part: str, factor: float) -> None:
    weights = load_file(run / "model.safetensors")
    for name in (n for n in weights if n.startswith(part)):
        weights[name] = weights[name] * factor + (0.01 * torch.rand(weights[name].shape) if factor else 0)
    save_file(weights, run / "model.safetensors")


@dataclass
class Diagnosed:
    evaluated: Path
    changed: Path  # other weights beside the evaluation of the first: its films go otherwise
    elsewhere: Path  # of other data, never evaluated
    collapsed: Path  # whose encoder gives the same latent for everything
    patches: Path  # whose latents are patch tokens, as DINO-WM's
    short: Path  # as FAST-WM's, but for at most three action chunks
    printed: list[str]
    said: str

    def read(self, run: str, what: str) -> dict:
        return json.loads((getattr(self, run) / f"diagnostics/{what}.json").read_text(), parse_constant=pytest.fail)


def save_untrained(folder: Path, like: Path, config: RunConfig) -> Path:
    """A run of an untrained model, with the evaluation of another one."""
    info, normalizer = read_run(like)
    torch.manual_seed(0)
    untrained = WorldModel(config.model, info.action_size, normalizer).eval()
    untrained.run = replace(info, config=config)
    save_model(untrained, folder)
    shutil.copytree(like / "evaluation", folder / "evaluation")
    return folder
