"""``atlas train``"""

import argparse
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from atlas_wm.cli.arguments import Device, TaskName, by_default
from atlas_wm.config import RunConfig
from atlas_wm.recipes import TUNED, recipe_config

if TYPE_CHECKING:
    from atlas_wm.tasks import Task


def make_train(default: RunConfig) -> Callable[..., None]:
    """``atlas train`` with the settings of the recipe as its defaults."""

    def train(
        task: TaskName,
        /,
        method: str = "atlas",
        recipe: str = "paper",
        data: Annotated[str | None, by_default("data/TASK.lance")] = None,
        out: Annotated[Path | None, by_default("runs/TASK-METHOD-RECIPE")] = None,
        device: Device = "auto",
        overwrite: bool = False,
        plain: bool = False,
        init: str | None = None,
        log: Literal["wandb"] | None = None,
        config: Annotated[RunConfig, arg(name="")] = default,
    ) -> None:
        """Train a world model and write a run folder.

        A recipe sets every flag below, and a flag overrides the recipe. The defaults shown are those of the
        recipe that --recipe names: `atlas train TASK --recipe demo --help` shows the demo's.

        If training is interrupted, run the same command again: it resumes from the last checkpoint
        (docs/guides/interruptions.md). Losses go to RUN/metrics.csv and TensorBoard.

            atlas train tworoom --method atlas --recipe demo
            atlas train pusht --recipe tuned --data data/pusht.h5
            atlas train pusht --data data/pusht.h5 --train.lr 1e-4 --objective.wemreg 1.0
            torchrun --nproc-per-node 4 -m atlas_wm train tworoom

        Args:
            method: atlas, lewm, lewm+ood, wemreg, pldm, dino-wm or fast-wm (`atlas methods` lists them), or your
                own as module:NAME (docs/guides/own-method.md).
            recipe: paper: the paper's run, 18 M parameters, 224×224 frames, for a GPU. small: 9.3 M parameters,
                96×96 frames, for a laptop with a GPU. demo: 0.27 M parameters, 32×32 frames, minutes without a GPU.
                tuned: the run with the best measured success on the task (docs/results.md). RECIPE+tuned: RECIPE,
                for weights that a study chose and passes as flags (docs/guides/study.md).
            data: Dataset: a path, or a URL (docs/guides/own-data.md).
            out: Run folder to write.
            device: Where to train; auto takes CUDA, then MPS, then the CPU.
            overwrite: Replace an existing run folder, or an interrupted run with other settings.
            plain: On a GPU, run every training step eagerly: no CUDA graphs, no fused kernels.
            init: Start from the weights of another run (folder or hub id). Its data and action size may differ:
                tensors of another shape keep their random start, and a log line names them.
            log: Also send metrics to Weights & Biases (needs `pip install "atlas-wm[wandb]"`). The project is named
                after the folder of --out, the run after --out. A resumed run continues its W&B run.
            config: Settings.
        """
        from atlas_wm.plugins import import_named
        from atlas_wm.tasks import get_task
        from atlas_wm.train.tracking import wandb_log

        for part, own in config.own_parts.items():
            import_named(part, own)
        known_task = get_task(task)
        out = out or Path(f"runs/{known_task.name}-{method.rpartition(':')[-1]}-{recipe}")
        data = data or f"data/{known_task.name}.lance"
        if recipe == "paper" and (known_task.name, method) in TUNED:
            logging.getLogger(__name__).info(
                "recipe paper is the paper's own run: on %s, --recipe tuned plans better (docs/results.md)",
                known_task.name,
            )
        options: dict[str, Any] = {"recipe": recipe, "device": device, "overwrite": overwrite, "plain": plain}
        options["init"] = init
        facts = {"task": task, "method": method, "recipe": recipe}
        with wandb_log(out, config, **facts) if log else nullcontext() as on_metrics:
            options |= {"on_metrics": on_metrics} if on_metrics else {}
            print(train_with_progress(config, known_task, data, out, method, **options))

    return train


def recipe_defaults(arguments: Sequence[str]) -> RunConfig:
    """The settings that --recipe, --method and the task stand for, so that the other flags change those."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--method", default="atlas")
    parser.add_argument("--recipe", default="paper")
    known, _ = parser.parse_known_args(arguments)
    first = arguments[1] if len(arguments) > 1 and not arguments[1].startswith("-") else None
    return recipe_config(known.recipe, known.method, task=first)


def train_with_progress(
    config: RunConfig, task: "Task", data: str | Path, out: Path, method: str, **options: Any
) -> Path:
    """Train with a bar, and say what the last validation measured."""
    from atlas_wm.cli.progress import Bar
    from atlas_wm.train.loop import Progress, train

    measured: dict[str, float] = {}
    given = options.pop("on_metrics", lambda step, row: None)

    def on_metrics(step: int, row: dict[str, float]) -> None:
        measured.update(row)
        given(step, row)

    with Bar(f"train {method}", "steps") as bar:

        def show(p: Progress) -> None:
            terms = "  ".join(f"{name} {value:.4f}" for name, value in p.terms.items())
            score = "" if p.score is None else f"  score {p.score:.3f}"
            bar.update(p.step, p.steps, f"{terms}{score}  {p.clips_per_second:,.0f} clips/s", p.seconds_left)

        def show_encoded(done: int, total: int) -> None:
            if bar.unit != "frames":
                bar.rename("read", "frames")
            bar.update(done, total)
            if done == total:
                bar.rename(f"train {method}", "steps")

        def show_head(done: int, total: int) -> None:
            if done == 1:
                bar.rename("fit the temporal head", "steps")
            bar.update(done, total)

        options |= {"on_progress": show, "on_encoded": show_encoded, "on_metrics": on_metrics, "on_head": show_head}
        run = train(config, task, data, out, method=method, **options)
        names = {"planning score": "val_score", "effective rank": "val_rank"}
        if found := [f"{text} {measured[name]:.3g}" for text, name in names.items() if name in measured]:
            bar.say(f"{', '.join(found)} (last validation)")
        return run
