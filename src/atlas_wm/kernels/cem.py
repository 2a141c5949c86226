"""Triton kernels that speed up CEM on a GPU: draw candidates, refit mean and standard deviation to the elites.

Must equal one iteration of :class:`atlas_wm.plan.cem.CEM`, but for the source of the noise.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _candidates(mean, std, keys, iteration, out, samples, SIZE, BLOCK: tl.constexpr):
    episode = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = i < samples * SIZE
    number = tl.load(iteration).to(tl.int32) * samples * SIZE + i  # unique for every draw of a plan
    noise = tl.where(i < SIZE, 0.0, tl.randn(tl.load(keys + episode), number))  # candidate 0 is the mean
    j = episode * SIZE + i % SIZE
    value = tl.load(mean + j, mask=here) + tl.load(std + j, mask=here) * noise
    tl.store(out + episode * samples * SIZE + i, value, mask=here)


def draw_candidates(mean: Tensor, std: Tensor, keys: Tensor, iteration: Tensor, samples: int) -> Tensor:
    """mean + std·noise, candidate 0 the mean itself: (B, H, D) twice → (B, samples, H, D).

    The noise is a function of an episode's key (B,) int64, the iteration (1,) and the index, by Philox: it does not
    depend on the other episodes of a batch, and has no state to store.
    """
    out = mean.new_empty(len(mean), samples, *mean.shape[1:])
    size = mean[0].numel()
    grid = (len(mean), triton.cdiv(samples * size, 1024))
    _candidates[grid](mean, std, keys, iteration, out, samples, size, BLOCK=1024)
    return out


@triton.jit
def _elect(costs, elected, samples, elites, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """1 for a candidate with fewer than ``elites`` cheaper ones, else 0. Of equal ones the earlier counts as
    cheaper; NaN counts as infinite."""
    episode = tl.program_id(0).to(tl.int64)
    costs += episode * samples
    i = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    mine = tl.load(costs + i, mask=i < samples, other=float("nan"))
    mine = tl.where(mine == mine, mine, float("inf"))
    cheaper = tl.zeros([ROWS], tl.int32)
    for first in range(0, samples, BLOCK):
        j = first + tl.arange(0, BLOCK)
        other = tl.load(costs + j, mask=j < samples, other=float("nan"))[None, :]
        before = (other < mine[:, None]) | ((other == mine[:, None]) & (j[None, :] < i[:, None]))
        cheaper += tl.sum(before.to(tl.int32), 1)
    tl.store(elected + episode * samples + i, (cheaper < elites).to(tl.int8), mask=i < samples)


@triton.jit
def _refine(elected, candidates, mean, std, iteration, samples, elites, SIZE, SIDE: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    """Mean and standard deviation of the elected candidates of one episode."""
    episode = tl.program_id(0).to(tl.int64)
    elected += episode * samples
    candidates += episode * samples * SIZE
    c = tl.arange(0, SIDE)[None, :]
    total = tl.zeros([BLOCK, SIDE], tl.float32)
    for first in range(0, samples, BLOCK):
        i = first + tl.arange(0, BLOCK)[:, None]
        here = (tl.load(elected + i, mask=i < samples, other=0) > 0) & (c < SIZE)
        total += tl.load(candidates + i * SIZE + c, mask=here, other=0.0)
    centre = tl.sum(total, 0) / elites
    squares = tl.zeros([BLOCK, SIDE], tl.float32)
    for first in range(0, samples, BLOCK):
        i = first + tl.arange(0, BLOCK)[:, None]
        here = (tl.load(elected + i, mask=i < samples, other=0) > 0) & (c < SIZE)
        gap = tl.where(here, tl.load(candidates + i * SIZE + c, mask=here, other=0.0) - centre[None, :], 0.0)
        squares += gap * gap
    at, inside = episode * SIZE + tl.arange(0, SIDE), tl.arange(0, SIDE) < SIZE
    tl.store(mean + at, centre, mask=inside)
    tl.store(std + at, tl.sqrt(tl.sum(squares, 0) / (elites - 1)), mask=inside)
    if episode == 0:
        tl.store(iteration, tl.load(iteration) + 1)


def refine(costs: Tensor, candidates: Tensor, elites: int, mean: Tensor, std: Tensor, iteration: Tensor) -> None:
    """Mean and standard deviation of the cheapest candidates, (B, S) and (B, S, H, D) → (B, H, D) twice; counts the
    iteration. ``topk``, ``gather``, ``mean`` and ``std`` in two kernels."""
    episodes, samples = costs.shape
    size = mean[0].numel()
    elected = torch.empty(episodes, samples, dtype=torch.int8, device=costs.device)
    _elect[(episodes, triton.cdiv(samples, 16))](
        costs.contiguous(), elected, samples, elites, ROWS=16, BLOCK=128, num_warps=1
    )
    _refine[(episodes,)](
        elected, candidates, mean, std, iteration, samples, elites, size,
        SIDE=triton.next_power_of_2(size), BLOCK=64, num_warps=8,
    )  # fmt: skip
