"""Draw what `plan.risk` sees, with the model that comes with the package: python tools/risk_figure.py OUT.png

TwoRoom with its door moved to 130 px. Two plans from one start: within the room, and through the door as the model
knows it.
"""

import sys

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.patches import Rectangle

from atlas_wm import Planner, load_model
from atlas_wm.images import frame_to_tensor
from atlas_wm.models.bank import EXACT
from atlas_wm.models.image_bank import SIDE
from atlas_wm.tasks import get_task

DOOR, START = np.array([130] * 3), (60.0, 60.0)
GOALS = {"a goal in the same room": (60.0, 160.0), "a goal in the other room": (165.0, 60.0)}
CHANGED, PATH = "#d95f02", "#2c7fb8"


def main(out: str) -> None:
    model, env = load_model("demo"), get_task("tworoom").make_env()
    planner = Planner(model)
    bank = model.bank
    assert bank is not None and bank.images is not None and bank.footprints is not None

    def render(state: tuple[float, float]) -> np.ndarray:
        at = np.array(state, np.float32)
        env.reset(seed=0, options={"state": at, "target_state": at, "variation_values": {"door.position": DOOR}})
        return np.array(env.render())

    frame = render(START)
    small = planner.prepare(frame_to_tensor(frame))
    canvas, axes = plt.subplots(1, 2, figsize=(7, 4.1), layout="constrained")
    for ax, (name, state) in zip(axes, GOALS.items(), strict=True):
        plan = planner.plan(frame, render(state))
        nearest = torch.cdist(torch.from_numpy(plan.latents), bank.points, compute_mode=EXACT).argmin(dim=1)
        ax.imshow(frame)
        for pixels, colour in (
            (bank.footprints[nearest].any(dim=0), PATH),
            (bank.images.changed(small)[0], CHANGED),
        ):
            unit = frame.shape[0] / SIDE
            for place in pixels.nonzero()[:, 0].tolist():
                corner = (place % SIDE * unit - 0.5, place // SIDE * unit - 0.5)
                ax.add_patch(Rectangle(corner, unit, unit, facecolor=colour, edgecolor=colour, alpha=0.45))
        ax.plot(*state, "x", color="black", ms=9, mew=2)
        ax.set(xticks=[], yticks=[])
        numbers = f"remaining {plan.remaining:.2f}, crossed {plan.crossed:.2f}, risk {plan.risk:.2f}"
        ax.set_title(f"{name}\n{numbers}", size=9)
    canvas.savefig(out, dpi=140)


if __name__ == "__main__":
    main(*sys.argv[1:])
