"""Training curves, and the settings of the runs."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from atlas_wm.report import captions
from atlas_wm.report.naming import task_name
from atlas_wm.report.page_table import Table
from atlas_wm.report.runs import Group, Json, Run, Study, read_study
from atlas_wm.report.section import Notice, Section, names, per_task
from atlas_wm.report.style import DASHES, Figure, Panel
from atlas_wm.report.table import seconds_per_plan
from atlas_wm.runs.folder import METRICS

TERMS = {
    "prediction": "Prediction of the next latent",
    "wemreg": "WEMReg: W₂² to a Gaussian",
    "sigreg": "SIGReg statistic",
    "relational": "OOD-recovery: distortion",
}
NO_WEIGHTS = ("directions", "ema_decay")  # other numbers of an objective
SCORE = "val_score"
NOT_TERMS = {"step", "epoch", "total", "lr", "grad_norm", "clips_per_second"}


def training_section(study: Study) -> Section:
    section = Section("training", "Training", "Did training converge?")
    without = [run for run in study.runs if not run.metrics]
    if without:
        section.blocks.append(Notice("missing", f"No {METRICS} to draw: {names(without)}."))
    if panels := curve_panels(study):
        section.blocks += [
            Figure("training", "Loss terms over training", panels, captions.TRAINING),
            _final_values(study),
        ]
    return section


def curve_panels(study: Study) -> list[Panel]:
    """One panel for each task and loss term, and one for the planning score."""
    panels = []
    for task in study.tasks:
        groups = study.of_task(task)
        columns = dict.fromkeys(
            c for g in groups for run in g.runs for c in run.metrics if not c.startswith("val_")
        )
        for term in sorted(columns.keys() - NOT_TERMS, key=lambda t: [*TERMS, t].index(t)):
            title = per_task(TERMS.get(term, term), task, study)
            panels.append(Panel(title, partial(_draw_curves, term=term, groups=groups), 2.7))
        if any(SCORE in run.metrics for group in groups for run in group.runs):
            title = per_task("Planning score", task, study)
            panels.append(Panel(title, partial(_draw_scores, groups=groups), 2.7))
    return panels


def _draw_curves(axes: Axes, term: str, groups: Sequence[Group]) -> None:
    positive = True
    for group in groups:
        for index, run in enumerate(run for run in group.runs if term in run.metrics):
            steps, values = run.metrics[term]
            label = group.label if index == 0 else None
            axes.plot(
                steps, values, DASHES[min(group.variant, 2)], color=group.colour, lw=1.2, label=label, alpha=0.9
            )
            if f"val_{term}" in run.metrics:
                axes.plot(*run.metrics[f"val_{term}"], "o", color=group.colour, ms=3.5)
            positive &= min(values) > 0
    axes.set(xlabel="step")
    if positive:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend(fontsize=8, loc="best")


def _draw_scores(axes: Axes, groups: Sequence[Group]) -> None:
    for group in groups:
        for index, run in enumerate(run for run in group.runs if SCORE in run.metrics):
            style, label = f"o{DASHES[min(group.variant, 2)]}", group.label if index == 0 else None
            axes.plot(*run.metrics[SCORE], style, color=group.colour, lw=1.2, ms=3.5, label=label, alpha=0.9)
    axes.set(xlabel="step")
    axes.legend(fontsize=8, loc="best")


def _final_values(study: Study) -> Table:
    terms = list(
        dict.fromkeys(c for run in study.runs for c in run.metrics if c.removeprefix("val_") not in NOT_TERMS)
    )
    terms = [c for c in terms if not c.startswith("val_")]
    rows, data = [], []
    for run in study.runs:
        record: dict[str, Any] = {"run": run.name}
        for name in (n for term in terms for n in (term, f"val_{term}")):
            record[name] = run.metrics[name][1][-1] if name in run.metrics else None
        cells = [[record[term], record[f"val_{term}"]] for term in terms]
        rows.append([run.name, *(" / ".join("–" if v is None else f"{v:.3g}" for v in pair) for pair in cells)])
        data.append(record)
    return Table(
        "training",
        "Last values of the loss terms",
        ["Run", *(TERMS.get(term, term) for term in terms)],
        rows,
        data,
        "Training / held-out clips, without weights. –: the method has no such term.",
        folded=True,
    )


def settings_section(study: Study) -> Section:
    section = Section("settings", "Settings and provenance", "With which settings, data and versions?")
    facts = {run.name: _facts(run) for run in study.runs}
    every = {run.name: _flat(run.config) for run in study.runs}
    section.blocks += [
        *_by_run("settings", facts),
        *(
            replace(table, folded=True)
            for table in _by_run("all-settings", every, "Every setting of config.json, ")
        ),
    ]
    return section


def _by_run(name: str, columns: dict[str, Json], title: str = "") -> list[Table]:
    """Two tables: settings that differ, with one column per run, and settings that are the same."""
    keys = list(dict.fromkeys(key for facts in columns.values() for key in facts))
    texts = {key: [_text(facts.get(key)) for facts in columns.values()] for key in keys}
    different = [[key, *cells] for key, cells in texts.items() if len(set(cells)) > 1]
    same = [[key, cells[0]] for key, cells in texts.items() if len(set(cells)) == 1]
    tables = [
        Table(f"{name}-by-run", f"{title}what differs".capitalize(), ["", *columns], different),
        Table(f"{name}-shared", f"{title}the same in all runs".capitalize(), ["", "all runs"], same),
    ]
    return [table for table in tables if table.rows]


def _text(value: object) -> str:
    return "not available" if value is None else str(value)


def _facts(run: Run) -> Json:
    config, data = run.config["config"], run.config.get("data") or {}
    train, objective, plan, model = (config[key] for key in ("train", "objective", "plan", "model"))
    speeds = run.metrics.get("clips_per_second", ([], []))[1]
    reports = [one.result for one in run.evaluations.values()]
    planning = [seconds_per_plan([r.model]) for r in reports]
    terms = {**objective, **objective.get("extra", {})}.items()
    weights = {k: v for k, v in terms if isinstance(v, int | float) and v and k not in NO_WEIGHTS}
    return {
        "task": task_name(run.task),
        "method": run.method,
        "recipe": run.config.get("recipe"),
        "training seed": run.seed,
        "loss weights": ", ".join(f"{name} {value:g}" for name, value in weights.items()),
        "steps": f"{run.metrics['total'][0][-1]:.0f}" if "total" in run.metrics else train.get("steps"),
        "batch size, learning rate": f"{train.get('batch')}, {train.get('lr')}",
        "image, latent size": f"{model['encoder'].get('image_size')} px, {model.get('latent')}",
        "planner": f"CEM {plan.get('candidates')} × {plan.get('iterations')}, horizon {plan.get('horizon')}",
        "dataset": data.get("hash"),
        "episodes, rows": f"{data.get('episodes')}, {data.get('rows')}" if data else None,
        "clips: training, held-out": f"{data.get('training_clips')}, {data.get('validation_clips')}"
        if data
        else None,
        "split": train.get("split"),
        "trained on": run.config.get("device"),
        "clips/s": f"{median(speeds):,.0f}" if speeds else None,
        "seconds per plan": ", ".join(f"{seconds:.3g}" for seconds in planning if seconds is not None) or None,
        "evaluated on": ", ".join(dict.fromkeys(r.device for r in reports)) or None,
        "evaluation seeds": "; ".join(dict.fromkeys(", ".join(map(str, r.protocol.seeds)) for r in reports))
        or None,
        "evaluations shown": ", ".join(f"{one.name}.json" for one in run.evaluations.values()) or None,
        "diagnosed": ", ".join(run.diagnostics) or None,
        "versions": ", ".join(f"{name} {version}" for name, version in (run.config.get("versions") or {}).items())
        or None,
    }


def _flat(data: Json, prefix: str = "") -> Json:
    flat: Json = {}
    for key, value in data.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if isinstance(value, str) else json.dumps(value)
    return flat


def training_curves(runs: Sequence[Path], path: Path) -> None:
    """Write the training curves as one image."""
    Figure(path.stem, "", curve_panels(read_study(runs)), captions.TRAINING).write(path.parent)
