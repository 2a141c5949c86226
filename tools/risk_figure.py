"""Draw what `plan.risk` sees, with the model that comes with the package: python tools/risk_figure.py OUT.png

Plans in TwoRoom: two with the door moved to 130 px, within the room and through the door as the model knows it, and
one in the unchanged scene to a goal behind the wall.
"""

import sys

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.patches import Rectangle

from atlas_wm import Planner, load_model
from atlas_wm.images import frame_to_tensor
from atlas_wm.models.image_bank import SIDE
from atlas_wm.tasks import get_task

MOVED = {"door.position": np.array([130] * 3)}
SCENES = (  # title, start, goal, variation
    ("door moved, goal in the same room", (60.0, 60.0), (60.0, 160.0), MOVED),
    ("door moved, goal in the other room", (60.0, 60.0), (165.0, 60.0), MOVED),
    ("unchanged, goal behind the wall", (60.0, 180.0), (165.0, 180.0), {}),
)
CHANGED, PATH = "#d95f02", "#2c7fb8"


def main(out: str) -> None:
    model, env = load_model("demo"), get_task("tworoom").make_env()
    planner = Planner(model)
    bank = model.bank
    assert bank is not None and bank.images is not None and bank.footprints is not None

    def render(state: tuple[float, float], variation: dict[str, np.ndarray]) -> np.ndarray:
        at = np.array(state, np.float32)
        env.reset(seed=0, options={"state": at, "target_state": at, "variation_values": variation})
        return np.array(env.render())

    canvas, axes = plt.subplots(1, len(SCENES), figsize=(9.6, 4.0), layout="constrained")
    for ax, (title, start, goal, variation) in zip(axes, SCENES, strict=True):
        frame = render(start, variation)
        plan = planner.plan(frame, render(goal, variation))
        (nearest,) = bank.nearest(torch.from_numpy(plan.latents)[None])
        ax.imshow(frame)
        for pixels, colour in (
            (bank.footprints[nearest].any(dim=0), PATH),
            (bank.images.changed(planner.prepare(frame_to_tensor(frame)))[0], CHANGED),
        ):
            unit = frame.shape[0] / SIDE
            for place in pixels.nonzero()[:, 0].tolist():
                corner = (place % SIDE * unit - 0.5, place // SIDE * unit - 0.5)
                ax.add_patch(Rectangle(corner, unit, unit, facecolor=colour, edgecolor=colour, alpha=0.45))
        ax.plot(*goal, "x", color="black", ms=9, mew=2)
        ax.set(xticks=[], yticks=[])
        parts = f"remaining {plan.remaining:.2f}, strayed {plan.strayed:.2f}, crossed {plan.crossed:.2f}"
        ax.set_title(f"{title}\n{parts}\nrisk {plan.risk:.2f}", size=9)
    canvas.savefig(out, dpi=120)


if __name__ == "__main__":
    main(*sys.argv[1:])
