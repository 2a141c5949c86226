"""The sections of the page about a dataset."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from atlas_wm.config import ModelConfig
from atlas_wm.data.card import card_path, read_card
from atlas_wm.data.findings import Finding, InspectedData
from atlas_wm.data.moments import MOST_SHOWN, moment_rows, moments
from atlas_wm.errors import UserError
from atlas_wm.report.captions import Caption
from atlas_wm.report.page_table import Table
from atlas_wm.report.section import Notice, Section
from atlas_wm.report.style import Figure, Panel
from atlas_wm.show.plots import Film, coverage, film_panel, histogram

FRAMES = 9  # in a film strip
MOST_PANELS, MOST_TEXT = 12, 300

LENGTHS = Caption(
    "How many episodes have how many rows.",
    "Episodes left of the dashed line hold no training clip, unless the frameskip or the history is lowered.",
)
FILMS = Caption(
    "Frames of an episode, from its first row to its last. The first strips are random episodes, the others the "
    "longest, the shortest, and the one with the largest mean norm of its actions.",
    "Look for what a model would learn by mistake: a camera that moved, an episode that does not start, or a robot "
    "that stands still.",
)
COVERAGE = Caption(
    "How many rows are in each cell, on a logarithmic scale: dark cells hold few rows, bright ones many, and empty "
    "cells none. Coordinates in pixels are drawn as in the image, the second one downwards.",
    "A model knows only what the data covers. Plans through empty regions are guesses.",
)
ACTIONS = Caption(
    "How often each value of an action coordinate occurs, and how the first two coordinates occur together. Dashed "
    "lines are the bounds of the task.",
    "The planner searches within the bounds. Peaks at the bounds mean clipped actions; a narrow peak means that "
    "planned actions will often be larger than those the model was trained on.",
)


def findings_section(found: Sequence[Finding]) -> Section:
    section = Section("findings", "Findings", "What is wrong with the dataset, and what helps?")
    for finding in found:
        sentences = [text[:1].upper() + text[1:] + "." for text in (finding.text, finding.remedy)]
        section.blocks.append(Notice(finding.level, " ".join(sentences).replace("`", "")))
    if not found:
        section.blocks.append(Notice("note", "Nothing: all checks passed."))
    return section


def episodes_section(data: InspectedData) -> Section:
    section = Section("episodes", "Episodes", "How long are they, and do their moments resemble published data?")
    clip = ModelConfig().clip_rows
    marks = [(clip - 0.5, f"{clip} rows: a training clip")]
    panel = histogram("Episode lengths", data.lengths, "rows", marks, width=4.5)
    section.blocks.append(Figure("lengths", "Lengths", [panel], LENGTHS))
    found = moments(data.task, data.lengths, data.actions, data.coordinate_states())
    header, *rows = moment_rows(found)
    note = "Mean and standard deviation of each coordinate, separated by commas."
    if data.not_finite:
        note += " Moments of columns with NaN or infinite values are nan."
    if len(rows) > MOST_SHOWN:
        note += f" {len(rows) - MOST_SHOWN} more are not shown."
    section.blocks.append(Table("moments", "Moments", header, rows[:MOST_SHOWN], note=note))
    return section


def films_section(data: InspectedData, random: int) -> Section:
    section = Section("films", "Films", "What do episodes look like?")
    there = np.flatnonzero(data.lengths > 1)
    drawn = np.random.default_rng(0).choice(there, min(random, len(there)), replace=False)
    norms = np.nan_to_num(np.linalg.norm(data.actions, axis=1))
    largest = max(there, key=lambda e: norms[data.offsets[e] : data.offsets[e] + data.lengths[e] - 1].mean())
    extremes: dict[int, list[str]] = {}  # names by episode, which may be extreme in several ways
    for name, episode in (
        ("longest", there[data.lengths[there].argmax()]),
        ("shortest", there[data.lengths[there].argmin()]),
        ("largest actions", largest),
    ):
        extremes.setdefault(int(episode), []).append(name)
    try:
        films = [_film(data, int(e), f"episode {e}") for e in np.sort(drawn)]
        extreme = [_film(data, e, f"{', '.join(names)}: episode {e}") for e, names in extremes.items()]
    except UserError as error:
        section.blocks.append(Notice("error", f"There are no frames: {error}"))
        return section
    panels = [film_panel("Random episodes", films)] if films else []
    section.blocks.append(
        Figure("films", "Film strips", [*panels, film_panel("Extreme episodes", extreme)], FILMS, 1)
    )
    return section


def _film(data: InspectedData, episode: int, label: str) -> Film:
    length = int(data.lengths[episode])
    steps = np.unique(np.linspace(0, length - 1, FRAMES).round().astype(int))
    frames = data.frames_of(data.offsets[episode] + steps)
    return Film(label, length, steps.tolist(), frames.permute(0, 2, 3, 1).numpy())


def coverage_section(data: InspectedData) -> Section:
    section = Section("coverage", "Coverage", "Which states does the data cover?")
    states = data.coordinate_states()
    panels = list(_coverage_panels(data, states))[:MOST_PANELS] if states.shape[1] else []
    if panels:
        section.blocks.append(Figure("coverage", "States", panels, COVERAGE))
    else:
        text = "The dataset has no state: name its columns as state_columns in a task (docs/guides/robot-data.md)."
        section.blocks.append(Notice("note", text))
    return section


def _coverage_panels(data: InspectedData, states: np.ndarray) -> Iterator[Panel]:
    """The first two numbers of each quantity; quantities of one number in pairs."""
    single = []
    for part in data.task.quantities(states):
        if part.values.shape[1] == 1:
            single.append(part)
        else:
            yield coverage(part.name, part.values[:, :2], (f"{part.name} 0", f"{part.name} 1"), part.unit)
    for one, other in zip(single[::2], single[1::2], strict=False):
        points = np.concatenate([one.values, other.values], axis=1)
        labels = tuple(f"{p.name} [{p.unit}]" if p.unit else p.name for p in (one, other))
        yield coverage(f"{one.name}, {other.name}", points, (labels[0], labels[1]))
    if len(single) % 2 and np.isfinite(single[-1].values).any():
        yield histogram(single[-1].name, single[-1].values[:, 0], single[-1].unit)


def actions_section(data: InspectedData) -> Section:
    section = Section("actions", "Actions", "Which actions does the data hold?")
    actions, bounds = data.actions[data.with_action], data.task.action_bounds
    actions = actions[np.isfinite(actions).all(axis=1)]
    if not len(actions):
        section.blocks.append(Notice("note", "No action is finite."))
        return section
    panels = []
    for number in range(min(actions.shape[1], MOST_PANELS - 1)):
        marks = [(end, "") for end in bounds[number] if np.isfinite(end)] if bounds else []
        panels.append(histogram(f"Action {number}", actions[:, number], "", marks))
    if actions.shape[1] > 1:
        panels.append(coverage("Actions 0 and 1", actions[:, :2], ("action 0", "action 1")))
    section.blocks.append(Figure("actions", "Action coordinates", panels, ACTIONS))
    return section


def card_section(data: InspectedData) -> Section:
    section = Section("card", "Card", "How was the dataset made?")
    card = read_card(data.path)
    rows = [[name, _text(value)] for name, value in _flat(card) if not name.startswith("moments")]
    if rows:
        section.blocks.append(Table("card", Path(card_path(data.path)).name, ["", "value"], rows))
    else:
        section.blocks.append(Notice("note", "There is no card. atlas collect writes one next to its datasets."))
    return section


def _flat(card: dict[str, object], path: str = "") -> Iterator[tuple[str, object]]:
    for name, value in card.items():
        if isinstance(value, dict) and value and not path:
            yield from _flat(value, f"{name}: ")
        else:
            yield path + name, value


def _text(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MOST_TEXT else text[: MOST_TEXT - 1] + "…"
