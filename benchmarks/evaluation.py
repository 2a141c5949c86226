"""Seconds to evaluate TwoRoom episodes: stable-worldmodel's World.evaluate with its WorldModelPolicy, CEMSolver and
LeWM, and our evaluation with the same weights, episodes and settings.

    python benchmarks/evaluation.py [--episodes 32] [--cem 64x3 300x10]

Each as it is made to run: theirs in one process with all threads, ours in a process for each core; neither is
charged for starting Python and loading libraries. The model has about the demo's size, and is not trained:
BatchNorm sees the data once, so that plans depend on the images and some near goals are reached. Noise differs,
so success may differ by some episodes.
"""

import argparse
import contextlib
import io
import os
import tempfile
import time
import warnings
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pairs import normalised, random_model, their_config, their_lewm
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from atlas_wm.config import DataInfo, ModelConfig, PlanConfig, RunInfo
from atlas_wm.data.collect import collect
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.evaluate.protocol import Protocol, draw_starts
from atlas_wm.evaluate.worker import Job, Setup, Worker
from atlas_wm.images import reduce_frames
from atlas_wm.models.world_model import WorldModel
from atlas_wm.normalizer import Normalizer
from atlas_wm.parallel.workers import WorkerPool
from atlas_wm.plan.harness import Standardisation
from atlas_wm.rng import make_rng
from atlas_wm.runs.model import save_model
from atlas_wm.tasks.base import import_harness
from atlas_wm.tasks.tworoom import TwoRoom

RECORDED = 60
# How the published evaluation puts an environment into a row of the dataset.
CALLABLES = [
    {"method": "_set_state", "args": {"state": {"value": "state"}}},
    {"method": "_set_goal_state", "args": {"goal_state": {"value": "goal_state"}}},
]


def small_config() -> ModelConfig:
    """The demo's sizes, but latents as wide as the predictor, as in every LeWM."""
    model = their_config().model
    return replace(
        model,
        encoder=replace(model.encoder, image_size=32, patch_size=4, width=48, depth=2),
        predictor=replace(model.predictor, width=64, depth=2, heads=2, head_dim=32, mlp=256),
        latent=64,
        hidden=256,
        action_hidden=256,
    )


def calibrate(model: WorldModel, data: EpisodeData) -> None:
    episodes = np.flatnonzero(data.lengths > 2 * model.config.frameskip)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm1d):
            layer.momentum = 1.0
    with torch.no_grad():
        frames = data.frames(episodes, np.zeros_like(episodes), 3)
        model.train()(frames, torch.randn(len(frames), 2, 10, generator=make_rng(0)))
    model.eval().normalizer = Normalizer.fit(data.actions)


def evaluate_theirs(
    theirs: Any,
    model: WorldModel,
    plan: PlanConfig,
    path: Path,
    data: EpisodeData,
    rows: np.ndarray,
    protocol: Protocol,
) -> tuple[float, float]:
    """Seconds, and success in percent."""
    from stable_worldmodel import World
    from stable_worldmodel.data import load_dataset
    from stable_worldmodel.policy import PlanConfig as TheirPlanConfig
    from stable_worldmodel.policy import WorldModelPolicy
    from stable_worldmodel.solver import CEMSolver

    def prepare(image: Any) -> Tensor:
        frames = torch.as_tensor(image).as_subclass(Tensor)[None]
        return normalised(reduce_frames(frames, data.image_size))[0]

    started = time.perf_counter()
    solver = CEMSolver(theirs, num_samples=plan.candidates, n_steps=plan.iterations, topk=plan.elites)
    policy = WorldModelPolicy(
        solver,
        TheirPlanConfig(plan.horizon, plan.execute, action_block=model.config.frameskip),
        process={"action": Standardisation(model.normalizer)},
        transform={"pixels": prepare, "goal": prepare},
    )
    episodes = np.searchsorted(data.offsets, rows, side="right") - 1
    world = World(data.task.env_id, len(rows), (224, 224), max_episode_steps=2 * protocol.steps)
    world.set_policy(policy)
    with contextlib.redirect_stdout(io.StringIO()):  # the solver prints its times
        result = world.evaluate(
            dataset=load_dataset(str(path)),
            episodes_idx=episodes.tolist(),
            start_steps=(rows - data.offsets[episodes]).tolist(),
            goal_offset=protocol.offset,
            eval_budget=protocol.steps,
            callables=CALLABLES,
        )
    world.close()
    return time.perf_counter() - started, 100 * float(np.mean(result["episode_successes"]))


def evaluate_ours(
    model: WorldModel, plan: PlanConfig, path: Path, rows: np.ndarray, protocol: Protocol
) -> tuple[float, float]:
    """As ``atlas eval`` does it on a CPU. Seconds, and success in percent."""
    nothing = DataInfo(str(path), "0" * 16, 1, 1, 1, 1)
    model.run = RunInfo(
        "tworoom", "lewm", "benchmark", 2, replace(their_config(), model=model.config), nothing, "cpu"
    )
    run = path.with_suffix(".run")
    save_model(model, run)
    cores = os.cpu_count() or 1
    each = -(-len(rows) // (2 * cores))
    jobs = [Job("model", protocol, 0, tuple(rows[i : i + each].tolist())) for i in range(0, len(rows), each)]
    setup = Setup(str(run), "tworoom", str(path), plan, "cpu")
    with contextlib.closing(WorkerPool(cores, Worker, setup)) as pool:
        warm_up = replace(jobs[0], rows=jobs[0].rows[:1])
        list(pool.each(deque([("run", warm_up)] * cores)))
        started = time.perf_counter()
        results = [result for _, result in pool.each(deque(("run", job) for job in jobs))]
        seconds = time.perf_counter() - started
    return seconds, 100 * float(np.mean([r.success for result in results for r in result.records]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--cem", nargs="+", default=["64x3", "300x10"], help="candidates x iterations")
    parser.add_argument("--offset", type=int, default=25)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    import_harness()
    protocol = Protocol(offset=arguments.offset, episodes=arguments.episodes)
    with tempfile.TemporaryDirectory() as folder:
        task, path = TwoRoom(), Path(folder) / "tworoom.h5"
        collect(task, path, RECORDED, seed=3, pixels=True, workers=1)
        model = random_model(small_config())
        data = EpisodeData(path, task, model.config.encoder.image_size, model.config.frameskip)
        calibrate(model, data)
        rows = draw_starts(data, protocol, seed=42)
        theirs = their_lewm(model)
        table = Table("CEM", "stable-worldmodel, s", "atlas-wm, s", "ratio", "success, %")
        for candidates, iterations in (map(int, cem.split("x")) for cem in arguments.cem):
            plan = PlanConfig(candidates=candidates, iterations=iterations, clip_actions=False)  # as the library
            evaluate_theirs(theirs, model, plan, path, data, rows[:1], protocol)  # to warm up
            before, their_success = evaluate_theirs(theirs, model, plan, path, data, rows, protocol)
            after, our_success = evaluate_ours(model, plan, path, rows, protocol)
            success = f"{their_success:.1f}, {our_success:.1f}"
            settings = f"{candidates}×{iterations}×{plan.horizon}"
            table.add_row(settings, f"{before:.1f}", f"{after:.1f}", f"{before / after:.2f}", success)
    console = Console()
    console.print(table)
    console.print(
        f"{len(rows)} episodes of TwoRoom, offset {protocol.offset}, budget {protocol.steps}, 32×32 pixels, "
        f"{os.cpu_count()} cores, one run each"
    )


if __name__ == "__main__":
    main()
