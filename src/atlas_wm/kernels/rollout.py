"""Speeds up planning: rollouts of :class:`CausalPredictor` in eval mode, without repeated work.

Must equal ``CausalPredictor.rollout`` and ``terminal`` (models/predictors.py). The order of the work differs:

- While the window grows, keys and values of earlier tokens come from a kv_cache; only the new token is computed.
  When the window slides, positions start at 0 again, so its tokens are recomputed; in the last block only the last.
- The modulation of all blocks and steps is one product, since an action has the same embedding in every window.
- Weights of normalisations are folded into the products behind them, BatchNorm's included.
- The first token of a window attends only to itself: its attention is W_o·W_v, one small product without a query.
- Attention over at most ``history`` tokens is written out: a general kernel would be mostly overhead.
- On a CPU weights are packed for oneDNN, whose products include bias and GELU.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, linear, silu

if TYPE_CHECKING:
    from atlas_wm.models.predictors import CausalPredictor

WORTH_PACKING = 2**15  # weights; a packed product takes 12 µs longer to start, and gains with its size


class Product(NamedTuple):
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        # contiguous: of a slice, linear computes one product for each sequence
        return linear(x.contiguous(), self.weight, self.bias)

    def then_gelu(self, x: Tensor) -> Tensor:
        return gelu(self(x))


class PackedProduct(Product):
    """The same by oneDNN, from weights in oneDNN's layout; without gradients."""

    __slots__ = ()

    @staticmethod
    def supported(dtype: torch.dtype = torch.float32) -> bool:
        """torch.compile uses these on a CPU. Not every build of torch has them, and not every CPU has bf16."""
        if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            return False
        return dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor) -> "PackedProduct":
        return cls(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()), bias)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    def then_gelu(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "gelu", [], "none")


class BlockWeights(NamedTuple):
    qkv: Product
    kv: Product  # the same without the query
    kvo: Product  # and with W_o·W_v: all that the first token of a window needs
    out: Product
    up: Product
    down: Product


def _after_norm(layer: nn.Linear, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """The product behind a LayerNorm, with the norm folded in: W(γx + β) + b = (Wγ)x + (Wβ + b)"""
    bias = layer.weight @ norm.bias
    return layer.weight * norm.weight, bias if layer.bias is None else bias + layer.bias


def _before_batchnorm(weight: Tensor, bias: Tensor, norm: nn.BatchNorm1d) -> tuple[Tensor, Tensor]:
    assert norm.running_mean is not None and norm.running_var is not None
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    return weight * scale[:, None], (bias - norm.running_mean) * scale + norm.bias


class FastTerminal:
    """``FastTerminal(predictor)(z, actions)`` equals ``predictor.terminal(z, actions)`` in eval mode.

    The weights are copied: build a new one after they change. ``pack``: for a CPU (:class:`PackedProduct`).
    """

    @torch.no_grad()
    def __init__(self, predictor: "CausalPredictor", dtype: torch.dtype = torch.float32, pack: bool = False):
        def product(weight: Tensor, bias: Tensor) -> Product:
            make = PackedProduct.pack if pack and weight.numel() >= WORTH_PACKING else Product
            return make(weight.to(dtype), bias.to(dtype))

        self.dtype, self.history = dtype, predictor.history
        smooth, widen, narrow = (m for m in predictor.action_encoder.modules() if isinstance(m, nn.Linear))
        self.action_in = product(widen.weight @ smooth.weight, widen.weight @ smooth.bias + widen.bias)
        self.action_out = product(narrow.weight, narrow.bias)
        enter = predictor.enter
        self.enter = product(enter.weight, enter.bias) if isinstance(enter, nn.Linear) else None
        self.positions = predictor.positions.detach().to(dtype)
        blocks: list[Any] = list(predictor.blocks)  # AdaLNBlock with CausalAttention: fast_rollout() has checked
        modulation = [block.modulation[1] for block in blocks]
        self.modulation = product(
            torch.cat([m.weight for m in modulation]),
            torch.cat([m.bias for m in modulation]),
        )
        self.eps, self.norm_eps = blocks[0].norm.eps, blocks[0].attention_norm.eps
        self.blocks = []
        for block in blocks:
            attention = block.attention
            self.heads = attention.heads
            (qkv, bias), out = _after_norm(attention.to_qkv, block.attention_norm), attention.out
            (_, wk, wv), (_, bk, bv) = qkv.chunk(3), bias.chunk(3)
            self.inner = len(wv)
            self.blocks.append(
                BlockWeights(
                    product(qkv, bias),
                    product(torch.cat([wk, wv]), torch.cat([bk, bv])),
                    product(torch.cat([wk, wv, out.weight @ wv]), torch.cat([bk, bv, out.weight @ bv + out.bias])),
                    product(out.weight, out.bias),
                    product(*_after_norm(block.mlp.up, block.mlp_norm)),
                    product(block.mlp.down.weight, block.mlp.down.bias),
                )
            )
        head = predictor.head
        assert isinstance(head.norm, nn.BatchNorm1d)
        self.head_in = product(*_before_batchnorm(*_after_norm(head.up, predictor.norm), head.norm))
        self.head_out = product(head.down.weight, head.down.bias)

    def terminal(self, z: Tensor, actions: Tensor) -> Tensor:
        """z: (B, d), actions: (B, S, H, A) → (B, S, d) float32"""
        return self._latents(z, actions)[-1].float().unflatten(0, actions.shape[:2])

    __call__ = terminal

    def rollout(self, z: Tensor, actions: Tensor) -> Tensor:
        """Not only the ends: (B, S, H, d) float32"""
        return torch.stack(self._latents(z, actions), dim=1).float().unflatten(0, actions.shape[:2])

    def _latents(self, z: Tensor, actions: Tensor) -> list[Tensor]:
        _, samples, horizon, _ = actions.shape
        embedded = self.action_out(silu(self.action_in(actions.to(self.dtype).flatten(0, 1))))  # (N, H, w)
        width = self.positions.shape[1]
        modulation = self.modulation(silu(embedded)).unflatten(-1, (len(self.blocks), -1, width))  # (N, H, L, 6, w)
        latent = z.to(self.dtype).repeat_interleave(samples, dim=0)
        latents: list[Tensor] = []
        tokens: list[Tensor] = []
        kv_cache: list[Any] = []
        for step in range(horizon):
            tokens.append(latent if self.enter is None else self.enter(latent))
            position = step if step < self.history else 0
            first = step if step < self.history else step + 1 - self.history
            window = tokens[-1][:, None] if first == step else torch.stack(tokens[first:], dim=1)
            latent, kv_cache = self.step(window, position, modulation[:, first : step + 1], kv_cache)
            latents.append(latent)
        return latents

    def step(
        self, tokens: Tensor, position: int, modulation: Tensor, kv_cache: list[Any]
    ) -> tuple[Tensor, list[Any]]:
        """The latent after new tokens (N, n, w), the first of which has this position in the window.

        ``kv_cache``: for each block the keys and values of the tokens before them, (N, h, e) each; the new one is
        returned. In the last block only the last token is computed.
        """
        new_cache: list[Any] = []
        width = tokens.shape[-1:]
        x = tokens + self.positions[position : position + tokens.shape[1]]
        for number, block in enumerate(self.blocks):
            shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = modulation[:, :, number].unbind(dim=2)
            y = self._norms(x, scale_a, shift_a)
            past = kv_cache[number] if position else ([], [])
            last = number == len(self.blocks) - 1
            attended, keys, values = self._attention(block, y, past, only_last=last)
            new_cache.append((keys, values))
            if last:
                x, gate_a, shift_m, scale_m, gate_m = (t[:, -1:] for t in (x, gate_a, shift_m, scale_m, gate_m))
            x = torch.addcmul(x, gate_a, attended)
            y = self._norms(x, scale_m, shift_m)
            x = torch.addcmul(x, gate_m, block.down(block.up.then_gelu(y)))
        return self.head_out(self.head_in.then_gelu(layer_norm(x[:, -1], width, eps=self.norm_eps))), new_cache

    def _norms(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        width = x.shape[-1:]
        return layer_norm(_modulate(layer_norm(x, width, eps=self.eps), scale, shift), width, eps=self.norm_eps)

    def _attention(
        self, block: BlockWeights, y: Tensor, past: tuple[list[Tensor], list[Tensor]], only_last: bool
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """What attention adds to the new tokens y, (N, n, w), or to the last of them; and all keys and values.

        A token that is not returned, or that attends only to itself, needs no query.
        """
        keys, values, answers = list(past[0]), list(past[1]), []
        silent = 0  # tokens without a query
        if not keys and (y.shape[1] == 1 or not only_last):
            silent = 1
            k, v, answer = block.kvo(y[:, :1]).split([self.inner, self.inner, y.shape[2]], dim=-1)
            answers.append(answer)
        elif not keys:
            silent = y.shape[1] - 1
            k, v = block.kv(y[:, :-1]).chunk(2, dim=-1)
        if silent:
            keys += k.unflatten(-1, (self.heads, -1)).unbind(dim=1)
            values += v.unflatten(-1, (self.heads, -1)).unbind(dim=1)
        if silent < y.shape[1]:
            q, k, v = block.qkv(y[:, silent:]).unflatten(-1, (3, self.heads, -1)).unbind(dim=2)  # (N, n, h, e)
            keys += k.unbind(dim=1)
            values += v.unbind(dim=1)
            answers.append(block.out(_attend(q, keys, values).flatten(-2)))
        return torch.cat(answers, dim=1), keys, values


def _modulate(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """x·(1 + scale) + shift"""
    return torch.addcmul(x + shift, x, scale)


def _attend(q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor]) -> Tensor:
    """Causal attention of the last n of m tokens. q: (N, n, h, e), k and v: m of (N, h, e) → (N, n, h, e)"""
    n, m = q.shape[1], len(k)
    answers = []
    for i, query in enumerate((q * q.shape[-1] ** -0.5).unbind(dim=1)):
        seen = m - n + i + 1
        scores = torch.stack([(query * key).sum(dim=-1, dtype=torch.float32) for key in k[:seen]])  # (seen, N, h)
        shares = scores.softmax(dim=0).to(q.dtype)[..., None]
        answer = shares[0] * v[0]
        for share, value in zip(shares[1:], v[1:seen], strict=True):
            answer = torch.addcmul(answer, share, value)
        answers.append(answer)
    return torch.stack(answers, dim=1)
