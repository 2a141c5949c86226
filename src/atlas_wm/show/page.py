"""The page about a dataset: one HTML file that needs no network."""

from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from atlas_wm import __version__
from atlas_wm.config import ModelConfig
from atlas_wm.data.findings import CHECKS, Finding, InspectedData, findings
from atlas_wm.errors import UserError
from atlas_wm.report.naming import task_name
from atlas_wm.report.page import GENERATOR, page_template
from atlas_wm.report.section import Section
from atlas_wm.report.style import Figure
from atlas_wm.runs.files import writing
from atlas_wm.show.sections import (
    actions_section,
    card_section,
    coverage_section,
    episodes_section,
    films_section,
    findings_section,
)
from atlas_wm.tasks import task_id


def write_page(
    data: InspectedData,
    out: str | Path | None = None,
    episodes: int = 3,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Path, list[Finding]]:
    """Write the page of a dataset; its path and the findings are returned.

    ``out``: default: DATA.html next to the dataset; in the current folder if the dataset is at a URL.
    ``episodes``: random ones shown as film strips. ``on_step(done, total)`` counts checks and sections.
    """
    beside = data.path.parent if isinstance(data.path, Path) else Path()
    page = Path(out) if out else beside / f"{Path(data.path).name}.html"
    if page.is_dir():
        raise UserError(f"--out {page} is a folder: name a file, such as {page / 'page.html'}")
    if page.exists() and GENERATOR not in page.read_text(errors="replace"):
        raise UserError(f"{page} exists and is not a page of this command: choose another --out")
    builders: list[Callable[[InspectedData], Section]] = [card_section]
    if len(data.with_action):
        films = partial(films_section, random=episodes)
        builders = [episodes_section, films, coverage_section, actions_section, *builders]
    total = len(CHECKS) + len(builders)
    found = findings(data, lambda done, _: on_step(done, total))
    sections = [_drawn(findings_section(found))]
    for number, build in enumerate(builders, 1):
        sections.append(_drawn(build(data)))
        on_step(len(CHECKS) + number, total)
    text = page_template("dataset.html", Path(__file__).parent).render(
        one_file=True,
        name=Path(data.path).name,
        path=_from_here(data.path),
        facts=_facts(data, found),
        sections=sections,
        version=__version__,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    with writing(page.parent):
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text)
    return page, found


def _from_here(path: Path | str) -> Path | str:
    here = Path.cwd()
    return path.relative_to(here) if isinstance(path, Path) and path.is_relative_to(here) else path


def _drawn(section: Section) -> dict[str, Any]:
    blocks = [
        {
            "kind": type(block).__name__.lower(),
            "block": block,
            "panels": block.inline if isinstance(block, Figure) else [],
        }
        for block in section.blocks
    ]
    return {"key": section.key, "title": section.title, "question": section.question, "blocks": blocks}


def _frames(data: InspectedData) -> str:
    try:
        size = data.frame_size
    except UserError:  # a finding says why
        return "cannot be read"
    return f"{size[1]}×{size[0]}" if size else "not stored"


def _facts(data: InspectedData, found: list[Finding]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The cards of the summary: a title, and lines with a label and a value."""
    lengths, clips = data.lengths, np.maximum(data.lengths - ModelConfig().clip_rows + 1, 0).sum()
    count = Counter(finding.level for finding in found)
    spread = f"{lengths.min()} / {np.median(lengths):.0f} / {lengths.max()}" if len(lengths) else "–"
    return [
        (
            "Size",
            [
                ("Episodes", f"{len(lengths):,}"),
                ("Rows", f"{len(data.actions):,}"),
                ("Training clips", f"{clips:,}"),
                ("Shortest / median / longest", spread),
                ("Hash", data.content_hash()),
            ],
        ),
        (
            "Contents",
            [
                ("Task", task_name(task_id(data.task))),
                ("Action coordinates", str(data.actions.shape[1])),
                ("State coordinates", str(data.states.shape[1])),
                ("Frames", _frames(data)),
            ],
        ),
        (
            "Findings",
            [
                ("Errors: not fit for training", str(count["error"])),
                ("Warnings", str(count["warning"])),
                ("Notes", str(count["note"])),
            ],
        ),
    ]
