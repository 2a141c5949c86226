"""Milliseconds a training step: stable-worldmodel's LeWM with its SIGReg, and our steps, on the same clips.

    python benchmarks/training.py [--device cpu] [--batch 4] [--profile]

Theirs is the step of its training script: bf16 autocast on a GPU, AdamW, gradients clipped at 1. Ours is LeWM (the
same losses) and ATLAS, plain and, on a GPU, captured. A second table has our step of each recipe, with the batch of
the recipe (on a CPU of the demo alone). With --profile also what our last step spends its time on.
"""

import argparse
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from pairs import PEAK, lewm_pair, milliseconds, normalised, our_step, step_of, their_config
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.profiler import ProfilerActivity, profile

from atlas_wm.config import ModelConfig, RunConfig
from atlas_wm.data.clips import Batch
from atlas_wm.models.world_model import WorldModel
from atlas_wm.parallel.devices import pick_device
from atlas_wm.recipes import get_recipe, paper
from atlas_wm.rng import make_rng

RATE = 5e-5


def step_flop(model: ModelConfig, batch: int) -> float:
    """Matrix products of encoder and predictor, forward and twice that backward."""
    e, p = model.encoder, model.predictor
    tokens, inner = 1 + e.patches, p.heads * p.head_dim
    block = 2 * tokens * e.width**2 * (4 + 2 * e.mlp_ratio) + 4 * tokens**2 * e.width
    frame = e.depth * block + 2 * e.patches * 3 * e.patch_size**2 * e.width
    step = p.depth * 2 * p.width * (4 * inner + 2 * p.mlp + 6 * p.width)
    heads = 2 * model.hidden * (e.width + model.latent)
    return 3 * batch * (model.clip_frames * (frame + heads) + model.history * (step + heads))


def their_step(model: Any, batch: Batch, device: torch.device) -> Callable[[], Tensor]:
    from stable_worldmodel.wm.loss import SIGReg

    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=1e-3)
    sigreg = SIGReg().to(device)
    model.train()

    def step() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            clip = model.encode({"pixels": normalised(batch.frames), "action": batch.actions})
            z = clip["emb"]
            predicted = model.predict(z[:, :-1], clip["act_emb"])
            loss = mse_loss(predicted, z[:, 1:]) + 0.09 * sigreg(z.transpose(0, 1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step


KINDS = {  # of kernels, by what their names contain
    "products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "addmm", "aten::mm", "bmm"),
    "attention": ("attend", "attention"),
    "norms": ("_add_norm", "_enter", "_leave", "layer_norm"),
    "GELU": ("gelu",),
    "AdamW": ("adam", "multi_tensor", "foreach"),
}


def profile_of(step: Callable[[], Any], device: torch.device) -> Table:
    gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as seen:
        step()
        if gpu:
            torch.cuda.synchronize()
    time, calls = Counter[str](), Counter[str]()
    for event in seen.key_averages():
        kind = next((k for k, names in KINDS.items() if any(n in event.key.lower() for n in names)), "all else")
        time[kind] += event.self_device_time_total if gpu else event.self_cpu_time_total
        calls[kind] += event.count
    table = Table("kernels", "ms", "calls")
    for kind, microseconds in time.most_common():
        table.add_row(kind, f"{microseconds / 1e3:.2f}", f"{calls[kind]:,}")
    table.add_row("together", f"{time.total() / 1e3:.2f}", f"{calls.total():,}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, help="clips [default: 4 on a CPU, 128 on a GPU]")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="also the kernels of our last step")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    device = pick_device(arguments.device)
    gpu = device.type == "cuda"
    size = arguments.batch or (128 if gpu else 4)
    draw = make_rng(1)
    frames = torch.randint(0, 256, (size, 4, 3, 224, 224), dtype=torch.uint8, generator=draw)
    batch = Batch(frames.to(device), torch.randn(size, 3, 10, generator=draw).to(device))

    def ours(model: WorldModel, config: RunConfig, fast: bool = False) -> Callable[[], Any]:
        step = our_step(model.to(device), config, device, fast=fast)
        return lambda: step(batch, make_rng(0, device=device), RATE)

    theirs, same = lewm_pair(device)
    lewm, atlas = their_config(), replace(paper("atlas"), model=their_config().model)
    rows: dict[str, Callable[[], Any]] = {"stable-worldmodel LeWM": their_step(theirs, batch, device)}
    for name, config in {"LeWM": lewm, "ATLAS": atlas}.items():
        rows[f"atlas-wm {name}, plain"] = ours(WorldModel(config.model, 2), config)
    if gpu:
        rows["atlas-wm ATLAS, captured"] = ours(same, atlas, fast=True)
        for _ in range(5):
            rows["atlas-wm ATLAS, captured"]()
    times = milliseconds(device, arguments.rounds, *rows.values())
    flop = step_flop(atlas.model, size)
    table = Table("step", "ms", "ratio", "share of the floor")
    for name, ms in zip(rows, times, strict=True):
        share = f"{100 * flop / PEAK / (ms / 1e3):.0f} %" if gpu else "–"
        table.add_row(name, f"{ms:,.1f}", f"{times[0] / ms:.2f}", share)
    console = Console()
    console.print(table)
    console.print(
        f"{size} clips of 4 frames, {flop / 1e12:.2f} TFLOP a step, {torch.get_num_threads()} threads, "
        f"median of {arguments.rounds} rounds on {device}"
    )
    if arguments.profile:
        console.print(profile_of(list(rows.values())[-1], device))
    recipes = ("paper", "small", "demo") if gpu else ("demo",)
    configs = {recipe: get_recipe(recipe)("atlas") for recipe in recipes}
    steps = [step_of(config, config.train.batch, device) for config in configs.values()]
    sizes = Table("recipe", "clips", "ms", "steps/s")
    for (recipe, config), ms in zip(configs.items(), milliseconds(device, arguments.rounds, *steps), strict=True):
        sizes.add_row(recipe, str(config.train.batch), f"{ms:,.1f}", f"{1e3 / ms:.1f}")
    console.print(sizes)


if __name__ == "__main__":
    main()
