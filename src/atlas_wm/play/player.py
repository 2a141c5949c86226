"""A model that plans for the page: its planner, what its search looked at, and images of what it imagines."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atlas_wm.config import PlanConfig
from atlas_wm.errors import UserError
from atlas_wm.evaluate.training_frames import TrainingFrames, open_training_frames
from atlas_wm.images import frame_to_tensor
from atlas_wm.plan.planner import FLAGGED, Plan, Planner
from atlas_wm.plan.trace import TracedSolver, traced
from atlas_wm.report.naming import method_name
from atlas_wm.runs.model import load_model


@dataclass
class Player:
    name: str
    planner: Planner
    trace: TracedSolver
    frames: TrainingFrames | None
    without_frames: str = ""  # why there are none

    @property
    def about(self) -> dict[str, Any]:
        model = self.planner.model
        assert model.run is not None
        return {
            "name": self.name,
            "method": method_name(model.run.method),
            "parameters": sum(p.numel() for p in model.parameters()),
            "iterations": self.planner.config.iterations,
            "candidates": self.planner.config.candidates,
            "bank": model.bank is not None,
            "flagged": FLAGGED,
            "without_frames": self.without_frames,
        }

    def plan(self, frame: np.ndarray, goal: np.ndarray, seed: int, last: Plan | None) -> Plan:
        return self.planner.plan(frame, goal, seed=seed, last=last)

    @torch.inference_mode()
    def novelty(self, *images: np.ndarray) -> list[dict[str, float]] | None:
        """Of each image the percentile of its latent, and of itself; None without a bank."""
        bank, planner = self.planner.model.bank, self.planner
        if bank is None:
            return None
        frames = torch.cat([planner.prepare(frame_to_tensor(image)) for image in images]).to(planner.device)
        found = [{"latent": value} for value in bank.percentiles(planner.model.encode(frames)).tolist()]
        if bank.images is not None:
            for one, value in zip(found, bank.images.percentiles(frames).tolist(), strict=True):
                one["image"] = value
        return found

    def chunks(self, standardised: torch.Tensor) -> np.ndarray:
        """(…, H, frameskip·A) → (…, H·frameskip, A) in the environment's units"""
        model = self.planner.model
        raw = model.normalizer.invert(standardised.unflatten(-1, (-1, model.action_size)).flatten(-3, -2))
        return model.normalizer.clip(raw).numpy() if self.planner.config.clip_actions else raw.numpy()


def load_player(
    run: Path, settings: Callable[[PlanConfig], PlanConfig], device: torch.device, data: str | Path | None
) -> Player:
    """``settings``: from the plan settings of the run to those of the planner."""
    model = load_model(run, device)
    assert model.run is not None
    # On a CUDA device plans are searched in graphs, which cannot be traced.
    planner = Planner(model, settings(model.run.config.plan), plain=device.type == "cuda")
    try:
        frames, why = open_training_frames(model, run, data), ""
    except UserError as error:
        frames, why = None, str(error)
    return Player(str(run.name or run), planner, traced(planner), frames, why)


def warm_up(player: Player) -> None:
    """The first plan of a process is slow: it chooses kernels and packs weights."""
    size = player.planner.model.config.encoder.image_size
    blank = np.zeros((size, size, 3), np.uint8)
    player.plan(blank, blank, 0, None)
