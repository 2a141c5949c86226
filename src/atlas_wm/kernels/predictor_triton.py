"""Triton kernels that speed up training the predictor: everything between its products, forward and backward.

With :mod:`atlas_wm.kernels.predictor` they must equal ``AdaLNBlock`` (models/layers.py) and its gradients.

Rows are few, so the number of kernels costs time. One kernel enters a branch (attention or MLP): the residual of
the branch before, both norms and the modulation between them; one kernel leaves it in the backward pass. What can
be recomputed from a row is not saved. Dropout is a function of a key, its site in the network and the element, so
the backward pass draws what the forward pass drew.
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
def _dropout(key, site, at, dropout, DROPS: tl.constexpr):
    """1/(1 − dropout), or 0 where an element is dropped."""
    factor = tl.full(at.shape, 1.0, tl.float32)
    if DROPS:
        factor = tl.where(tl.rand(tl.load(key) + site, at) >= dropout, 1 / (1 - dropout), 0.0)
    return factor


@triton.jit
def _unit(value, inside, WIDTH: tl.constexpr, eps):
    """Rows with mean 0 and standard deviation 1, and 1/std."""
    centred = tl.where(inside, value - (tl.sum(value, 1) / WIDTH)[:, None], 0.0)
    rate = (1 / tl.sqrt(tl.sum(centred * centred, 1) / WIDTH + eps))[:, None]
    return centred * rate, rate


@triton.jit
def _through(grad, unit, rate, inside, WIDTH: tl.constexpr):
    """The gradient before ``_unit``, from the one after it."""
    along = (tl.sum(grad * unit, 1) / WIDTH)[:, None]
    return tl.where(inside, (grad - (tl.sum(grad, 1) / WIDTH)[:, None] - unit * along) * rate, 0.0)


@triton.jit
def _enter(x, change, modulation, weight, bias, x_out, out, key, branch, rows, each, dropout,
           WIDTH: tl.constexpr, SIDE: tl.constexpr, ROWS: tl.constexpr, FIRST: tl.constexpr,
           MODULATED: tl.constexpr, DROPS: tl.constexpr, EPS: tl.constexpr, NORM_EPS: tl.constexpr):  # fmt: skip
    """x_out = x + gate·dropout(change), out = norm(modulate(norm(x_out))).

    modulation: (rows, each), shift, scale and gate of every branch. The gate is that of the branch before, whose
    output is ``change``; FIRST: there is none. After the last branch comes only the norm with weights.
    """
    r, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, SIDE)[None, :]
    inside, here = c < WIDTH, (r < rows) & (c < WIDTH)
    at = r * WIDTH + c
    modulation += r.to(tl.int64) * each + branch * 3 * WIDTH + c
    value = tl.load(x + at, mask=here, other=0.0)
    if not FIRST:
        gate = tl.load(modulation - WIDTH, mask=here, other=0.0).to(tl.float32)
        gate *= _dropout(key, branch, at, dropout, DROPS)
        value += gate * tl.load(change + at, mask=here, other=0.0).to(tl.float32)
        tl.store(x_out + at, value, mask=here)
    if MODULATED:
        unit, _ = _unit(value, inside, WIDTH, EPS)
        shift = tl.load(modulation, mask=here, other=0.0).to(tl.float32)
        value = unit * (1 + tl.load(modulation + WIDTH, mask=here, other=0.0).to(tl.float32)) + shift
    unit, _ = _unit(value, inside, WIDTH, NORM_EPS)
    answer = unit * tl.load(weight + c, mask=inside, other=0.0) + tl.load(bias + c, mask=inside, other=0.0)
    tl.store(out + at, answer.to(out.dtype.element_ty), mask=here)


@triton.jit
def _leave(grad, later, x, change, modulation, weight, dx, d_change, d_modulation, sums, key, branch, rows, each,
           dropout, WIDTH: tl.constexpr, SIDE: tl.constexpr, ROWS: tl.constexpr, FIRST: tl.constexpr,
           MODULATED: tl.constexpr, DROPS: tl.constexpr, EPS: tl.constexpr, NORM_EPS: tl.constexpr):  # fmt: skip
    """The gradients of ``_enter``, of ``grad`` (of out) and ``later`` (of x_out, by the branches after this one).
    sums: (programs, 2, WIDTH), over rows, of the gradients of weight and bias."""
    r, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, SIDE)[None, :]
    inside, here = c < WIDTH, (r < rows) & (c < WIDTH)
    at = r * WIDTH + c
    offset = r.to(tl.int64) * each + branch * 3 * WIDTH + c
    value = tl.load(x + at, mask=here, other=0.0)
    scale = value * 0
    before, before_rate = _unit(value, inside, WIDTH, EPS)
    if MODULATED:
        scale = 1 + tl.load(modulation + offset + WIDTH, mask=here, other=0.0).to(tl.float32)
        value = before * scale + tl.load(modulation + offset, mask=here, other=0.0).to(tl.float32)
    unit, rate = _unit(value, inside, WIDTH, NORM_EPS)
    g = tl.load(grad + at, mask=here, other=0.0).to(tl.float32)
    total = sums + tl.program_id(0) * 2 * WIDTH + tl.arange(0, SIDE)
    tl.store(total, tl.sum(g * unit, 0), mask=tl.arange(0, SIDE) < WIDTH)
    tl.store(total + WIDTH, tl.sum(g, 0), mask=tl.arange(0, SIDE) < WIDTH)
    g = _through(g * tl.load(weight + c, mask=inside, other=0.0), unit, rate, inside, WIDTH)
    if MODULATED:
        low = d_modulation.dtype.element_ty
        tl.store(d_modulation + offset, g.to(low), mask=here)
        tl.store(d_modulation + offset + WIDTH, (g * before).to(low), mask=here)
        g = _through(g * scale, before, before_rate, inside, WIDTH) + tl.load(later + at, mask=here, other=0.0)
    tl.store(dx + at, g, mask=here)
    if not FIRST:
        g *= _dropout(key, branch, at, dropout, DROPS)
        d_gate = g * tl.load(change + at, mask=here, other=0.0).to(tl.float32)
        tl.store(d_modulation + offset - WIDTH, d_gate.to(d_modulation.dtype.element_ty), mask=here)
        gate = tl.load(modulation + offset - WIDTH, mask=here, other=0.0).to(tl.float32)
        tl.store(d_change + at, (g * gate).to(d_change.dtype.element_ty), mask=here)


@triton.jit
def _gelu(x, out, key, site, count, dropout, BLOCK: tl.constexpr, DROPS: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    share, _ = _normal(value)
    answer = value * share * _dropout(key, site, at, dropout, DROPS)
    tl.store(out + at, answer.to(out.dtype.element_ty), mask=at < count)


@triton.jit
def _gelu_backward(grad, x, dx, key, site, count, dropout, BLOCK: tl.constexpr, DROPS: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    share, density = _normal(value)
    answer = tl.load(grad + at, mask=at < count, other=0.0).to(tl.float32) * (share + value * density)
    answer *= _dropout(key, site, at, dropout, DROPS)
    tl.store(dx + at, answer.to(dx.dtype.element_ty), mask=at < count)


@triton.jit
def _shares(q, k, t, s, key, site, scale, dropout, TOKENS: tl.constexpr, SIDE: tl.constexpr, DROPS: tl.constexpr):
    """Attention weights of each token over those up to itself, (SIDE, SIDE), and the factor of dropout."""
    scores = tl.where((s <= t) & (s < TOKENS), tl.sum(q[:, None, :] * k[None, :, :], 2) * scale, float("-inf"))
    p = tl.exp(scores - tl.max(scores, 1)[:, None])
    at = (tl.program_id(0) * SIDE + t) * SIDE + s
    return p / tl.sum(p, 1)[:, None], _dropout(key, site, at, dropout, DROPS)


@triton.jit
def _attend(qkv, out, key, site, scale, dropout, HEADS: tl.constexpr, E: tl.constexpr, TOKENS: tl.constexpr,
            SIDE: tl.constexpr, DROPS: tl.constexpr):  # fmt: skip
    """Causal attention of one head of one sequence. qkv: (N, TOKENS, 3, HEADS, E), out: (N, TOKENS, HEADS, E)"""
    first, head = tl.program_id(0) // HEADS * TOKENS, tl.program_id(0) % HEADS
    t, e = tl.arange(0, SIDE)[:, None], tl.arange(0, E)[None, :]
    here = t < TOKENS
    at = qkv + ((first + t) * 3 * HEADS + head) * E + e
    q = tl.load(at, mask=here, other=0.0).to(tl.float32)
    k = tl.load(at + HEADS * E, mask=here, other=0.0).to(tl.float32)
    v = tl.load(at + 2 * HEADS * E, mask=here, other=0.0).to(tl.float32)
    p, drop = _shares(q, k, t, tl.arange(0, SIDE)[None, :], key, site, scale, dropout, TOKENS, SIDE, DROPS)
    answer = tl.sum((p * drop)[:, :, None] * v[None, :, :], 1)
    tl.store(out + ((first + t) * HEADS + head) * E + e, answer.to(out.dtype.element_ty), mask=here)


@triton.jit
def _attend_backward(grad, qkv, dqkv, key, site, scale, dropout, HEADS: tl.constexpr, E: tl.constexpr,
                     TOKENS: tl.constexpr, SIDE: tl.constexpr, DROPS: tl.constexpr):  # fmt: skip
    first, head = tl.program_id(0) // HEADS * TOKENS, tl.program_id(0) % HEADS
    t, e = tl.arange(0, SIDE)[:, None], tl.arange(0, E)[None, :]
    here = t < TOKENS
    offset = ((first + t) * 3 * HEADS + head) * E + e
    q = tl.load(qkv + offset, mask=here, other=0.0).to(tl.float32)
    k = tl.load(qkv + offset + HEADS * E, mask=here, other=0.0).to(tl.float32)
    v = tl.load(qkv + offset + 2 * HEADS * E, mask=here, other=0.0).to(tl.float32)
    g = tl.load(grad + ((first + t) * HEADS + head) * E + e, mask=here, other=0.0).to(tl.float32)
    p, drop = _shares(q, k, t, tl.arange(0, SIDE)[None, :], key, site, scale, dropout, TOKENS, SIDE, DROPS)
    dp = tl.sum(g[:, None, :] * v[None, :, :], 2) * drop
    ds = p * (dp - tl.sum(dp * p, 1)[:, None]) * scale
    low = dqkv.dtype.element_ty
    dq = tl.sum(ds[:, :, None] * k[None, :, :], 1)
    dk = tl.sum(ds[:, :, None] * q[:, None, :], 0)
    dv = tl.sum((p * drop)[:, :, None] * g[:, None, :], 0)
    tl.store(dqkv + offset, dq.to(low), mask=here)
    tl.store(dqkv + offset + HEADS * E, dk.to(low), mask=here)
    tl.store(dqkv + offset + 2 * HEADS * E, dv.to(low), mask=here)


class Dropout(NamedTuple):
    key: Tensor  # (1,) int64
    rate: float

    @property
    def drops(self) -> bool:
        return self.rate > 0


class Branches(NamedTuple):
    """What all branches share."""

    modulation: Tensor  # (M, branches, 3, w): shift, scale and gate of each
    dropout: Dropout
    eps: float  # of the norm before the modulation
    norm_eps: float  # of the norm after it

    def options(self, branch: int) -> dict[str, Any]:
        _, branches, _, width = self.modulation.shape
        return {
            "WIDTH": width, "SIDE": triton.next_power_of_2(width), "ROWS": ROWS_A_PROGRAM, "FIRST": branch == 0,
            "MODULATED": branch < branches, "DROPS": self.dropout.drops, "EPS": self.eps,
            "NORM_EPS": self.norm_eps, "num_warps": 2,
        }  # fmt: skip

    def enter(
        self, branch: int, x: Tensor, change: Tensor, norm: Tensor, bias: Tensor, x_out: Tensor, out: Tensor
    ) -> None:
        """Branch number ``branch``, or the last norm: x (M, w) + the gated change of the branch before → x_out, and
        its norms → out. The first branch has no change before it, and does not write x_out."""
        rows, each = len(x), self.modulation[0].numel()
        _enter[(programs(rows),)](
            x, change, self.modulation, norm, bias, x_out, out, self.dropout.key, branch, rows, each,
            self.dropout.rate, **self.options(branch),
        )  # fmt: skip

    def leave(
        self, branch: int, grad: Tensor, later: Tensor, x: Tensor, change: Tensor, norm: Tensor, d_change: Tensor,
        d_modulation: Tensor, sums: Tensor,
    ) -> Tensor:  # fmt: skip
        """The gradient of x (M, w), from those of out and x_out (none of x_out after the last branch); writes the
        other gradients to the tensors given for them."""
        rows, each = len(x), self.modulation[0].numel()
        dx = torch.empty_like(x)
        _leave[(programs(rows),)](
            grad, later, x, change, self.modulation, norm, dx, d_change, d_modulation, sums, self.dropout.key,
            branch, rows, each, self.dropout.rate, **self.options(branch),
        )  # fmt: skip
        return dx


def programs(rows: int) -> int:
    return int(triton.cdiv(rows, ROWS_A_PROGRAM))


def gelu(x: Tensor, out: Tensor, dropout: Dropout, site: int) -> None:
    _gelu[(triton.cdiv(x.numel(), 1024),)](
        x, out, dropout.key, site, x.numel(), dropout.rate, BLOCK=1024, DROPS=dropout.drops
    )


def gelu_backward(grad: Tensor, x: Tensor, dx: Tensor, dropout: Dropout, site: int) -> None:
    _gelu_backward[(triton.cdiv(x.numel(), 1024),)](
        grad, x, dx, dropout.key, site, x.numel(), dropout.rate, BLOCK=1024, DROPS=dropout.drops
    )


def attend(qkv: Tensor, out: Tensor, heads: int, tokens: int, dropout: Dropout, site: int) -> None:
    """Causal attention within sequences of ``tokens``: (M, 3·h·e) → (M, h·e)"""
    grid, size, shapes = _heads(qkv, heads, tokens)
    _attend[grid](qkv, out, dropout.key, site, size**-0.5, dropout.rate, **shapes, DROPS=dropout.drops, num_warps=1)


def attend_backward(
    grad: Tensor, qkv: Tensor, dqkv: Tensor, heads: int, tokens: int, dropout: Dropout, site: int
) -> None:
    grid, size, shapes = _heads(qkv, heads, tokens)
    _attend_backward[grid](
        grad, qkv, dqkv, dropout.key, site, size**-0.5, dropout.rate, **shapes, DROPS=dropout.drops, num_warps=1
    )


def _heads(qkv: Tensor, heads: int, tokens: int) -> tuple[tuple[int], int, dict[str, int]]:
    rows, size = len(qkv), qkv.shape[1] // (3 * heads)
    shapes = {"HEADS": heads, "E": size, "TOKENS": tokens, "SIDE": triton.next_power_of_2(tokens)}
    return (rows // tokens * heads,), size, shapes
