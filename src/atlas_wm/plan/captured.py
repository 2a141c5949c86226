"""CEM (:mod:`atlas_wm.plan.cem`) with the costs of this package on a CUDA device, as CUDA graphs.

One iteration is captured as a graph and replayed; so are the encoding before it and the rollout after it. Noise
comes from a counter-based generator inside the graph, keyed by the episode: its candidates do not depend on the
others in its batch. A graph has a fixed batch size; smaller batches are padded. Batches that do not fit into memory
are halved.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from atlas_wm.config import PlanConfig
from atlas_wm.models.world_model import WorldModel
from atlas_wm.plan.bounds import clip_limits
from atlas_wm.plan.costs import candidate_costs, make_cost
from atlas_wm.plan.offer import fast_rollout
from atlas_wm.plan.retrieval import NONE, Retrieval, cheapest

log = logging.getLogger(__name__)

LARGEST_BATCH = 128  # episodes; the graphs of the paper's model take about 60 MB for each
EXACT_BATCHES = 8  # above it, batch sizes are multiples of it


class Found(NamedTuple):
    """The result of a search."""

    z: Tensor  # (B, …)
    z_goal: Tensor  # (B, …)
    mean: Tensor  # (B, H, D) the answer
    latents: Tensor  # (B, H, …) imagined along the answer


class Weights:
    """The weights of a module at one time: equal to those of a later time if none was written in between."""

    def __init__(self, tensors: list[Tensor]):
        self.tensors = tensors  # references, so that no other tensor gets the same address
        self.state = [(t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors]

    @classmethod
    def of(cls, module: nn.Module) -> "Weights":
        return cls([w.detach() for w in chain(module.parameters(), module.buffers())])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Weights) and self.state == other.state


def captured(function: Callable[[], Any], pool: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of the function's work on the device, and its result, which every replay overwrites."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # warm up: compile kernels, allocate workspaces of libraries
        function()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    # thread_local: other threads, such as a loader that pins memory, may call CUDA during the capture.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = function()
    return graph, result


class CapturedSearch:
    """``search(frames, goals, keys, start)`` finds plans for B episodes.

    ``dtype``: of the products while candidates are compared: bfloat16, or float32 for the numbers of the plain
    search. Frames are encoded, and the answer is rolled out, in float32 in both cases. ``retrieval``: proposes
    sequences, which compete with the start.
    """

    def __init__(
        self,
        model: WorldModel,
        config: PlanConfig,
        dtype: torch.dtype = torch.bfloat16,
        retrieval: Retrieval | None = None,
    ):
        from atlas_wm.kernels import cem as kernels  # needs Triton

        self.model, self.config, self.dtype, self.retrieval = model, config, dtype, retrieval
        self.cost = make_cost(config, model)
        self.most = config.candidate_chunk or LARGEST_BATCH * config.candidates  # candidates at once
        self.kernels = kernels
        self._fold(Weights.of(model))

    @torch.inference_mode()
    def __call__(
        self, frames: Tensor, goals: Tensor, keys: Sequence[int], start: Tensor, left_out: Tensor | None = None
    ) -> Found:
        """frames and goals: (B, 3, S, S) uint8 on any device; keys: one noise seed per plan; start: (B, H, D), the
        first mean of each search; left_out: (B,), as in Retrieval."""
        if left_out is None:
            left_out = torch.full((len(keys),), NONE)
        found = self._search(frames, goals, keys, start, left_out)
        # While the device works: check that the folded weights are still current.
        weights = Weights.of(self.model)
        if weights != self.weights:
            self._fold(weights)
            found = self._search(frames, goals, keys, start, left_out)
        return found

    def _fold(self, weights: Weights) -> None:
        self._drop_graphs()
        self.exact = self.world = fast_rollout(self.model, torch.float32, capturable=True)
        if self.dtype != torch.float32:
            self.world = fast_rollout(self.model, self.dtype, capturable=True)
        self.weights = weights

    def _drop_graphs(self) -> None:
        self.batches: dict[int, _Batch] = {}
        # The graphs never run at the same time, so they share memory, which is freed with the last of them.
        self.pool = torch.cuda.graph_pool_handle()

    def _search(self, frames: Tensor, goals: Tensor, keys: Sequence[int], start: Tensor, left_out: Tensor) -> Found:
        while True:
            largest = max(1, min(LARGEST_BATCH, self.most // self.config.candidates))
            try:
                return self._search_parts(largest, frames, goals, keys, start, left_out)
            except torch.cuda.OutOfMemoryError:
                at_once = min(self.most, padded(min(len(keys), largest), largest) * self.config.candidates)
                if at_once == 1:
                    raise
            self.most = at_once // 2
            log.warning("out of memory with %d candidates at once: %d from now on", at_once, self.most)
            self._drop_graphs()
            torch.cuda.empty_cache()

    def _search_parts(
        self, largest: int, frames: Tensor, goals: Tensor, keys: Sequence[int], start: Tensor, left_out: Tensor
    ) -> Found:
        parts = -(-len(keys) // largest)
        each = -(-len(keys) // parts)
        found = []
        for i in range(0, len(keys), each):
            mine = slice(i, i + each)
            size = padded(len(keys[mine]), largest)
            if size not in self.batches:
                self.batches[size] = _Batch(self, size, frames)
            parts_of = (frames[mine], goals[mine], keys[mine], start[mine], left_out[mine])
            found.append(self.batches[size].search(*parts_of))
        return Found(*map(torch.cat, zip(*found, strict=True)))


def padded(count: int, largest: int) -> int:
    """The batch size that a number of episodes is padded to: few sizes, so few graphs."""
    return count if count <= EXACT_BATCHES else min(-(-count // EXACT_BATCHES) * EXACT_BATCHES, largest)


class _Batch:
    """The graphs for one batch size, and the tensors they read and write."""

    def __init__(self, search: CapturedSearch, size: int, frames: Tensor):
        model, config, world, exact = search.model, search.config, search.world, search.exact
        device = next(model.parameters()).device
        self.size, self.iterations = size, config.iterations
        self.frames = torch.zeros(2, size, *frames.shape[1:], dtype=torch.uint8, device=device)  # and goals
        self.keys = torch.zeros(size, dtype=torch.int64, device=device)
        iteration = torch.zeros(1, dtype=torch.int64, device=device)
        self.mean = torch.zeros(size, config.horizon, model.config.frameskip * model.action_size, device=device)
        self.start = torch.zeros_like(self.mean)
        self.left_out = torch.full_like(self.keys, NONE)
        self.best = torch.zeros_like(self.mean)  # the cheapest proposal
        std = torch.ones_like(self.mean)
        limits = clip_limits(config, model)
        self.graph_inputs = (std, iteration, limits)  # graphs hold addresses: these tensors must outlive them
        together = max(1, min(config.candidates, search.most // size))  # candidates of each episode

        def begin() -> Tensor:
            self.mean.copy_(self.start)
            std.fill_(1)
            iteration.zero_()
            return model.encode(self.frames.flatten(0, 1)).unflatten(0, (2, size))

        def costs_of(candidates: Tensor) -> Tensor:
            costs = [
                candidate_costs(search.cost, model, world, self.z[0], part, self.z[1])
                for part in candidates.split(together, dim=1)
            ]
            return costs[0] if len(costs) == 1 else torch.cat(costs, dim=1)

        def retrieve() -> Tensor:
            assert search.retrieval is not None
            proposals = search.retrieval.proposals(self.start, self.z[0], self.z[1], self.left_out)
            self.mean.copy_(cheapest(costs_of(proposals), proposals))
            self.best.copy_(self.mean)
            return proposals

        def iterate(proposals: Tensor | None = None) -> None:
            candidates = search.kernels.draw_candidates(self.mean, std, self.keys, iteration, config.candidates)
            if proposals is not None:
                candidates[:, : proposals.shape[1]] = proposals
            search.kernels.refine(costs_of(candidates), candidates, config.elites, self.mean, std, iteration)

        def finish() -> Tensor:
            if limits is not None:
                self.mean.clamp_(*limits)
                self.best.clamp_(*limits)
            if search.retrieval is not None:
                answers = torch.stack([self.mean, self.best], dim=1)
                costs = candidate_costs(search.cost, model, exact, self.z[0], answers, self.z[1])
                self.mean.copy_(cheapest(costs, answers))
            return exact.rollout(self.z[0], self.mean[:, None])[:, 0]

        self.begin, self.z = captured(begin, search.pool)
        self.begin.replay()
        self.first: list[torch.cuda.CUDAGraph] = []  # instead of the first iteration
        if search.retrieval is not None:
            retrieving, self.proposals = captured(retrieve, search.pool)
            retrieving.replay()
            self.first = [retrieving, captured(partial(iterate, self.proposals), search.pool)[0]]
        self.iterate, _ = captured(iterate, search.pool)
        self.finish, self.latents = captured(finish, search.pool)

    def search(self, frames: Tensor, goals: Tensor, keys: Sequence[int], start: Tensor, left_out: Tensor) -> Found:
        count = len(keys)
        self.start[:count].copy_(start)
        self.left_out[:count].copy_(left_out)
        self.frames[0, :count].copy_(frames)
        self.frames[1, :count].copy_(goals)
        self.keys[:count].copy_(torch.tensor(keys, dtype=torch.int64))
        self.begin.replay()
        for graph in self.first:
            graph.replay()
        for _ in range(self.iterations - bool(self.first)):
            self.iterate.replay()
        self.finish.replay()
        return Found(*(t[:count].clone() for t in (*self.z, self.mean, self.latents)))
