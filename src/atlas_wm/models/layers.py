"""Building blocks: one BatchNorm, one MLP, one attention, and two Transformer blocks."""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from atlas_wm.parallel.processes import several, summed


class BatchNorm(nn.BatchNorm1d):
    """nn.BatchNorm1d; in several processes its statistics are over the rows of all, however many each has.

    torch's SyncBatchNorm does that on GPUs only.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(n, C) → (n, C)"""
        if not several() or not self.training:
            return super().forward(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        *total, rows = summed(torch.cat([wide.sum(dim=0), wide.new_full((1,), len(x))])).split(
            [self.num_features, 1]
        )
        mean = total[0] / rows
        centred = wide - mean
        variance = summed(centred.square().sum(dim=0)) / rows
        self._remember(mean.detach(), (variance * rows / (rows - 1)).detach())
        return (centred * (variance + self.eps).rsqrt() * self.weight + self.bias).to(x.dtype)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        share = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, share)
        self.running_var.lerp_(variance, share)


class MLP(nn.Module):
    """Linear → (BatchNorm) → GELU → Linear on the last axis; leading axes are one batch to the BatchNorm."""

    def __init__(self, size: int, hidden: int, out: int, *, batchnorm: bool = False, dropout: float = 0.0):
        super().__init__()
        self.up = nn.Linear(size, hidden)
        self.norm = BatchNorm(hidden) if batchnorm else nn.Identity()
        self.activation = nn.GELU()
        self.down = nn.Linear(hidden, out)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) → (..., out)"""
        leading = x.shape[:-1]
        x = self.activation(self.norm(self.up(x.reshape(-1, x.shape[-1]))))
        return self.dropout(self.down(self.dropout(x))).unflatten(0, leading)


class CausalAttention(nn.Module):
    """Multi-head self-attention over steps of ``tokens`` tokens: a token attends to its own and earlier steps."""

    def __init__(self, width: int, heads: int, head_dim: int, dropout: float = 0.0, tokens: int = 1):
        super().__init__()
        self.heads, self.tokens = heads, tokens
        self.to_qkv = nn.Linear(width, 3 * heads * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T·tokens, width) → the same shape"""
        # (B, n, 3·h·e) → three of (B, h, n, e)
        q, k, v = self.to_qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        drop = self.dropout.p if self.training else 0.0
        mask = None
        if self.tokens > 1:
            step = torch.arange(x.shape[1], device=x.device) // self.tokens
            mask = step[:, None] >= step
        attended = scaled_dot_product_attention(q, k, v, mask, dropout_p=drop, is_causal=mask is None)
        return self.dropout(self.out(attended.transpose(1, 2).flatten(-2)))


class Pointwise(nn.Module):
    """Attention of a token that attends only to itself: its values, projected back."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.to_v = nn.Linear(width, inner, bias=False)
        self.out = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) → (..., width)"""
        return self.out(self.to_v(x))


class Block(nn.Module):
    """The plain pre-norm Transformer block around a mixer (attention)."""

    def __init__(self, width: int, mixer: nn.Module, mlp: int, dropout: float = 0.0):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = mixer
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width, mlp, width, dropout=dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) → (B, T, width)"""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


MODULATION = 6  # an AdaLN block's shift, scale and gate, of attention and of the MLP


class AdaLNBlock(nn.Module):
    """Transformer block whose condition shifts, scales and gates both branches (AdaLN-zero).

    The modulation starts at zero, so the block starts as the identity. As in LeWM each branch normalises
    twice: once without weights before the modulation, once with weights after it.
    """

    def __init__(self, width: int, mixer: nn.Module, mlp: int, dropout: float = 0.0):
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.attention_norm = nn.LayerNorm(width)
        self.attention = mixer
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width, mlp, width, dropout=dropout)
        modulation = nn.Linear(width, MODULATION * width)
        nn.init.zeros_(modulation.weight)
        nn.init.zeros_(modulation.bias)
        self.modulation = nn.Sequential(nn.SiLU(), modulation)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """x and condition: (B, T, width) → (B, T, width)"""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulation(condition).chunk(MODULATION, dim=-1)
        x = x + gate_a * self.attention(self.attention_norm(self.norm(x) * (1 + scale_a) + shift_a))
        return x + gate_m * self.mlp(self.mlp_norm(self.norm(x) * (1 + scale_m) + shift_m))
