"""How much of the state can be read from each representation? R² and error of a linear and an MLP probe."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from atlas_wm.data.clips import held_out_of
from atlas_wm.diagnose.frozen_run import FRAMES_PER_BATCH, FrozenRun
from atlas_wm.errors import UserError
from atlas_wm.models.probes import error, explained, mlp_probe, ridge_probe
from atlas_wm.rng import DiagnoseRng

FITTED, JUDGED = 5000, 1000  # the most rows
PROBES = {"linear": ridge_probe, "mlp": mlp_probe}


def state(run: FrozenRun, seed: int) -> dict[str, Any]:
    """Probes are fitted on rows of training episodes and judged on rows of held-out episodes."""
    data, train = run.training, run.info.config.train
    coordinates = data.coordinates()
    held_out = np.repeat(held_out_of(run.info, len(data.lengths)), data.lengths)
    if held_out.all():
        raise UserError(f"{data.path} has too few episodes to hold some out: collect more")
    rng = np.random.default_rng([seed, DiagnoseRng.STATE])
    fitted, judged = (
        np.sort(rng.choice(rows, min(count, len(rows)), replace=False))
        for rows, count in ((np.flatnonzero(~held_out), FITTED), (np.flatnonzero(held_out), JUDGED))
    )
    known, queries = features_of(run, fitted), features_of(run, judged)
    targets = torch.from_numpy(np.concatenate([c.values for c in coordinates], axis=1))
    sizes = [c.values.shape[1] for c in coordinates]
    representations: dict[str, Any] = {}
    for name in known:
        representations[name] = {}
        for kind, probe in PROBES.items():
            predicted = probe(known[name], targets[fitted], queries[name]).split(sizes, dim=1)
            parts = zip(coordinates, predicted, targets[judged].split(sizes, dim=1), strict=True)
            representations[name][kind] = {
                c.name: {"r2": explained(p, y), "error": error(p, y, c.angle)} for c, p, y in parts
            }
    result: dict[str, Any] = {
        "coordinates": [{"name": c.name, "unit": c.unit} for c in coordinates],
        "representations": representations,
        "fitted": len(fitted),
        "judged": len(judged),
    }
    if train.split == "clips":
        result["note"] = "the model was trained on clips of all episodes, also of those held out from the probes"
    return result


def features_of(run: FrozenRun, rows: np.ndarray) -> dict[str, Tensor]:
    """By representation, (n, d) each. Frames are read batch by batch: thousands would fill the memory."""
    parts = np.split(rows, range(FRAMES_PER_BATCH, len(rows), FRAMES_PER_BATCH))
    found = [run.features(run.training.frames_of(part)) for part in parts]
    return {name: torch.cat([getattr(f, name) for f in found]) for name in ("patch", "cls", "z")}
