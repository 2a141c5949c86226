"""How much of the state can be read from each representation?"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from matplotlib.axes import Axes

from atlas_wm.report import captions
from atlas_wm.report.naming import task_name
from atlas_wm.report.page_table import Table
from atlas_wm.report.probe import LABELS
from atlas_wm.report.runs import Group, Json, Study
from atlas_wm.report.section import Section, diagnostic_notices, per_task
from atlas_wm.report.style import ALPHAS, Bar, Estimate, Figure, Panel, bars, bars_height

REPRESENTATIONS = {"z": 1.0, "patch": 0.65, "cls": 0.35}  # with the strength of their colour


def state_section(study: Study) -> Section:
    section = Section("state", "State probe", "How much of the state can be read from the latent?")
    section.blocks += diagnostic_notices(study, "state")
    panels, rows, data = [], [], []
    columns = list(
        dict.fromkeys(name for _, groups in study.measured("state") for _, rs in groups for name in units(rs))
    )
    for task, groups in study.measured("state"):
        for group, results in groups:
            named = units(results)
            height = bars_height(len(named) * len(REPRESENTATIONS))
            title = per_task(group.label, task, study)
            panels.append(Panel(title, partial(_draw, group=group, results=results, names=list(named)), height))
            for representation in REPRESENTATIONS:
                cells = [_cell(results, representation, c, named[c]) if c in named else "–" for c in columns]
                rows.append([task_name(task), group.label, LABELS[representation], *cells])
                for name, unit in named.items():
                    numbers = {
                        f"{key}_{probe}": e and e.value
                        for probe in ("linear", "mlp")
                        for key in ("r2", "error")
                        for e in [estimate(results, representation, probe, name, key)]
                    }
                    data.append({"task": task, "method": group.label, "representation": representation,
                                 "coordinate": name, "unit": unit, "runs": len(results), **numbers})  # fmt: skip
    if panels:
        section.blocks += [
            Figure("state", "R² of an MLP that reads the state, by representation", panels, captions.STATE),
            Table(
                "state",
                "State coordinates read by probes on held-out episodes",
                ["Task", "Method", "Representation", *columns],
                rows,
                data,
                "R² of a linear probe / of an MLP, and the MLP's error: the root mean squared distance, for angles "
                "the mean absolute difference. Means if there are several runs.",
            ).without_constant("Task"),
        ]
    return section


def units(results: Sequence[Json]) -> dict[str, str]:
    """The unit of each coordinate."""
    return {c["name"]: c["unit"] for result in results for c in result["coordinates"]}


def estimate(results: Sequence[Json], representation: str, probe: str, name: str, key: str) -> Estimate | None:
    found = [r["representations"][representation][probe].get(name, {}) for r in results]
    return Estimate.of([(f.get(key), None, None) for f in found], most=1 if key == "r2" else math.inf)


def _cell(results: Sequence[Json], representation: str, name: str, unit: str) -> str:
    read = partial(estimate, results, representation)
    linear, mlp, error = read("linear", name, "r2"), read("mlp", name, "r2"), read("mlp", name, "error")
    r2 = " / ".join("not available" if e is None else f"{e.value:.2f}" for e in (linear, mlp))
    return r2 if error is None else f"{r2}, {f'{error.value:.3g} {unit}'.strip()}"


def _at_least_0(e: Estimate) -> Estimate:
    """As drawn: R² has no lower end, and one bad probe would squeeze all other bars."""
    low, high = (None if bound is None else max(bound, 0.0) for bound in (e.low, e.high))
    return replace(e, value=max(e.value, 0.0), low=low, high=high)


def _draw(axes: Axes, group: Group, results: Sequence[Json], names: Sequence[str]) -> None:
    rows = []
    for name in names:
        for representation, strength in REPRESENTATIONS.items():
            e = estimate(results, representation, "mlp", name, "r2")
            label, alpha = f"{name}, {LABELS[representation]}", ALPHAS[min(group.variant, 2)] * strength
            rows.append(Bar(label, e and _at_least_0(e), group.colour, alpha, f"{e.value:.2f}" if e else None))
    bars(axes, rows, top=1.0)
    axes.set(xticks=[0, 0.25, 0.5, 0.75, 1.0], xlabel="R² on held-out episodes")
