"""Train many small models and measure their planning success: what an offline score has to predict.

    PYTHONPATH=src python3 tools/score_models.py --out DIR            # one GPU, about six minutes
    PYTHONPATH=src python3 tools/score_models.py --out DIR --toy      # two models of 20 steps, on a CPU

Writes to DIR: models.jsonl, one line per model (settings, success); episodes-TASK.npz, some episodes as the
models see them; weights-N.tar, the weights of all models. tools/score_table.py reads these. Data go to --data.
"""

import argparse
import json
import multiprocessing
import os
import tarfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from safetensors.torch import save_file

from atlas_wm.config import RunConfig
from atlas_wm.data.clips import held_out_episodes
from atlas_wm.data.collect import collect
from atlas_wm.data.frame_cache import FrameCache
from atlas_wm.data.training_set import TrainingSet, open_training_set
from atlas_wm.evaluate.env_batch import EnvBatch
from atlas_wm.evaluate.protocol import Protocol, draw_starts
from atlas_wm.evaluate.rollout import planning_policy, run_episodes
from atlas_wm.models.world_model import TRAINING_ONLY, WorldModel
from atlas_wm.plan.planner import Planner
from atlas_wm.recipes import demo
from atlas_wm.tasks import get_task
from atlas_wm.train.loop import fit
from atlas_wm.train.start import run_info

EVALUATION_SEED = 42
HELD_OUT, TRAINED = 100, 80  # episodes, at most, whose frames are saved: to judge scores on, to fit probes on
MOST_TAR = 16_000_000  # bytes


@dataclass(frozen=True)
class TaskSetup:
    episodes: int
    pixels: bool
    image: int
    offset: int
    budget: int
    workers: int  # that collect
    demonstrator: tuple[str, ...] = ()


TASKS = {
    "tworoom": TaskSetup(2000, False, 32, 50, 75, 6),
    "pusht": TaskSetup(600, True, 64, 25, 50, 12, ("white_noise=0.4",)),
}


@dataclass(frozen=True)
class ModelSetup:
    task: str
    method: str
    weights: dict[str, float] = field(default_factory=dict)
    """Of the objective, where they differ from the demo recipe's."""
    steps: int = 800
    seed: int = 3072
    recipe: str = "demo"
    """demo, or random: position embeddings drawn as in the paper, with a standard deviation of 1."""

    @property
    def name(self) -> str:
        weights = "-".join(f"{name}{value:g}" for name, value in self.weights.items())
        return "-".join(
            filter(None, (self.task, self.method, weights, str(self.steps), str(self.seed), self.recipe))
        )

    @property
    def config(self) -> RunConfig:
        base = demo(self.method)
        model, objective = base.model, replace(base.objective, **self.weights)  # type: ignore[arg-type]
        if objective.inverse:
            model = replace(model, inverse_hidden=128)
        if self.task == "pusht":  # more to see and to know
            encoder = replace(model.encoder, image_size=64, patch_size=8, width=96, depth=3)
            predictor = replace(model.predictor, width=96, heads=3)
            model = replace(model, encoder=encoder, predictor=predictor, latent=48)
        if self.recipe == "random":
            encoder = replace(model.encoder, positions="random")
            model = replace(model, encoder=encoder, predictor=replace(model.predictor, positions_std=1.0))
        train = replace(base.train, steps=self.steps, seed=self.seed, precision="32-true")
        train = replace(train, log_every=100, validate_every=10**6, warmup=min(50 / self.steps, 0.5))
        return replace(base, model=model, objective=objective, train=train)


def tworoom_models() -> Iterator[ModelSetup]:
    seeds = iter(range(3072, 4000))
    for weight in (0.02, 0.06, 0.2, 0.6, 1.5, 3.0):
        for method in ("atlas", "wemreg"):
            yield ModelSetup("tworoom", method, {"wemreg": weight}, seed=next(seeds))
    for weight in (0.003, 0.01, 0.03, 0.1, 0.3, 1.0):
        for method in ("lewm+ood", "lewm"):
            yield ModelSetup("tworoom", method, {"sigreg": weight}, seed=next(seeds))
    for steps in (50, 100, 200, 400, 1600, 3000):
        for method in ("atlas", "lewm"):
            yield ModelSetup("tworoom", method, steps=steps, seed=next(seeds))
    for scale in (1.0, 0.1, 0.01):
        weights = {"std": 18.0 * scale, "std_t": 0.7 * scale, "cov": 12.0 * scale, "temporal": 0.2 * scale}
        yield ModelSetup("tworoom", "pldm", weights, seed=next(seeds))
    for weight in (0.02, 0.2, 3.0):
        yield ModelSetup("tworoom", "atlas", {"wemreg": weight, "inverse": 1.0}, seed=next(seeds))
        yield ModelSetup("tworoom", "atlas", {"wemreg": weight}, seed=next(seeds), recipe="random")


def pusht_models() -> Iterator[ModelSetup]:
    seeds = iter(range(4000, 5000))
    for steps in (4000, 1000):
        for weight in (0.05, 0.2, 0.6, 2.0):
            yield ModelSetup("pusht", "atlas", {"wemreg": weight}, steps, next(seeds))
        for weight in (0.01, 0.03, 0.1, 0.5):
            yield ModelSetup("pusht", "lewm", {"sigreg": weight}, steps, next(seeds))
        for weight in (0.2, 2.0):
            yield ModelSetup("pusht", "atlas", {"wemreg": weight, "inverse": 1.0}, steps, next(seeds))
    scale = 0.1
    weights = {"std": 18.0 * scale, "std_t": 0.7 * scale, "cov": 12.0 * scale, "temporal": 0.2 * scale}
    yield ModelSetup("pusht", "pldm", weights, 4000, next(seeds))
    yield ModelSetup("pusht", "atlas", {}, 200, next(seeds))


class WholeFrames(FrameCache):
    """All frames on the device, uncompressed: at this size they fit many times."""

    def __init__(self, frames: torch.Tensor):
        self.frames = frames

    def read(self, rows: np.ndarray) -> torch.Tensor:
        return self.frames[torch.from_numpy(rows).to(self.frames.device)]


# Preparation: demonstrations, and their frames in one file that all processes map


def prepare(name: str, setup: TaskSetup, ready: Any, limits: "Limits") -> None:
    """Collect the data of a task, draw or read all frames, and save some episodes."""
    started, folder, workers = time.monotonic(), limits.data, min(setup.workers, os.cpu_count() or 1)
    task = get_task(name)
    if setup.demonstrator:
        task = task.with_demonstrator(setup.demonstrator)
    collect(task, data_path(name, folder), setup.episodes, pixels=setup.pixels, workers=workers)
    collected = time.monotonic() - started
    training_set = open_set(name, folder)
    data = training_set.data
    rows, size = len(data.actions), setup.image
    frames = np.lib.format.open_memmap(frames_path(name, folder), "w+", np.uint8, (rows, 3, size, size))
    frames.flush()
    pieces = np.array_split(np.arange(rows), max(1, rows // 1000))
    context = multiprocessing.get_context("fork")  # of a process without threads and CUDA
    each = [context.Process(target=_read_frames, args=(name, folder, pieces[i::workers])) for i in range(workers)]
    for process in each:
        process.start()
    for process in each:
        process.join()
    if any(process.exitcode for process in each):
        raise RuntimeError(f"frames of {name} cannot be read")
    save_episodes(name, training_set, np.load(frames_path(name, folder), mmap_mode="r"), limits.out)
    ready.set()
    seconds = time.monotonic() - started
    limits.say(f"{name}: {rows} rows, collected in {collected:.0f} s, ready after {seconds:.0f} s")


def _read_frames(name: str, folder: Path, pieces: list[np.ndarray]) -> None:
    torch.set_num_threads(1)
    frames = np.load(frames_path(name, folder), mmap_mode="r+")
    data = open_set(name, folder).data
    for rows in pieces:
        frames[rows[0] : rows[-1] + 1] = data.frames_of(rows).numpy()


def save_episodes(name: str, training_set: TrainingSet, frames: np.ndarray, folder: Path) -> None:
    """Episodes: frames one action chunk apart, with the standardised chunk after each (0 after the last)."""
    data = training_set.data
    skip, rng = data.frameskip, np.random.default_rng(0)
    held_out = held_out_episodes(len(data.lengths), training_set.config.train)
    order = [e for e in rng.permutation(len(held_out)) if data.lengths[e] > 2 * skip]
    chosen = [e for e in order if held_out[e]][:HELD_OUT] + [e for e in order if not held_out[e]][:TRAINED]
    found: dict[str, list[np.ndarray]] = {"frames": [], "actions": [], "episode": [], "states": [], "held_out": []}
    for number, episode in enumerate(chosen):
        chunks = (int(data.lengths[episode]) - 1) // skip
        first = int(data.offsets[episode])
        rows = first + skip * np.arange(chunks + 1)
        actions = training_set.normalizer.apply(torch.from_numpy(data.actions[first : first + chunks * skip]))
        found["frames"].append(frames[rows])
        found["actions"].append(np.pad(actions.reshape(chunks, -1).numpy(), ((0, 1), (0, 0))))
        found["episode"].append(np.full(chunks + 1, number))
        found["states"].append(data.states[rows])
        found["held_out"].append(np.full(chunks + 1, held_out[episode]))
    arrays: dict[str, Any] = {key: np.concatenate(parts) for key, parts in found.items()}
    np.savez_compressed(folder / f"episodes-{name}.npz", **arrays)


def data_path(name: str, folder: Path) -> Path:
    return folder / f"{name}.h5"


def frames_path(name: str, folder: Path) -> Path:
    return folder / f"{name}-frames.npy"


def open_set(name: str, folder: Path) -> TrainingSet:
    return open_training_set(data_path(name, folder), get_task(name), ModelSetup(name, "atlas").config)


# One model


@dataclass
class Bench:
    """The data of one task in one process."""

    training_set: TrainingSet
    frames: WholeFrames
    envs: EnvBatch

    @classmethod
    def of(cls, name: str, folder: Path, device: torch.device) -> "Bench":
        frames = torch.from_numpy(np.load(frames_path(name, folder))).to(device)
        return cls(open_set(name, folder), WholeFrames(frames), EnvBatch(get_task(name), TASKS[name].image))


def run_model(setup: ModelSetup, bench: Bench, device: torch.device, limits: "Limits") -> dict[str, Any]:
    """Train, save the weights, plan the held-out episodes."""
    started = time.monotonic()
    config = setup.config
    training_set = replace(bench.training_set, config=config)
    training_set.cache = bench.frames
    torch.manual_seed(setup.seed)
    model = WorldModel(config.model, training_set.normalizer.size, training_set.normalizer)
    model.prepare_training(config.objective)
    rows: list[dict[str, float]] = []
    fit(model, training_set, device, lambda step, row: rows.append(row))
    trained = time.monotonic() - started
    state = {n: t.detach().cpu() for n, t in model.state_dict().items() if not n.startswith(TRAINING_ONLY)}
    half = {n: (t.half() if t.ndim > 1 else t).contiguous() for n, t in state.items()}
    save_file(half, limits.data / "weights" / f"{setup.name}.safetensors")
    model.load_state_dict(
        {n: t.to(state[n].dtype) for n, t in half.items()}, strict=False
    )  # what is scored is planned
    success = plan_episodes(model, setup, bench, limits.episodes)
    settings = {**asdict(setup), "name": setup.name}
    losses = {name: value for name, value in rows[-1].items() if name.startswith("val_")}
    seconds = {"train": round(trained, 1), "plan": round(time.monotonic() - started - trained, 1)}
    return settings | success | {"losses": losses, "seconds": seconds}


def plan_episodes(model: WorldModel, setup: ModelSetup, bench: Bench, episodes: int) -> dict[str, Any]:
    task, data = TASKS[setup.task], bench.training_set.data
    protocol = Protocol(task.offset, task.budget, episodes, (EVALUATION_SEED,), "heldout")
    device = next(model.parameters()).device
    info = run_info(setup.config, data.task, bench.training_set, torch.device("cpu"), setup.method, "demo", None)
    starts = draw_starts(data, protocol, EVALUATION_SEED, info).tolist()
    planner = Planner(model, setup.config.plan, plain=device.type == "cuda")
    policy = planning_policy(planner, EVALUATION_SEED)
    records, _ = run_episodes([bench.envs], data, policy, starts, task.offset, task.budget)
    errors = [r.error for r in records if r.error is not None]
    return {
        "offset": task.offset,
        "budget": task.budget,
        "success": sum(r.success for r in records) / len(records),
        "solved_at_start": sum(r.solved_at_start for r in records) / len(records),
        "final_distance": float(np.mean([r.final_distance for r in records if r.final_distance is not None])),
        "episodes": len(records),
        "outcomes": "".join("01"[r.success] for r in records),
        "errors": errors[:3],
    }


@dataclass(frozen=True)
class Limits:
    out: Path
    data: Path
    started: float
    seconds: float
    episodes: int
    device: str

    @property
    def left(self) -> float:
        return self.started + self.seconds - time.monotonic()

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.started:5.0f} s  {text}", flush=True)


def work(jobs: Any, ready: dict[str, Any], lock: Any, limits: Limits) -> None:
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    device, benches = torch.device(limits.device), dict[str, Bench]()
    while (setup := jobs.get()) is not None and limits.left > 0:
        try:
            if not ready[setup.task].wait(timeout=limits.left):
                raise TimeoutError(f"the data of {setup.task} was not ready in time")
            if setup.task not in benches:
                benches[setup.task] = Bench.of(setup.task, limits.data, device)
            line = run_model(setup, benches[setup.task], device, limits)
            limits.say(f"{setup.name}: {100 * line['success']:.0f} %, {line['seconds']}")
        except Exception as error:
            traceback.print_exc()
            line = {**asdict(setup), "name": setup.name, "failed": f"{type(error).__name__}: {error}"}
        with lock, (limits.out / "models.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def in_order(tworoom: list[ModelSetup], pusht: list[ModelSetup]) -> list[ModelSetup]:
    """Few processes wait: PushT takes longer to collect, and its models longer to train."""
    mixed = [tworoom[i] for i in np.random.default_rng(0).permutation(len(tworoom))]
    return [*mixed[:20], *pusht, *mixed[20:]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path("data/score"))
    parser.add_argument("--workers", type=int, default=10, help="processes that train and plan on the GPU")
    parser.add_argument("--episodes", type=int, default=200, help="planned with each model")
    parser.add_argument("--seconds", type=float, default=300, help="no model is started after this time")
    parser.add_argument("--grace", type=float, default=45, help="seconds for the models that are under way")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--toy", action="store_true")
    given = parser.parse_args()
    started = time.monotonic()
    (given.data / "weights").mkdir(parents=True, exist_ok=True)
    given.out.mkdir(parents=True, exist_ok=True)
    tasks, models = TASKS, in_order(list(tworoom_models()), list(pusht_models()))
    if given.toy:
        given.workers, given.episodes, given.device = 1, 5, "cpu"
        tasks = {name: replace(setup, episodes=30) for name, setup in TASKS.items()}
        models = [ModelSetup("tworoom", "atlas", steps=20), ModelSetup("pusht", "lewm", steps=20)]
    assert len({setup.name for setup in models}) == len(models)

    limits = Limits(given.out, given.data, started, given.seconds, given.episodes, given.device)
    context = multiprocessing.get_context("spawn")
    lock, jobs = context.Lock(), context.Queue()
    ready = {name: context.Event() for name in tasks}
    for setup in [*models, *[None] * given.workers]:
        jobs.put(setup)
    preparing = [context.Process(target=prepare, args=(n, s, ready[n], limits)) for n, s in tasks.items()]
    workers = [context.Process(target=work, args=(jobs, ready, lock, limits)) for _ in range(given.workers)]
    for process in (*preparing, *workers):
        process.start()
    for process in workers:
        process.join(max(0.0, limits.left + given.grace))
    for process in (*workers, *preparing):
        if process.is_alive():
            process.terminate()
    pack(given.data / "weights", given.out)
    limits.say(f"{len((given.out / 'models.jsonl').read_text().splitlines())} of {len(models)} models")
    jobs.cancel_join_thread()


def pack(weights: Path, out: Path) -> None:
    """The weights as tars of at most MOST_TAR bytes."""
    groups: list[list[Path]] = [[]]
    for path in sorted(weights.glob("*.safetensors")):
        if sum(other.stat().st_size + 2048 for other in [*groups[-1], path]) > MOST_TAR:
            groups.append([])
        groups[-1].append(path)
    for number, group in enumerate(groups):
        with tarfile.open(out / f"weights-{number}.tar", "w") as tar:
            for path in group:
                tar.add(path, path.name)


if __name__ == "__main__":
    main()
