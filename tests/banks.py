"""Runs end with banks of frames, which most tests do not look at."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def small_banks() -> Iterator[None]:
    """Runs end with few frames in their banks: all frames of the dataset take as long as the training."""
    from atlas_wm.data import training_set

    whole, images = training_set.TrainingSet.sample_frames, (training_set.IMAGES_FITTED, training_set.IMAGES_JUDGED)
    training_set.TrainingSet.sample_frames = lambda self, count=60: whole(self, count)
    training_set.IMAGES_FITTED = training_set.IMAGES_JUDGED = 60
    try:
        yield
    finally:
        training_set.TrainingSet.sample_frames = whole
        training_set.IMAGES_FITTED, training_set.IMAGES_JUDGED = images
