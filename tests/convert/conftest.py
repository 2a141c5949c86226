from functools import partialmethod

import pytest
import torch
from lewm_models import LeWM, lewm, save, vit

from atlas_wm.convert.lewm import import_lewm
from atlas_wm.data.training_set import TrainingSet


@pytest.fixture(scope="module")
def theirs() -> LeWM:
    torch.manual_seed(1)
    return lewm(vit())


@pytest.fixture(scope="module")
def checkpoint(theirs, tmp_path_factory):
    return save(theirs.state_dict(), tmp_path_factory.mktemp("published") / "lewm")


@pytest.fixture(scope="module")
def small_banks(run_folder):
    """Once the shared run has its own: to encode a whole bank at the paper's size takes a minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingSet, "sample_frames", partialmethod(TrainingSet.sample_frames, 60))
        yield


@pytest.fixture(scope="module")
def imported(checkpoint, task, dataset_path, tmp_path_factory, small_banks):
    return import_lewm(checkpoint, task, dataset_path, tmp_path_factory.mktemp("runs") / "imported")


@pytest.fixture(scope="module")
def small() -> LeWM:
    torch.manual_seed(2)
    return lewm(vit(64, 2, 2, 128, 4, 16), latent=32, heads=2, dim_head=16, mlp=48, depth=2)
