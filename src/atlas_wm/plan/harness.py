"""atlas-wm models inside stable-worldmodel: a cost for its solvers and a policy for its World.

Usage: docs/guides/in-stable-worldmodel.md.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from atlas_wm.config import PlanConfig
from atlas_wm.errors import UserError, unknown
from atlas_wm.images import check_frames, reduce_frames
from atlas_wm.models.world_model import WorldModel
from atlas_wm.normalizer import Normalizer
from atlas_wm.plan.costs import Cost, candidate_costs, make_cost
from atlas_wm.plan.planner import Planner
from atlas_wm.plan.retrieval import Retrieval, cheapest

log = logging.getLogger(__name__)
SOLVERS = ("cem", "icem", "mppi", "gradient")


class _Encoded(NamedTuple):
    given: Tensor  # as the solver passed it
    frames: Tensor  # (B, 3, H, W) a copy of the encoded frames
    z: Tensor  # (B, …)


class GoalCost(nn.Module):
    """The ``Costable`` of the library's solvers: a cost of plan/costs.py; default, the distance of each candidate's
    end from the goal.

    A solver may run on another device than the model. ``candidate_chunk``: as in :class:`PlanConfig`. The other
    settings of the model's run are not read; :func:`goal_cost` follows them.
    """

    def __init__(self, model: WorldModel, candidate_chunk: int | None = None, cost: Cost | None = None):
        super().__init__()
        self.model = model.eval()
        self.cost = cost or make_cost(PlanConfig(), model)
        plan = model.run.config.plan if cost is None and model.run else PlanConfig()
        if (plan.cost, plan.start) != ("terminal", "zero"):
            log.warning(
                "GoalCost(model) has the cost terminal, and its searches start from zero: goal_cost(model) has the "
                "run's cost %s and start %s",
                *(plan.cost, plan.start),
            )
        self.candidate_chunk = candidate_chunk
        self._encoded: dict[str, _Encoded] = {}

    def get_cost(self, info: dict[str, Any], candidates: Tensor) -> Tensor:
        """candidates: (B, S, horizon, frameskip·A) standardised actions → (B, S), differentiable in them.

        info["pixels"] and info["goal"]: (B, S, T, 3, H, W) uint8 of any size, the same for all S; the last of T is
        used.
        """
        z, z_goal = self._encode(info, "pixels"), self._encode(info, "goal")
        weights = {
            name: p.detach() for name, p in self.named_parameters()
        }  # gradients pass through them, but are not stored

        def cost(part: Tensor) -> Tensor:
            return functional_call(self, weights, (z, part, z_goal))

        chunk = self.candidate_chunk or candidates.shape[0] * candidates.shape[1]
        parts = candidates.to(z.device).split(max(1, chunk // len(candidates)), dim=1)
        if len(parts) > 1:  # the backward pass recomputes each chunk, so that only one is in memory
            cost = partial(checkpoint, cost, use_reentrant=False)
        return torch.cat([cost(part) for part in parts], dim=1).to(candidates.device)

    criterion = get_cost  # another name that the protocol requires

    def forward(self, z: Tensor, actions: Tensor, z_goal: Tensor) -> Tensor:
        return candidate_costs(self.cost, self.model, self.model, z, actions, z_goal)

    def _encode(self, info: dict[str, Any], key: str) -> Tensor:
        """Once for each solve: a solver passes the same tensor in every iteration, and a new one in every solve."""
        if key not in info:
            raise UserError(f"no {key!r} image to plan with: the environment or the dataset must provide it")
        given = info[key]
        frames, known = given[:, 0, -1], self._encoded.get(key)
        # Another tensor means another solve, before which the weights may have changed; other content means that
        # new frames were written into the same tensor.
        if known is None or known.given is not given or not torch.equal(known.frames, frames):
            check_frames(frames)
            device, size = next(self.parameters()).device, self.model.config.encoder.image_size
            with torch.no_grad():
                z = self.model.encode(reduce_frames(frames.to(device), size))
            known = self._encoded[key] = _Encoded(given, frames.clone(), z)
        return known.z


class RetrievalCost(GoalCost):
    """Also says where a search starts: the library's solvers ask a cost that has ``get_action``."""

    def __init__(self, model: WorldModel, candidate_chunk: int | None, cost: Cost, retrieval: Retrieval):
        super().__init__(model, candidate_chunk, cost)
        self.retrieval = retrieval

    def get_action(self, info: dict[str, Any], horizon: int = 1, prefix_actions: Tensor | None = None) -> Tensor:
        """The cheapest of zero and of the retrieved sequences: (B, horizon, frameskip·A).

        info["pixels"] and info["goal"]: (B, T, 3, H, W). Every search starts anew, so there are no prefix_actions.
        """
        if prefix_actions is not None or horizon != len(self.retrieval.chunks):
            raise UserError(
                f"with plan.start retrieval every search starts with {len(self.retrieval.chunks)} action chunks "
                f"(plan.horizon), but the solver asks for {horizon}: give both the same horizon, and the library's "
                f"PlanConfig warm_start=False"
            )
        info = {key: value[:, None] for key, value in info.items() if key in ("pixels", "goal")}
        z, z_goal = self._encode(info, "pixels"), self._encode(info, "goal")
        zero = torch.zeros(len(z), horizon, self.retrieval.actions.shape[1], device=z.device)
        proposals = self.retrieval.proposals(zero, z, z_goal)
        return cheapest(self.get_cost(info, proposals), proposals).to(info["pixels"].device)


def goal_cost(model: WorldModel, plan: PlanConfig | None = None) -> GoalCost:
    """With the cost and the start of these settings, by default those of the model's run."""
    planner = Planner(model, plan)
    parts = model, planner.config.candidate_chunk, planner.cost
    return GoalCost(*parts) if planner.retrieval is None else RetrievalCost(*parts, planner.retrieval)


class Standardisation:
    """A model's normaliser with the interface that the library expects, scikit-learn's.

    ``clip``: ``inverse_transform`` clips actions to the normaliser's bounds.
    """

    def __init__(self, normalizer: Normalizer, clip: bool = False):
        self.normalizer, self.clip = normalizer, clip

    def transform(self, actions: np.ndarray) -> np.ndarray:
        return self.normalizer.apply(torch.tensor(actions)).numpy()

    def inverse_transform(self, actions: np.ndarray) -> np.ndarray:
        raw = self.normalizer.invert(torch.tensor(actions))
        return (self.normalizer.clip(raw) if self.clip else raw).numpy()


def harness_policy(
    model: WorldModel,
    plan: PlanConfig | None = None,
    solver: str | Callable[[GoalCost], Any] = "cem",
    *,
    seed: int = 0,
) -> Any:
    """The policy that ``World.set_policy`` takes: a ``WorldModelPolicy`` that plans with ``model``.

    ``plan`` defaults to the settings of the model's run. ``solver``: one of SOLVERS, with these settings, or a
    function that builds another from the cost: ``lambda cost: PredictiveSamplingSolver(cost, num_samples=500)``.
    """
    from stable_worldmodel.policy import PlanConfig as TheirPlanConfig
    from stable_worldmodel.policy import WorldModelPolicy

    plan = plan or (model.run.config.plan if model.run else PlanConfig())
    if plan.solver != "cem":
        raise UserError(f"the library's policy runs the library's solvers, not {plan.solver}: pass solver=…")
    cost = goal_cost(model, plan)
    # With retrieval the library would ask only for the chunks after the rest of the last plan.
    warm_start = cost.cost.warm_start and not isinstance(cost, RetrievalCost)
    standardisation = Standardisation(model.normalizer, clip=plan.clip_actions)

    class Policy(WorldModelPolicy):
        def set_env(self, env: Any) -> None:
            """Standardises the bounds, to which iCEM clips its candidates."""
            super().set_env(env)
            space = env.action_space
            low, high = (standardisation.transform(limit).astype(np.float32) for limit in (space.low, space.high))
            self.solver.configure(action_space=gym.spaces.Box(low, high), n_envs=env.num_envs, config=self.cfg)

    return Policy(
        solver(cost) if callable(solver) else _make_solver(solver, cost, plan, seed),
        TheirPlanConfig(plan.horizon, plan.execute, action_block=model.config.frameskip, warm_start=warm_start),
        process={"action": standardisation},
        transform=dict.fromkeys(("pixels", "goal"), _as_plain_tensor),
    )


def _as_plain_tensor(image: Tensor) -> Tensor:
    """The library moves colour first if there is a transform; :class:`GoalCost` resizes."""
    return image.as_subclass(Tensor)


def _make_solver(name: str, cost: GoalCost, plan: PlanConfig, seed: int) -> Any:
    from stable_worldmodel import solver as library

    if name not in SOLVERS:
        raise unknown("solver", name, SOLVERS)
    on_cpu = next(cost.parameters()).device.type == "cpu"
    settings: dict[str, Any] = {
        "num_samples": plan.candidates,
        "n_steps": plan.iterations,
        "batch_size": 1 if on_cpu else 1_000_000,  # episodes planned together: see Planner.plan_batch
        "seed": seed,
    }
    if name == "gradient":
        adam = {"optimizer_cls": torch.optim.Adam, "optimizer_kwargs": {"lr": 0.1}}
        return library.GradientSolver(cost, **settings, **adam)
    sampling = {"cem": library.CEMSolver, "icem": library.ICEMSolver, "mppi": library.MPPISolver}[name]
    return sampling(cost, topk=plan.elites, **settings)
