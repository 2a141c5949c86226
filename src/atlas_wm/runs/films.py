"""The films of an evaluation: where they are and what their frames show."""

from collections.abc import Sequence
from pathlib import Path


def films_path(path: Path) -> Path:
    """The path of an evaluation's films."""
    return path.with_name(f"{path.stem}.films.npz")


def film_steps(frames: int, steps: int, every: int) -> list[int]:
    """The step of each frame of a film: one every ``every`` steps, and the last step.

    frames: number without the goal. steps: length of the episode.
    """
    return [*range(0, steps + 1, every), steps][:frames]


def film_rows(films: Sequence[str]) -> list[int]:
    """The start rows of films, from the names in the file."""
    return [int(name.removeprefix("row")) for name in films]
