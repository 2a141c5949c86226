"""Triton kernels that speed up training the encoder: norms, GELU and patches, forward and backward.

Must equal torch's ``layer_norm`` and exact ``gelu``, their gradients, and the patches of timm's ``PatchEmbed``.

They are bound by memory, so each reads and writes everything once, and sums the gradients of biases and norms in
the same pass. Sums are float32, whatever the dtype of the products.

Where products are bf16, the residual stream and its gradient are two bf16 numbers, rounded and rest, whose sum has
16 bits. Products read the rounded gradient, so it is not written twice; the backward pass of a norm reads only the
rounded x.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS_A_PROGRAM = 64  # of the kernels that also sum over rows


@triton.jit
def _store_split(value, out, rest, at, here, SPLIT: tl.constexpr):
    rounded = value.to(out.dtype.element_ty)
    tl.store(out + at, rounded, mask=here)
    if SPLIT:
        tl.store(rest + at, (value - rounded.to(tl.float32)).to(rest.dtype.element_ty), mask=here)


@triton.jit
def _add_norm(x, x_rest, change, weight, bias, x_out, rest_out, out, moments, rows, x_rows, eps,
              WIDTH: tl.constexpr, SIDE: tl.constexpr, ROWS: tl.constexpr, HAS_REST: tl.constexpr,
              SPLIT: tl.constexpr):  # fmt: skip
    """x_out = x + change, out = norm(x_out). x repeats itself after ``x_rows`` rows."""
    r, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, SIDE)
    inside = c < WIDTH
    here = (r < rows)[:, None] & inside[None, :]
    at = r[:, None].to(tl.int64) * WIDTH + c[None, :]
    x += (r % x_rows)[:, None].to(tl.int64) * WIDTH + c[None, :]
    value = tl.load(x, mask=here, other=0.0).to(tl.float32)
    if HAS_REST:
        value += tl.load(x_rest + at, mask=here, other=0.0).to(tl.float32)
    value += tl.load(change + at, mask=here, other=0.0).to(tl.float32)
    _store_split(value, x_out, rest_out, at, here, SPLIT)
    mean = tl.sum(value, 1) / WIDTH
    centred = tl.where(inside[None, :], value - mean[:, None], 0.0)
    rate = 1 / tl.sqrt(tl.sum(centred * centred, 1) / WIDTH + eps)
    answer = centred * rate[:, None] * tl.load(weight + c, mask=inside, other=0.0)[None, :]
    answer += tl.load(bias + c, mask=inside, other=0.0)[None, :]
    tl.store(out + at, answer.to(out.dtype.element_ty), mask=here)
    tl.store(moments + 2 * r, mean, mask=r < rows)
    tl.store(moments + 2 * r + 1, rate, mask=r < rows)


@triton.jit
def _add_norm_backward(grad, later, later_rest, x, moments, weight, dx, dx_rest, sums, rows, WIDTH: tl.constexpr,
                       SIDE: tl.constexpr, ROWS: tl.constexpr, REPEAT: tl.constexpr, HAS_LATER: tl.constexpr,
                       SPLIT: tl.constexpr):  # fmt: skip
    """dx of ``_add_norm``, plus the gradient of x_out from later layers; and sums over rows of the gradients of
    weight and bias, and of dx, which is the gradient of the bias inside ``change``: (programs, 3, WIDTH)."""
    c = tl.arange(0, SIDE)
    inside = c < WIDTH
    scale = tl.load(weight + c, mask=inside, other=0.0)[None, :]
    d_weight = tl.zeros([ROWS, SIDE], tl.float32)  # rows are summed at the end: sums across warps are slow
    d_bias = tl.zeros([ROWS, SIDE], tl.float32)
    d_change = tl.zeros([ROWS, SIDE], tl.float32)
    for i in range(REPEAT):
        r = (tl.program_id(0) * REPEAT + i) * ROWS + tl.arange(0, ROWS)
        here = (r < rows)[:, None] & inside[None, :]
        at = r[:, None].to(tl.int64) * WIDTH + c[None, :]
        g = tl.load(grad + at, mask=here, other=0.0).to(tl.float32)
        mean = tl.load(moments + 2 * r, mask=r < rows, other=0.0)[:, None]
        rate = tl.load(moments + 2 * r + 1, mask=r < rows, other=0.0)[:, None]
        unit = tl.where(here, (tl.load(x + at, mask=here, other=0.0).to(tl.float32) - mean) * rate, 0.0)
        d_weight += g * unit
        d_bias += g
        g *= scale
        along = (tl.sum(g * unit, 1) / WIDTH)[:, None]
        answer = (g - (tl.sum(g, 1) / WIDTH)[:, None] - unit * along) * rate
        if HAS_LATER:
            answer += tl.load(later + at, mask=here, other=0.0).to(tl.float32)
            if SPLIT:
                answer += tl.load(later_rest + at, mask=here, other=0.0).to(tl.float32)
        _store_split(answer, dx, dx_rest, at, here, SPLIT)
        d_change += tl.where(here, answer, 0.0)
    sums += tl.program_id(0) * 3 * WIDTH + c
    tl.store(sums, tl.sum(d_weight, 0), mask=inside)
    tl.store(sums + WIDTH, tl.sum(d_bias, 0), mask=inside)
    tl.store(sums + 2 * WIDTH, tl.sum(d_change, 0), mask=inside)


@triton.jit
def _normal(x):
    """Φ and φ of the standard normal. The error of Φ is below 1e-7 (Abramowitz and Stegun 7.1.26), and both use one
    exponential: the library's erf would take longer than the memory traffic."""
    density = tl.exp2(x * x * -0.7213475204444817)  # exp(−x²/2)
    t = 1 / (1 + 0.3275911 * 0.7071067811865476 * tl.abs(x))
    tail = 0.5 * density * t * (
        0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
    )  # fmt: skip
    return tl.where(x < 0, tail, 1 - tail), density * 0.3989422804014327


@triton.jit
def _gelu(x, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    share, _ = _normal(value)
    tl.store(out + at, (value * share).to(out.dtype.element_ty), mask=at < count)


@triton.jit
def _gelu_backward(grad, x, dx, sums, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                   REPEAT: tl.constexpr):  # fmt: skip
    """dx, and its sums over the rows of each program: (programs, columns)"""
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = c < columns
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for i in range(REPEAT):
        r = (tl.program_id(0) * REPEAT + i) * ROWS + tl.arange(0, ROWS)
        here = (r < rows)[:, None] & inside[None, :]
        at = r[:, None].to(tl.int64) * columns + c[None, :]
        value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
        share, density = _normal(value)
        answer = tl.load(grad + at, mask=here, other=0.0).to(tl.float32) * (share + value * density)
        tl.store(dx + at, answer.to(dx.dtype.element_ty), mask=here)
        total += answer
    tl.store(sums + tl.program_id(0) * columns + c, tl.sum(total, 0), mask=inside)


@triton.jit
def _patches(frames, out, grid, size, PATCH: tl.constexpr, INNER: tl.constexpr, PADDED: tl.constexpr,
             SIDE: tl.constexpr):  # fmt: skip
    """One row of patches of a frame: (3, size, size) uint8 → (grid, PADDED), 3·PATCH² numbers less 128, then 0.
    Before the patches of a frame there is one of zeros."""
    frame, row = tl.program_id(0).to(tl.int64) // grid, tl.program_id(0) % grid
    frames += frame * 3 * size * size + row * PATCH * size
    out += frame * (1 + grid * grid) * PADDED
    c = tl.arange(0, SIDE)
    if row == 0:
        tl.store(out + c, tl.zeros([SIDE], out.dtype.element_ty), mask=c < PADDED)
    out += (1 + row * grid) * PADDED
    pixel = frames + (c // (PATCH * PATCH)) * size * size + (c // PATCH % PATCH) * size + c % PATCH
    for patch in range(grid):
        value = tl.load(pixel + patch * PATCH, mask=c < INNER, other=128).to(tl.float32) - 128
        tl.store(out + patch * PADDED + c, value.to(out.dtype.element_ty), mask=c < PADDED)


class Split(NamedTuple):
    """(M, w); not split if there is no rest."""

    rounded: Tensor
    rest: Tensor | None = None

    @classmethod
    def empty(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> "Split":
        rounded = torch.empty(shape, dtype=dtype, device=device)
        return cls(rounded, None if dtype == torch.float32 else torch.empty_like(rounded))

    def map(self, function: Callable[[Tensor], Tensor]) -> "Split":
        return Split(function(self.rounded), None if self.rest is None else function(self.rest))


def add_norm(
    x: Split, change: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Split, Tensor, Tensor]:
    """x + change (M, w), split if that is bf16; its LayerNorm in ``dtype``; and mean and 1/std of each row:
    (M, 2). x has M rows, or fewer that repeat themselves."""
    rows, width = change.shape
    x_out, out = Split.empty(change.shape, change.dtype, change.device), torch.empty_like(change, dtype=dtype)
    moments = torch.empty(rows, 2, device=change.device)
    side, block = triton.next_power_of_2(width), 8
    _add_norm[(triton.cdiv(rows, block),)](
        x.rounded, x.rest, change, weight, bias, *x_out, out, moments, rows, len(x.rounded), eps,
        WIDTH=width, SIDE=side, ROWS=block, HAS_REST=x.rest is not None, SPLIT=x_out.rest is not None, num_warps=4,
    )  # fmt: skip
    return x_out, out, moments


def add_norm_backward(
    grad: Tensor, later: Split | None, x: Tensor, moments: Tensor, weight: Tensor, sums: Tensor
) -> Split:
    """Of x_out's norm; ``later``: the gradient of x_out from later layers. dx (M, w), split if x is rounded.
    Partial sums of the gradients of weight, bias and the bias inside change go to ``sums`` (programs, 3, w)."""
    rows, width = x.shape
    dx = Split.empty(x.shape, x.dtype, x.device)
    side, block = triton.next_power_of_2(width), 2
    _add_norm_backward[(len(sums),)](
        grad, *(later or dx), x, moments, weight, *dx, sums, rows,
        WIDTH=width, SIDE=side, ROWS=block, REPEAT=ROWS_A_PROGRAM // block, HAS_LATER=later is not None,
        SPLIT=dx.rest is not None, num_warps=1,
    )  # fmt: skip
    return dx


def gelu(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    _gelu[(triton.cdiv(x.numel(), 4096),)](x, out, x.numel(), BLOCK=4096, num_warps=4)
    return out


def gelu_backward(grad: Tensor, x: Tensor, sums: Tensor) -> Tensor:
    """The gradient of x (M, h); its sums go to ``sums`` (programs, h)."""
    rows, columns = x.shape
    dx, block = torch.empty_like(x), min(256, triton.next_power_of_2(columns))
    _gelu_backward[(len(sums), triton.cdiv(columns, block))](
        grad, x, dx, sums, rows, columns, ROWS=2, COLUMNS=block, REPEAT=ROWS_A_PROGRAM // 2, num_warps=2
    )
    return dx


def patches(frames: Tensor, patch: int, dtype: torch.dtype) -> Tensor:
    """The patches of frames (N, 3, S, S) uint8, less 128, which is exact in bf16: (N, 1 + K, 3·p²). Zeros pad
    them to a multiple of 16, for fast products, and stand before them, for the CLS token."""
    count, size = len(frames), frames.shape[-1]
    grid, inner = size // patch, 3 * patch * patch
    padded = triton.cdiv(inner, 16) * 16
    out = torch.empty(count, 1 + grid * grid, padded, dtype=dtype, device=frames.device)
    _patches[(count * grid,)](
        frames.contiguous(), out, grid, size,
        PATCH=patch, INNER=inner, PADDED=padded, SIDE=triton.next_power_of_2(padded), num_warps=4,
    )  # fmt: skip
    return out


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """gradᵀ·x in float32: (M, out) and (M, in) → (out, in), or (…, M, out) and (…, M, in)"""
    if not grad.is_cuda:
        return grad.mT.float() @ x.float()
    product = torch.mm if grad.ndim == 2 else torch.bmm
    return product(grad.mT, x) if grad.dtype == torch.float32 else product(grad.mT, x, out_dtype=torch.float32)
