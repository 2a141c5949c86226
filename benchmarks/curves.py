"""Do the fast training steps follow the plain one? Losses of the same clips from the same weights.

    python benchmarks/curves.py [--steps 200] [--batch 128]

bf16 training on a GPU does not repeat itself bit for bit, so the plain step is run twice: the difference of the two
is what any other may differ by. Clips show a bright spot that the actions move, so that there is something to
learn. Dropout is off, for the steps draw it differently. On a CPU there is only the plain step.
"""

import argparse
from dataclasses import replace

import torch
from pairs import our_step
from rich.console import Console
from rich.table import Table
from torch import Tensor

from atlas_wm.config import RunConfig
from atlas_wm.data.clips import Batch
from atlas_wm.models.world_model import WorldModel
from atlas_wm.parallel.devices import pick_device
from atlas_wm.recipes import paper
from atlas_wm.rng import make_rng

BATCHES = 12  # that are shown again and again
LAST = 20


def moving_spot(size: int, image: int, number: int, device: torch.device) -> Batch:
    draw = make_rng(1, number)
    actions = torch.randn(size, 3, 10, generator=draw)
    start = torch.randn(size, 1, 2, generator=draw)
    place = torch.cat([start, start + actions[..., :2].cumsum(dim=1)], dim=1).to(device)  # (B, 4, 2)
    axis = torch.linspace(-3, 3, image, device=device)
    away = (axis[:, None] - place[..., :1, None]).square() + (axis - place[..., 1:, None]).square()
    spot = torch.exp(-4 * away)  # (B, 4, S, S)
    frames = (255 * torch.stack([spot, 1 - spot, spot / 2], dim=2)).to(torch.uint8)
    return Batch(frames, actions.to(device))


def losses(name: str, config: RunConfig, batches: list[Batch], steps: int, device: torch.device) -> Tensor:
    torch.manual_seed(0)
    model = WorldModel(config.model, action_size=2).to(device)
    step = our_step(model, config, device, fast=name.startswith("fast"), compiled="compiled" in name)
    total = [
        step(
            batches[i % len(batches)], make_rng(2, i, device=device), config.train.lr * min(1, (i + 1) / 20)
        ).losses.total
        for i in range(steps)
    ]
    return torch.stack(total).double().cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, help="clips [default: 4 on a CPU, 128 on a GPU]")
    parser.add_argument("--steps", type=int, help="[default: 5 on a CPU, 200 on a GPU]")
    parser.add_argument("--compile", action="store_true", help="also with what is left compiled")
    arguments = parser.parse_args()
    device = pick_device(arguments.device)
    gpu = device.type == "cuda"
    steps, config = arguments.steps or (200 if gpu else 5), paper("atlas")
    model = replace(config.model, predictor=replace(config.model.predictor, dropout=0.0))
    config = replace(config, model=model)
    size = arguments.batch or (128 if gpu else 4)
    batches = [moving_spot(size, model.encoder.image_size, i, device) for i in range(BATCHES)]
    names = ["plain again", *(["fast"] if gpu else []), *(["fast, compiled"] if gpu and arguments.compile else [])]
    plain = losses("plain", config, batches, steps, device)
    table = Table("step", "2nd step", "largest", f"mean of the last {LAST}", "last loss")
    for name in names:
        other = losses(name, config, batches, steps, device)
        gap = (other - plain).abs() / plain
        last = f"{float(other[-1]):.4f}"
        table.add_row(name, f"{gap[1]:.1e}", f"{gap.max():.1e}", f"{gap[-LAST:].mean():.1e}", last)
    console = Console()
    console.print(table)
    console.print(
        f"relative differences of the total loss from a plain run, which goes from {float(plain[0]):.4f} to "
        f"{float(plain[-1]):.4f} in {steps} steps of {size} clips on {device}"
    )


if __name__ == "__main__":
    main()
