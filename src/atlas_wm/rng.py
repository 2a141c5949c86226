"""Randomness is explicit: every draw comes from a generator that is a function of its key."""

from enum import IntEnum

import numpy as np
import torch


class TrainRng(IntEnum):
    """What a generator of training is for: the part of its key after the seed."""

    SHUFFLE = 1  # order of the clips in an epoch
    LOSS = 2  # directions of projections, own terms
    VALIDATION_CLIPS = 3
    VALIDATION_LOSS = 4
    DROPOUT = 5
    SCORE = 6  # starts and other actions of the planning score


class DiagnoseRng(IntEnum):
    """The same for the diagnostics."""

    QUERIES = 1  # starts, goals and candidate actions
    MAP = 2  # rows of the latent map
    MARGINAL = 3  # recorded frames, of a task without an environment
    STATE = 4  # rows that state probes are fitted and judged on


class HeadRng(IntEnum):
    """The same for the temporal head."""

    WEIGHTS = 1  # before it is fitted
    PAIRS = 2  # of latents, in each step


def make_rng(*key: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator of its own for each key, such as (seed, episode, replan)."""
    # With the length in front: SeedSequence takes (1,) and (1, 0) for the same.
    state = int(np.random.SeedSequence((len(key), *key)).generate_state(1, np.uint64)[0])
    return torch.Generator(device).manual_seed(state >> 1)
