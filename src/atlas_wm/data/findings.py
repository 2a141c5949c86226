"""What is wrong with a dataset: `atlas doctor DATA` prints the findings, `atlas show DATA` puts them on a page.

Actions and states are checked in all rows, frames in a sample: reading frames takes most of the time.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from atlas_wm.config import ModelConfig, TrainConfig
from atlas_wm.data.card import card_path, check_card, read_card
from atlas_wm.data.clips import clip_index, split_clips
from atlas_wm.data.dataset import EpisodeData, find_dataset
from atlas_wm.data.groups import episode_groups, with_variants
from atlas_wm.data.lerobot import is_lerobot
from atlas_wm.data.render_check import REMEDY, rendering_difference
from atlas_wm.data.training_set import GROUPED
from atlas_wm.errors import UserError, reason, short
from atlas_wm.runs.folder import CONFIG
from atlas_wm.task_table import TASKS
from atlas_wm.tasks import OfflineTask, Task, get_task

Level = Literal["error", "warning", "note"]  # error: the dataset cannot be trained on
LEVELS: tuple[Level, ...] = ("error", "warning", "note")

IMAGE_SIZE = 96  # pixels: small objects still show
PAIRS, PAIRS_AT_ONCE = 200, 50  # sampled frames, each with the frame one action chunk later
ONE_COLOUR, BLACK = 2, 8  # grey levels: largest range of a frame of one colour, largest value of a black one
MOVED = 0.1  # of a coordinate's standard deviation, within an action chunk: two frames must then differ
STILL = 0.2  # of the pairs of a dataset without a state: a robot may stand still, but not most of the time


@dataclass(frozen=True)
class Finding:
    level: Level
    text: str  # what is wrong, in how many rows or episodes, with an example
    remedy: str


class InspectedData(EpisodeData):
    """A dataset that may hold NaN or infinite values: they are listed, where training refuses to open it."""

    def __init__(self, path: str | Path, task: Task):
        self.not_finite: dict[str, Finding] = {}  # by column
        super().__init__(path, task, IMAGE_SIZE, ModelConfig().frameskip)

    def _check_finite(self, name: str, values: np.ndarray, remedy: str) -> None:
        try:
            super()._check_finite(name, values, remedy)
        except UserError as error:
            text = str(error).removeprefix(f"{self.path}: ").removesuffix(f": {remedy}")
            again = "write the dataset again without these episodes"
            self.not_finite[name] = Finding("error", text, again if again in remedy else f"{again}; {remedy}")

    @property
    def with_action(self) -> np.ndarray:
        """The rows that have an action, all but the last of each episode."""
        return np.delete(np.arange(len(self.actions)), (self.offsets + self.lengths - 1)[self.lengths > 0])

    def coordinate_states(self) -> np.ndarray:
        """Rows (R, n) of the columns that ``Task.coordinates`` takes; n = 0 if the dataset has none."""
        task = self.task
        try:
            return self.columns(task.coordinate_columns or task.state_columns)
        except UserError:  # only probes need them
            return np.empty((len(self.actions), 0), np.float32)

    def position(self, row: int) -> str:
        (episode,), (step,) = self.locate(np.array([row]))
        return f"row {row} (episode {episode}, step {step})"


def open_to_inspect(path: str | Path, task: str | None = None) -> InspectedData:
    """``task``: its name; None: the task on the card of the dataset, ``offline`` for LeRobot datasets."""
    found = find_dataset(path)
    return InspectedData(found, get_task(task) if task else _task_of(found))


def _task_of(path: Path | str) -> Task:
    name = read_card(path).get("task")
    if isinstance(name, str) and name in TASKS:
        return get_task(name)
    if name is not None:  # a file does not decide which code runs
        raise UserError(
            f"{card_path(path)} names a task outside this package, {short(name)}: if you trust that code, pass "
            f"--task {short(name)}"
        )
    if isinstance(path, Path) and is_lerobot(path):
        return OfflineTask()
    if isinstance(path, Path) and (path / CONFIG).is_file():
        raise UserError(f"{path} is a run folder: `atlas report` shows it; pass the dataset it was trained on")
    raise UserError(f"{path} has no card that names its task: pass --task {', '.join(TASKS)} or module:Class")


def findings(data: InspectedData, on_check: Callable[[int, int], None] = lambda done, total: None) -> list[Finding]:
    """All findings, the worst first. ``on_check(done, total)`` counts the checks."""
    found: list[Finding] = []
    for done, check in enumerate(CHECKS):
        on_check(done, len(CHECKS))
        found += check(data)
    on_check(len(CHECKS), len(CHECKS))
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))


def finite(data: InspectedData) -> Iterable[Finding]:
    data.coordinate_states()
    return list(data.not_finite.values())


def matches_card(data: InspectedData) -> Iterator[Finding]:
    try:
        check_card(data)
    except UserError as error:
        yield _split("error", str(error).replace(str(data.path), "the dataset", 1))
    failed = read_card(data.path).get("failed")
    if isinstance(failed, dict) and failed:
        number, why = next(iter(failed.items()))
        text = (
            f"{len(failed)} episodes failed while the dataset was collected, such as number {number}: {short(why)}"
        )
        yield Finding("note", text, "they are left out; nothing to do unless there are many")


def long_enough(data: InspectedData) -> Iterator[Finding]:
    """Too few rows or episodes for the clips of training, with the defaults of `atlas train`."""
    model, train, lengths = ModelConfig(), TrainConfig(), data.lengths
    try:
        training, _ = split_clips(clip_index(lengths, model.clip_rows), len(lengths), train)
    except UserError as error:
        yield _split("error", str(error).removeprefix("the dataset: "))
        return
    if len(training) < train.batch:
        text = f"{len(training)} training clips do not fill one batch of {train.batch}"
        yield Finding("warning", text, "collect more episodes, or lower --train.batch")
    few = np.flatnonzero(lengths < model.clip_rows)
    if len(few):
        text = (
            f"{len(few)} of {len(lengths)} episodes are shorter than a training clip of {model.clip_rows} rows "
            f"({model.clip_frames} frames, {model.frameskip} rows apart), such as episode {few[0]} with "
            f"{lengths[few[0]]} rows"
        )
        yield Finding("note", text, "training skips them; lower --model.frameskip or --model.history to use them")


def varies(data: InspectedData) -> Iterator[Finding]:
    """Coordinates with the same value in all rows."""
    rows = data.with_action
    if len(rows) < 2:
        return
    what: tuple[tuple[str, Level, np.ndarray, str], ...] = (
        ("action", "warning", data.actions[rows], "the model cannot learn what they do: check the recording"),
        ("state", "note", data.states, "nothing to do if they cannot change in this task"),
    )
    for name, level, values, remedy in what:
        constant = np.flatnonzero((values == values[0]).all(axis=0))
        if len(constant):
            which = ", ".join(map(str, constant[:8])) + (", …" if len(constant) > 8 else "")
            text = (
                f"{len(constant)} of {values.shape[1]} {name} coordinates are constant in all {len(values)} rows: "
                f"number {which}; number {constant[0]} is always {values[0, constant[0]]:.4g}"
            )
            yield Finding(level, text, remedy)


def within_bounds(data: InspectedData) -> Iterator[Finding]:
    bounds = data.task.action_bounds
    if bounds is None:
        return
    low, high = np.asarray(bounds, data.actions.dtype).T
    actions = data.actions[data.with_action]
    outside = (actions < low) | (actions > high)
    wrong = np.flatnonzero(outside.any(axis=1))
    if len(wrong):
        coordinate = int(outside[wrong[0]].argmax())
        text = (
            f"{len(wrong)} of {len(actions)} actions are outside the bounds of {data.task.name}, such as "
            f"{actions[wrong[0], coordinate]:.4g} in coordinate {coordinate} of "
            f"{data.position(data.with_action[wrong[0]])}; the bounds are {low[coordinate]:g} to "
            f"{high[coordinate]:g}"
        )
        yield Finding(
            "warning", text, "plans are clipped to the bounds: clip the data, or set action_bounds in the task"
        )


def unique(data: InspectedData) -> Iterator[Finding]:
    """Episodes with exactly the actions and states of an earlier one."""
    first: dict[bytes, int] = {}
    repeated: list[tuple[int, int]] = []
    for episode, (start, length) in enumerate(zip(data.offsets, data.lengths, strict=True)):
        if length > 1:
            digest = hashlib.sha256(data.actions[start : start + length - 1].tobytes())
            digest.update(data.states[start : start + length].tobytes())
            earlier = first.setdefault(digest.digest(), episode)
            if earlier != episode:
                repeated.append((episode, earlier))
    if repeated:
        text = (
            f"{len(repeated)} of {len(data.lengths)} episodes repeat the actions and states of an earlier one, "
            f"such as episode {repeated[0][0]} those of episode {repeated[0][1]}"
        )
        yield Finding(
            "warning", text, "validation would see training data: write the dataset again without the copies"
        )


def no_variants(data: InspectedData) -> Iterator[Finding]:
    if data.not_finite or len(data.lengths) < 2:
        return
    groups = episode_groups(data)
    variants = with_variants(groups)
    if variants.mean() >= GROUPED:
        group = np.flatnonzero(groups == groups[variants.argmax()])
        text = (
            f"{variants.sum()} of {len(groups)} episodes are variants of one another ({groups.max() + 1} groups in "
            f"all), such as episodes {', '.join(map(str, group[:4]))}{', …' if len(group) > 4 else ''}"
        )
        yield Finding("warning", text, "hold out whole groups with --train.split groups")


def frames_show_something(data: InspectedData) -> Iterator[Finding]:
    """Frames that are black, of one colour, or the same although the state changed; in a sample."""
    rng, ahead = np.random.default_rng(0), data.frameskip
    usable = np.flatnonzero(data.lengths > ahead)
    if not len(usable) or (data.not_finite and not data.has_pixels):  # then frames are drawn from states
        return
    episodes = np.sort(rng.choice(usable, PAIRS))
    starts = rng.integers(0, data.lengths[episodes] - ahead)
    try:
        parts = np.arange(PAIRS).reshape(-1, PAIRS_AT_ONCE)
        pairs = torch.cat([data.frames(episodes[part], starts[part], 2) for part in parts])  # (PAIRS, 2, 3, S, S)
        size = data.frame_size
    except UserError as error:  # damaged, or frames can neither be read nor drawn
        yield _split("error", str(error).removeprefix(f"{data.path}: "))
        return
    rows = data.offsets[episodes] + starts
    brightest, ranges = pairs.flatten(2).amax(2), pairs.flatten(3).amax(3) - pairs.flatten(3).amin(3)
    black = brightest <= BLACK  # (PAIRS, 2)
    one_colour = (ranges <= ONE_COLOUR).all(2) & ~black
    for blank, name in ((black, "black"), (one_colour, "of one colour")):
        if blank.any():
            pair, late = blank.nonzero()[0].tolist()
            text = (
                f"{int(blank.sum())} of {blank.numel()} sampled frames are {name}, such as "
                f"{data.position(rows[pair] + late * ahead)}"
            )
            remedy = "check the camera or the renderer (`atlas doctor`), and write or collect these episodes again"
            yield Finding("error" if blank.all() else "warning", text, remedy)
    same = ((pairs[:, 0] == pairs[:, 1]).flatten(1).all(1) & ~(black | one_colour).any(1)).numpy()
    states = data.coordinate_states()
    if states.shape[1]:
        values = np.concatenate([part.values for part in data.task.coordinates(states)], axis=1)
        same &= (np.abs(values[rows + ahead] - values[rows]) > MOVED * values.std(axis=0)).any(axis=1)
    else:
        same &= same.mean() > STILL
    if same.any():
        change = " while the state changed" if states.shape[1] else ""
        text = (
            f"{same.sum()} of {PAIRS} sampled pairs of frames {ahead} rows apart are identical{change}, such as "
            f"from {data.position(rows[same.argmax()])}"
        )
        yield Finding("warning", text, "the camera may have stopped: write or collect these episodes again")
    if size and size[0] != size[1]:
        text = f"the frames of all rows are {size[1]}×{size[0]} pixels, not square"
        yield Finding("note", text, "training resizes them to a square; crop them if that distorts too much")


def renders_equal(data: InspectedData) -> Iterator[Finding]:
    if data.not_finite:
        return
    try:
        difference = rendering_difference(data)
    except Exception as error:  # of an environment, of any kind
        text = f"stored frames are not compared with renders of {data.task.name}: {reason(error)}"
        yield Finding("note", text, "`atlas doctor` says whether the environment works")
        return
    if difference:
        yield Finding("warning", difference, REMEDY)


def _split(level: Level, message: str) -> Finding:
    """A finding from an error message, whose remedy follows its last colon."""
    text, _, remedy = message.rpartition(": ")
    return Finding(level, text or remedy, remedy if text else "")


CHECKS: tuple[Callable[[InspectedData], Iterable[Finding]], ...] = (
    finite,
    matches_card,
    long_enough,
    varies,
    within_bounds,
    unique,
    no_variants,
    frames_show_something,
    renders_equal,
)


def trainable(found: Iterable[Finding]) -> bool:
    return all(finding.level != "error" for finding in found)
