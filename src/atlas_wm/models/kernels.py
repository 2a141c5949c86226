"""Triton kernels for planning on a GPU: the ends of action sequences in five kernels a block.

One plan is hundreds of small products after each other, so what costs time is the number of kernels, and with many
plans at once the traffic between them. Here everything around a product happens inside it: the residual, both
normalisations and the modulation while its input is read, GELU while its output is written.

Products read bf16 and sum in float32; the residual stream stays float32.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from atlas_wm.errors import UserError
from atlas_wm.models.fast import FastTerminal, Product
from atlas_wm.models.predictors import CausalPredictor

SMALLEST = 16  # of a side of a product on the matrix units


@triton.jit
def _residual(x, delta, gate, x_out, k, here, HAS_GATE: tl.constexpr):
    value = tl.load(x[:, None] + k, mask=here, other=0.0).to(tl.float32)
    change = tl.load(delta[:, None] + k, mask=here, other=0.0).to(tl.float32)
    if HAS_GATE:
        change *= tl.load(gate[:, None] + k, mask=here, other=0.0).to(tl.float32)
    if tl.program_id(1) == 0:
        tl.store(x_out[:, None] + k, value + change, mask=here)
    return value + change


@triton.jit
def _moments(a, b, WIDTH: tl.constexpr, eps):
    """Mean and 1/deviation of rows that lie in two pieces."""
    mean = ((tl.sum(a, 1) + tl.sum(b, 1)) / WIDTH)[:, None]
    variance = (tl.sum((a - mean) * (a - mean), 1) + tl.sum((b - mean) * (b - mean), 1)) / WIDTH
    return mean, (1 / tl.sqrt(variance + eps))[:, None]


@triton.jit
def _modulate(value, mean, rate, scale, shift, k, here):
    factor = 1 + tl.load(scale[:, None] + k, mask=here, other=0.0).to(tl.float32)
    return (value - mean) * rate * factor + tl.load(shift[:, None] + k, mask=here, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _norm_product(
    x, delta, gate, scale, shift, weight, bias, out, x_out,
    rows, steps, columns, columns_each,
    x_n, x_t, delta_n, delta_t, mod_n, mod_t, out_n, out_t,
    A: tl.constexpr, B: tl.constexpr, HAS_GATE: tl.constexpr,
    MODULATED: tl.constexpr, GELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out = act(W·norm(modulate(norm(x + gate·delta))) + b), and x_out = x + gate·delta.

    A row is a token: number n of a sequence, t of a step. Its A + B coordinates are held as two pieces, for a
    piece has to be a power of two. A program does ROWS rows and columns_each columns.
    """
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n, t, here = (r // steps).to(tl.int64), r % steps, (r < rows)[:, None]
    ka, kb = tl.arange(0, A)[None, :], A + tl.arange(0, B)[None, :]
    x += n * x_n + t * x_t
    delta += n * delta_n + t * delta_t
    gate += n * mod_n + t * mod_t
    scale += n * mod_n + t * mod_t
    shift += n * mod_n + t * mod_t
    x_out += r.to(tl.int64) * (A + B)
    a = _residual(x, delta, gate, x_out, ka, here, HAS_GATE)
    b = _residual(x, delta, gate, x_out, kb, here, HAS_GATE)
    if MODULATED:
        mean, rate = _moments(a, b, A + B, 1e-6)
        a = _modulate(a, mean, rate, scale, shift, ka, here)
        b = _modulate(b, mean, rate, scale, shift, kb, here)
    mean, rate = _moments(a, b, A + B, 1e-5)
    a = ((a - mean) * rate).to(weight.dtype.element_ty)
    b = ((b - mean) * rate).to(weight.dtype.element_ty)
    out += n * out_n + t * out_t
    first = tl.program_id(1) * columns_each
    for start in range(first, first + columns_each, COLUMNS):
        c = start + tl.arange(0, COLUMNS)[None, :]
        inside = c < columns
        row = weight + c.to(tl.int64) * (A + B)
        answer = tl.dot(a, tl.load(row + tl.trans(ka), mask=inside, other=0.0))
        answer = tl.dot(b, tl.load(row + tl.trans(kb), mask=inside, other=0.0), answer)
        answer += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
        if GELU:
            answer = 0.5 * answer * (1 + tl.erf(answer * 0.7071067811865476))
        tl.store(out[:, None] + c, answer.to(out.dtype.element_ty), mask=here & inside)


@triton.jit(do_not_specialize=["sequences"])
def _attend(
    qkv, out, sequences, first, tokens, scale, qkv_n, qkv_t, inner, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    """Causal attention of one head for one query token, number first + program_id(2) of ``tokens``."""
    n = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    here = (n < sequences)[:, None]
    e = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)[None, :]
    query = first + tl.program_id(2)
    place = qkv + n[:, None] * qkv_n + e
    q = tl.load(place + query * qkv_t, mask=here, other=0.0).to(tl.float32) * scale
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    answer = tl.zeros((ROWS, WIDTH), tl.float32)
    for token in range(query + 1):
        k = tl.load(place + inner + token * qkv_t, mask=here, other=0.0).to(tl.float32)
        v = tl.load(place + 2 * inner + token * qkv_t, mask=here, other=0.0).to(tl.float32)
        score = tl.sum(q * k, 1)
        new = tl.maximum(largest, score)
        old_share, share = tl.exp(largest - new), tl.exp(score - new)
        answer = answer * old_share[:, None] + v * share[:, None]
        total = total * old_share + share
        largest = new
    target = out + (n * (tokens - first) + tl.program_id(2))[:, None] * inner + e
    tl.store(target, (answer / total[:, None]).to(out.dtype.element_ty), mask=here)


@triton.jit
def _candidates(mean, std, keys, iteration, out, samples, SIZE, BLOCK: tl.constexpr):
    episode = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = i < samples * SIZE
    number = tl.load(iteration).to(tl.int32) * samples * SIZE + i  # every draw of a plan has its own
    noise = tl.where(i < SIZE, 0.0, tl.randn(tl.load(keys + episode), number))  # candidate 0 is the mean
    j = episode * SIZE + i % SIZE
    value = tl.load(mean + j, mask=here) + tl.load(std + j, mask=here) * noise
    tl.store(out + episode * samples * SIZE + i, value, mask=here)


def draw_candidates(mean: Tensor, std: Tensor, keys: Tensor, iteration: Tensor, samples: int) -> Tensor:
    """mean + std·noise, candidate 0 the mean itself: (B, H, D) twice → (B, samples, H, D).

    The noise is a function of an episode's key (B,) int64, the iteration (1,) and the place, by Philox: no episode
    feels its company, and no state has to be kept.
    """
    out = mean.new_empty(len(mean), samples, *mean.shape[1:])
    size = mean[0].numel()
    grid = (len(mean), triton.cdiv(samples * size, 1024))
    _candidates[grid](mean, std, keys, iteration, out, samples, size, BLOCK=1024)
    return out


def pieces(width: int) -> tuple[int, int] | None:
    """Two powers of two that add up to the width, or None."""
    largest = 1 << (width.bit_length() - 1)
    a, b = (largest // 2, largest // 2) if largest == width else (largest, width - largest)
    return (a, b) if b & (b - 1) == 0 and min(a, b) >= SMALLEST else None


class TritonTerminal(FastTerminal):
    """:class:`FastTerminal` with these kernels."""

    tile = (64, 128, 4)  # rows and columns of a product done at once, and by how many warps

    def __init__(self, predictor: CausalPredictor, dtype: torch.dtype = torch.bfloat16):
        super().__init__(predictor, dtype)
        self.width = predictor.positions.shape[1]
        inner = self.blocks[0].out.weight.shape[1]
        self.head_dim = inner // self.heads
        sizes = pieces(self.width)
        if sizes is None or self.head_dim & (self.head_dim - 1):
            raise UserError(f"no kernels for width {self.width} with heads of {self.head_dim}")
        self.pieces = sizes

    def step(
        self, tokens: Tensor, place: int, modulation: Tensor, kept: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """As in the base class, but ``kept`` has room for the whole window from the start."""
        count, new, _ = tokens.shape
        if not kept:
            room = (count, self.history, 3 * self.heads * self.head_dim)
            kept = [tokens.new_empty(room) for _ in self.blocks]
        seen = place + new
        x, change, gate = tokens, self.positions[place:seen].expand(count, -1, -1), None
        for number, (block, cache) in enumerate(zip(self.blocks, kept, strict=True)):
            shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = modulation[:, :, number].unbind(dim=2)
            x, _ = self._product(x, change, gate, (scale_a, shift_a), block.qkv, out=cache[:, place:seen])
            if number == len(self.blocks) - 1:
                x, gate_a, shift_m, scale_m, gate_m = (t[:, -1:] for t in (x, gate_a, shift_m, scale_m, gate_m))
            attended = self._attend(cache, seen, x.shape[1])
            x, hidden = self._product(x, block.out(attended), gate_a, (scale_m, shift_m), block.up, gelu=True)
            change, gate = block.down(hidden), gate_m
        _, hidden = self._product(x, change, gate, None, self.head_in, gelu=True)
        return self.head_out(hidden[:, -1]), kept

    def _product(
        self,
        x: Tensor,
        change: Tensor,
        gate: Tensor | None,
        modulation: tuple[Tensor, Tensor] | None,
        product: Product,
        *,
        out: Tensor | None = None,
        gelu: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """x + gate·change (N, n, w), and the product of what the norms make of it."""
        count, steps, width = x.shape
        rows, columns = count * steps, len(product.weight)
        summed = torch.empty(count, steps, width, device=x.device)
        out = x.new_empty(count, steps, columns, dtype=self.dtype) if out is None else out
        scale, shift = modulation or (change, change)
        strides = (scale if modulation else gate).stride()  # type: ignore[union-attr]
        tile_rows, tile_columns, warps = self.tile
        # Few rows: columns are shared out until every multiprocessor has work. Many: the norms are done once.
        blocks = triton.cdiv(rows, tile_rows)
        parts = max(1, min(triton.cdiv(columns, tile_columns), triton.cdiv(132, blocks)))
        each = triton.cdiv(triton.cdiv(columns, tile_columns), parts) * tile_columns
        _norm_product[(blocks, triton.cdiv(columns, each))](
            x, change, change if gate is None else gate, scale, shift, product.weight, product.bias, out, summed,
            rows, steps, columns, each,
            *x.stride()[:2], *change.stride()[:2], *strides[:2], *out.stride()[:2],
            *self.pieces, HAS_GATE=gate is not None, MODULATED=modulation is not None, GELU=gelu,
            ROWS=tile_rows, COLUMNS=tile_columns, num_warps=warps,
        )  # fmt: skip
        return summed, out

    def _attend(self, qkv: Tensor, tokens: int, queries: int) -> Tensor:
        """The last ``queries`` of ``tokens`` tokens: (N, room, 3·h·e) → (N, queries, h·e)"""
        count, inner = len(qkv), self.heads * self.head_dim
        out = qkv.new_empty(count, queries, inner)
        _attend[(triton.cdiv(count, 32), self.heads, queries)](
            qkv, out, count, tokens - queries, tokens, self.head_dim**-0.5, *qkv.stride()[:2], inner,
            WIDTH=self.head_dim, ROWS=32,
        )  # fmt: skip
        return out
