"""Success and time of a run under both planning costs, with a new plan after every K action chunks.

    python benchmarks/replanning.py RUN [--every 5 2 1] [--costs terminal nearest] [--episodes 200] [--seeds 42]

Every row is ``atlas eval --replan-every K --cost COST`` on the same episodes, printed as soon as it is known. The
run folder is left as it is. ``--precisions bf16 float32`` compares those as well.
"""

import argparse
import logging
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.console import Console
from rich.table import Table

from atlas_wm.evaluate.evaluate import evaluate
from atlas_wm.runs.folder import read_run
from atlas_wm.runs.results import EvaluationResult, Protocol

SOON = 25  # steps


def row_of(report: EvaluationResult) -> list[str]:
    model = report.model
    assert model.seconds_per_plan is not None and model.planning_seconds is not None
    episodes = [e for mine in model.episodes.values() for e in mine]
    success = np.array([e.success for e in episodes])
    steps = np.array([e.steps if e.success else report.protocol.steps for e in episodes])
    rate, soon = 100 * success.mean(), 100 * (success & (steps <= SOON)).mean()
    return [
        f"{rate:.1f} ± {np.sqrt(rate * (100 - rate) / len(episodes)):.1f}",
        f"{soon:.1f}",
        f"{steps.mean():.1f}",
        f"{model.plans:,}",
        f"{1e3 * model.seconds_per_plan:.1f}",
        f"{model.planning_seconds / len(episodes):.3f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument(
        "--every", type=int, nargs="+", default=[5, 2, 1], help="action chunks before the next plan"
    )
    parser.add_argument("--costs", nargs="+", default=["terminal", "nearest"])
    parser.add_argument("--precisions", nargs="+", default=["auto"])
    parser.add_argument("--episodes", type=int, default=200, help="for each seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--offset", type=int, default=50)
    parser.add_argument("--part", default="all", choices=["all", "heldout"])
    parser.add_argument("--data", help="[default: where the run has its data from]")
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    plan = read_run(arguments.run)[0].config.plan
    protocol = Protocol(arguments.offset, None, arguments.episodes, tuple(arguments.seeds), arguments.part)
    names = "success, %", f"within {SOON} steps, %", "mean steps", "plans", "ms a plan", "planning, s an episode"
    console, table = Console(), Table("cost, K, precision", *names)
    with TemporaryDirectory() as folder:  # results of other evaluations stay in the run folder
        run = shutil.copytree(arguments.run, Path(folder) / "run")
        for cost, every, precision in product(arguments.costs, arguments.every, arguments.precisions):
            (report,) = evaluate(
                run,
                [protocol],
                data_path=arguments.data,
                plan=replace(plan, cost=cost, execute=every),
                policies=("model",),
                films=0,
                device=arguments.device,
                precision=precision,
            )
            cells = f"{cost}, {every}, {precision}", *row_of(report)
            table.add_row(*cells)
            print(" | ".join(cells), flush=True)
    console.print(table)
    console.print(
        f"{arguments.episodes} episodes for each of {len(arguments.seeds)} seeds at offset {protocol.offset}, "
        f"budget {protocol.steps} (the steps of a failure), "
        f"CEM {plan.candidates}×{plan.iterations}×{plan.horizon}; ± is a standard error"
    )


if __name__ == "__main__":
    main()
