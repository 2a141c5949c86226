"""Attention, against the formula."""

import math

import pytest
import torch

from atlas_wm.models.layers import CausalAttention
from atlas_wm.rng import make_rng


@pytest.mark.parametrize(("steps", "tokens"), [(4, 1), (3, 2)])
def test_attention_is_the_formula(steps, tokens):
    """out(softmax(q kᵀ / √e) v) per head, over the tokens of a token's own step and of those before it."""
    torch.manual_seed(0)
    heads, size = 2, 8
    attention = CausalAttention(12, heads=heads, head_dim=size, tokens=tokens).eval().requires_grad_(False)
    x = torch.randn(5, steps * tokens, 12, generator=make_rng(0))
    q, k, v = attention.to_qkv(x).split(heads * size, dim=-1)
    found = torch.zeros_like(q)
    for head in range(heads):
        own = slice(head * size, (head + 1) * size)
        for place in range(steps * tokens):
            seen = slice(0, (place // tokens + 1) * tokens)
            scores = torch.einsum("be,bne->bn", q[:, place, own], k[:, seen, own]) / math.sqrt(size)
            found[:, place, own] = torch.einsum("bn,bne->be", scores.softmax(dim=-1), v[:, seen, own])
    torch.testing.assert_close(attention(x), attention.out(found))
