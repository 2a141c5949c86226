"""The encoder's blocks for training on a CUDA device: the same function, forward and backward, in few kernels.

Between two matrix products there is one kernel, and the backward pass is written out, so that gradients of biases
and norms fall out of kernels that run anyway. Products and what is kept for them are bf16, as under autocast; the
residual stream and its gradient have 16 bits (fused_kernels.py).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, pad

from atlas_wm.config import EncoderConfig
from atlas_wm.kernels import attention
from atlas_wm.kernels import encoder_triton as kernels

PER_BLOCK = 12  # parameters
TAKES = "a trained ViT with heads of 16, 32 or 64 and at most 256 patches"


class _Block(NamedTuple):
    """Parameters of one block, or their gradients; weights (out, in)."""

    norm1: Tensor
    norm1_bias: Tensor
    qkv: Tensor
    qkv_bias: Tensor
    out: Tensor
    out_bias: Tensor
    norm2: Tensor
    norm2_bias: Tensor
    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor


class _Kept(NamedTuple):
    """What the backward pass of one block reads."""

    x1: Tensor  # (M, w), M = frames · tokens
    moments1: Tensor  # (M, 2)
    y1: Tensor  # (M, w)
    qkv: Tensor  # (M, 3·w)
    lse: Tensor  # (frames · heads, tokens)
    attended: Tensor  # (M, w)
    x2: Tensor  # (M, w)
    moments2: Tensor  # (M, 2)
    y2: Tensor  # (M, w)
    h: Tensor  # (M, hidden)
    g: Tensor  # (M, hidden)


def supports(config: EncoderConfig) -> bool:
    head = config.width // config.heads
    return (
        not config.frozen and head in (16, 32, attention.LARGEST_HEAD) and config.patches <= attention.MOST_PATCHES
    )


@torch.compiler.disable
def fused_tokens(
    vit: VisionTransformer, frames: Tensor, mean: Tensor, std: Tensor, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    """``vit.forward_features`` of frames (N, 3, S, S) uint8, normalised: CLS token (N, w) and patches (N, K, w).

    Whole numbers from −128 to 127 are exact in bf16, so they enter the product, and the normalisation its weights.
    """
    embed: Any = vit.patch_embed
    weight, scale = embed.proj.weight, 1 / (255 * std)
    shift = (weight * (128 * scale - mean / std)).sum(dim=(1, 2, 3))
    patches = kernels.patches(frames, embed.patch_size[0], dtype)
    folded = (weight * scale).flatten(1).to(dtype)
    x = linear(patches.flatten(0, 1), pad(folded, (0, patches.shape[-1] - folded.shape[1])))
    places: Any = vit.pos_embed
    cls: Any = vit.cls_token
    assert places.shape[1] == patches.shape[1]  # here they are not interpolated
    start = places[0] + torch.cat([cls[0], (embed.proj.bias + shift).expand(places.shape[1] - 1, -1)])
    return fused_blocks(vit, x, start, dtype)


def fused_blocks(vit: VisionTransformer, x: Tensor, start: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``vit.norm(vit.blocks(x + start))``: the CLS token (N, w) and the patches (N, K, w), in float32.

    x: (N · (1 + K), w) in ``dtype``, that of the products; start: (1 + K, w), what every frame begins with.
    """
    norm: Any = vit.norm
    blocks: Any = vit.blocks
    parameters = [p for block in blocks for p in _parameters(block)]
    heads, eps = blocks[0].attn.num_heads, norm.eps
    return _Blocks.apply(x, start.contiguous(), heads, eps, dtype, *parameters, norm.weight, norm.bias)


def _parameters(block: Any) -> Iterator[Tensor]:
    for layer in (block.norm1, block.attn.qkv, block.attn.proj, block.norm2, block.mlp.fc1, block.mlp.fc2):
        yield layer.weight
        yield layer.bias


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, change: Tensor, x: Tensor, heads: int, eps: float, dtype: torch.dtype, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        frames = len(change) // len(x)
        *stack, norm, norm_bias = parameters
        stream = kernels.Split(x)
        low = [torch.empty_like(p, dtype=dtype) for p in stack]
        torch._foreach_copy_(low, stack)
        saved: list[Tensor] = []
        for i in range(0, len(stack), PER_BLOCK):
            full, b = _Block(*stack[i : i + PER_BLOCK]), _Block(*low[i : i + PER_BLOCK])
            stream, y1, moments1 = kernels.add_norm(stream, change, full.norm1, full.norm1_bias, eps, dtype)
            x1 = stream.rounded
            qkv = torch.addmm(b.qkv_bias, y1, b.qkv.T)
            attended, lse = attention.attend(qkv, frames, heads)
            change = torch.addmm(b.out_bias, attended, b.out.T)
            stream, y2, moments2 = kernels.add_norm(stream, change, full.norm2, full.norm2_bias, eps, dtype)
            h = torch.addmm(b.up_bias, y2, b.up.T)
            g = kernels.gelu(h)
            change = torch.addmm(b.down_bias, g, b.down.T)
            saved += _Kept(x1, moments1, y1, qkv, lse, attended, stream.rounded, moments2, y2, h, g)
            saved += b.qkv, b.out, b.up, b.down, full.norm1, full.norm2
        stream, y, moments = kernels.add_norm(stream, change, norm, norm_bias, eps, torch.float32)
        ctx.save_for_backward(*saved, stream.rounded, moments, norm)
        ctx.frames, ctx.heads = frames, heads
        ctx.set_materialize_grads(False)
        tokens = y.unflatten(0, (frames, -1))
        return tokens[:, 0].clone(), tokens[:, 1:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_cls: Tensor | None, d_patches: Tensor | None) -> tuple[Tensor | None, ...]:
        *saved, x, moments, norm = ctx.saved_tensors
        frames, heads = ctx.frames, ctx.heads
        each = len(_Kept._fields) + 6
        depth, tokens, width = len(saved) // each, len(x) // frames, x.shape[1]
        # What kernels sum over some rows; over all of them it is summed at the end, for all blocks at once.
        programs = -(-len(x) // kernels.ROWS_A_PROGRAM)
        norm_sums = torch.empty(2 * depth + 1, programs, 3, width, device=x.device)
        up_sums = norm_sums.new_empty(depth, programs, saved[len(_Kept._fields) - 1].shape[1])
        q_sums: list[Tensor] = []
        outs: list[Tensor] = []

        # The objective looks at the CLS token alone unless a term of the user's own has a gradient for the patches.
        # Then the last block, but for its keys and values, is a matter of one token in 257.
        only_cls = d_patches is None
        if only_cls:
            assert d_cls is not None  # or nobody would ask
            grad = d_cls.contiguous()
        else:
            assert d_patches is not None
            first = d_patches.new_zeros(frames, width) if d_cls is None else d_cls
            grad = torch.cat([first[:, None], d_patches], dim=1).flatten(0, 1)

        def picked(t: Tensor) -> Tensor:
            return t.unflatten(0, (frames, tokens))[:, 0].contiguous() if only_cls else t

        def spread(t: Tensor) -> Tensor:
            everywhere = t.new_zeros(frames, tokens, width)
            everywhere[:, 0] = t
            return everywhere.flatten(0, 1)

        weights: list[tuple[Tensor, ...]] = []
        dx = kernels.add_norm_backward(grad, None, picked(x), picked(moments), norm, norm_sums[-1])
        for i in reversed(range(depth)):
            *tensors, qkv, out, up, down, norm1, norm2 = saved[i * each : (i + 1) * each]
            kept = _Kept(*tensors)
            d_down = kernels.weight_gradient(dx.rounded, picked(kept.g))
            dh = kernels.gelu_backward(dx.rounded @ down, picked(kept.h), up_sums[i])
            d_up = kernels.weight_gradient(dh, picked(kept.y2))
            x2, moments2, sums = picked(kept.x2), picked(kept.moments2), norm_sums[2 * i + 1]
            dx = kernels.add_norm_backward(dh @ up, dx, x2, moments2, norm2, sums)
            d_out = kernels.weight_gradient(dx.rounded, picked(kept.attended))
            d_attended = dx.rounded @ out
            if only_cls:
                dx, d_attended = dx.map(spread), spread(d_attended)
            dqkv, sums = attention.attend_backward(d_attended, kept.qkv, kept.attended, kept.lse, heads, only_cls)
            q_sums.insert(0, sums)
            outs.insert(0, out)
            only_cls = False
            d_qkv = kernels.weight_gradient(dqkv, kept.y1)
            sums = norm_sums[2 * i]
            dx = kernels.add_norm_backward(dqkv @ qkv, dx, kept.x1, kept.moments1, norm1, sums)
            weights.insert(0, (d_qkv, d_out, d_up, d_down))

        norms, up_bias = norm_sums.sum(dim=1), up_sums.sum(dim=1)
        # Of qkv's bias: the same for all keys changes no softmax, the same for all values is added to the answer.
        q_bias = torch.stack(q_sums).sum(dim=(1, 3)).flatten(1)
        v_bias = (norms[1::2, 2, :, None] * torch.stack(outs)).sum(dim=1)
        qkv_bias = torch.cat([q_bias, torch.zeros_like(q_bias), v_bias], dim=1)
        gradients: list[Tensor] = []
        for i, (d_qkv, d_out, d_up, d_down) in enumerate(weights):
            before, between, after = norms[2 * i : 2 * i + 3]  # the third sum of a norm is of the bias before it
            gradients += _Block(
                before[0], before[1], d_qkv, qkv_bias[i], d_out, between[2],
                between[0], between[1], d_up, up_bias[i], d_down, after[2],
            )  # fmt: skip
        start = sum(
            part.unflatten(0, (frames, tokens)).sum(dim=0, dtype=torch.float32) for part in dx if part is not None
        )
        return dx.rounded, start, None, None, None, *gradients, norms[-1, 0], norms[-1, 1]
