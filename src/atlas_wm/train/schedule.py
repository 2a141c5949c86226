"""The learning rate over a run."""

import math
from collections.abc import Callable


def warmup_cosine(steps: int, warmup: float) -> Callable[[int], float]:
    """Factor on the base rate at update ``step`` (from 0): linear warm-up over the first ``warmup · steps``
    updates, then a half cosine to 0 after the last one."""
    rising = round(warmup * steps)

    def factor(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))

    return factor
