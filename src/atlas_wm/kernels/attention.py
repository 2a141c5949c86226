"""Triton kernels that speed up training the encoder: attention within a frame, forward and backward.

Must equal torch's ``scaled_dot_product_attention`` (without a mask), as timm's ViT calls it, and its gradients.

The patches of a frame fill the tiles of the products; the CLS token has a small tile, outside the inner loops. No
sum uses atomics: the same input gives the same bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
MOST_PATCHES = 256  # that fit a multiprocessor, in heads of at most LARGEST_HEAD
LARGEST_HEAD = 64
FEWEST = 16  # rows of a product


@triton.jit
def _offsets(which, PATCHES: tl.constexpr, HEADS: tl.constexpr, E: tl.constexpr):
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
def _first_row(base, e, FEW: tl.constexpr):
    """A row and zeros below it, (FEW, E): the smallest tile that products take."""
    r = tl.arange(0, FEW)
    return tl.load(base + r[:, None] * 0 + e[None, :], mask=(r == 0)[:, None], other=0.0)


@triton.jit
def _more(q, k, v, scale, inside, largest, total, answer, WHOLE: tl.constexpr):
    """Some more keys in the softmax, whose shares are summed relative to the largest score so far."""
    scores = tl.dot(q, tl.trans(k))
    if not WHOLE:
        scores = tl.where(inside[None, :], scores, float("-inf"))
    more = tl.maximum(largest, tl.max(scores, 1) * scale)
    p, before = tl.exp2(scores * scale - more[:, None]), tl.exp2(largest - more)
    return more, total * before + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, answer * before[:, None])


@triton.jit
def _attend(qkv, out, lse, scale, PATCHES: tl.constexpr, HEADS: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr,
            BLOCK: tl.constexpr, FEW: tl.constexpr):  # fmt: skip
    """softmax(q·kᵀ)·v for ROWS patches of one frame and head, and the logarithm (of base 2) of each softmax's sum.

    qkv: (frames, 1 + PATCHES, 3, HEADS, E). ``scale`` includes log₂ e. The CLS token is every row's first key.
    """
    which, block = tl.program_id(0), tl.program_id(1)
    WIDTH: tl.constexpr = HEADS * E
    WHOLE: tl.constexpr = PATCHES % ROWS == 0 and PATCHES % BLOCK == 0
    three, one, line = _offsets(which, PATCHES, HEADS, E)
    qkv, out, lse = qkv + three, out + one, lse + line
    e, n, few = tl.arange(0, E), tl.arange(0, BLOCK), tl.arange(0, FEW)
    k0, v0 = tl.load(qkv + WIDTH + e).to(tl.float32), tl.load(qkv + 2 * WIDTH + e).to(tl.float32)

    r = block * ROWS + tl.arange(0, ROWS)
    q = _rows(qkv, block * ROWS, 3 * WIDTH, e, PATCHES, ROWS, WHOLE)
    largest, total = tl.sum(q.to(tl.float32) * k0[None, :], 1) * scale, tl.full([ROWS], 1.0, tl.float32)
    answer = tl.zeros([ROWS, E], tl.float32) + v0[None, :]
    for first in range(0, PATCHES, BLOCK):
        k = _rows(qkv + WIDTH, first, 3 * WIDTH, e, PATCHES, BLOCK, WHOLE)
        v = _rows(qkv + 2 * WIDTH, first, 3 * WIDTH, e, PATCHES, BLOCK, WHOLE)
        largest, total, answer = _more(q, k, v, scale, first + n < PATCHES, largest, total, answer, WHOLE)
    here = r < PATCHES
    tl.store(out + (1 + r)[:, None] * WIDTH + e[None, :], (answer / total[:, None]).to(out.dtype.element_ty),
             mask=here[:, None])  # fmt: skip
    tl.store(lse + 1 + r, largest + tl.log2(total), mask=here)

    if block == 0:  # the row of the CLS token
        q0 = _first_row(qkv, e, FEW)
        largest0, total0 = tl.sum(q0.to(tl.float32) * k0[None, :], 1) * scale, tl.full([FEW], 1.0, tl.float32)
        answer0 = tl.zeros([FEW, E], tl.float32) + v0[None, :]
        for first in range(0, PATCHES, BLOCK):
            k = _rows(qkv + WIDTH, first, 3 * WIDTH, e, PATCHES, BLOCK, WHOLE)
            v = _rows(qkv + 2 * WIDTH, first, 3 * WIDTH, e, PATCHES, BLOCK, WHOLE)
            largest0, total0, answer0 = _more(
                q0, k, v, scale, first + n < PATCHES, largest0, total0, answer0, WHOLE
            )
        tl.store(out + few[:, None] * 0 + e[None, :], (answer0 / total0[:, None]).to(out.dtype.element_ty),
                 mask=(few == 0)[:, None])  # fmt: skip
        tl.store(lse + few * 0, largest0 + tl.log2(total0), mask=few == 0)


@triton.jit
def _attend_backward_queries(qkv, out, lse, grad, dqkv, deltas, sums, scale, PATCHES: tl.constexpr,
                             HEADS: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                             FEW: tl.constexpr, ONLY_CLS: tl.constexpr):  # fmt: skip
    """dq of the patches of one frame and head, dk and dv of the CLS token, and Σ grad·out of every query, which
    goes to ``deltas`` (frames · HEADS, 1 + PATCHES).

    sums: (frames · HEADS, 2, E), of dq over the patches and over the CLS token. ``scale`` is without log₂ e.
    ONLY_CLS: no gradient came to the patches.
    """
    which = tl.program_id(0)
    WIDTH: tl.constexpr = HEADS * E
    WHOLE: tl.constexpr = PATCHES % ROWS == 0 and PATCHES % BLOCK == 0
    three, one, line = _offsets(which, PATCHES, HEADS, E)
    qkv, dqkv, out, grad, lse, deltas = qkv + three, dqkv + three, out + one, grad + one, lse + line, deltas + line
    low = dqkv.dtype.element_ty
    scale2 = scale * 1.4426950408889634
    e, n, cls = tl.arange(0, E), tl.arange(0, ROWS), (tl.arange(0, FEW) == 0)[None, :]
    k0, v0 = _first_row(qkv + WIDTH, e, FEW), _first_row(qkv + 2 * WIDTH, e, FEW)
    dk0, dv0 = tl.zeros([E, FEW], tl.float32), tl.zeros([E, FEW], tl.float32)
    dq_sum = tl.zeros([E], tl.float32)
    for start in range(0, PATCHES, ROWS):
        r = start + n
        dq = tl.zeros([ROWS, E], tl.float32)
        if not ONLY_CLS:
            q = _rows(qkv, start, 3 * WIDTH, e, PATCHES, ROWS, WHOLE)
            g = _rows(grad, start, WIDTH, e, PATCHES, ROWS, WHOLE)
            o = _rows(out, start, WIDTH, e, PATCHES, ROWS, WHOLE)
            # A row that is not there has no share in anything.
            row_lse = tl.load(lse + 1 + r, mask=r < PATCHES, other=float("inf"))
            delta = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
            tl.store(deltas + 1 + r, delta, mask=r < PATCHES)
            p0 = tl.where(cls, tl.exp2(tl.dot(q, tl.trans(k0)) * scale2 - row_lse[:, None]), 0.0)  # (ROWS, FEW)
            ds0 = (p0 * (tl.dot(g, tl.trans(v0)) - delta[:, None])).to(low)
            dk0 = tl.dot(tl.trans(q), ds0, dk0)
            dv0 = tl.dot(tl.trans(g), p0.to(low), dv0)
            dq = tl.dot(ds0, k0)
            for first in range(0, PATCHES, BLOCK):
                k = _rows(qkv + WIDTH, first, 3 * WIDTH, e, PATCHES, BLOCK, WHOLE)
                v = _rows(qkv + 2 * WIDTH, first, 3 * WIDTH, e, PATCHES, BLOCK, WHOLE)
                p = tl.exp2(tl.dot(q, tl.trans(k)) * scale2 - row_lse[:, None])  # (ROWS, BLOCK)
                if not WHOLE:
                    p = tl.where((first + tl.arange(0, BLOCK) < PATCHES)[None, :], p, 0.0)  # or infinite, maybe
                dq = tl.dot((p * (tl.dot(g, tl.trans(v)) - delta[:, None])).to(low), k, dq)
            dq *= scale
            dq_sum += tl.sum(dq, 0)
        tl.store(dqkv + (1 + r)[:, None] * 3 * WIDTH + e[None, :], dq.to(low), mask=(r < PATCHES)[:, None])
    tl.store(sums + which * 2 * E + e, dq_sum)

    # The CLS token for itself.
    q, g = tl.load(qkv + e).to(tl.float32), tl.load(grad + e).to(tl.float32)
    delta = tl.sum(g * tl.load(out + e).to(tl.float32), 0)
    tl.store(deltas, delta)
    p = tl.exp2(tl.sum(q * tl.load(qkv + WIDTH + e).to(tl.float32), 0) * scale2 - tl.load(lse))
    ds = p * (tl.sum(g * tl.load(qkv + 2 * WIDTH + e).to(tl.float32), 0) - delta)
    tl.store(dqkv + WIDTH + e, ((tl.sum(dk0, 1) + ds * q) * scale).to(low))
    tl.store(dqkv + 2 * WIDTH + e, (tl.sum(dv0, 1) + p * g).to(low))


@triton.jit
def _gradients(k, v, q, g, lse, delta, scale, inside, dk, dv, WHOLE: tl.constexpr):
    """What some queries add to dk and dv; and the gradients of their scores. These lie on their side, keys first,
    so that the sums over queries stay where they are."""
    p = tl.exp2(tl.dot(k, tl.trans(q)) * scale - lse[None, :])
    if not WHOLE:
        p = tl.where(inside[:, None], p, 0.0)  # which may have been infinite
    dv = tl.dot(p.to(g.dtype), g, dv)
    ds = (p * (tl.dot(v, tl.trans(g)) - delta[None, :])).to(q.dtype)
    return tl.dot(ds, q, dk), dv, ds


@triton.jit
def _attend_backward_keys(qkv, lse, grad, dqkv, deltas, sums, scale, PATCHES: tl.constexpr, HEADS: tl.constexpr,
                          E: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr,
                          ONLY_CLS: tl.constexpr):  # fmt: skip
    """The rest: dk and dv of the patches, and dq of the CLS token."""
    which = tl.program_id(0)
    WIDTH: tl.constexpr = HEADS * E
    WHOLE: tl.constexpr = KEYS == PATCHES
    three, one, line = _offsets(which, PATCHES, HEADS, E)
    qkv, dqkv, grad, lse, deltas = qkv + three, dqkv + three, grad + one, lse + line, deltas + line
    low = dqkv.dtype.element_ty
    scale2 = scale * 1.4426950408889634
    e, s, n, few = tl.arange(0, E), tl.arange(0, KEYS), tl.arange(0, BLOCK), tl.arange(0, FEW)
    there = s < PATCHES
    k = _rows(qkv + WIDTH, 0, 3 * WIDTH, e, PATCHES, KEYS, WHOLE)
    v = _rows(qkv + 2 * WIDTH, 0, 3 * WIDTH, e, PATCHES, KEYS, WHOLE)
    dk, dv = tl.zeros([KEYS, E], tl.float32), tl.zeros([KEYS, E], tl.float32)
    q0, g0 = _first_row(qkv, e, FEW), _first_row(grad, e, FEW)
    lse0 = tl.load(lse + few * 0, mask=few == 0, other=float("inf"))
    delta0 = tl.load(deltas + few * 0, mask=few == 0, other=0.0)
    dk, dv, ds0 = _gradients(k, v, q0, g0, lse0, delta0, scale2, there, dk, dv, WHOLE)
    dq0 = tl.sum(tl.dot(tl.trans(k), ds0), 1)
    for first in range(0, 0 if ONLY_CLS else PATCHES, BLOCK):
        r = first + n
        q = _rows(qkv, first, 3 * WIDTH, e, PATCHES, BLOCK, WHOLE)
        g = _rows(grad, first, WIDTH, e, PATCHES, BLOCK, WHOLE)
        row_lse = tl.load(lse + 1 + r, mask=r < PATCHES, other=float("inf"))
        delta = tl.load(deltas + 1 + r, mask=r < PATCHES, other=0.0)
        dk, dv, _ = _gradients(k, v, q, g, row_lse, delta, scale2, there, dk, dv, WHOLE)
    at = dqkv + (1 + s)[:, None] * 3 * WIDTH + e[None, :]
    tl.store(at + WIDTH, (dk * scale).to(low), mask=there[:, None])
    tl.store(at + 2 * WIDTH, dv.to(low), mask=there[:, None])

    q, g = tl.load(qkv + e).to(tl.float32), tl.load(grad + e).to(tl.float32)
    k0, v0 = tl.load(qkv + WIDTH + e).to(tl.float32), tl.load(qkv + 2 * WIDTH + e).to(tl.float32)
    own = tl.exp2(tl.sum(q * k0, 0) * scale2 - tl.load(lse)) * (tl.sum(g * v0, 0) - tl.load(deltas))
    dq0 = (dq0 + own * k0) * scale
    tl.store(dqkv + e, dq0.to(low))
    tl.store(sums + which * 2 * E + E + e, dq0)


def attend(qkv: Tensor, frames: int, heads: int) -> tuple[Tensor, Tensor]:
    """Self-attention within each frame: (frames · tokens, 3·w) → (frames · tokens, w), and the softmaxes' log₂ sums
    (frames · heads, tokens)."""
    rows, width = len(qkv), qkv.shape[1] // 3
    tokens, size = rows // frames, width // heads
    out, lse = qkv.new_empty(rows, width), torch.empty(frames * heads, tokens, device=qkv.device)
    at_once = _rows_at_once(tokens - 1)
    _attend[(frames * heads, triton.cdiv(tokens - 1, at_once))](
        qkv, out, lse, size**-0.5 * LOG2_E,
        PATCHES=tokens - 1, HEADS=heads, E=size, ROWS=at_once, BLOCK=min(64, at_once), FEW=FEWEST,
        num_warps=4, num_stages=3, maxnreg=168,  # so that three programs share a multiprocessor
    )  # fmt: skip
    return out, lse


def attend_backward(
    grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, heads: int, only_cls: bool
) -> tuple[Tensor, Tensor]:
    """The gradient of qkv, and sums of its first third over some of the tokens: (frames, heads, 2, e).
    ``only_cls``: the gradient is zero but for the CLS token."""
    tokens, size = lse.shape[1], out.shape[1] // heads
    dqkv, deltas = torch.empty_like(qkv), torch.empty_like(lse)
    sums = torch.empty(len(lse) // heads, heads, 2, size, device=qkv.device)
    at_once, keys = _rows_at_once(tokens - 1), _power_of_two(tokens - 1)
    shapes = {"PATCHES": tokens - 1, "HEADS": heads, "E": size, "BLOCK": min(32, at_once)}
    options = {"FEW": FEWEST, "ONLY_CLS": only_cls, "num_stages": 3}
    given = dqkv, deltas, sums, size**-0.5
    _attend_backward_queries[(len(lse),)](
        qkv, out, lse, grad, *given, **shapes, **options, ROWS=at_once, num_warps=4
    )
    _attend_backward_keys[(len(lse),)](
        qkv, lse, grad, *given, **shapes, **options, KEYS=keys, num_warps=8 if keys > 128 else 4
    )
    return dqkv, sums


def _power_of_two(patches: int) -> int:
    return int(max(FEWEST, triton.next_power_of_2(patches)))


def _rows_at_once(patches: int) -> int:
    """At most 128: all, or 64 where that leaves fewer rows of the last tile empty."""
    rows = min(128, _power_of_two(patches))
    return min((rows, 64), key=lambda r: triton.cdiv(patches, r) * r) if rows > 64 else rows
