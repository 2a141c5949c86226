"""Speeds up training on a CUDA device: the predictor's blocks, forward and backward, in few kernels.

Must equal ``CausalPredictor.forward`` (models/predictors.py), from its first block to its last norm, and its
gradients.

A clip has three tokens, so every tensor is small: plainly, a step is 900 kernels that take longer to launch than to
run. Here one kernel stands between two products, the modulation of all blocks is one product, and the gradients of
weights of one shape are one product for all blocks.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from atlas_wm.config import ModelConfig
from atlas_wm.kernels import predictor_triton as kernels
from atlas_wm.kernels.encoder_triton import weight_gradient

if TYPE_CHECKING:
    from atlas_wm.models.predictors import CausalPredictor

MOST_TOKENS = 16
TAKES = f"a causal one with heads of a power of two and a history of at most {MOST_TOKENS}"


class _Blocks(NamedTuple):
    """Parameters of all blocks, or their gradients: (blocks, out, in) and (blocks, out)."""

    modulation: Tensor
    modulation_bias: Tensor
    qkv: Tensor
    out: Tensor
    out_bias: Tensor
    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor


PER_BLOCK = len(_Blocks._fields)


def supports(config: ModelConfig) -> bool:
    p = config.predictor
    fits = p.head_dim & (p.head_dim - 1) == 0 and config.history <= MOST_TOKENS
    return fits and p.kind not in ("prefix", "patch")


@torch.compiler.disable
def fused_blocks(
    predictor: "CausalPredictor", x: Tensor, condition: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """``predictor.norm(predictor.blocks(x, condition))``: (B, T, w) twice → (B, T, w) in ``dtype``, that of the
    products. The residual stream is float32."""
    blocks: Any = predictor.blocks
    eps = blocks[0].norm.eps, blocks[0].attention_norm.eps
    products = [
        p
        for b in blocks
        for p in (
            b.modulation[-1].weight, b.modulation[-1].bias, b.attention.to_qkv.weight, b.attention.out.weight,
            b.attention.out.bias, b.mlp.up.weight, b.mlp.up.bias, b.mlp.down.weight, b.mlp.down.bias,
        )
    ]  # fmt: skip
    norms = [norm for b in blocks for norm in (b.attention_norm, b.mlp_norm)] + [predictor.norm]
    affine = [p for norm in norms for p in (norm.weight, norm.bias)]
    heads, dropout = blocks[0].attention.heads, blocks[0].mlp.dropout.p if predictor.training else 0.0
    return _Function.apply(
        x.float(), condition.float(), heads, dropout, eps, dtype, len(blocks), *products, *affine
    )


def _stacked(parameters: list[Tensor], dtype: torch.dtype) -> _Blocks:
    kinds = [parameters[i::PER_BLOCK] for i in range(PER_BLOCK)]
    stacks = [kind[0].new_empty(len(kind), *kind[0].shape, dtype=dtype) for kind in kinds]
    torch._foreach_copy_([one for stack in stacks for one in stack.unbind()], [p for kind in kinds for p in kind])
    return _Blocks(*stacks)


def _bias_gradient(grad: Tensor) -> Tensor:
    return grad.sum(dim=-2, dtype=torch.float32)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        condition: Tensor,
        heads: int,
        rate: float,
        eps: tuple[float, float],
        dtype: torch.dtype,
        depth: int,
        *parameters: Tensor,
    ) -> Tensor:
        shape, tokens, width = x.shape, x.shape[1], x.shape[2]
        products, affine = list(parameters[: depth * PER_BLOCK]), parameters[depth * PER_BLOCK :]
        low = _stacked(products, dtype)
        rows, inner, hidden = x.numel() // width, low.out.shape[-1], low.up.shape[1]
        new = low.qkv.new_empty
        dropout = kernels.Dropout(torch.randint(2**62, (1,), device=x.device), rate)
        active = silu(condition.reshape(rows, width)).to(dtype)
        modulation = torch.addmm(low.modulation_bias.flatten(), active, low.modulation.flatten(0, 1).T)
        branches = kernels.Branches(modulation.view(rows, 2 * depth, 3, width), dropout, *eps)

        # Input and output of every branch; xs: the residual stream before each, and after the last.
        xs, ys = x.new_empty(2 * depth + 1, rows, width), new(2 * depth, rows, width)
        changes, last = torch.empty_like(ys), new(rows, width)
        qkvs, attended = new(depth, rows, 3 * inner), new(depth, rows, inner)
        hs, gs = new(depth, rows, hidden), new(depth, rows, hidden)
        xs[0] = x.reshape(rows, width)

        def enter(branch: int, out: Tensor) -> None:
            before, norm, bias = max(0, branch - 1), affine[2 * branch], affine[2 * branch + 1]
            branches.enter(branch, xs[before], changes[before], norm, bias, xs[branch], out)

        for i in range(depth):
            a, m = 2 * i, 2 * i + 1
            enter(a, ys[a])
            torch.mm(ys[a], low.qkv[i].T, out=qkvs[i])
            kernels.attend(qkvs[i], attended[i], heads, tokens, dropout, 3 * depth + 1 + i)
            torch.addmm(low.out_bias[i], attended[i], low.out[i].T, out=changes[a])
            enter(m, ys[m])
            torch.addmm(low.up_bias[i], ys[m], low.up[i].T, out=hs[i])
            kernels.gelu(hs[i], gs[i], dropout, 2 * depth + 1 + i)
            torch.addmm(low.down_bias[i], gs[i], low.down[i].T, out=changes[m])
        enter(2 * depth, last)
        ctx.save_for_backward(
            condition, active, modulation, dropout.key, xs, ys, changes, qkvs, attended, hs, gs, *low, *affine[::2]
        )
        ctx.settings = depth, heads, tokens, rate, eps
        return last.view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        condition, active, modulation, key, xs, ys, changes, qkvs, attended, hs, gs, *rest = ctx.saved_tensors
        depth, heads, tokens, rate, eps = ctx.settings
        low, norms = _Blocks(*rest[:PER_BLOCK]), rest[PER_BLOCK:]
        rows, width = ys.shape[1:]
        dropout = kernels.Dropout(key, rate)
        branches = kernels.Branches(modulation.view(rows, 2 * depth, 3, width), dropout, *eps)
        d_changes, d_modulation = torch.empty_like(changes), torch.empty_like(modulation)
        d_qkvs, d_hs = torch.empty_like(qkvs), torch.empty_like(hs)
        sums = xs.new_empty(2 * depth + 1, kernels.programs(rows), 2, width)

        def leave(branch: int, grad: Tensor, later: Tensor) -> Tensor:
            before = max(0, branch - 1)
            return branches.leave(
                branch, grad, later, xs[branch], changes[before], norms[branch], d_changes[before], d_modulation,
                sums[branch],
            )  # fmt: skip

        dx = leave(2 * depth, grad.reshape(rows, width), xs[0])
        for i in reversed(range(depth)):
            a, m = 2 * i, 2 * i + 1
            kernels.gelu_backward(d_changes[m] @ low.down[i], hs[i], d_hs[i], dropout, 2 * depth + 1 + i)
            dx = leave(m, d_hs[i] @ low.up[i], dx)
            kernels.attend_backward(
                d_changes[a] @ low.out[i], qkvs[i], d_qkvs[i], heads, tokens, dropout, 3 * depth + 1 + i
            )
            dx = leave(a, d_qkvs[i] @ low.qkv[i], dx)

        d_outs, d_downs = d_changes[0::2], d_changes[1::2]
        d_active = d_modulation @ low.modulation.flatten(0, 1)
        gradients = _Blocks(
            modulation=weight_gradient(d_modulation, active).view(low.modulation.shape),
            modulation_bias=_bias_gradient(d_modulation).view(depth, -1),
            qkv=weight_gradient(d_qkvs, ys[0::2]),
            out=weight_gradient(d_outs, attended),
            out_bias=_bias_gradient(d_outs),
            up=weight_gradient(d_hs, ys[1::2]),
            up_bias=_bias_gradient(d_hs),
            down=weight_gradient(d_downs, gs),
            down_bias=_bias_gradient(d_downs),
        )
        d_condition = torch.ops.aten.silu_backward(d_active.float(), condition.reshape(rows, width))
        return (
            *(dx.view(grad.shape), d_condition.view(grad.shape), None, None, None, None, None),
            *(kind[i] for i in range(depth) for kind in gradients),
            *sums.sum(dim=1).flatten(0, 1),
        )
