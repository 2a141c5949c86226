"""Triton kernels for training the encoder: norms, GELU and patches, forward and backward.

They are bound by memory, so each reads and writes everything once, and sums for the gradients of biases and norms
fall out on the way. Sums are float32, whatever the products read.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS_A_PROGRAM = 256  # of the kernels that also sum over rows


@triton.jit
def _add_norm(x, change, weight, bias, x_out, out, moments, rows, eps, WIDTH: tl.constexpr,
              SIDE: tl.constexpr, ROWS: tl.constexpr, HAS_CHANGE: tl.constexpr):  # fmt: skip
    """x_out = x + change, out = norm(x_out)"""
    r, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, SIDE)
    inside = c < WIDTH
    here = (r < rows)[:, None] & inside[None, :]
    at = r[:, None].to(tl.int64) * WIDTH + c[None, :]
    value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    if HAS_CHANGE:
        value += tl.load(change + at, mask=here, other=0.0).to(tl.float32)
        tl.store(x_out + at, value.to(x_out.dtype.element_ty), mask=here)
    mean = tl.sum(value, 1) / WIDTH
    centred = tl.where(inside[None, :], value - mean[:, None], 0.0)
    rate = 1 / tl.sqrt(tl.sum(centred * centred, 1) / WIDTH + eps)
    answer = centred * rate[:, None] * tl.load(weight + c, mask=inside, other=0.0)[None, :]
    answer += tl.load(bias + c, mask=inside, other=0.0)[None, :]
    tl.store(out + at, answer.to(out.dtype.element_ty), mask=here)
    tl.store(moments + 2 * r, mean, mask=r < rows)
    tl.store(moments + 2 * r + 1, rate, mask=r < rows)


@triton.jit
def _add_norm_backward(grad, later, x, moments, weight, dx, dx_low, sums, rows, WIDTH: tl.constexpr,
                       SIDE: tl.constexpr, ROWS: tl.constexpr, REPEAT: tl.constexpr,
                       HAS_LATER: tl.constexpr):  # fmt: skip
    """dx of ``_add_norm``, plus the gradient that reached x_out by a later way; and sums over rows of the gradients
    of weight and bias, and of dx, which is the gradient of the bias inside ``change``: (programs, 3, WIDTH)."""
    c = tl.arange(0, SIDE)
    inside = c < WIDTH
    scale = tl.load(weight + c, mask=inside, other=0.0)[None, :]
    d_weight = tl.zeros([ROWS, SIDE], tl.float32)  # rows are summed at the end: between warps that is dear
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
        tl.store(dx + at, answer.to(dx.dtype.element_ty), mask=here)
        if dx_low.dtype.element_ty != dx.dtype.element_ty:
            tl.store(dx_low + at, answer.to(dx_low.dtype.element_ty), mask=here)
        d_change += tl.where(here, answer, 0.0)
    sums += tl.program_id(0) * 3 * WIDTH + c
    tl.store(sums, tl.sum(d_weight, 0), mask=inside)
    tl.store(sums + WIDTH, tl.sum(d_bias, 0), mask=inside)
    tl.store(sums + 2 * WIDTH, tl.sum(d_change, 0), mask=inside)


@triton.jit
def _normal(x):
    """Φ and φ of the standard normal. The error of Φ is below 1e-7 (Abramowitz and Stegun 7.1.26), and the
    exponential serves both: the library's erf would take longer than the memory."""
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
    """One row of patches of a frame: (3, size, size) uint8 → (grid, PADDED), 3·PATCH² numbers less 128, then 0."""
    row = tl.program_id(0).to(tl.int64)  # frame · grid + row of patches
    frames += (row // grid) * 3 * size * size + (row % grid) * PATCH * size
    out += row * grid * PADDED
    c = tl.arange(0, SIDE)
    pixel = frames + (c // (PATCH * PATCH)) * size * size + (c // PATCH % PATCH) * size + c % PATCH
    for patch in range(grid):
        value = tl.load(pixel + patch * PATCH, mask=c < INNER, other=128).to(tl.float32) - 128
        tl.store(out + patch * PADDED + c, value.to(out.dtype.element_ty), mask=c < PADDED)


def add_norm(
    x: Tensor, change: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """x + change (M, w); its LayerNorm in ``dtype``; and mean and 1/deviation of each row: (M, 2) float32."""
    rows, width = x.shape
    x_out = x if change is None else torch.empty_like(x)
    out, moments = torch.empty_like(x, dtype=dtype), torch.empty(rows, 2, device=x.device)
    side, block = triton.next_power_of_2(width), 8
    _add_norm[(triton.cdiv(rows, block),)](
        x, x if change is None else change, weight, bias, x_out, out, moments, rows, eps,
        WIDTH=width, SIDE=side, ROWS=block, HAS_CHANGE=change is not None, num_warps=4,
    )  # fmt: skip
    return x_out, out, moments


def add_norm_backward(
    grad: Tensor, later: Tensor | None, x: Tensor, moments: Tensor, weight: Tensor, dtype: torch.dtype, sums: Tensor
) -> tuple[Tensor, Tensor]:
    """Of x_out's norm; ``later``: the gradient that reached x_out otherwise. dx (M, w), as x is and in ``dtype``.
    What sums up to the gradients of weight, bias and the bias inside change goes to ``sums`` (programs, 3, w)."""
    rows, width = x.shape
    dx = torch.empty_like(x)
    low = dx if x.dtype == dtype else torch.empty_like(x, dtype=dtype)
    side, block = triton.next_power_of_2(width), 4
    _add_norm_backward[(len(sums),)](
        grad, x if later is None else later, x, moments, weight, dx, low, sums, rows,
        WIDTH=width, SIDE=side, ROWS=block, REPEAT=ROWS_A_PROGRAM // block, HAS_LATER=later is not None,
        num_warps=4,
    )  # fmt: skip
    return dx, low


def gelu(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    _gelu[(triton.cdiv(x.numel(), 4096),)](x, out, x.numel(), BLOCK=4096, num_warps=4)
    return out


def gelu_backward(grad: Tensor, x: Tensor, sums: Tensor) -> Tensor:
    """The gradient of x (M, h); its sums go to ``sums`` (programs, h)."""
    rows, columns = x.shape
    dx, block = torch.empty_like(x), min(256, triton.next_power_of_2(columns))
    _gelu_backward[(len(sums), triton.cdiv(columns, block))](
        grad, x, dx, sums, rows, columns, ROWS=4, COLUMNS=block, REPEAT=ROWS_A_PROGRAM // 4, num_warps=4
    )
    return dx


def patches(frames: Tensor, patch: int, dtype: torch.dtype) -> Tensor:
    """The patches of frames (N, 3, S, S) uint8, less 128, which is exact in bf16: (N, K, 3·p²), and zeros to a
    multiple of 16, as fast products want it."""
    count, size = len(frames), frames.shape[-1]
    grid, inner = size // patch, 3 * patch * patch
    padded = triton.cdiv(inner, 16) * 16
    out = torch.empty(count, grid * grid, padded, dtype=dtype, device=frames.device)
    _patches[(count * grid,)](
        frames.contiguous(), out, grid, size,
        PATCH=patch, INNER=inner, PADDED=padded, SIDE=triton.next_power_of_2(padded), num_warps=4,
    )  # fmt: skip
    return out
