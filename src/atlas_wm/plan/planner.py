"""From two images to actions: encode the current frame and the goal once, then search for the cheapest actions."""

import logging
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from atlas_wm.config import MOST_SEED, PlanConfig
from atlas_wm.errors import UserError, short
from atlas_wm.image_remedies import unlike_training
from atlas_wm.images import check_frames, frame_to_tensor, reduce_frames
from atlas_wm.kernels.rollout import FastTerminal, PackedProduct
from atlas_wm.models.layers import MODULATION
from atlas_wm.models.predictors import Dynamics
from atlas_wm.models.world_model import WorldModel
from atlas_wm.parallel.devices import one_thread
from atlas_wm.plan.bounds import clip_limits
from atlas_wm.plan.captured import CapturedSearch, Found, Weights
from atlas_wm.plan.cem import make_solver
from atlas_wm.plan.costs import candidate_costs, make_cost, plan_costs, starts
from atlas_wm.plan.offer import NoFastRollout, fast_rollout
from atlas_wm.plan.retrieval import NONE, Retrieval, cheapest
from atlas_wm.rng import make_rng

log = logging.getLogger(__name__)

WORKING_SET = 2**30  # bytes that candidates may take while they are rolled out on a CPU
LARGEST_CHUNK = 2**31  # candidates: no limit
Image = np.ndarray | Tensor
FLAGGED = 99.0  # percentile
SMALL_PREDICTOR = 2_000_000  # parameters


def dtype_of(precision: str) -> torch.dtype | None:
    """The dtype that --precision names; None for auto."""
    return {"auto": None, "bf16": torch.bfloat16, "float32": torch.float32}[precision]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_seed(seed: Any) -> int:
    if type(seed) is bool or not isinstance(seed, (int, np.integer)) or not 0 <= seed <= MOST_SEED:
        raise UserError(f"seed must be a whole number from 0 to {MOST_SEED}, not {short(seed)}")
    return int(seed)


class LatentNovelty(NamedTuple):
    """How unlike the training frames latents are: percentiles, 0 to 100, among those frames (LatentBank)."""

    frame: float  # the current frame
    goal: float
    end: float  # the imagined end of the plan


class Novelty(NamedTuple):
    """The same, and how unlike them the images are: percentiles among held-out frames (ImageBank)."""

    frame: float
    goal: float
    end: float
    frame_image: float
    goal_image: float


def is_flagged(novelty: Novelty | LatentNovelty) -> bool:
    """Whether one of its numbers lies above the percentile that about 1 training frame in 100 exceeds."""
    return max(novelty) > FLAGGED


class Plan(NamedTuple):
    """Actions, clipped if PlanConfig.clip_actions is set, and what the model imagines of exactly these.

    ``strayed`` is None without demonstrations and ``crossed`` without a bank, and ``Planner`` warns; ``risk`` takes
    None as 0.
    """

    actions: np.ndarray  # (execute·frameskip, A) in the environment's units: to execute before planning again
    cost: float  # by plan.cost: terminal and nearest, a WorldModel.distance from the goal; temporal, model steps
    start_cost: float  # by the same measure, before the first action
    latents: np.ndarray  # (horizon, …) imagined latents after each action chunk
    novelty: Novelty | LatentNovelty | None  # None where the run has no bank; of older runs only the latents'
    remaining: float  # share of start_cost (or Cost.near) at the end; if the cost reads all steps, at the nearest
    strayed: float | None  # how far the imagined path leaves what was seen in training (Demonstrations.strayed)
    crossed: float | None  # share of what changed in the scene that lies on the imagined path (LatentBank.crossed)
    risk: float  # 1 − (1 − remaining)(1 − strayed)(1 − crossed), 0 to 1: high values predict failure
    rest: np.ndarray  # (horizon − execute, frameskip·A) the standardised chunks after those, for the next plan


class Planner:
    """Receding-horizon planning to a goal image: cost ‖ẑ_H − z_g‖², or another one (plan/costs.py).

    >>> plan = Planner(load_model("runs/x")).plan(frame, goal)
    >>> for action in plan.actions: env.step(action)

    ``config`` defaults to the settings of the model's run. On a CUDA device CEM with a cost of this package runs as
    captured graphs, with their own noise; otherwise the predictor's fast rollout is used where it offers one.
    ``dtype`` of the products while candidates are compared: bfloat16 on a CUDA device; float32, the numbers of the
    plain search, elsewhere. ``plain``: no fast path.

    On a CPU a small model plans with one thread, whatever torch's setting is, unless OMP_NUM_THREADS is set: more
    gain little, and on busy cores they make a plan take seconds (docs/notes/planning-speed.md).
    """

    def __init__(
        self,
        model: WorldModel,
        config: PlanConfig | None = None,
        *,
        plain: bool = False,
        dtype: torch.dtype | None = None,
    ):
        if not isinstance(model, torch.nn.Module):
            raise UserError(f"Planner takes a model, not {short(model)}: Planner(load_model(…))")
        if config is not None and not isinstance(config, PlanConfig):
            raise UserError(f"Planner takes its settings as a PlanConfig(…), not {short(config)}")
        self.model = model.eval()
        self.config = config or (model.run.config.plan if model.run else PlanConfig())
        self.cost, self.solver = make_cost(self.config, self.model), make_solver(self.config)
        self.retrieval = (
            Retrieval(model, self.config, self.cost.ends_only) if self.config.start == "retrieval" else None
        )
        self.plain = plain or self.solver.needs_gradients  # which fast paths do not have
        self.dtype = dtype or (torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        if model.run and self.config.clip_actions and model.normalizer.low is None:
            log.warning("plans are not clipped: the run has no action bounds (`atlas bank RUN` adds them)")
        known = {"strayed": model.demonstrations and model.demonstrations.usual, "crossed": model.bank}
        if model.run and None in known.values():
            without = " and ".join(name for name, part in known.items() if part is None)
            log.warning(
                "risk is without %s: `atlas bank RUN` adds what that needs, for final weights and if episodes are "
                "longer than a plan",
                without,
            )
        if self.device.type == "cuda" and not self.plain and self.config.own_parts:
            log.info("no CUDA graphs: they are for the costs and the solver of atlas-wm")
        size = sum(parameter.numel() for parameter in model.predictor.parameters())
        small = self.device.type == "cpu" and size < SMALL_PREDICTOR and "OMP_NUM_THREADS" not in os.environ
        self.threads = one_thread if small else nullcontext
        self.seconds = 0.0  # spent planning
        self.chunk = self.config.candidate_chunk or self._automatic_chunk()
        self._seen: set[tuple[int, ...]] = set()  # image sizes
        self._captured: CapturedSearch | None = None
        self._fast: Dynamics | None = None
        self._weights: Weights | None = None

    @property
    def _action_chunk(self) -> int:
        return self.model.config.frameskip * self.model.action_size

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def plan(self, frame: Image, goal: Image, *, seed: int = 0, last: Plan | None = None) -> Plan:
        """One plan. frame and goal: (H, W, 3) uint8, arrays or tensors, as environments render them. last: the plan
        executed before this one, to the same goal; only a cost with ``warm_start`` uses it."""
        seed = check_seed(seed)
        frames = self.prepare(frame_to_tensor(frame, "frame"))
        goals = self.prepare(frame_to_tensor(goal, "goal"))
        return self.plan_batch(frames, goals, [make_rng(seed)], [None if last is None else self._rest(last)])[0]

    def _rest(self, last: Plan) -> np.ndarray:
        rest, most = getattr(last, "rest", None), (self.config.horizon, self._action_chunk)
        if not isinstance(rest, np.ndarray) or rest.shape[1:] != most[1:] or len(rest) > most[0]:
            found = f"a rest of shape {rest.shape}" if isinstance(rest, np.ndarray) else short(last)
            raise UserError(f"last must be a plan of this planner, whose rest is at most {most}, not {found}")
        return rest

    def prepare(self, frames: Tensor) -> Tensor:
        """(N, 3, H, W) uint8 of any size → the size that the model was trained on. Warns, once for each size, where
        this changes images otherwise than it changed the training frames."""
        check_frames(frames)
        shape, size = tuple(frames.shape[-2:]), self.model.config.encoder.image_size
        if shape not in self._seen:
            self._seen.add(shape)
            unlike = unlike_training(shape, size, self.model.run.data.frame_size if self.model.run else None)
            if unlike is not None:
                log.warning("%s", unlike)
        return reduce_frames(frames, size)

    def plan_batch(
        self,
        frames: Tensor,
        goals: Tensor,
        rngs: Sequence[torch.Generator],
        rests: Sequence[np.ndarray | None] | None = None,
        left_out: Sequence[int] | None = None,
    ) -> list[Plan]:
        """A plan for each of B episodes. frames and goals: (B, 3, S, S) uint8, prepared; one rng each.

        ``rests``: ``Plan.rest`` of the last plan of each episode, None at its start. ``left_out``: the group of
        demonstrations that each episode must not retrieve, or retrieval.NONE.

        On a CPU episodes are planned one by one: matrix products round differently in batches of different sizes,
        and an episode's plan must not depend on the other episodes in its batch.
        """
        rests = [None] * len(rngs) if rests is None else rests
        left_out = [NONE] * len(rngs) if left_out is None else [int(group) for group in left_out]
        if not len(frames) == len(goals) == len(rngs) == len(rests) == len(left_out):
            counts = f"{len(frames)} frames, {len(goals)} goals, {len(rngs)} rngs, {len(rests)} rests"
            raise ValueError(f"{counts} and {len(left_out)} left out do not match")
        started = time.perf_counter()
        self.model.eval()
        start = starts(self.cost, self._action_chunk, rests).to(self.device)
        without = torch.tensor(left_out, dtype=torch.int64, device=self.device)
        together = self.device.type != "cpu" or len(rngs) == 1
        each = [slice(None)] if together else [slice(i, i + 1) for i in range(len(rngs))]
        with self.threads(), torch.no_grad() if self.solver.needs_gradients else torch.inference_mode():
            plans = [
                plan
                for one in each
                for plan in self._solve(frames[one], goals[one], rngs[one], start[one], without[one])
            ]
        self.seconds += time.perf_counter() - started
        return plans

    def _solve(
        self, frames: Tensor, goals: Tensor, rngs: Sequence[torch.Generator], start: Tensor, left_out: Tensor
    ) -> list[Plan]:
        model, execute = self.model, self.config.execute
        found = None
        if self.device.type == "cuda" and not self.plain and not self.config.own_parts:
            found = self._search_captured(frames, goals, rngs, start, left_out)
        z, z_goal, mean, latents = found or self._search(frames, goals, rngs, start, left_out)
        costs = plan_costs(self.cost, model, z, mean, latents, z_goal).tolist()
        start_costs = self.cost.distance(model, z, z_goal)
        distances = self.cost.distance(model, latents, z_goal[:, None])  # (B, H)
        ends = distances[:, -1] if self.cost.ends_only else distances.amin(dim=1)
        near = max(self.cost.near(model), 1e-12)
        remaining = (ends / start_costs.clamp_min(near)).cpu()
        way = (start_costs / near).clamp(0, 1).cpu()  # who is there has none to go
        paths = torch.cat([z[:, None], latents], dim=1)
        strayed, crossed = (share if share is None else way * share for share in self._on_the_way(frames, paths))
        shares = [remaining.clamp(0, 1), *(share for share in (strayed, crossed) if share is not None)]
        risk = 1 - torch.stack([1 - share for share in shares]).prod(dim=0)
        standardised = mean[:, :execute].unflatten(-1, (-1, model.action_size)).flatten(1, 2)
        raw = model.normalizer.invert(standardised.cpu())
        if self.config.clip_actions:  # again, to the bounds themselves: inverting rounds
            raw = model.normalizer.clip(raw)
        novelty = self._novelty((z, z_goal, latents[:, -1]), (frames, goals))
        actions, imagined, rests = raw.numpy(), latents.cpu().numpy(), mean[:, execute:].cpu().numpy()
        on_the_way = [[None] * len(actions) if share is None else share.tolist() for share in (strayed, crossed)]
        judged = (novelty, remaining.tolist(), *on_the_way, risk.tolist())
        parts = (actions, costs, start_costs.tolist(), imagined, *judged, rests)
        return [Plan(*part) for part in zip(*parts, strict=True)]

    def _search(
        self,
        frames: Tensor,
        goals: Tensor,
        rngs: Sequence[torch.Generator],
        start: Tensor,
        left_out: Tensor | None = None,
    ) -> Found:
        model = self.model
        z = model.encode(frames.to(self.device))  # (B, …)
        z_goal = model.encode(goals.to(self.device))
        dynamics = self._dynamics()

        def costs(candidates: Tensor) -> Tensor:
            while True:
                parts = candidates.split(max(1, self.chunk // len(candidates)), dim=1)
                try:
                    each = (candidate_costs(self.cost, model, dynamics, z, part, z_goal) for part in parts)
                    return torch.cat(list(each), dim=1)
                except torch.cuda.OutOfMemoryError:
                    rows = parts[0].shape[0] * parts[0].shape[1]
                    if parts[0].shape[1] == 1:
                        raise
                self.chunk = rows // 2
                log.warning("out of memory with %d candidates at once: %d from now on", rows, self.chunk)
                torch.cuda.empty_cache()

        proposals: tuple[Tensor, ...] = ()
        if self.retrieval is not None:
            found = self.retrieval.proposals(start, z, z_goal, left_out)
            start = cheapest(costs(found), found)
            proposals = (found,) if self.solver.takes_proposals else ()
        mean, limits = self.solver(costs, start, rngs, *proposals).mean, clip_limits(self.config, model)
        if limits is not None:
            mean, start = mean.clamp(*limits), start.clamp(*limits)
        exact = dynamics if self.dtype == torch.float32 else model
        if self.retrieval is not None:  # a plan never costs more than the best proposal
            answers = torch.stack([mean, start], dim=1)
            mean = cheapest(candidate_costs(self.cost, model, exact, z, answers, z_goal), answers)
        latents = exact.rollout(z, mean[:, None])[:, 0]
        return Found(z, z_goal, mean, latents)

    def _search_captured(
        self,
        frames: Tensor,
        goals: Tensor,
        rngs: Sequence[torch.Generator],
        start: Tensor,
        left_out: Tensor | None = None,
    ) -> Found | None:
        """None where this machine or this model cannot. Of each rng only the seed is used, so one plan each."""
        try:
            with torch.cuda.device(self.device):  # kernels go to the current one
                if self._captured is None:
                    self._captured = CapturedSearch(self.model, self.config, self.dtype, self.retrieval)
                    log.info("fast path: CUDA graphs, products in %s", _name(self.dtype))
                return self._captured(frames, goals, [s.initial_seed() for s in rngs], start, left_out)
        except Exception as error:  # of a driver, a compiler or too little memory
            self._captured = None
            self._turn_off(error)
            return None

    def _dynamics(self) -> Dynamics:
        """The model, or the fast rollout that its predictor offers, rebuilt when the weights change."""
        if self.plain:
            return self.model
        weights = Weights.of(self.model.predictor)
        if self._fast is None or weights != self._weights:
            try:
                fast = fast_rollout(self.model, self.dtype)
            except Exception as error:  # as above; a UserError says why there is none
                self._turn_off(error)
                return self.model
            packable = self.device.type == "cpu" and isinstance(fast, FastTerminal)
            if packable and self._fast is None and not PackedProduct.supported(self.dtype):
                log.info("slower: this torch or this CPU has no oneDNN products in %s", _name(self.dtype))
            self._fast, self._weights = fast, weights
        return self._fast

    def _automatic_chunk(self) -> int:
        """No limit on a GPU, which reports when memory runs out; on a CPU as many candidates as fit about 1 GiB."""
        if self.device.type != "cpu":
            return LARGEST_CHUNK
        config, p = self.model.config, self.model.config.predictor
        steps = max(config.history, self.config.horizon)
        tokens = steps * (config.encoder.patches if p.kind == "patch" else 1)
        # For each token: q, k, v, the output and both sides of GELU; and of all blocks k, v and the modulation.
        floats = tokens * (
            4 * p.heads * p.head_dim + 2 * p.mlp + p.depth * (2 * p.heads * p.head_dim + MODULATION * p.width)
        )
        return max(1, WORKING_SET // (4 * floats))

    def _turn_off(self, error: Exception) -> None:
        """Plan without fast paths from now on; a predictor that offers none is no reason to warn."""
        why = str(error).partition("\n")[0]
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        level = logging.INFO if isinstance(error, NoFastRollout) else logging.WARNING
        log.log(level, "fast path: off (%s%s)", kind, why)
        self.plain = True

    def _on_the_way(self, frames: Tensor, paths: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """How far each path strays, and how much of what changed it crosses."""
        known, bank = self.model.demonstrations, self.model.bank
        strayed = None if known is None else known.strayed(paths)
        return strayed, None if bank is None else bank.crossed(frames.to(self.device), paths)

    def _novelty(
        self, latents: Sequence[Tensor], images: Sequence[Tensor]
    ) -> Sequence[Novelty | LatentNovelty | None]:
        """Of latents of frame, goal and end, (B, …) each, in one query, and of the images of frame and goal."""
        bank = self.model.bank
        if bank is None:
            return [None] * len(latents[0])
        ranks = bank.percentiles(torch.cat(list(latents))).unflatten(0, (3, -1)).T.tolist()
        if bank.images is None:
            return [LatentNovelty(*row) for row in ranks]
        seen = bank.images.percentiles(torch.cat(list(images)).to(self.device)).unflatten(0, (2, -1)).T.tolist()
        return [Novelty(*row, *image) for row, image in zip(ranks, seen, strict=True)]
