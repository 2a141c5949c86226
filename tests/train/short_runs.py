"""Runs of a second or two, in this process or in one that can be killed."""

import csv
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from atlas_wm.config import RunConfig
from banks import small_banks
from preloaded import forkserver_context

STEPS = 60


def short_config(**changes) -> RunConfig:
    """Dropout and BatchNorm on, log rows that straddle checkpoints, statistics measured anew at validation."""
    from atlas_wm.recipes import demo

    config = demo("atlas")
    encoder = replace(config.model.encoder, image_size=16, patch_size=8, width=24, depth=1)
    predictor = replace(config.model.predictor, width=16, depth=1, heads=1, head_dim=16, mlp=32, dropout=0.1)
    train = replace(config.train, steps=STEPS, batch=8, log_every=7, validate_every=21, batchnorm_batches=1)
    return replace(
        config,
        model=replace(config.model, encoder=encoder, predictor=predictor, latent=8, hidden=16, action_hidden=16),
        objective=replace(config.objective, directions=8),
        train=replace(train, **{"checkpoint_every": 5, **changes}),
        plan=replace(config.plan, candidates=20, iterations=2, elites=4),
    )


def short_train(config: RunConfig, data: Path, out: Path, **options) -> Path:
    from atlas_wm.tasks import get_task
    from atlas_wm.train.loop import train

    given = {"method": "atlas", "recipe": "demo", "device": "cpu"} | options
    with small_banks():
        return train(config, get_task("tworoom"), data, out, **given)


def same_result(one: Path, other: Path) -> bool:
    """Weights to the last bit, and all metrics but the speed."""
    for name in ("model.safetensors", "bank.safetensors"):
        first, second = (load_file(run / name) for run in (one, other))
        if first.keys() != second.keys() or not all(torch.equal(first[key], second[key]) for key in first):
            return False
    return metrics(one) == metrics(other)


def metrics(run: Path) -> list[dict[str, str]]:
    rows = list(csv.DictReader((run / "metrics.csv").open(newline="")))
    return [{name: value for name, value in row.items() if name != "clips_per_second"} for row in rows]


# What follows runs in processes of its own.


def start(data: Path, out: Path, config: RunConfig, *, die_at_sync: int = 0, most: int = STEPS):
    """most: updates before it waits to be killed, so that it cannot finish however busy the machine is."""
    context = forkserver_context()
    reached = context.Value("i", 0)
    process = context.Process(target=_run, args=(data, out, config, reached, die_at_sync, most))
    process.start()
    return process, reached


def _run(data: Path, out: Path, config: RunConfig, reached, die_at_sync: int, most: int) -> None:
    from atlas_wm.errors import Interrupted
    from atlas_wm.train import step

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    whole = step.PlainStep.__call__

    def counted(self, *given):
        with reached:
            reached.value += 1
        time.sleep(0.01 if reached.value <= most else 3600)
        return whole(self, *given)

    step.PlainStep.__call__ = counted
    if die_at_sync:
        _die_at(die_at_sync)
    try:
        short_train(config, data, out)
    except Interrupted as stop:
        raise SystemExit(stop.code) from None


def _die_at(call: int) -> None:
    """A power cut, as far as a process sees it, at one of the moments when a file reaches the disk."""
    whole, calls = os.fsync, iter(range(1, 10**6))

    def fsync(descriptor):
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        whole(descriptor)

    os.fsync = fsync


def wait_for(reached, updates: int, process) -> None:
    """Until so many updates were begun."""
    while reached.value < updates and process.is_alive():
        time.sleep(0.001)
