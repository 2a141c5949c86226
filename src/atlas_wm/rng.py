"""Randomness is explicit: every draw comes from a stream that is a function of its key."""

import numpy as np
import torch


def stream(*key: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A random stream of its own for each key, such as (seed, episode, replan)."""
    # With the length in front: SeedSequence takes (1,) and (1, 0) for the same.
    state = int(np.random.SeedSequence((len(key), *key)).generate_state(1, np.uint64)[0])
    return torch.Generator(device).manual_seed(state >> 1)
