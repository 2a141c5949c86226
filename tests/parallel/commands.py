"""The commands in one process, in two, and in two of which one fails: ``python commands.py DATASET RUN FOLDER``."""

import json
import os
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from forked import fork
from safetensors.torch import save_file

from atlas_wm.config import EncoderConfig, ModelConfig, ObjectiveConfig, PredictorConfig, RunConfig, TrainConfig
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.diagnose import marginal, simulate
from atlas_wm.diagnose.catalog import QuerySettings
from atlas_wm.diagnose.diagnose import diagnose
from atlas_wm.errors import Interrupted, UserError
from atlas_wm.evaluate import evaluate, worker
from atlas_wm.evaluate.protocol import Protocol
from atlas_wm.models.encoders import ViTEncoder
from atlas_wm.parallel.launch import process_info
from atlas_wm.rng import make_rng
from atlas_wm.settings import to_dict
from atlas_wm.tasks import get_task
from atlas_wm.train.loop import train

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "train")]
from short_runs import short_config, short_train, small_banks

DATA, RUN, OUT = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])


class Here:
    """Worker processes that would take seconds to start, played by the one that asks them."""

    def __init__(self, count: int, make: Callable[..., Any], *arguments: Any):
        self.make, self.arguments = make, arguments

    @cached_property
    def made(self) -> Any:
        return self.make(*self.arguments)

    def each(self, requests: deque[Any]) -> Iterator[tuple[Any, Any]]:
        while requests:
            what, *given = request = requests.popleft()
            yield request, getattr(self.made, what)(*given)

    def close(self) -> None: ...


def training(
    folder: Path, on_progress: Callable[[Any], None] = lambda progress: None, data: str = DATA, **settings: Any
) -> None:
    few = {"steps": 4, "batch": 9, "log_every": 2, "validate_every": 2, "batchnorm_batches": 2}
    short_train(short_config(**few, **settings), data, folder / "trained", on_progress=on_progress)


def training_from_tokens(folder: Path) -> None:
    """A frozen encoder's, that the main process keeps in a file."""
    encoder = EncoderConfig(kind="dinov2", image_size=32, patch_size=8, width=12, depth=1, heads=3)
    weights = folder / f"{process_info().rank}.safetensors"
    save_file({k: draw(v.shape) for k, v in ViTEncoder(encoder).vit.state_dict().items()}, weights)
    predictor = PredictorConfig(kind="patch", depth=1, heads=2, head_dim=4, mlp=16, dropout=0.0)
    settings = TrainConfig(steps=4, batch=9, lr=1e-3, log_every=1, validate_every=2, cache_tokens="always")
    model = ModelConfig(replace(encoder, weights=str(weights)), predictor)
    config = RunConfig(model, ObjectiveConfig(), settings)
    task = get_task("tworoom")
    options: dict[str, Any] = {"method": "dino-wm", "recipe": "demo", "device": "cpu"}
    encoded: list[int] = []
    options["on_encoded"] = lambda done, _: encoded.append(done)
    with small_banks():
        train(config, task, DATA, folder / "from-tokens", **options)
    assert bool(encoded) == (process_info().rank == 0)


def draw(shape: torch.Size) -> torch.Tensor:
    return torch.randn(shape, generator=make_rng(0)) / 4


def commands(folder: Path) -> None:
    training(folder)
    training_from_tokens(folder)
    protocols = [Protocol(25, 30, 7, (3, 4)), Protocol(10, None, 5, (3,))]
    reports = evaluate.evaluate(folder / "run", protocols, films=1, device="cpu")
    settings = QuerySettings(queries=3, candidates=4)
    files = diagnose([folder / "run"], ("marginal", "rollout", "regret"), settings=settings, device="cpu")
    found = {"reports": [to_dict(report) for report in reports], "files": [file.name for file in files]}
    (folder / f"{process_info().rank}.json").write_text(json.dumps(found))


def scenario(name: str, work: Callable[[Path], None], size: int = 2, slurm: bool = False) -> None:
    folder = OUT / name
    shutil.copytree(RUN, folder / "run")

    def one() -> None:
        """Errors are printed as the command line prints them."""
        sys.stderr = (folder / f"{process_info().rank}.err").open("w", buffering=1)
        try:
            work(folder)
        except UserError as error:
            print(f"atlas: {error}", file=sys.stderr)
            sys.exit(1)
        except Interrupted as stop:
            print(f"atlas: {stop}", file=sys.stderr)
            sys.exit(stop.code)

    started = time.monotonic()
    statuses = fork(size, one, slurm)
    (folder / "ended.json").write_text(json.dumps([statuses, time.monotonic() - started]))


def second(action: Callable[[], None]) -> Callable[[Any], None]:
    """What the second process does when it is to report progress."""
    return lambda progress: action() if process_info().rank == 1 else None


def die_in_the_end(progress: Any) -> None:
    if progress.step == progress.steps:
        os.kill(os.getpid(), signal.SIGKILL)


def full() -> None:
    raise UserError("the disk is full")


if __name__ == "__main__":
    torch.set_num_threads(1)
    EpisodeData(DATA, get_task("tworoom"), 32, 5)  # imports what it needs, before the others are forked
    worker.WorkerPool = simulate.WorkerPool = Here
    marginal.EPISODES = 10
    scenario("alone", commands, size=1)
    scenario("together", commands)
    scenario("under-slurm", training, slurm=True)
    scenario("one-fails", lambda f: training(f, second(full)))
    scenario("one-fails-under-slurm", lambda f: training(f, second(full)), slurm=True)
    scenario("one-is-killed", lambda f: training(f, second(lambda: os.kill(os.getpid(), signal.SIGKILL))))
    scenario("broken-off", lambda f: training(f, die_in_the_end, checkpoint_every=1))
    scenario("goes-on", lambda f: training(OUT / "broken-off", checkpoint_every=1))
    scenario("all-are-stopped", lambda f: training(f, lambda progress: signal.raise_signal(signal.SIGTERM)))
    scenario("all-fail", lambda f: training(f, data="nowhere.h5"))
