"""Memory of one process over many plans and several evaluations: it should not grow.

    python benchmarks/soak.py RUN --data DATA [--plans 200] [--evaluations 3] [--episodes 20]

The evaluations plan in this process, beside a process with the environments, which is another each time. Prints the
resident memory and draws docs/images/soak.png.
"""

import argparse
import resource
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib
import numpy as np
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from atlas_wm.data.dataset import EpisodeData
from atlas_wm.evaluate.evaluate import evaluate
from atlas_wm.evaluate.protocol import Protocol
from atlas_wm.models.world_model import WorldModel
from atlas_wm.plan.planner import Planner
from atlas_wm.report.naming import method_colour
from atlas_wm.report.style import MUTED, STYLE
from atlas_wm.runs.model import load_model
from atlas_wm.tasks import get_task_of

WARM = 20  # plans until everything that is kept has been made
IMAGE = Path(__file__).parent.parent / "docs/images/soak.png"


def resident() -> float:
    """MiB of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def plans(model: WorldModel, data: EpisodeData, count: int) -> list[float]:
    planner = Planner(model)
    rows = np.random.default_rng(0).choice(len(data.actions) - 50, count)
    measured = []
    for seed, row in enumerate(rows):
        frame, goal = (data.frame(r)[0].permute(1, 2, 0).numpy() for r in (row, row + 50))
        planner.plan(frame, goal, seed=seed)
        measured.append(resident())
    return measured


def evaluations(run: Path, data: Path, count: int, episodes: int) -> list[list[float]]:
    """For each, after each of its parts."""
    found: list[list[float]] = []
    for seed in range(count):
        found.append([])
        evaluate(
            run,
            [Protocol(offset=25, budget=50, episodes=episodes, seeds=(seed,))],
            data_path=data,
            workers=1,
            films=1,
            device="cpu",
            environments="remote",
            on_progress=lambda *_: found[-1].append(resident()),
        )
        found[-1].append(resident())
    return found


def draw(planned: list[float], evaluated: list[list[float]]) -> None:
    colour = method_colour("atlas")

    def finish(axes: Axes, title: str, label: str) -> None:
        axes.set(title=title, xlabel=label, ylabel="resident memory, MiB", ylim=(0, 1.25 * max(planned)))

    with matplotlib.rc_context(STYLE):
        canvas, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3), layout="constrained")
        left.plot(range(1, len(planned) + 1), planned, color=colour)
        left.axvline(WARM, color=MUTED, lw=0.8, ls=":")
        left.annotate(f"growth after plan {WARM}: {planned[-1] - planned[WARM - 1]:+.1f} MiB", (WARM + 4, 8))
        finish(left, f"{len(planned)} plans in one process", "plan")
        first = 1
        for number, values in enumerate(evaluated, 1):
            right.plot(range(first, first + len(values)), values, "o-", color=colour, ms=3)
            right.annotate(f"evaluation {number}", (first, max(values) + 25), color=MUTED, fontsize=8)
            first += len(values)
        finish(right, f"then {len(evaluated)} evaluations", "part of an evaluation")
        IMAGE.parent.mkdir(exist_ok=True)
        canvas.savefig(IMAGE, dpi=160, facecolor="white")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--plans", type=int, default=200)
    parser.add_argument("--evaluations", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=20)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(given.run)
    assert model.run is not None
    data = EpisodeData(given.data, get_task_of(model.run), model.config.encoder.image_size, model.config.frameskip)
    planned = plans(model, data, given.plans)
    print(f"plans: {planned[0]:.1f} MiB after the first, {planned[WARM - 1]:.1f} after {WARM}, {planned[-1]:.1f} "
          f"after {len(planned)}, most {max(planned):.1f}", flush=True)  # fmt: skip
    with TemporaryDirectory() as folder:
        run = shutil.copytree(given.run, Path(folder) / "run")
        evaluated = evaluations(run, given.data, given.evaluations, given.episodes)
    for number, values in enumerate(evaluated, 1):
        print(f"evaluation {number}: {values[-1]:.1f} MiB at its end, most {max(values):.1f}")
    draw(planned, evaluated)


if __name__ == "__main__":
    main()
