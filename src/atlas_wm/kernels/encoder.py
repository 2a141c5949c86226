"""Speeds up training on a CUDA device: the ViT encoder, forward and backward, in few kernels.

Must equal ``VisionTransformer.forward_features`` of timm on standardised frames, as ``ViTEncoder.forward``
(models/encoders.py) calls it, and its gradients.

One kernel stands between two matrix products. The backward pass is written out, so that kernels that run anyway
also sum the gradients of biases and norms. Products and their saved inputs are bf16, as under autocast; the
residual stream and its gradient have 16 bits (encoder_triton.py).
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

TAKES = "a trained ViT with heads of 32 or 64 and 129 to 256 patches, or heads of 16 and at most 256 patches"


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


PER_BLOCK = len(_Block._fields)


class _Saved(NamedTuple):
    """Activations of one block, then weights, that its backward pass reads."""

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
    w_qkv: Tensor
    w_out: Tensor
    w_up: Tensor
    w_down: Tensor
    norm1: Tensor
    norm2: Tensor


def supports(config: EncoderConfig) -> bool:
    """Few patches in wide heads are left out: with 64 or 100 in heads of 64 the gradient of the keys ends in an
    illegal memory access on an H200, with 4 warps and with 8."""
    head = config.width // config.heads
    fits = head in (16, 32, attention.LARGEST_HEAD) and config.patches <= attention.MOST_PATCHES
    return not config.frozen and fits and (head == 16 or config.patches > 128)


@torch.compiler.disable
def fused_tokens(
    vit: VisionTransformer, frames: Tensor, mean: Tensor, std: Tensor, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    """``vit.forward_features`` of frames (N, 3, S, S) uint8, normalised: CLS token (N, w) and patches (N, K, w).

    Integers from −128 to 127 are exact in bf16: they enter the product, and its weights include the normalisation.
    """
    embed: Any = vit.patch_embed
    weight, scale = embed.proj.weight, 1 / (255 * std)
    shift = (weight * (128 * scale - mean / std)).sum(dim=(1, 2, 3))
    patches = kernels.patches(frames, embed.patch_size[0], dtype)
    folded = (weight * scale).flatten(1).to(dtype)
    x = linear(patches.flatten(0, 1), pad(folded, (0, patches.shape[-1] - folded.shape[1])))
    positions: Any = vit.pos_embed
    cls: Any = vit.cls_token
    assert positions.shape[1] == patches.shape[1]  # they are not interpolated here
    start = positions[0] + torch.cat([cls[0], (embed.proj.bias + shift).expand(positions.shape[1] - 1, -1)])
    return fused_blocks(vit, x, start, dtype)


def fused_blocks(vit: VisionTransformer, x: Tensor, start: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``vit.norm(vit.blocks(x + start))``: the CLS token (N, w) and the patches (N, K, w), in float32.

    x: (N · (1 + K), w) in ``dtype``, that of the products; start: (1 + K, w), added to every frame.
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
            saved += _Saved(
                x1, moments1, y1, qkv, lse, attended, stream.rounded, moments2, y2, h, g,
                b.qkv, b.out, b.up, b.down, full.norm1, full.norm2,
            )  # fmt: skip
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
        each = len(_Saved._fields)
        blocks = [_Saved(*saved[i : i + each]) for i in range(0, len(saved), each)]
        depth, tokens, width = len(blocks), len(x) // frames, x.shape[1]
        # Kernels sum over some rows each; the sum over all rows follows at the end, for all blocks at once.
        programs = -(-len(x) // kernels.ROWS_A_PROGRAM)
        norm_sums = torch.empty(2 * depth + 1, programs, 3, width, device=x.device)
        up_sums = norm_sums.new_empty(depth, programs, blocks[0].g.shape[1])
        q_sums: list[Tensor] = []
        outs: list[Tensor] = []

        # Only the user's own loss terms have a gradient for the patches. Without it the last block needs, but for
        # its keys and values, one token in 257.
        only_cls = d_patches is None
        if only_cls:
            assert d_cls is not None  # otherwise there is no backward pass
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
            block = blocks[i]
            d_down = kernels.weight_gradient(dx.rounded, picked(block.g))
            dh = kernels.gelu_backward(dx.rounded @ block.w_down, picked(block.h), up_sums[i])
            d_up = kernels.weight_gradient(dh, picked(block.y2))
            x2, moments2, sums = picked(block.x2), picked(block.moments2), norm_sums[2 * i + 1]
            dx = kernels.add_norm_backward(dh @ block.w_up, dx, x2, moments2, block.norm2, sums)
            d_out = kernels.weight_gradient(dx.rounded, picked(block.attended))
            d_attended = dx.rounded @ block.w_out
            if only_cls:
                dx, d_attended = dx.map(spread), spread(d_attended)
            dqkv, sums = attention.attend_backward(
                d_attended, block.qkv, block.attended, block.lse, heads, only_cls
            )
            q_sums.insert(0, sums)
            outs.insert(0, block.w_out)
            only_cls = False
            d_qkv = kernels.weight_gradient(dqkv, block.y1)
            sums = norm_sums[2 * i]
            dx = kernels.add_norm_backward(dqkv @ block.w_qkv, dx, block.x1, block.moments1, block.norm1, sums)
            weights.insert(0, (d_qkv, d_out, d_up, d_down))

        norms, up_bias = norm_sums.sum(dim=1), up_sums.sum(dim=1)
        # Of qkv's bias: a shift of all keys changes no softmax; a shift of all values is added to the output.
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
