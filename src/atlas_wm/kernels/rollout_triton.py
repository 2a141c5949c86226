"""Triton kernels that speed up planning on a GPU: :class:`FastTerminal` in seven kernels a block.

Must equal ``CausalPredictor.rollout`` and ``terminal`` (models/predictors.py), as :mod:`atlas_wm.kernels.rollout`
does. A plan is hundreds of small products in sequence, so the number of kernels costs time, and with many plans at
once the memory traffic between them. Here everything between two products is one kernel: residual, both norms and
the modulation; attention; and GELU is part of the product before it.

The residual stream and all sums are float32, whatever the dtype of the products.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import gelu

from atlas_wm.errors import UserError
from atlas_wm.kernels.rollout import FastTerminal, Product

if TYPE_CHECKING:
    from atlas_wm.models.predictors import CausalPredictor

SMALLEST = 16  # side of a product on the matrix units
MANY_ROWS = 4096


@triton.jit
def _residual(x, change, gate, x_out, k, here, HAS_GATE: tl.constexpr):
    value = tl.load(change[:, None] + k, mask=here, other=0.0).to(tl.float32)
    if HAS_GATE:
        value *= tl.load(gate[:, None] + k, mask=here, other=0.0).to(tl.float32)
    value += tl.load(x[:, None] + k, mask=here, other=0.0).to(tl.float32)
    tl.store(x_out[:, None] + k, value, mask=here)
    return value


@triton.jit
def _moments(a, b, WIDTH: tl.constexpr, eps):
    """Mean and 1/std of rows that lie in two pieces."""
    mean = ((tl.sum(a, 1) + tl.sum(b, 1)) / WIDTH)[:, None]
    variance = (tl.sum((a - mean) * (a - mean), 1) + tl.sum((b - mean) * (b - mean), 1)) / WIDTH
    return mean, (1 / tl.sqrt(variance + eps))[:, None]


@triton.jit
def _modulate(value, mean, rate, scale, shift, k, here):
    factor = 1 + tl.load(scale[:, None] + k, mask=here, other=0.0).to(tl.float32)
    return (value - mean) * rate * factor + tl.load(shift[:, None] + k, mask=here, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _normalise(
    x, change, gate, scale, shift, x_out, out,
    rows, steps, x_n, x_t, change_n, change_t, mod_n, mod_t,
    A: tl.constexpr, B: tl.constexpr, HAS_GATE: tl.constexpr, MODULATED: tl.constexpr, ROWS: tl.constexpr,
    EPS: tl.constexpr, NORM_EPS: tl.constexpr,
):  # fmt: skip
    """x_out = x + gate·change, out = norm(modulate(norm(x_out))).

    A row is one token: sequence n, step t. Its A + B coordinates are held as two pieces, because a piece has to be
    a power of two.
    """
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n, t, here = (r // steps).to(tl.int64), r % steps, (r < rows)[:, None]
    ka, kb = tl.arange(0, A)[None, :], A + tl.arange(0, B)[None, :]
    x += n * x_n + t * x_t
    change += n * change_n + t * change_t
    gate += n * mod_n + t * mod_t
    scale += n * mod_n + t * mod_t
    shift += n * mod_n + t * mod_t
    x_out += r.to(tl.int64) * (A + B)
    out += r.to(tl.int64) * (A + B)
    a = _residual(x, change, gate, x_out, ka, here, HAS_GATE)
    b = _residual(x, change, gate, x_out, kb, here, HAS_GATE)
    if MODULATED:
        mean, rate = _moments(a, b, A + B, EPS)
        a = _modulate(a, mean, rate, scale, shift, ka, here)
        b = _modulate(b, mean, rate, scale, shift, kb, here)
    mean, rate = _moments(a, b, A + B, NORM_EPS)
    tl.store(out[:, None] + ka, ((a - mean) * rate).to(out.dtype.element_ty), mask=here)
    tl.store(out[:, None] + kb, ((b - mean) * rate).to(out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["rows"])
def _product_gelu(
    x, weight, bias, out, rows, columns,
    A: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out = gelu(x·Wᵀ + b). The inner dimension, A + B, is short enough to be read at once."""
    r = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    c = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    ka, kb = tl.arange(0, A), A + tl.arange(0, B)
    here, inside = r < rows, c < columns
    row, column = x + r * (A + B), weight + c * (A + B)
    answer = tl.dot(
        tl.load(row + ka[None, :], mask=here, other=0.0), tl.load(column + ka[:, None], mask=inside, other=0.0)
    )
    answer = tl.dot(
        tl.load(row + kb[None, :], mask=here, other=0.0),
        tl.load(column + kb[:, None], mask=inside, other=0.0),
        answer,
    )
    answer += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    answer = 0.5 * answer * (1 + tl.erf(answer * 0.7071067811865476))
    tl.store(out + r * columns + c, answer.to(out.dtype.element_ty), mask=here & inside)


@triton.jit
def _look(q, key, value, here, largest, total, answer):
    """One more token in the softmax, which is summed relative to the largest score so far."""
    score = tl.sum(q * tl.load(key, mask=here, other=0.0).to(tl.float32), 1)
    new = tl.maximum(largest, score)
    before, share = tl.exp(largest - new), tl.exp(score - new)
    answer = answer * before[:, None] + share[:, None] * tl.load(value, mask=here, other=0.0).to(tl.float32)
    return new, total * before + share, answer


@triton.jit(do_not_specialize=["sequences"])
def _attend(
    qkv, cache, out, sequences, position, first, tokens, scale, inner, room, line, STORE: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Causal attention of one head for one of the new tokens; its key and value are copied to ``cache``.

    qkv: (N, tokens, 3·inner) new tokens, cache: (N, room, line) keys and values of ``position`` tokens before them.
    """
    queries = tokens - first
    query = first + tl.program_id(0) % queries
    n = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    here = n < sequences
    e = tl.program_id(0) // queries * WIDTH + tl.arange(0, WIDTH)[None, :]
    new = qkv + n * tokens * 3 * inner + e
    old = cache + n * room * line + e
    q = tl.load(new + query * 3 * inner, mask=here, other=0.0).to(tl.float32) * scale
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    answer = tl.zeros((ROWS, WIDTH), tl.float32)
    for token in range(position):
        at = old + token * line
        largest, total, answer = _look(q, at, at + inner, here, largest, total, answer)
    for token in range(query + 1):
        at = new + (token * 3 + 1) * inner
        largest, total, answer = _look(q, at, at + inner, here, largest, total, answer)
    if STORE:
        at, to = new + (query * 3 + 1) * inner, old + (position + query) * line
        tl.store(to, tl.load(at, mask=here), mask=here)
        tl.store(to + inner, tl.load(at + inner, mask=here), mask=here)
    target = out + (n * queries + query - first) * inner + e
    tl.store(target, (answer / total[:, None]).to(out.dtype.element_ty), mask=here)


def pieces(width: int) -> tuple[int, int] | None:
    """Two powers of two that add up to the width, or None."""
    largest = 1 << (width.bit_length() - 1)
    a, b = (largest // 2, largest // 2) if largest == width else (largest, width - largest)
    return (a, b) if b & (b - 1) == 0 and min(a, b) >= SMALLEST else None


class TritonTerminal(FastTerminal):
    """:class:`FastTerminal` with these kernels."""

    def __init__(self, predictor: "CausalPredictor", dtype: torch.dtype = torch.bfloat16):
        super().__init__(predictor, dtype)
        width = predictor.positions.shape[1]
        self.inner = self.blocks[0].out.weight.shape[1]
        self.head_dim = self.inner // self.heads
        sizes = pieces(width)
        if sizes is None or self.head_dim & (self.head_dim - 1):
            raise UserError(f"the kernels do not support width {width} with heads of {self.head_dim}")
        self.pieces = sizes

    def step(
        self, tokens: Tensor, position: int, modulation: Tensor, kv_cache: list[Any]
    ) -> tuple[Tensor, list[Any]]:
        """As in the base class, but a cache has room for the keys and values of the whole window, and for the
        attention output of the first token, which attends only to itself."""
        count, new, width = tokens.shape
        alone = position == 0 and new == 1
        if not kv_cache:
            kv_cache = [tokens.new_empty(count, self.history, 2 * self.inner + width) for _ in self.blocks]
        x, change, gate = tokens, self.positions[position : position + new].expand(count, -1, -1), None
        for number, (block, past) in enumerate(zip(self.blocks, kv_cache, strict=True)):
            shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = modulation[:, :, number].unbind(dim=2)
            x, y = self._normalise(x, change, gate, (scale_a, shift_a))
            if number == len(self.blocks) - 1:
                x, gate_a, shift_m, scale_m, gate_m = (t[:, -1:] for t in (x, gate_a, shift_m, scale_m, gate_m))
            if alone:
                assert block.kvo.bias is not None
                torch.addmm(block.kvo.bias, y[:, 0], block.kvo.weight.T, out=past[:, 0])
                answer = past[:, :1, 2 * self.inner :]
            else:
                answer = block.out(self._attend(block.qkv(y), past, position, x.shape[1]))
            x, y = self._normalise(x, answer, gate_a, (scale_m, shift_m))
            change, gate = block.down(self._product_gelu(y, block.up)), gate_m
        _, y = self._normalise(x, change, gate)
        return self.head_out(self._product_gelu(y, self.head_in)[:, -1]), kv_cache

    def _normalise(
        self, x: Tensor, change: Tensor, gate: Tensor | None, modulation: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """x + gate·change (N, n, w), and its norms and modulation."""
        count, steps, width = x.shape
        summed = torch.empty(count, steps, width, device=x.device)
        out = torch.empty_like(summed, dtype=self.dtype)
        scale, shift = modulation or (change, change)
        gates = change if gate is None else gate
        strides = (scale if modulation else gates).stride()[:2]
        _normalise[(triton.cdiv(count * steps, 4),)](
            x, change, gates, scale, shift, summed, out,
            count * steps, steps, *x.stride()[:2], *change.stride()[:2], *strides,
            *self.pieces, HAS_GATE=gate is not None, MODULATED=modulation is not None, ROWS=4,
            EPS=self.eps, NORM_EPS=self.norm_eps,
        )  # fmt: skip
        return summed, out

    def _product_gelu(self, x: Tensor, product: Product) -> Tensor:
        rows, columns = x.shape[0] * x.shape[1], len(product.weight)
        # In float32 the matrix units would round. With many rows the library's product saves more than GELU costs.
        if self.dtype == torch.float32 or rows >= MANY_ROWS:
            return gelu(product(x))
        out = x.new_empty(*x.shape[:2], columns)
        _product_gelu[(triton.cdiv(columns, 64), triton.cdiv(rows, 64))](
            x, product.weight, product.bias, out, rows, columns, *self.pieces, ROWS=64, COLUMNS=64
        )  # fmt: skip
        return out

    def _attend(self, qkv: Tensor, cache: Tensor, position: int, queries: int) -> Tensor:
        """Of the last ``queries`` tokens: (N, n, 3·h·e) → (N, queries, h·e)"""
        count, tokens, _ = qkv.shape
        out = qkv.new_empty(count, queries, self.inner)
        # Programs that share keys and values run side by side, so that these are read once.
        _attend[(self.heads * queries, triton.cdiv(count, 32))](
            qkv, cache, out, count, position, tokens - queries, tokens, self.head_dim**-0.5, self.inner,
            *cache.shape[1:], STORE=position + tokens < self.history, WIDTH=self.head_dim, ROWS=32,
        )  # fmt: skip
        return out
