"""Add a latent bank and demonstrations to a run that was trained without them."""

import logging
from dataclasses import replace
from pathlib import Path

from atlas_wm.data.states import save_states
from atlas_wm.data.training_set import TrainingSet, open_training_set
from atlas_wm.errors import UserError
from atlas_wm.models.image_bank import ImageBank
from atlas_wm.models.world_model import WorldModel
from atlas_wm.parallel.devices import pick_device
from atlas_wm.runs.files import write_json
from atlas_wm.runs.folder import BANK, NORMALIZER
from atlas_wm.runs.model import load_model, save_bank, save_demonstrations
from atlas_wm.tasks import get_task_of

log = logging.getLogger(__name__)


def write_bank(run: Path, data: Path | None = None, device: str = "auto") -> Path:
    """Write what training would have written: the bank, demonstrations, states for the ID/OOD split and
    action bounds.
    """
    model = load_model(run, pick_device(device))
    training_set = open_training_set_of(model, run, data)
    model.build_bank(training_set.sample_frames(), ImageBank.of(*training_set.image_frames()))
    model.build_demonstrations(training_set.demonstrations())
    assert model.bank is not None and model.demonstrations is not None
    save_bank(model.bank, run)
    save_demonstrations(model.demonstrations, run)
    if model.normalizer.low is None:
        bounded = replace(model.normalizer, low=training_set.normalizer.low, high=training_set.normalizer.high)
        write_json(run / NORMALIZER, bounded.to_dict())
        log.info("added action bounds to %s: plans are clipped to them unless clip_actions is off", NORMALIZER)
    assert model.run is not None
    save_states(run, training_set.data, model.run)
    return run / BANK


def open_training_set_of(model: WorldModel, run: Path, data: Path | None) -> TrainingSet:
    """What the loaded model of a run folder was trained on; data: where it is now, None: where it was."""
    assert model.run is not None
    training_set = open_training_set(data or model.run.data.path, get_task_of(model.run), model.run.config)
    if training_set.info.hash != model.run.data.hash:
        raise UserError(
            f"{run} was trained on data with hash {model.run.data.hash}, "
            f"{training_set.info.path} has {training_set.info.hash}: pass the --data it was trained on"
        )
    return training_set
