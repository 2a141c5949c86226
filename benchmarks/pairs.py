"""The same LeWM twice, as stable-worldmodel's own module and as ours, and how both are timed."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from atlas_wm.config import IMAGENET_MEAN, IMAGENET_STD, RunConfig
from atlas_wm.convert.lewm import installed_names_are_old, old_name, to_lewm
from atlas_wm.models.world_model import WorldModel
from atlas_wm.recipes import paper
from atlas_wm.tasks.base import import_harness

PEAK = 790e12  # measured rate of an H200 for a large bf16 matrix product, FLOP/s


def their_config() -> RunConfig:
    """LeWM as in the paper, with the ε of Hugging Face's LayerNorms."""
    config = paper("lewm")
    return replace(config, model=replace(config.model, encoder=replace(config.model.encoder, norm_eps=1e-12)))


def lewm_pair(device: torch.device) -> tuple[Any, WorldModel]:
    """Theirs and ours with the same random weights, in eval mode."""
    import_harness()
    from stable_worldmodel.wm.lewm import LeWM
    from stable_worldmodel.wm.lewm.module import MLP, Embedder, Predictor
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    ours = WorldModel(their_config().model, action_size=2)
    for block in ours.predictor.blocks:  # the modulation starts at 0: actions would not matter
        nn.init.normal_(block.modulation[-1].weight, std=0.05)
    vit = ViTConfig(
        hidden_size=192,
        num_hidden_layers=12,
        num_attention_heads=3,
        intermediate_size=768,
        patch_size=14,
        image_size=224,
    )
    head = partial(MLP, 192, hidden_dim=2048, output_dim=192, norm_fn=nn.BatchNorm1d)
    theirs = LeWM(
        ViTModel(vit, add_pooling_layer=False),
        Predictor(
            num_frames=3,
            depth=6,
            heads=16,
            dim_head=64,
            input_dim=192,
            hidden_dim=192,
            output_dim=192,
            mlp_dim=2048,
        ),
        Embedder(input_dim=10, smoothed_dim=10, emb_dim=192),
        projector=head(),
        pred_proj=head(),
    )
    weights = to_lewm(ours.state_dict())
    old = installed_names_are_old()
    theirs.load_state_dict({old_name(name) if old else name: tensor for name, tensor in weights.items()})
    return theirs.eval().to(device), ours.eval().to(device)


def normalised(frames: Tensor) -> Tensor:
    mean, std = (torch.tensor(v, device=frames.device).view(3, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD))
    return (frames / 255 - mean) / std


def milliseconds(device: torch.device, rounds: int, *functions: Callable[[], Any]) -> list[float]:
    """Medians, after one round to warm up. They take turns: the machine may be shared."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(1 + rounds):
        for function, mine in zip(functions, times, strict=True):
            if device.type == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter()
            function()
            if device.type == "cuda":
                torch.cuda.synchronize()
            mine.append(1e3 * (time.perf_counter() - started))
    return [float(np.median(mine[1:])) for mine in times]
