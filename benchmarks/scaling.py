"""Milliseconds a training step on several GPUs: predicted from one, and measured where there are several.

    python benchmarks/scaling.py [--recipe paper] [--gpus 2,8,64]
    torchrun --nproc-per-node 8 benchmarks/scaling.py [--recipe paper]

The global batch stays the same. A GPU encodes its share of the clips and computes the losses of all; its part is
measured here, alone. What travels is counted, and takes its bytes over the bandwidth plus a latency per message.
Gradients travel while the backward pass runs, about 60 % of the computation; the last message cannot. Under
torchrun the step is also measured, beside its prediction.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from pairs import batch_of, milliseconds, step_of
from rich.console import Console
from rich.table import Table
from torch import nn

from atlas_wm.config import RunConfig
from atlas_wm.losses.objective import ClipLatents, objective
from atlas_wm.models.world_model import WorldModel
from atlas_wm.parallel.devices import pick_device
from atlas_wm.parallel.gradients import MESSAGE_BYTES
from atlas_wm.parallel.launch import processes
from atlas_wm.parallel.processes import alone, is_main, rank, several, shard_sizes, world_size
from atlas_wm.recipes import get_recipe
from atlas_wm.rng import make_rng
from atlas_wm.train.step import clip_latents

BACKWARD = 0.6  # of the computation of a step


class Link(NamedTuple):
    name: str
    bandwidth: float  # bytes a second, of one GPU in one direction
    latency: float  # seconds a message


LINKS = (Link("NVLink, 450 GB/s", 450e9, 15e-6), Link("network, 200 Gbit/s", 25e9, 40e-6))


class Traffic(NamedTuple):
    """Of one step."""

    gradients: int  # bytes
    latents: int  # bytes of the whole batch
    messages: int  # small ones: sums of BatchNorm, forward and backward

    def seconds(self, gpus: int, link: Link, compute: float) -> float:
        """That the step waits for messages."""
        if gpus == 1:
            return 0.0
        others = (gpus - 1) / gpus
        gather = others * self.latents / link.bandwidth + link.latency
        large = 2 * others * self.gradients / link.bandwidth + link.latency * (1 + self.gradients // MESSAGE_BYTES)
        last = 2 * others * min(self.gradients, MESSAGE_BYTES) / link.bandwidth + link.latency
        return self.messages * link.latency + gather + max(last, large - BACKWARD * compute)


def losses_of(config: RunConfig, clips: int, device: torch.device) -> Callable[[], object]:
    """The losses of so many clips and their gradient by the latents."""
    model = WorldModel(config.model, 2).to(device).train()
    found = clip_latents(model, batch_of(config, clips, device), mixed=False)
    latents = ClipLatents(*(None if t is None else t.detach().requires_grad_(t.requires_grad) for t in found))  # type: ignore[arg-type]
    rng = make_rng(3, device=device)
    return lambda: objective(latents, config.objective, rng).total.backward()


def traffic_of(config: RunConfig) -> Traffic:
    model = WorldModel(config.model, 2).train()
    few = clip_latents(model, batch_of(config, 2, torch.device("cpu")), mixed=False)
    each = sum(t.numel() * 4 for t in few if t is not None) // 2
    norms = sum(isinstance(m, nn.BatchNorm1d) for m in model.modules())
    gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return Traffic(gradients, each * config.train.batch, 4 * norms)


@processes()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="paper")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--gpus", default="2,8,64", help="numbers of GPUs to predict")
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    device = pick_device(given.device)
    config = get_recipe(given.recipe)("atlas")
    config = replace(config, train=replace(config.train, compile="never"))
    counts = [world_size()] if several() else [1, *map(int, given.gpus.split(","))]
    measured = None
    if several():
        mine = shard_sizes(config.train.batch)[rank()]
        (measured,) = milliseconds(device, given.rounds, step_of(config, mine, device))
    if not is_main():
        return
    with alone():
        traffic = traffic_of(config)
        shares = [max(1, config.train.batch // count) for count in counts]
        steps = milliseconds(device, given.rounds, *(step_of(config, share, device) for share in shares))
        whole, *parts = milliseconds(
            device, given.rounds, *(losses_of(config, n, device) for n in (config.train.batch, *shares))
        )
    columns = [
        "GPUs",
        "clips each",
        "computation, ms",
        *(f"{link.name}: ms, steps/s" for link in LINKS),
        "measured, ms",
    ]
    table = Table(*columns)
    for count, share, step, part in zip(counts, shares, steps, parts, strict=True):
        compute = step + max(0.0, whole - part)
        each = [compute + 1e3 * traffic.seconds(count, link, compute / 1e3) for link in LINKS]
        found = step if count == 1 else measured
        cells = [f"{ms:.1f}, {1e3 / ms:.0f}" for ms in each]
        table.add_row(str(count), str(share), f"{compute:.1f}", *cells, f"{found:.1f}" if found else "")
    console = Console(width=120)
    console.print(table)
    console.print(
        f"A step sends {traffic.gradients / 1e6:.0f} MB of gradients, {traffic.latents / 1e6:.1f} MB of latents "
        f"and {traffic.messages} small sums. {given.recipe}, batch {config.train.batch}, {device}."
    )


if __name__ == "__main__":
    main()
