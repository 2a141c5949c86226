"""Add a latent bank and demonstrations to a run that was trained without them."""

import logging
from dataclasses import replace
from pathlib import Path

from atlas_wm.data.states import save_states
from atlas_wm.data.training_set import open_training_set_of
from atlas_wm.models.image_bank import ImageBank
from atlas_wm.parallel.devices import pick_device
from atlas_wm.runs.bank_frames import save_frames
from atlas_wm.runs.files import write_json
from atlas_wm.runs.folder import BANK, NORMALIZER
from atlas_wm.runs.model import load_model, save_bank, save_demonstrations

log = logging.getLogger(__name__)


def write_bank(run: Path, data: str | Path | None = None, device: str = "auto", frames: bool = False) -> Path:
    """Write what training would have written: the bank, demonstrations, states for the ID/OOD split and
    action bounds. ``frames``: also small images of the bank's frames.
    """
    model = load_model(run, pick_device(device))
    assert model.run is not None
    training_set = open_training_set_of(model.run, run, data)
    model.build_bank(training_set.sample_frames(), ImageBank.of(*training_set.image_frames()))
    model.build_demonstrations(training_set.demonstrations())
    assert model.bank is not None and model.demonstrations is not None
    save_bank(model.bank, run)
    if frames:
        save_frames(training_set.sample_frames(), run)
    save_demonstrations(model.demonstrations, run)
    if model.normalizer.low is None:
        bounded = replace(model.normalizer, low=training_set.normalizer.low, high=training_set.normalizer.high)
        write_json(run / NORMALIZER, bounded.to_dict())
        log.info("added action bounds to %s: plans are clipped to them unless clip_actions is off", NORMALIZER)
    save_states(run, training_set.data, model.run)
    return run / BANK
