"""From two images to actions: encode the current frame and the goal once, then search with CEM."""

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from atlas_wm.config import MOST_SEED, PlanConfig
from atlas_wm.errors import UserError, short
from atlas_wm.image_remedies import unlike_training
from atlas_wm.images import check_frames, frame_to_tensor, reduce_frames
from atlas_wm.kernels.rollout import FastTerminal, PackedProduct
from atlas_wm.models.predictors import Dynamics
from atlas_wm.models.world_model import WorldModel
from atlas_wm.plan.bounds import clip_limits
from atlas_wm.plan.captured import CapturedSearch, Found, Weights
from atlas_wm.plan.cem import cem
from atlas_wm.plan.offer import fast_rollout
from atlas_wm.plan.rules import cost, judge, starts
from atlas_wm.rng import make_rng

log = logging.getLogger(__name__)

WORKING_SET = 2**30  # bytes that candidates may take while they are rolled out on a CPU
LARGEST_CHUNK = 2**31  # candidates: no bound
Image = np.ndarray | Tensor


def dtype_of(precision: str) -> torch.dtype | None:
    """Of --precision; None for auto: what the device is best at."""
    return {"auto": None, "bf16": torch.bfloat16, "float32": torch.float32}[precision]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Novelty(NamedTuple):
    """How unknown latents are: 0 to 100, the share of training frames that are better known (LatentBank)."""

    frame: float  # the current frame
    goal: float
    end: float  # the imagined end of the plan


class Plan(NamedTuple):
    """What to do, clipped as PlanConfig.clip_actions says, and what the model imagines of just that."""

    actions: np.ndarray  # (execute·frameskip, A) in the environment's units: what to do before planning again
    cost: float  # WorldModel.distance from the goal: of the imagined end, or of what the rule counts
    start_cost: float  # the distance before the first action
    latents: np.ndarray  # (horizon, …) imagined latents after each block
    novelty: Novelty | None  # None where the run has no bank
    rest: np.ndarray  # (horizon − execute, frameskip·A) the standardised blocks after those: for the next plan


class Planner:
    """Receding-horizon planning to a goal image: cost ‖ẑ_H − z_g‖², or as its rule says (plan/rules.py).

    >>> plan = Planner(load_model("runs/x")).plan(frame, goal)
    >>> for action in plan.actions: env.step(action)

    ``config`` defaults to the settings of the model's run. On a CUDA device the search runs as captured graphs
    where it can, with noise of its own; elsewhere repeated work is left out. ``dtype`` of the products while
    candidates are compared: bfloat16 on a CUDA device and float32, the numbers of the plain search, elsewhere.
    ``plain``: every step as :mod:`atlas_wm.plan.cem` writes it.
    """

    def __init__(
        self,
        model: WorldModel,
        config: PlanConfig | None = None,
        *,
        plain: bool = False,
        dtype: torch.dtype | None = None,
    ):
        self.model = model.eval()
        self.config = config or (model.run.config.plan if model.run else PlanConfig())
        self.plain = plain
        self.dtype = dtype or (torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        if model.run and self.config.clip_actions and model.normalizer.low is None:
            log.warning("plans are not clipped: the run has no action bounds (`atlas bank RUN` adds them)")
        self.seconds = 0.0  # spent planning
        self.chunk = self.config.candidate_chunk or self._automatic_chunk()
        self._seen: set[tuple[int, ...]] = set()  # sizes of images
        self._captured: CapturedSearch | None = None
        self._fast: Dynamics | None = None
        self._weights: Weights | None = None

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def plan(self, frame: Image, goal: Image, *, seed: int = 0, last: Plan | None = None) -> Plan:
        """One plan. frame and goal: (H, W, 3) uint8, arrays or tensors, as environments render them. last: the plan
        that was acted on before this one, towards the same goal; the rule terminal does not look at it."""
        if type(seed) is bool or not isinstance(seed, (int, np.integer)) or not 0 <= seed <= MOST_SEED:
            raise UserError(f"seed must be a whole number from 0 to {MOST_SEED}, not {short(seed)}")
        frames = self.prepare(frame_to_tensor(frame, "frame"))
        goals = self.prepare(frame_to_tensor(goal, "goal"))
        return self.plan_batch(frames, goals, [make_rng(int(seed))], [last and last.rest])[0]

    def prepare(self, frames: Tensor) -> Tensor:
        """(N, 3, H, W) uint8 of any size → the size the model was trained on. What that does to them and did not do
        to the training frames is logged, once for each size."""
        check_frames(frames)
        shape, size = tuple(frames.shape[-2:]), self.model.config.encoder.image_size
        if shape not in self._seen:
            self._seen.add(shape)
            unlike = unlike_training(shape, size, self.model.run.data.frame_size if self.model.run else None)
            if unlike is not None:
                log.warning("%s", unlike)
        return reduce_frames(frames, size)

    @torch.inference_mode()
    def plan_batch(
        self,
        frames: Tensor,
        goals: Tensor,
        rngs: Sequence[torch.Generator],
        rests: Sequence[np.ndarray | None] | None = None,
    ) -> list[Plan]:
        """A plan for each of B episodes. frames and goals: (B, 3, S, S) uint8, prepared; one stream each.

        ``rests``: for each episode what its last plan left over (``Plan.rest``), None in the beginning.

        On the CPU episodes are planned one by one: matrix products round differently in batches of different
        sizes, and an episode's plan must not depend on the company it was planned in.
        """
        rests = rests or [None] * len(rngs)
        if not len(frames) == len(goals) == len(rngs) == len(rests):
            counts = f"{len(frames)} frames, {len(goals)} goals, {len(rngs)} rngs and {len(rests)} rests"
            raise ValueError(f"{counts} do not match")
        started = time.perf_counter()
        start = starts(self.config, self.model.config.frameskip * self.model.action_size, rests).to(self.device)
        together = self.device.type != "cpu" or len(rngs) == 1
        each = [slice(None)] if together else [slice(i, i + 1) for i in range(len(rngs))]
        plans = [plan for one in each for plan in self._solve(frames[one], goals[one], rngs[one], start[one])]
        self.seconds += time.perf_counter() - started
        return plans

    def _solve(self, frames: Tensor, goals: Tensor, rngs: Sequence[torch.Generator], start: Tensor) -> list[Plan]:
        model, execute = self.model, self.config.execute
        found = None
        if self.device.type == "cuda" and not self.plain:
            found = self._search_captured(frames, goals, rngs, start)
        z, z_goal, mean, latents = found or self._search(frames, goals, rngs, start)
        costs = judge(self.config, model.distance(latents, z_goal[:, None])).tolist()
        start_costs = model.distance(z, z_goal).tolist()
        standardised = mean[:, :execute].unflatten(-1, (-1, model.action_size)).flatten(1, 2)
        raw = model.normalizer.invert(standardised.cpu())
        if self.config.clip_actions:  # again: the bounds themselves, not what rounding makes of them
            raw = model.normalizer.clip(raw)
        novelty = self._novelty(z, z_goal, latents[:, -1])
        actions, imagined, rests = raw.numpy(), latents.cpu().numpy(), mean[:, execute:].cpu().numpy()
        return [Plan(*parts) for parts in zip(actions, costs, start_costs, imagined, novelty, rests, strict=True)]

    def _search(self, frames: Tensor, goals: Tensor, rngs: Sequence[torch.Generator], start: Tensor) -> Found:
        model, config = self.model, self.config
        z = model.encode(frames.to(self.device))  # (B, …)
        z_goal = model.encode(goals.to(self.device))
        dynamics = self._dynamics()

        def costs(candidates: Tensor) -> Tensor:
            while True:
                parts = candidates.split(max(1, self.chunk // len(candidates)), dim=1)
                try:
                    return torch.cat([cost(config, model, dynamics, z, part, z_goal) for part in parts], dim=1)
                except torch.cuda.OutOfMemoryError:
                    rows = parts[0].shape[0] * parts[0].shape[1]
                    if parts[0].shape[1] == 1:
                        raise
                self.chunk = rows // 2
                log.warning("out of memory with %d candidates at once: %d from now on", rows, self.chunk)
                torch.cuda.empty_cache()

        mean, limits = cem(costs, start, config, rngs).mean, clip_limits(config, model)
        if limits is not None:
            mean = mean.clamp(*limits)
        exact = dynamics if self.dtype == torch.float32 else model
        latents = exact.rollout(z, mean[:, None])[:, 0]
        return Found(z, z_goal, mean, latents)

    def _search_captured(
        self, frames: Tensor, goals: Tensor, rngs: Sequence[torch.Generator], start: Tensor
    ) -> Found | None:
        """None where this machine or this model cannot; a stream stands for its seed, so for one plan."""
        try:
            with torch.cuda.device(self.device):  # kernels go to the current one
                if self._captured is None:
                    self._captured = CapturedSearch(self.model, self.config, self.dtype)
                    log.info("fast path: CUDA graphs, products in %s", _name(self.dtype))
                return self._captured(frames, goals, [s.initial_seed() for s in rngs], start)
        except Exception as error:  # whatever a driver, a compiler or little memory brings about
            self._captured = None
            self._do_without(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            return None

    def _dynamics(self) -> Dynamics:
        """The model, or what its predictor offers instead, made anew where the weights have changed."""
        if self.plain:
            return self.model
        weights = Weights.of(self.model.predictor)
        if self._fast is None or weights != self._weights:
            try:
                fast = fast_rollout(self.model, self.dtype)
            except UserError as why:
                self._do_without(str(why))
                return self.model
            packable = self.device.type == "cpu" and isinstance(fast, FastTerminal)
            if packable and self._fast is None and not PackedProduct.supported(self.dtype):
                log.info("slower: this torch or this CPU has no oneDNN products in %s", _name(self.dtype))
            self._fast, self._weights = fast, weights
        return self._fast

    def _automatic_chunk(self) -> int:
        """No bound on a GPU, which says when its memory ends; on a CPU as many candidates as about 1 GiB holds."""
        if self.device.type != "cpu":
            return LARGEST_CHUNK
        config, p = self.model.config, self.model.config.predictor
        steps = max(config.history, self.config.horizon)
        tokens = steps * (config.encoder.patches if p.kind == "patch" else 1)
        # Of each token q, k, v, the answer and both sides of GELU; k and v, and the modulation, of all blocks.
        floats = tokens * (
            4 * p.heads * p.head_dim + 2 * p.mlp + p.depth * (2 * p.heads * p.head_dim + 6 * p.width)
        )
        return max(1, WORKING_SET // (4 * floats))

    def _do_without(self, why: str) -> None:
        log.warning("fast path: off (%s)", why)
        self.plain = True

    def _novelty(self, *latents: Tensor) -> Sequence[Novelty | None]:
        """Of frame, goal and end, (B, …) each, in one query."""
        if self.model.bank is None:
            return [None] * len(latents[0])
        ranks = self.model.bank.percentiles(torch.cat(latents)).unflatten(0, (3, -1))
        return [Novelty(*row) for row in ranks.T.tolist()]
