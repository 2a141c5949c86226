"""How many frames of changed TwoRooms a run flags: python benchmarks/novelty.py RUN [--data DATA] [--frames 200]

Held-out states, rendered under stable-worldmodel's variation space; a frame is flagged above the 99th percentile.
"""

import argparse

import numpy as np
import torch
from torch import Tensor

from atlas_wm.data.training_set import IMAGES_FITTED, IMAGES_JUDGED, open_training_set
from atlas_wm.images import reduce_frames
from atlas_wm.runs.model import load_model
from atlas_wm.tasks import get_task_of

COLOURS = {"blue": (0, 0, 255), "green": (0, 255, 0), "orange": (255, 128, 0), "dark red": (180, 0, 0)}
CHANGES: dict[str, dict[str, object]] = {
    "none": {},
    **{f"door at {y} px instead of 49": {"door.position": np.array([y] * 3)} for y in (89, 130, 175)},
    **{f"agent {name}": {"agent.color": np.array(rgb, np.uint8)} for name, rgb in COLOURS.items()},
    "wall turned": {"wall.axis": 0},
    "agent radius 12": {"agent.radius": np.array([12.0], np.float32)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--data")
    parser.add_argument("--frames", type=int, default=200)
    options = parser.parse_args()
    model = load_model(options.run)
    assert model.run is not None and model.bank is not None and model.bank.images is not None
    task, size = get_task_of(model.run), model.config.encoder.image_size
    ready = open_training_set(options.data or model.run.data.path, task, model.run.config)
    _, judged = ready.probe_rows(IMAGES_FITTED, IMAGES_JUDGED)
    _, rows = ready.probe_rows(1, 10**9)
    rows = np.random.default_rng(1).permutation(np.setdiff1d(rows, judged))[: options.frames]
    if not len(rows):
        parser.error("every held-out frame calibrates the bank: use a run with more than 4,000 held-out frames")
    env = task.make_env()

    def render(state: np.ndarray, values: dict[str, object]) -> Tensor:
        env.reset(seed=0, options={"state": state, "target_state": state, "variation_values": values})
        return torch.from_numpy(np.array(env.render())).permute(2, 0, 1)

    sets = {
        name: reduce_frames(torch.stack([render(state, values) for state in ready.data.states[rows]]), size)
        for name, values in CHANGES.items()
    }
    sets["red and blue swapped"] = sets["none"].flip(1)
    print(f"{len(rows)} frames each; share above 99, %\n{'':30}latent  image  either")
    for name, frames in sets.items():
        with torch.inference_mode():
            latent = model.bank.percentiles(model.encode(frames)) > 99
        image = model.bank.images.percentiles(frames) > 99
        shares = (100 * float(flags.float().mean()) for flags in (latent, image, latent | image))
        print(f"{name:30}" + "".join(f"{share:7.1f}" for share in shares))


if __name__ == "__main__":
    main()
