"""The planning score at a validation, and a warning where latent distances saturate."""

import logging
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from atlas_wm.config import RunConfig
from atlas_wm.data.training_set import TrainingSet
from atlas_wm.models.score import Episodes, planning_score, saturation
from atlas_wm.models.world_model import WorldModel
from atlas_wm.parallel.processes import alone
from atlas_wm.rng import TrainRng, make_rng
from atlas_wm.train.monitors import LEAST_RANK

log = logging.getLogger(__name__)
FRAMES, FRAMES_AT_ONCE = 1000, 250  # of held-out episodes, at most; encoded together
SATURATED = 0.8  # share of the distance between frames of different episodes
REGULARISERS = ("wemreg", "sigreg", "std", "cov")


class PlanningScore:
    """Measured on whole episodes with validation clips, always the same (docs/concepts.md#planning-score)."""

    names = ("score", "saturation")

    def __init__(self, training_set: TrainingSet):
        self.training_set = training_set
        self.horizon = training_set.config.plan.horizon
        self.rows, self.episode, self.actions = scored_episodes(training_set)

    @classmethod
    def of(cls, training_set: TrainingSet) -> "PlanningScore | None":
        """None, and a line in the log, where no held-out episode is long enough."""
        found = cls(training_set)
        if bool((found.episode[: -found.horizon] == found.episode[found.horizon :]).any()):
            return found
        log.info(
            "no planning score: no episode with validation clips has %d action chunks. weights/best follows the "
            "loss",
            found.horizon,
        )
        return None

    def measure(self, model: WorldModel, device: torch.device, *, mixed: bool = False) -> dict[str, float]:
        """The main process computes it, without the others."""
        model.eval()
        with alone(), torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=mixed):
            z = torch.cat([self._latents(model, rows, device) for rows in self.rows])
            recorded = Episodes(z, self.actions.to(device), self.episode.to(device))
            rng = make_rng(self.training_set.config.train.seed, TrainRng.SCORE)
            score = planning_score(model, recorded, self.horizon, rng)
            share = saturation(model, recorded, self.horizon)
        model.train()
        return {"score": score, "saturation": share}

    def _latents(self, model: WorldModel, rows: np.ndarray, device: torch.device) -> Tensor:
        inputs = self.training_set.inputs_of(rows).to(device)
        return (inputs if inputs.is_floating_point() else model.encode(inputs)).float()


def scored_episodes(training_set: TrainingSet) -> tuple[list[np.ndarray], Tensor, Tensor]:
    """Rows one action chunk apart, in batches; the number of the episode of each, (N,); the standardised chunk
    after each, (N, frameskip·A), 0 after the last row of an episode."""
    data, left = training_set.data, FRAMES
    rows, episodes, actions = [], [], []
    for episode in np.random.default_rng(0).permutation(np.unique(training_set.validation.episode)).tolist():
        chunks = min((int(data.lengths[episode]) - 1) // data.frameskip, left - 1)
        if chunks < 1:  # enough frames
            break
        first = int(data.offsets[episode])
        taken = torch.from_numpy(data.actions[first : first + chunks * data.frameskip])
        standardised = training_set.normalizer.apply(taken).reshape(chunks, -1)
        rows.append(first + data.frameskip * np.arange(chunks + 1))
        episodes.append(torch.full((chunks + 1,), episode))
        actions += [standardised, torch.zeros_like(standardised[:1])]
        left -= chunks + 1
    every = np.concatenate(rows)
    batches = np.split(every, range(FRAMES_AT_ONCE, len(every), FRAMES_AT_ONCE))
    return batches, torch.cat(episodes), torch.cat(actions)


class SaturationMonitor:
    """Warns once if latent distances saturate while the latents do not collapse."""

    def __init__(self, config: RunConfig):
        self.horizon, self.warned = config.plan.horizon, False
        weights = {name: weight for name, weight in config.objective.weights.items() if name in REGULARISERS}
        self.remedy = " or ".join(f"--objective.{name} ({weight:g})" for name, weight in weights.items())

    def check(self, found: Mapping[str, float]) -> None:
        """found: the results of a validation."""
        share = found.get("saturation", 0.0)
        if not self.warned and self.remedy and share > SATURATED and found["rank"] >= LEAST_RANK:
            self.warned = True
            log.warning(
                "latent distances saturate: frames %d action chunks apart are %.2f times as far apart as frames of "
                "different episodes, so a plan cannot tell whether it comes nearer to its goal: lower %s",
                *(self.horizon, share, self.remedy),
            )
