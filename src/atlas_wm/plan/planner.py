"""From two pictures to actions: encode the current frame and the goal once, then search with CEM."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from atlas_wm.config import PlanConfig
from atlas_wm.frames import check_frames, frame_to_tensor, reduce_frames
from atlas_wm.models.fast import FastTerminal
from atlas_wm.models.predictors import CausalPredictor
from atlas_wm.models.world_model import WorldModel
from atlas_wm.plan.captured import CapturedSearch, Found
from atlas_wm.plan.cem import cem
from atlas_wm.streams import stream

log = logging.getLogger(__name__)


class Novelty(NamedTuple):
    """How unknown latents are: 0 to 100, the share of training frames that are better known (LatentBank)."""

    frame: float  # the current frame
    goal: float
    end: float  # the imagined end of the plan


class Plan(NamedTuple):
    actions: np.ndarray  # (execute·frameskip, A) in the environment's units: what to do before planning again
    cost: float  # WorldModel.distance of the imagined end from the goal
    start_cost: float  # the same before the first action
    latents: np.ndarray  # (horizon, …) imagined latents after each block
    novelty: Novelty | None  # None where the run has no bank


class Planner:
    """Receding-horizon planning to a goal image: cost ‖ẑ_H − z_g‖², terminal only.

    >>> plan = Planner(WorldModel.load("runs/x")).plan(frame, goal)
    >>> for action in plan.actions: env.step(action)

    ``config`` defaults to the settings of the model's run. On a CUDA device the search runs as captured graphs
    where it can, with products in ``dtype`` (float32: the numbers of the plain search) and noise of its own;
    elsewhere repeated work is left out. ``plain``: every step as :mod:`atlas_wm.plan.cem` writes it.
    """

    def __init__(
        self,
        model: WorldModel,
        config: PlanConfig | None = None,
        *,
        plain: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ):
        self.model = model.eval()
        self.config = config or (model.run.config.plan if model.run else PlanConfig())
        self.plain, self.dtype = plain, dtype
        self._captured: CapturedSearch | None = None

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def plan(self, frame: np.ndarray, goal: np.ndarray, *, seed: int = 0) -> Plan:
        """One plan. frame and goal: (H, W, 3) uint8, as an environment renders them."""
        frames = self.prepare(frame_to_tensor(frame, "frame"))
        goals = self.prepare(frame_to_tensor(goal, "goal"))
        return self.plan_batch(frames, goals, [stream(seed)])[0]

    def prepare(self, frames: Tensor) -> Tensor:
        """(N, 3, H, W) uint8 of any size → the size the model was trained on."""
        check_frames(frames)
        return reduce_frames(frames, self.model.config.encoder.image_size)

    @torch.inference_mode()
    def plan_batch(self, frames: Tensor, goals: Tensor, streams: Sequence[torch.Generator]) -> list[Plan]:
        """A plan for each of B episodes. frames and goals: (B, 3, S, S) uint8, prepared; one stream each.

        On the CPU episodes are planned one by one: matrix products round differently in batches of different
        sizes, and an episode's plan must not depend on the company it was planned in.
        """
        if not len(frames) == len(goals) == len(streams):
            raise ValueError(f"{len(frames)} frames, {len(goals)} goals and {len(streams)} streams do not match")
        if self.device.type != "cpu" or len(streams) == 1:
            return self._solve(frames, goals, streams)
        return [self._solve(frames[i : i + 1], goals[i : i + 1], [s])[0] for i, s in enumerate(streams)]

    def _solve(self, frames: Tensor, goals: Tensor, streams: Sequence[torch.Generator]) -> list[Plan]:
        model, config = self.model, self.config
        found = None
        if self.device.type == "cuda" and not self.plain:
            found = self._search_captured(frames, goals, streams)
        z, z_goal, mean, latents = found or self._search(frames, goals, streams)
        costs = model.distance(latents[:, -1], z_goal).tolist()
        start_costs = model.distance(z, z_goal).tolist()
        standardised = mean[:, : config.execute].unflatten(-1, (-1, model.action_size)).flatten(1, 2)
        actions = model.normalizer.invert(standardised.cpu()).numpy()
        novelty = self._novelty(z, z_goal, latents[:, -1])
        imagined = latents.cpu().numpy()
        return [Plan(*parts) for parts in zip(actions, costs, start_costs, imagined, novelty, strict=True)]

    def _search(self, frames: Tensor, goals: Tensor, streams: Sequence[torch.Generator]) -> Found:
        model, config = self.model, self.config
        z = model.encode(frames.to(self.device))  # (B, …)
        z_goal = model.encode(goals.to(self.device))
        fast = isinstance(model.predictor, CausalPredictor) and not self.plain
        terminal = FastTerminal(model.predictor) if fast else model.terminal  # type: ignore[arg-type]

        def cost(candidates: Tensor) -> Tensor:
            chunk = config.candidate_chunk or len(streams) * config.candidates
            parts = candidates.split(max(1, chunk // len(streams)), dim=1)
            return torch.cat([model.distance(terminal(z, part), z_goal[:, None]) for part in parts], dim=1)

        solution = cem(cost, model.config.frameskip * model.action_size, config, streams, self.device)
        latents = model.rollout(z, solution.mean[:, None])[:, 0]
        return Found(z, z_goal, solution.mean, latents)

    def _search_captured(self, frames: Tensor, goals: Tensor, streams: Sequence[torch.Generator]) -> Found | None:
        """None where this machine or this model cannot; a stream stands for its seed, so for one plan."""
        try:
            if self._captured is None:
                self._captured = CapturedSearch(self.model, self.config, self.dtype)
                log.info("fast path: CUDA graphs, products in %s", str(self.dtype).removeprefix("torch."))
            with torch.cuda.device(self.device):  # kernels go to the current one
                return self._captured(frames, goals, [s.initial_seed() for s in streams])
        except Exception as error:  # whatever a driver, a compiler or little memory brings about
            log.warning("fast path: off (%s: %s)", type(error).__name__, str(error).partition("\n")[0])
            self.plain, self._captured = True, None
            return None

    def _novelty(self, *latents: Tensor) -> Sequence[Novelty | None]:
        """Of frame, goal and end, (B, …) each, in one query."""
        if self.model.bank is None:
            return [None] * len(latents[0])
        ranks = self.model.bank.percentiles(torch.cat(latents)).unflatten(0, (3, -1))
        return [Novelty(*row) for row in ranks.T.tolist()]
