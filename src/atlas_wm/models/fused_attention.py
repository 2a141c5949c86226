"""Triton kernels for training the encoder: attention within a frame, forward and backward.

All keys of a frame and a head are held at once. The patches fill the tiles of the products, and the CLS token,
which would cost a tile of its own, is one more column and one more row beside them. Nothing is added up by atomics:
the same input gives the same bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
MOST_PATCHES = 256  # that fit a multiprocessor, in heads of at most LARGEST_HEAD
LARGEST_HEAD = 64


@triton.jit
def _places(which, PATCHES: tl.constexpr, HEADS: tl.constexpr, E: tl.constexpr):
    """Where pair ``which`` of frame and head begins in (…, 3, HEADS, E), in (…, HEADS, E) and in (which, …)."""
    token = (which // HEADS).to(tl.int64) * (1 + PATCHES)
    head = (which % HEADS) * E
    return token * (3 * HEADS * E) + head, token * (HEADS * E) + head, which.to(tl.int64) * (1 + PATCHES)


@triton.jit
def _rows(base, first, stride, e, PATCHES: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr):
    """Patches first.. of a frame, zero beyond the last: (ROWS, E). Token 0 is the CLS token."""
    r = first + tl.arange(0, ROWS)
    at = base + (1 + r)[:, None] * stride + e[None, :]
    if WHOLE:
        return tl.load(at)
    return tl.load(at, mask=(r < PATCHES)[:, None], other=0.0)


@triton.jit
def _attend(qkv, out, lse, scale, PATCHES: tl.constexpr, HEADS: tl.constexpr, E: tl.constexpr, KEYS: tl.constexpr,
            ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """softmax(q·kᵀ)·v for ROWS patches of one frame and head, and the logarithm (of base 2) of each softmax's sum.

    qkv: (frames, 1 + PATCHES, 3, HEADS, E). ``scale`` includes log₂ e. Shares are summed relative to the largest
    score so far, which is at first that of the CLS token.
    """
    which, block = tl.program_id(0), tl.program_id(1)
    WIDTH: tl.constexpr = HEADS * E
    WHOLE: tl.constexpr = KEYS == PATCHES
    three, one, line = _places(which, PATCHES, HEADS, E)
    qkv, out, lse = qkv + three, out + one, lse + line
    e, n = tl.arange(0, E), tl.arange(0, BLOCK)
    k0, v0 = tl.load(qkv + WIDTH + e).to(tl.float32), tl.load(qkv + 2 * WIDTH + e).to(tl.float32)

    r = block * ROWS + tl.arange(0, ROWS)
    q = _rows(qkv, block * ROWS, 3 * WIDTH, e, PATCHES, ROWS, WHOLE)
    largest = tl.sum(q.to(tl.float32) * k0[None, :], 1) * scale
    total = tl.full([ROWS], 1.0, tl.float32)
    answer = tl.zeros([ROWS, E], tl.float32) + v0[None, :]
    for first in range(0, KEYS, BLOCK):
        k = _rows(qkv + WIDTH, first, 3 * WIDTH, e, PATCHES, BLOCK, WHOLE)
        v = _rows(qkv + 2 * WIDTH, first, 3 * WIDTH, e, PATCHES, BLOCK, WHOLE)
        scores = tl.dot(q, tl.trans(k)) * scale
        if not WHOLE:
            scores = tl.where((first + n < PATCHES)[None, :], scores, float("-inf"))
        more = tl.maximum(largest, tl.max(scores, 1))
        p, before = tl.exp2(scores - more[:, None]), tl.exp2(largest - more)
        total = total * before + tl.sum(p, 1)
        answer = tl.dot(p.to(v.dtype), v, answer * before[:, None])
        largest = more
    here = r < PATCHES
    tl.store(out + (1 + r)[:, None] * WIDTH + e[None, :], (answer / total[:, None]).to(out.dtype.element_ty),
             mask=here[:, None])  # fmt: skip
    tl.store(lse + 1 + r, largest + tl.log2(total), mask=here)

    if block == 0:  # the row of the CLS token
        q0 = tl.load(qkv + e).to(tl.float32)
        most = tl.sum(q0 * k0, 0) * scale
        sum0 = most * 0 + 1
        answer0 = v0
        for first in range(0, KEYS, BLOCK):
            k = _rows(qkv + WIDTH, first, 3 * WIDTH, e, PATCHES, BLOCK, WHOLE).to(tl.float32)
            v = _rows(qkv + 2 * WIDTH, first, 3 * WIDTH, e, PATCHES, BLOCK, WHOLE).to(tl.float32)
            row = tl.where(first + n < PATCHES, tl.sum(k * q0[None, :], 1) * scale, float("-inf"))
            new = tl.maximum(most, tl.max(row, 0))
            share, kept = tl.exp2(row - new), tl.exp2(most - new)
            sum0 = sum0 * kept + tl.sum(share, 0)
            answer0 = answer0 * kept + tl.sum(share[:, None] * v, 0)
            most = new
        tl.store(out + e, (answer0 / sum0).to(out.dtype.element_ty))
        tl.store(lse, most + tl.log2(sum0))


@triton.jit
def _attend_backward_keys(qkv, out, lse, grad, dqkv, sums, scale, PATCHES: tl.constexpr, HEADS: tl.constexpr,
                          E: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
                          ONLY_CLS: tl.constexpr):  # fmt: skip
    """dk and dv of the patches, and dq of the CLS token, for one frame and head. Scores lie on their side, keys
    first, so that the sums over queries stay where they are.

    sums: (frames · HEADS, 2, 3, E), of dqkv over tokens; those of this kernel are the first of the two. ``scale``
    is without log₂ e. ONLY_CLS: no gradient came to the patches.
    """
    which = tl.program_id(0)
    WIDTH: tl.constexpr = HEADS * E
    WHOLE: tl.constexpr = KEYS == PATCHES
    three, one, line = _places(which, PATCHES, HEADS, E)
    qkv, dqkv, out, grad, lse = qkv + three, dqkv + three, out + one, grad + one, lse + line
    sums += which * 6 * E
    low = dqkv.dtype.element_ty
    scale2 = scale * 1.4426950408889634
    e, s, n = tl.arange(0, E), tl.arange(0, KEYS), tl.arange(0, BLOCK)
    there = s < PATCHES
    k = _rows(qkv + WIDTH, 0, 3 * WIDTH, e, PATCHES, KEYS, WHOLE)
    v = _rows(qkv + 2 * WIDTH, 0, 3 * WIDTH, e, PATCHES, KEYS, WHOLE)

    # The CLS token's row begins the sums.
    q0, g0 = tl.load(qkv + e).to(tl.float32), tl.load(grad + e).to(tl.float32)
    delta0 = tl.sum(g0 * tl.load(out + e).to(tl.float32), 0)
    p0 = tl.where(there, tl.exp2(tl.sum(k.to(tl.float32) * q0[None, :], 1) * scale2 - tl.load(lse)), 0.0)
    ds0 = p0 * (tl.sum(v.to(tl.float32) * g0[None, :], 1) - delta0) * scale
    dq0 = tl.sum(ds0[:, None] * k.to(tl.float32), 0)
    dk, dv = ds0[:, None] * q0[None, :], p0[:, None] * g0[None, :]
    for first in range(0, 0 if ONLY_CLS else KEYS, BLOCK):
        r = first + n
        q = _rows(qkv, first, 3 * WIDTH, e, PATCHES, BLOCK, WHOLE)
        g = _rows(grad, first, WIDTH, e, PATCHES, BLOCK, WHOLE)
        o = _rows(out, first, WIDTH, e, PATCHES, BLOCK, WHOLE)
        delta = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
        row_lse = tl.load(lse + 1 + r, mask=r < PATCHES, other=float("inf"))  # no share in a row that is not there
        p = tl.exp2(tl.dot(k, tl.trans(q)) * scale2 - row_lse[None, :])  # (KEYS, BLOCK)
        dv = tl.dot(p.to(low), g, dv)
        ds = p * (tl.dot(v, tl.trans(g)) - delta[None, :]) * scale
        dk = tl.dot(ds.to(low), q, dk)
    at = (1 + s)[:, None] * 3 * WIDTH + e[None, :]
    tl.store(dqkv + WIDTH + at, dk.to(low), mask=there[:, None])
    tl.store(dqkv + 2 * WIDTH + at, dv.to(low), mask=there[:, None])
    k0, v0 = tl.load(qkv + WIDTH + e).to(tl.float32), tl.load(qkv + 2 * WIDTH + e).to(tl.float32)
    own = tl.exp2(tl.sum(q0 * k0, 0) * scale2 - tl.load(lse)) * (tl.sum(g0 * v0, 0) - delta0) * scale
    dq0 += own * k0
    tl.store(dqkv + e, dq0.to(low))
    tl.store(sums + e, dq0)
    tl.store(sums + E + e, tl.sum(tl.where(there[:, None], dk, 0.0), 0))
    tl.store(sums + 2 * E + e, tl.sum(tl.where(there[:, None], dv, 0.0), 0))


@triton.jit
def _attend_backward_queries(qkv, out, lse, grad, dqkv, sums, scale, PATCHES: tl.constexpr, HEADS: tl.constexpr,
                             E: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                             ONLY_CLS: tl.constexpr):  # fmt: skip
    """The rest: dq of the patches, and dk and dv of the CLS token."""
    which = tl.program_id(0)
    WIDTH: tl.constexpr = HEADS * E
    WHOLE: tl.constexpr = KEYS == PATCHES
    three, one, line = _places(which, PATCHES, HEADS, E)
    qkv, dqkv, out, grad, lse = qkv + three, dqkv + three, out + one, grad + one, lse + line
    sums += which * 6 * E + 3 * E
    low = dqkv.dtype.element_ty
    scale2 = scale * 1.4426950408889634
    e, n = tl.arange(0, E), tl.arange(0, ROWS)
    q0, k0, v0 = (tl.load(qkv + e).to(tl.float32), tl.load(qkv + WIDTH + e).to(tl.float32),
                  tl.load(qkv + 2 * WIDTH + e).to(tl.float32))  # fmt: skip
    g0 = tl.load(grad + e).to(tl.float32)
    own = tl.exp2(tl.sum(q0 * k0, 0) * scale2 - tl.load(lse))
    ds_own = own * (tl.sum(g0 * v0, 0) - tl.sum(g0 * tl.load(out + e).to(tl.float32), 0)) * scale
    dk0, dv0, dq_sum = ds_own * q0, own * g0, q0 * 0
    for start in range(0, KEYS, ROWS):
        r = start + n
        dq = tl.zeros([ROWS, E], tl.float32)
        if not ONLY_CLS:
            q = _rows(qkv, start, 3 * WIDTH, e, PATCHES, ROWS, WHOLE)
            g = _rows(grad, start, WIDTH, e, PATCHES, ROWS, WHOLE)
            o = _rows(out, start, WIDTH, e, PATCHES, ROWS, WHOLE)
            row_lse = tl.load(lse + 1 + r, mask=r < PATCHES, other=float("inf"))
            delta = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
            p0 = tl.exp2(tl.sum(q.to(tl.float32) * k0[None, :], 1) * scale2 - row_lse)
            ds0 = p0 * (tl.sum(g.to(tl.float32) * v0[None, :], 1) - delta) * scale
            dk0 += tl.sum(ds0[:, None] * q.to(tl.float32), 0)
            dv0 += tl.sum(p0[:, None] * g.to(tl.float32), 0)
            dq += ds0[:, None] * k0[None, :]
            for first in range(0, KEYS, BLOCK):
                k = _rows(qkv + WIDTH, first, 3 * WIDTH, e, PATCHES, BLOCK, WHOLE)
                v = _rows(qkv + 2 * WIDTH, first, 3 * WIDTH, e, PATCHES, BLOCK, WHOLE)
                p = tl.exp2(tl.dot(q, tl.trans(k)) * scale2 - row_lse[:, None])  # (ROWS, BLOCK)
                ds = p * (tl.dot(g, tl.trans(v)) - delta[:, None]) * scale
                dq = tl.dot(ds.to(low), k, dq)  # a key that is not there is zero
            dq_sum += tl.sum(dq, 0)
        tl.store(dqkv + (1 + r)[:, None] * 3 * WIDTH + e[None, :], dq.to(low), mask=(r < PATCHES)[:, None])
    tl.store(dqkv + WIDTH + e, dk0.to(low))
    tl.store(dqkv + 2 * WIDTH + e, dv0.to(low))
    tl.store(sums + e, dq_sum)
    tl.store(sums + E + e, dk0)
    tl.store(sums + 2 * E + e, dv0)


def attend(qkv: Tensor, frames: int, heads: int) -> tuple[Tensor, Tensor]:
    """Self-attention within each frame: (frames · tokens, 3·w) → (frames · tokens, w), and the softmaxes' log₂ sums
    (frames · heads, tokens)."""
    rows, width = len(qkv), qkv.shape[1] // 3
    tokens, size = rows // frames, width // heads
    out, lse = qkv.new_empty(rows, width), torch.empty(frames * heads, tokens, device=qkv.device)
    keys = _keys(tokens)
    block = min(128, keys)
    _attend[(frames * heads, triton.cdiv(tokens - 1, block))](
        qkv, out, lse, size**-0.5 * LOG2_E,
        PATCHES=tokens - 1, HEADS=heads, E=size, KEYS=keys, ROWS=block, BLOCK=min(64, keys),
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out, lse


def attend_backward(
    grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, heads: int, sums: Tensor, only_cls: bool
) -> Tensor:
    """The gradient of qkv; its sums go to ``sums`` (frames, heads, 2, 3, e). ``only_cls``: zero elsewhere."""
    tokens, size = lse.shape[1], out.shape[1] // heads
    keys, dqkv = _keys(tokens), torch.empty_like(qkv)
    given = qkv, out, lse, grad, dqkv, sums, size**-0.5
    shapes = {"PATCHES": tokens - 1, "HEADS": heads, "E": size, "KEYS": keys, "BLOCK": min(32, keys)}
    options = {"ONLY_CLS": only_cls, "num_stages": 3}
    _attend_backward_keys[(len(lse),)](*given, **shapes, **options, num_warps=8 if keys > 128 else 4)
    _attend_backward_queries[(len(lse),)](*given, **shapes, **options, ROWS=min(128, keys), num_warps=4)
    return dqkv


def _keys(tokens: int) -> int:
    """Patches, filled up to a power of two."""
    return int(max(16, triton.next_power_of_2(tokens - 1)))
