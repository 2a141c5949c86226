"""Do the fast paths give the plain answers? Elites of the search, and gradients of the training step, of a model of
the paper's size with random weights.

    python benchmarks/agreement.py [--episodes 8] [--iterations 30]

Elites: the plain search runs, and the fast rollout judges the same candidates in every iteration. Gradients (on a
CUDA device only): those of the fused kernels and of autocast against float32, relative errors of their norms over
the parameters.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from pairs import random_model
from rich.console import Console
from rich.table import Table
from torch import Tensor

from atlas_wm.config import PlanConfig
from atlas_wm.models.world_model import WorldModel
from atlas_wm.parallel.devices import pick_device
from atlas_wm.plan.cem import CEM
from atlas_wm.recipes import paper
from atlas_wm.rng import make_rng

FRAMES = 64


@torch.inference_mode()
def elites(model: WorldModel, plan: PlanConfig, episodes: int, device: torch.device) -> Table:
    table = Table("search", f"same {plan.elites} elites", "elites shared", "largest relative difference of a cost")
    size = model.config.encoder.image_size
    images = torch.randint(0, 256, (2 * episodes, 3, size, size), dtype=torch.uint8, generator=make_rng(1))
    z, z_goal = model.encode(images.to(device)).chunk(2)
    start = torch.zeros(episodes, plan.horizon, 10, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        fast, shared, gaps = model.predictor.fast_rollout(dtype, capturable=device.type == "cuda"), [], []

        def cost(candidates: Tensor, fast=fast, shared=shared, gaps=gaps) -> Tensor:  # type: ignore[no-untyped-def]
            plain, other = (
                model.distance(world.terminal(z, candidates), z_goal[:, None]) for world in (model, fast)
            )
            best, others = (costs.topk(plan.elites, dim=1, largest=False).indices for costs in (plain, other))
            shared.append((best[:, :, None] == others[:, None]).any(dim=2).float().mean(dim=1))
            gaps.append(((other - plain).abs() / plain).max())
            return plain

        CEM(plan)(cost, start, [make_rng(0, e) for e in range(episodes)])
        found = torch.cat(shared)
        same, mean = 100 * (found == 1).float().mean(), 100 * found.mean()
        table.add_row(str(dtype), f"{same:.1f} %", f"{mean:.1f} %", f"{max(gaps):.1e}")
    return table


def gradients(model: WorldModel, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Table:
    from atlas_wm.kernels.encoder import fused_tokens
    from atlas_wm.kernels.predictor import fused_blocks

    model.train()
    encoder, predictor, size = model.encoder, model.predictor, model.config.encoder.image_size
    draw = make_rng(2)
    noise = torch.rand(FRAMES, 3, size, size, generator=draw)
    frames = (255 * torch.nn.functional.avg_pool2d(noise, 15, 1, 7)).to(torch.uint8).to(device)  # smooth images
    way = torch.randn(FRAMES, model.config.encoder.width, generator=draw).to(device)
    shape = (FRAMES, model.config.history, model.config.predictor.width)
    x, condition, along = (torch.randn(shape, generator=draw).to(device) for _ in range(3))

    def blocks() -> Tensor:
        y = x
        for block in predictor.blocks:
            y = block(y, condition)
        return predictor.norm(y)

    Part = tuple[str, Sequence[tuple[str, Tensor]], Tensor, Callable[[], Tensor], Callable[[], Tensor]]
    parts: list[Part] = [
        (
            *("encoder", list(encoder.named_parameters()), way, lambda: encoder(frames).cls),
            lambda: fused_tokens(encoder.vit, frames, encoder.mean, encoder.std, dtype)[0],
        ),
        (
            *("predictor", list(predictor.blocks.named_parameters()), along, blocks),
            lambda: fused_blocks(predictor, x, condition, dtype),
        ),
    ]
    table = Table("gradients against float32", "median", "worst", "of")
    for part, named, weights, plain, fused in parts:
        parameters = [p for _, p in named]

        def of(run: Callable[[], Tensor], weights=weights, parameters=parameters):  # type: ignore[no-untyped-def]
            return torch.autograd.grad((run().float() * weights).sum(), parameters)

        def autocast(plain: Callable[[], Tensor] = plain) -> Tensor:
            with torch.autocast(device.type, dtype):
                return plain()

        exact = of(plain)
        for name, run in {"fused": fused, "autocast": autocast}.items():
            errors = [float((g - e).norm() / e.norm()) for g, e in zip(of(run), exact, strict=True)]
            worst = max(range(len(errors)), key=errors.__getitem__)
            middle = sorted(errors)[len(errors) // 2]
            table.add_row(f"{part}, {name}", f"{middle:.1e}", f"{errors[worst]:.1e}", named[worst][0])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--episodes", type=int, help="[default: 1 on a CPU, 8 on a GPU]")
    parser.add_argument("--iterations", type=int, help="[default: 4 on a CPU, 30 on a GPU]")
    arguments = parser.parse_args()
    device = pick_device(arguments.device)
    gpu = device.type == "cuda"
    config = paper("atlas")
    still = replace(config.model, predictor=replace(config.model.predictor, dropout=0.0))
    model = random_model(still).to(device)
    plan = replace(config.plan, iterations=arguments.iterations or (30 if gpu else 4))
    console = Console()
    console.print(elites(model, plan, arguments.episodes or (8 if gpu else 1), device))
    if gpu:
        console.print(gradients(model, device))


if __name__ == "__main__":
    main()
