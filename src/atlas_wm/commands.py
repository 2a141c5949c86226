"""What the commands of ``atlas`` do, with progress shown; plain functions, also for scripts."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from atlas_wm.config import PlanConfig, RunConfig
from atlas_wm.data.collect import collect
from atlas_wm.data.states import keep_states
from atlas_wm.data.training_set import open_training_set
from atlas_wm.device import pick_device
from atlas_wm.errors import UserError
from atlas_wm.evaluate.evaluate import evaluate
from atlas_wm.models.world_model import WorldModel
from atlas_wm.progress import Bar
from atlas_wm.results import EvaluationResult, Protocol
from atlas_wm.run_folder import BANK, NORMALIZER, write_json
from atlas_wm.tasks import Task, get_task_of
from atlas_wm.train.loop import Progress, train

log = logging.getLogger(__name__)


def collect_with_progress(task: Task, out: Path, episodes: int, **options: Any) -> dict[str, Any]:
    import time

    started = time.monotonic()
    with Bar(f"collect {task.name}", "episodes") as bar:

        def show(done: int, rows: int) -> None:
            bar.update(done, episodes, f"{rows:,} rows, {rows / (time.monotonic() - started):,.0f} rows/s")

        return collect(task, out, episodes, on_episodes=show, say=bar.say, **options)


def train_with_progress(config: RunConfig, task: Task, data: Path, out: Path, method: str, **options: Any) -> Path:
    with Bar(f"train {method}", "steps") as bar:

        def show(p: Progress) -> None:
            terms = "  ".join(f"{name} {value:.4f}" for name, value in p.terms.items())
            bar.update(p.step, p.steps, f"{terms}  {p.clips_per_second:,.0f} clips/s", p.seconds_left)

        def show_encoded(done: int, total: int) -> None:
            if bar.unit != "frames":
                bar.rename("read", "frames")
            bar.update(done, total)
            if done == total:
                bar.rename(f"train {method}", "steps")

        return train(config, task, data, out, method=method, on_progress=show, on_encoded=show_encoded, **options)


def evaluate_with_progress(
    run: Path, protocols: Sequence[Protocol], plan: PlanConfig | None = None, **options: Any
) -> list[EvaluationResult]:
    with Bar(f"evaluate {run.name}", "episodes") as bar:

        def show(done: int, total: int, success: float) -> None:
            bar.update(done, total, f"success so far {100 * success:.0f} %")

        return evaluate(run, list(protocols), plan=plan, on_progress=show, **options)


def write_bank(run: Path, data: Path | None = None, device: str = "auto") -> Path:
    """What training would have written into the run folder: the bank, states for the ID/OOD split, bounds."""
    model = WorldModel.load(run, pick_device(device))
    assert model.run is not None
    ready = open_training_set(data or model.run.data.path, get_task_of(model.run), model.run.config)
    if ready.info.hash != model.run.data.hash:
        raise UserError(
            f"{run} was trained on data with hash {model.run.data.hash}, {ready.info.path} has {ready.info.hash}: "
            f"pass the --data it was trained on"
        )
    model.remember(ready.some_frames())
    assert model.bank is not None
    model.bank.write(run)
    if model.normalizer.low is None:
        bounded = replace(model.normalizer, low=ready.normalizer.low, high=ready.normalizer.high)
        write_json(run / NORMALIZER, bounded.to_dict())
        log.info("action bounds added to %s: its plans are clipped to them unless clip_actions is off", NORMALIZER)
    keep_states(run, ready.data, model.run)
    return run / BANK


def diagnose_with_progress(
    runs: Sequence[Path],
    what: Sequence[str],
    *,
    queries: int | None = None,
    candidates: int = 128,
    offset: int = 50,
    seed: int = 0,
    **options: Any,
) -> list[Path]:
    from atlas_wm.diagnose.diagnose import DIAGNOSTICS, diagnose
    from atlas_wm.diagnose.queries import QuerySettings

    settings = QuerySettings(queries, candidates, offset=offset, seed=seed)
    with Bar("diagnose", "parts") as bar:

        def show(name: str, done: int, total: int) -> None:
            if bar.title != name:
                bar.rename(name, "parts")
            bar.update(done, total)

        files = diagnose(
            runs,
            tuple(DIAGNOSTICS) if "all" in what else tuple(what),
            settings=settings,
            on_step=show,
            say=bar.say,
            **options,
        )
    for file in files:
        print(file)
    return files
