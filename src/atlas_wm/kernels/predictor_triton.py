"""Triton kernels for training the predictor: what lies between its products, forward and backward.

Its rows are few, so what costs time is the number of kernels. A branch (attention or MLP) is entered by one kernel:
the residual of the branch before, both norms and the modulation between them; and left by one in the backward pass.
What can be had again from a row is not kept. Dropout is a function of a key, the place where it stands and the
element, so the backward pass draws what the forward pass drew.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from atlas_wm.kernels.encoder_triton import _normal

ROWS_A_PROGRAM = 2  # of the kernels that normalise


@triton.jit
def _kept(key, place, at, dropout, DROPS: tl.constexpr):
    """1/(1 − dropout) where an element is kept, else 0."""
    factor = tl.full(at.shape, 1.0, tl.float32)
    if DROPS:
        factor = tl.where(tl.rand(tl.load(key) + place, at) >= dropout, 1 / (1 - dropout), 0.0)
    return factor


@triton.jit
def _unit(value, inside, WIDTH: tl.constexpr, eps):
    """Rows with mean 0 and deviation 1, and 1/deviation."""
    centred = tl.where(inside, value - (tl.sum(value, 1) / WIDTH)[:, None], 0.0)
    rate = (1 / tl.sqrt(tl.sum(centred * centred, 1) / WIDTH + eps))[:, None]
    return centred * rate, rate


@triton.jit
def _through(grad, unit, rate, inside, WIDTH: tl.constexpr):
    """The gradient before ``_unit``, of the one after it."""
    along = (tl.sum(grad * unit, 1) / WIDTH)[:, None]
    return tl.where(inside, (grad - (tl.sum(grad, 1) / WIDTH)[:, None] - unit * along) * rate, 0.0)


@triton.jit
def _enter(x, change, modulation, weight, bias, x_out, out, key, branch, rows, each, dropout,
           WIDTH: tl.constexpr, SIDE: tl.constexpr, ROWS: tl.constexpr, FIRST: tl.constexpr,
           MODULATED: tl.constexpr, DROPS: tl.constexpr):  # fmt: skip
    """x_out = x + gate·dropout(change), out = norm(modulate(norm(x_out))).

    modulation: (rows, each), of every branch its shift, scale and gate. The gate is that of the branch before,
    whose answer ``change`` is; FIRST: there is none. After the last branch there is a norm with weights alone.
    """
    r, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, SIDE)[None, :]
    inside, here = c < WIDTH, (r < rows) & (c < WIDTH)
    at = r * WIDTH + c
    modulation += r.to(tl.int64) * each + branch * 3 * WIDTH + c
    value = tl.load(x + at, mask=here, other=0.0)
    if not FIRST:
        gate = tl.load(modulation - WIDTH, mask=here, other=0.0).to(tl.float32)
        gate *= _kept(key, branch, at, dropout, DROPS)
        value += gate * tl.load(change + at, mask=here, other=0.0).to(tl.float32)
        tl.store(x_out + at, value, mask=here)
    if MODULATED:
        unit, _ = _unit(value, inside, WIDTH, 1e-6)
        shift = tl.load(modulation, mask=here, other=0.0).to(tl.float32)
        value = unit * (1 + tl.load(modulation + WIDTH, mask=here, other=0.0).to(tl.float32)) + shift
    unit, _ = _unit(value, inside, WIDTH, 1e-5)
    answer = unit * tl.load(weight + c, mask=inside, other=0.0) + tl.load(bias + c, mask=inside, other=0.0)
    tl.store(out + at, answer.to(out.dtype.element_ty), mask=here)


@triton.jit
def _leave(grad, later, x, change, modulation, weight, dx, d_change, d_modulation, sums, key, branch, rows, each,
           dropout, WIDTH: tl.constexpr, SIDE: tl.constexpr, ROWS: tl.constexpr, FIRST: tl.constexpr,
           MODULATED: tl.constexpr, DROPS: tl.constexpr):  # fmt: skip
    """The gradients of ``_enter``, of ``grad`` (of out) and ``later`` (of x_out, by the branches after this one).
    sums: (programs, 2, WIDTH), over rows, of the gradients of weight and bias."""
    r, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, SIDE)[None, :]
    inside, here = c < WIDTH, (r < rows) & (c < WIDTH)
    at = r * WIDTH + c
    place = r.to(tl.int64) * each + branch * 3 * WIDTH + c
    value = tl.load(x + at, mask=here, other=0.0)
    scale = value * 0
    before, before_rate = _unit(value, inside, WIDTH, 1e-6)
    if MODULATED:
        scale = 1 + tl.load(modulation + place + WIDTH, mask=here, other=0.0).to(tl.float32)
        value = before * scale + tl.load(modulation + place, mask=here, other=0.0).to(tl.float32)
    unit, rate = _unit(value, inside, WIDTH, 1e-5)
    g = tl.load(grad + at, mask=here, other=0.0).to(tl.float32)
    total = sums + tl.program_id(0) * 2 * WIDTH + tl.arange(0, SIDE)
    tl.store(total, tl.sum(g * unit, 0), mask=tl.arange(0, SIDE) < WIDTH)
    tl.store(total + WIDTH, tl.sum(g, 0), mask=tl.arange(0, SIDE) < WIDTH)
    g = _through(g * tl.load(weight + c, mask=inside, other=0.0), unit, rate, inside, WIDTH)
    if MODULATED:
        low = d_modulation.dtype.element_ty
        tl.store(d_modulation + place, g.to(low), mask=here)
        tl.store(d_modulation + place + WIDTH, (g * before).to(low), mask=here)
        g = _through(g * scale, before, before_rate, inside, WIDTH) + tl.load(later + at, mask=here, other=0.0)
    tl.store(dx + at, g, mask=here)
    if not FIRST:
        g *= _kept(key, branch, at, dropout, DROPS)
        d_gate = g * tl.load(change + at, mask=here, other=0.0).to(tl.float32)
        tl.store(d_modulation + place - WIDTH, d_gate.to(d_modulation.dtype.element_ty), mask=here)
        gate = tl.load(modulation + place - WIDTH, mask=here, other=0.0).to(tl.float32)
        tl.store(d_change + at, (g * gate).to(d_change.dtype.element_ty), mask=here)


@triton.jit
def _gelu(x, out, key, place, count, dropout, BLOCK: tl.constexpr, DROPS: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    share, _ = _normal(value)
    answer = value * share * _kept(key, place, at, dropout, DROPS)
    tl.store(out + at, answer.to(out.dtype.element_ty), mask=at < count)


@triton.jit
def _gelu_backward(grad, x, dx, key, place, count, dropout, BLOCK: tl.constexpr, DROPS: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    share, density = _normal(value)
    answer = tl.load(grad + at, mask=at < count, other=0.0).to(tl.float32) * (share + value * density)
    answer *= _kept(key, place, at, dropout, DROPS)
    tl.store(dx + at, answer.to(dx.dtype.element_ty), mask=at < count)


@triton.jit
def _shares(q, k, t, s, key, place, scale, dropout, TOKENS: tl.constexpr, SIDE: tl.constexpr, DROPS: tl.constexpr):
    """What each token gives to those up to itself, (SIDE, SIDE), and the factor of dropout."""
    scores = tl.where((s <= t) & (s < TOKENS), tl.sum(q[:, None, :] * k[None, :, :], 2) * scale, float("-inf"))
    p = tl.exp(scores - tl.max(scores, 1)[:, None])
    at = (tl.program_id(0) * SIDE + t) * SIDE + s
    return p / tl.sum(p, 1)[:, None], _kept(key, place, at, dropout, DROPS)


@triton.jit
def _attend(qkv, out, key, place, scale, dropout, HEADS: tl.constexpr, E: tl.constexpr, TOKENS: tl.constexpr,
            SIDE: tl.constexpr, DROPS: tl.constexpr):  # fmt: skip
    """Causal attention of one head of one sequence. qkv: (N, TOKENS, 3, HEADS, E), out: (N, TOKENS, HEADS, E)"""
    first, head = tl.program_id(0) // HEADS * TOKENS, tl.program_id(0) % HEADS
    t, e = tl.arange(0, SIDE)[:, None], tl.arange(0, E)[None, :]
    here = t < TOKENS
    at = qkv + ((first + t) * 3 * HEADS + head) * E + e
    q = tl.load(at, mask=here, other=0.0).to(tl.float32)
    k = tl.load(at + HEADS * E, mask=here, other=0.0).to(tl.float32)
    v = tl.load(at + 2 * HEADS * E, mask=here, other=0.0).to(tl.float32)
    p, kept = _shares(q, k, t, tl.arange(0, SIDE)[None, :], key, place, scale, dropout, TOKENS, SIDE, DROPS)
    answer = tl.sum((p * kept)[:, :, None] * v[None, :, :], 1)
    tl.store(out + ((first + t) * HEADS + head) * E + e, answer.to(out.dtype.element_ty), mask=here)


@triton.jit
def _attend_backward(grad, qkv, dqkv, key, place, scale, dropout, HEADS: tl.constexpr, E: tl.constexpr,
                     TOKENS: tl.constexpr, SIDE: tl.constexpr, DROPS: tl.constexpr):  # fmt: skip
    first, head = tl.program_id(0) // HEADS * TOKENS, tl.program_id(0) % HEADS
    t, e = tl.arange(0, SIDE)[:, None], tl.arange(0, E)[None, :]
    here = t < TOKENS
    place3 = ((first + t) * 3 * HEADS + head) * E + e
    q = tl.load(qkv + place3, mask=here, other=0.0).to(tl.float32)
    k = tl.load(qkv + place3 + HEADS * E, mask=here, other=0.0).to(tl.float32)
    v = tl.load(qkv + place3 + 2 * HEADS * E, mask=here, other=0.0).to(tl.float32)
    g = tl.load(grad + ((first + t) * HEADS + head) * E + e, mask=here, other=0.0).to(tl.float32)
    p, kept = _shares(q, k, t, tl.arange(0, SIDE)[None, :], key, place, scale, dropout, TOKENS, SIDE, DROPS)
    dp = tl.sum(g[:, None, :] * v[None, :, :], 2) * kept
    ds = p * (dp - tl.sum(dp * p, 1)[:, None]) * scale
    low = dqkv.dtype.element_ty
    dq = tl.sum(ds[:, :, None] * k[None, :, :], 1)
    dk = tl.sum(ds[:, :, None] * q[:, None, :], 0)
    dv = tl.sum((p * kept)[:, :, None] * g[:, None, :], 0)
    tl.store(dqkv + place3, dq.to(low), mask=here)
    tl.store(dqkv + place3 + HEADS * E, dk.to(low), mask=here)
    tl.store(dqkv + place3 + 2 * HEADS * E, dv.to(low), mask=here)


class Dropout(NamedTuple):
    key: Tensor  # (1,) int64
    rate: float

    @property
    def drops(self) -> bool:
        return self.rate > 0


class Branches(NamedTuple):
    """What all branches share: the modulation (M, branches, 3, w), shift, scale and gate of each, and dropout."""

    modulation: Tensor
    dropout: Dropout

    def options(self, branch: int) -> dict[str, Any]:
        _, branches, _, width = self.modulation.shape
        return {
            "WIDTH": width, "SIDE": triton.next_power_of_2(width), "ROWS": ROWS_A_PROGRAM, "FIRST": branch == 0,
            "MODULATED": branch < branches, "DROPS": self.dropout.drops, "num_warps": 2,
        }  # fmt: skip

    def enter(
        self, branch: int, x: Tensor, change: Tensor, norm: Tensor, bias: Tensor, x_out: Tensor, out: Tensor
    ) -> None:
        """Branch number ``branch``, or the last norm: x (M, w) + the gated change of the branch before → x_out, and
        its norms → out. Before the first branch there is no change, and x_out is left alone."""
        rows, each = len(x), self.modulation[0].numel()
        _enter[(programs(rows),)](
            x, change, self.modulation, norm, bias, x_out, out, self.dropout.key, branch, rows, each,
            self.dropout.rate, **self.options(branch),
        )  # fmt: skip

    def leave(
        self, branch: int, grad: Tensor, later: Tensor, x: Tensor, change: Tensor, norm: Tensor, d_change: Tensor,
        d_modulation: Tensor, sums: Tensor,
    ) -> Tensor:  # fmt: skip
        """The gradient of x (M, w), of those of out and x_out (none of x_out after the last branch); the others go
        to the places given for them."""
        rows, each = len(x), self.modulation[0].numel()
        dx = torch.empty_like(x)
        _leave[(programs(rows),)](
            grad, later, x, change, self.modulation, norm, dx, d_change, d_modulation, sums, self.dropout.key,
            branch, rows, each, self.dropout.rate, **self.options(branch),
        )  # fmt: skip
        return dx


def programs(rows: int) -> int:
    return int(triton.cdiv(rows, ROWS_A_PROGRAM))


def gelu(x: Tensor, out: Tensor, dropout: Dropout, place: int) -> None:
    _gelu[(triton.cdiv(x.numel(), 1024),)](
        x, out, dropout.key, place, x.numel(), dropout.rate, BLOCK=1024, DROPS=dropout.drops
    )


def gelu_backward(grad: Tensor, x: Tensor, dx: Tensor, dropout: Dropout, place: int) -> None:
    _gelu_backward[(triton.cdiv(x.numel(), 1024),)](
        grad, x, dx, dropout.key, place, x.numel(), dropout.rate, BLOCK=1024, DROPS=dropout.drops
    )


def attend(qkv: Tensor, out: Tensor, heads: int, tokens: int, dropout: Dropout, place: int) -> None:
    """Causal attention within sequences of ``tokens``: (M, 3·h·e) → (M, h·e)"""
    grid, size, shapes = _heads(qkv, heads, tokens)
    _attend[grid](
        qkv, out, dropout.key, place, size**-0.5, dropout.rate, **shapes, DROPS=dropout.drops, num_warps=1
    )


def attend_backward(
    grad: Tensor, qkv: Tensor, dqkv: Tensor, heads: int, tokens: int, dropout: Dropout, place: int
) -> None:
    grid, size, shapes = _heads(qkv, heads, tokens)
    _attend_backward[grid](
        grad, qkv, dqkv, dropout.key, place, size**-0.5, dropout.rate, **shapes, DROPS=dropout.drops, num_warps=1
    )


def _heads(qkv: Tensor, heads: int, tokens: int) -> tuple[tuple[int], int, dict[str, int]]:
    rows, size = len(qkv), qkv.shape[1] // (3 * heads)
    shapes = {"HEADS": heads, "E": size, "TOKENS": tokens, "SIDE": triton.next_power_of_2(tokens)}
    return (rows // tokens * heads,), size, shapes
