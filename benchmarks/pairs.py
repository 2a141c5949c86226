"""The same LeWM twice, as stable-worldmodel's own module and as ours, our training steps, and how all are timed."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from atlas_wm.config import IMAGENET_MEAN, IMAGENET_STD, ModelConfig, RunConfig
from atlas_wm.convert.lewm import installed_names_are_old, old_name, to_lewm
from atlas_wm.data.clips import Batch
from atlas_wm.models.world_model import WorldModel
from atlas_wm.recipes import paper
from atlas_wm.rng import make_rng
from atlas_wm.tasks.base import import_harness
from atlas_wm.train.step import CapturedStep, PlainStep, Step, make_step

PEAK = 790e12  # measured rate of an H200 for a large bf16 matrix product, FLOP/s


def their_config() -> RunConfig:
    """LeWM as in the paper, with the ε of Hugging Face's LayerNorms."""
    config = paper("lewm")
    return replace(config, model=replace(config.model, encoder=replace(config.model.encoder, norm_eps=1e-12)))


def lewm_pair(device: torch.device) -> tuple[Any, WorldModel]:
    """Theirs and ours with the same random weights, in eval mode."""
    ours = random_model(their_config().model)
    return their_lewm(ours).to(device), ours.to(device)


def random_model(config: ModelConfig) -> WorldModel:
    torch.manual_seed(0)
    ours = WorldModel(config, action_size=2)
    for block in ours.predictor.blocks:  # the modulation starts at 0: actions would not matter
        nn.init.normal_(block.modulation[-1].weight, std=0.05)
    return ours.eval()


def their_lewm(ours: WorldModel) -> Any:
    """stable-worldmodel's own module with the weights of ours."""
    import_harness()
    from stable_worldmodel.wm.lewm import LeWM
    from stable_worldmodel.wm.lewm.module import MLP, Embedder, Predictor
    from transformers import ViTConfig, ViTModel

    config, e, p = ours.config, ours.config.encoder, ours.config.predictor
    vit = ViTConfig(
        hidden_size=e.width,
        num_hidden_layers=e.depth,
        num_attention_heads=e.heads,
        intermediate_size=int(e.width * e.mlp_ratio),
        patch_size=e.patch_size,
        image_size=e.image_size,
    )
    head = partial(MLP, hidden_dim=config.hidden, output_dim=config.latent, norm_fn=nn.BatchNorm1d)
    theirs = LeWM(
        ViTModel(vit, add_pooling_layer=False),
        Predictor(
            num_frames=config.history,
            depth=p.depth,
            heads=p.heads,
            dim_head=p.head_dim,
            input_dim=config.latent,
            hidden_dim=p.width,
            output_dim=config.latent,
            mlp_dim=p.mlp,
        ),
        Embedder(input_dim=10, smoothed_dim=config.action_smooth, emb_dim=p.width),
        projector=head(e.width),
        pred_proj=head(p.width),
    )
    weights = to_lewm(ours.state_dict())
    old = installed_names_are_old()
    theirs.load_state_dict({old_name(name) if old else name: tensor for name, tensor in weights.items()})
    return theirs.eval()


def normalised(frames: Tensor) -> Tensor:
    mean, std = (torch.tensor(v, device=frames.device).view(3, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD))
    return (frames / 255 - mean) / std


def our_step(
    model: WorldModel, config: RunConfig, device: torch.device, *, fast: bool, compiled: bool = False
) -> Step:
    """A training step as it is written, or (on a GPU) the fast one."""
    model.train()
    if fast:
        return CapturedStep(model, config, device, compiled=compiled)
    return PlainStep(model.to(device), config, device)


def batch_of(config: RunConfig, clips: int, device: torch.device) -> Batch:
    size, frames = config.model.encoder.image_size, config.model.clip_frames
    images = torch.randint(0, 256, (clips, frames, 3, size, size), dtype=torch.uint8, generator=make_rng(0))
    actions = torch.randn(clips, frames - 1, 2 * config.model.frameskip, generator=make_rng(1))
    return Batch(images.to(device), actions.to(device))


def step_of(config: RunConfig, clips: int, device: torch.device) -> Callable[[], object]:
    """A training step with so many clips, as training makes it."""
    model = WorldModel(config.model, 2).to(device).train()
    model.prepare_training(config.objective)
    step, batch, rng = (
        make_step(model, config, device, 1000),
        batch_of(config, clips, device),
        make_rng(2, device=device),
    )
    for _ in range(6):  # kernels are compiled, the graph is captured
        step(batch, rng, 1e-4)
    return lambda: step(batch, rng, 1e-4)


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
