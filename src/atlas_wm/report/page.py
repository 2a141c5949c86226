"""The report: one page that needs no network, and a folder with every table and figure."""

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2

from atlas_wm import __version__
from atlas_wm.errors import UserError
from atlas_wm.report.ablation import ablation_section
from atlas_wm.report.differences import differences_section
from atlas_wm.report.films import cases_section
from atlas_wm.report.imagined import imagined_section
from atlas_wm.report.latents import geometry_section, marginal_section
from atlas_wm.report.naming import task_name
from atlas_wm.report.page_table import Table
from atlas_wm.report.planning import regret_section, relational_section, rollout_section
from atlas_wm.report.probe import probe_section
from atlas_wm.report.runs import Run, Study, read_study, read_tries
from atlas_wm.report.section import Notice, Section, data_warnings
from atlas_wm.report.state import state_section
from atlas_wm.report.style import Figure, themed
from atlas_wm.report.success import headlines, main_section
from atlas_wm.report.training import settings_section, training_section
from atlas_wm.report.tuning import score_section, tuning_section
from atlas_wm.report.variations import variations_section
from atlas_wm.report.ways import ways_section
from atlas_wm.runs.files import writing
from atlas_wm.runs.folder import writable_folder

GENERATOR = '<meta name="generator" content="atlas-wm">'
# Raised by values that no check covers.
ERRORS = (LookupError, TypeError, ValueError, AttributeError, OSError, ArithmeticError, RuntimeError)
SECTIONS: list[Callable[[Study], Section]] = [
    main_section,
    differences_section,
    ways_section,
    variations_section,
    ablation_section,
    probe_section,
    state_section,
    geometry_section,
    marginal_section,
    rollout_section,
    relational_section,
    regret_section,
    cases_section,
    imagined_section,
    tuning_section,
    score_section,
    training_section,
    settings_section,
]


def write_report(
    runs: Sequence[str | Path],
    out: str | Path | None = None,
    tuning: str | Path | None = None,
    left_out: Mapping[str, str] | None = None,
) -> Path:
    """Write the report of these runs and return the path of its page.

    ``out``: folder; default: ``report/`` in the run folder, or next to the run folders if there are several.
    ``tuning``: the table of tries of a study, tuning.csv. ``left_out``: methods that were not run, and why.
    """
    folders = [Path(run) for run in runs]
    if not folders:
        raise UserError("a report needs at least one run folder")
    study = read_study(folders)
    study.tries = read_tries(Path(tuning)) if tuning else []
    study.left_out = left_out or {}
    folder = Path(out) if out else default_folder(folders)
    files = {Figure: folder / "figures", Table: folder / "tables"}
    if not out and len(folders) == 1:
        writable_folder(folders[0], folder.name)
    with writing(folder):
        _clear(folder, files.values())
    sections = [section for build in SECTIONS if (section := _finish(build, study, files))["blocks"]]
    page = folder / "index.html"
    page.write_text(
        page_template().render(
            study=study,
            tasks=[task_name(task) for task in study.tasks],
            runs=[_run_line(run) for run in study.runs],
            headlines=headlines(study),
            warnings=data_warnings(study),
            sections=sections,
            version=__version__,
            written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        )
    )
    return page


def default_folder(folders: Sequence[Path]) -> Path:
    if len(folders) == 1:
        return folders[0] / "report"
    here, common = Path.cwd(), Path(os.path.commonpath([folder.absolute().parent for folder in folders]))
    return (common.relative_to(here) if common.is_relative_to(here) else common) / "report"


def _clear(folder: Path, subfolders: Iterable[Path]) -> None:
    """Delete the files of an earlier report, and nothing else."""
    page = folder / "index.html"
    if page.exists():
        if GENERATOR not in page.read_text(errors="replace"):
            raise UserError(f"{page} exists and is not a report: choose another --out")
        for subfolder in subfolders:
            shutil.rmtree(subfolder, ignore_errors=True)
    for subfolder in subfolders:
        subfolder.mkdir(parents=True, exist_ok=True)


def _finish(build: Callable[[Study], Section], study: Study, files: dict[Any, Path]) -> dict[str, Any]:
    """Draw a section and write its files. Runs whose files cannot be drawn are left out and listed."""
    left_out: list[Notice] = []
    try:
        section, panels = _draw(build, study)
    except ERRORS as error:
        culprits = {run.name: problem for run in study.runs if (problem := _problem(build, run))} or {
            "all": f"{type(error).__name__}: {error}"
        }
        for name, problem in culprits.items():
            what = f"{build.__name__.removesuffix('_section')}: the files of {name} cannot be drawn ({problem})"
            study.problems.append(what)
            left_out.append(Notice("warning", f"Left out, {what}."))
        others = [run for run in study.runs if run.name not in culprits and "all" not in culprits]
        section, panels = _draw(build, Study(others))
    for block in section.blocks:
        if not isinstance(block, Notice):
            block.write(files[type(block)])
    blocks = [{"kind": "notice", "block": notice, "panels": []} for notice in left_out]
    blocks += [
        {"kind": type(block).__name__.lower(), "block": block, "panels": drawn}
        for block, drawn in zip(section.blocks, panels, strict=True)
    ]
    return {"key": section.key, "title": section.title, "question": section.question, "blocks": blocks}


def _draw(build: Callable[[Study], Section], study: Study) -> tuple[Section, list[list[str]]]:
    section = build(study)
    return section, [block.inline if isinstance(block, Figure) else [] for block in section.blocks]


def _problem(build: Callable[[Study], Section], run: Run) -> str:
    """Why the files of this run cannot be drawn; empty if they can."""
    try:
        _draw(build, Study([run]))
    except ERRORS as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _run_line(run: Run) -> dict[str, Any]:
    return {
        "name": run.name,
        "task": task_name(run.task),
        "method": run.method,
        "recipe": run.config.get("recipe"),
        "seed": run.seed,
        "evaluations": len(run.evaluations),
        "diagnostics": len(run.diagnostics),
    }


def page_template(name: str = "page.html", *folders: Path) -> jinja2.Template:
    """folders: of templates that extend page.html."""
    loader = jinja2.FileSystemLoader([*folders, Path(__file__).parent])
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["themed"] = themed
    return environment.get_template(name)
