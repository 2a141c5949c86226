"""Does novelty predict failure? AUROC for each representation and for the true state."""

from collections.abc import Iterable, Sequence
from functools import partial

from matplotlib.axes import Axes

from atlas_wm.report import captions
from atlas_wm.report.naming import task_name
from atlas_wm.report.page_table import Table
from atlas_wm.report.runs import Group, Json, Study
from atlas_wm.report.section import Section, diagnostic_notices, per_task
from atlas_wm.report.style import ALPHAS, MUTED, Bar, Estimate, Figure, Panel, bars, bars_height

LABELS = {"patch": "mean patch", "cls": "CLS", "z": "planning latent z", "oracle": "true state (oracle)"}


def probe_section(study: Study) -> Section:
    section = Section(
        "probe",
        "Failure probe",
        "Does novelty predict failure, and in which representation of the model?",
    )
    section.blocks += diagnostic_notices(study, "probe")
    panels, rows, data = [], [], []
    columns = representations(result for _, groups in study.measured("probe") for _, rs in groups for result in rs)
    for task, groups in study.measured("probe"):
        for group, results in groups:
            named = {name: _estimate(results, name) for name in columns}
            panels.append(
                Panel(
                    per_task(group.label, task, study),
                    partial(_draw, group=group, named={n: e for n, e in named.items() if _has(results, n)}),
                    bars_height(len(columns)) + 0.3,
                )
            )
            texts = [e.text() if e else "not available" for e in named.values()]
            episodes, failures = (sum(r[key] for r in results) for key in ("episodes", "failures"))
            rows.append([task_name(task), group.label, *texts, f"{failures} of {episodes}"])
            for name, e in named.items():
                data.append({"task": task, "method": group.label, "representation": name, "runs": len(results),
                             "auroc": e and e.value, "low": e and e.low, "high": e and e.high,
                             "episodes": episodes, "failures": failures})  # fmt: skip
    if panels:
        section.blocks += [
            Figure(
                "probe",
                "AUROC of novelty for failure, by representation",
                panels,
                captions.probe(study.task_names),
                4,
            ),
            Table(
                "probe",
                "AUROC of novelty for planning failure",
                ["Task", "Method", *columns, "Failures"],
                rows,
                data,
                "Brackets: 95 % bootstrap interval over episodes; with several runs, for other training "
                "seeds, too. Chance is 0.5.",
            ).without_constant("Task"),
        ]
    return section


def representations(results: Iterable[Json]) -> list[str]:
    """Names in the order of depth, the true state last."""
    found = dict.fromkeys(name for result in results for name in result["representations"])
    blocks = sorted((n for n in found if n not in LABELS), key=lambda n: int(n[1:]) if n[1:].isdigit() else 0)
    return [*blocks, *(name for name in LABELS if name in found)]


def _has(results: Sequence[Json], name: str) -> bool:
    return any(name in result["representations"] for result in results)


def _estimate(results: Sequence[Json], name: str) -> Estimate | None:
    found = [r["representations"][name] for r in results if name in r["representations"]]
    return Estimate.of([(f.get("auroc"), f.get("low"), f.get("high")) for f in found], 0, 1)


def _draw(axes: Axes, group: Group, named: dict[str, Estimate | None]) -> None:
    oracle = named.get("oracle")
    rows = [
        Bar(
            f"CLS after block {name[1:]}" if name not in LABELS else LABELS[name],
            estimate,
            MUTED if name == "oracle" else group.colour,
            ALPHAS[min(group.variant, 2)] * (1 if name in ("z", "oracle") else 0.5),
        )
        for name, estimate in named.items()
    ]
    bars(axes, rows, top=1.0, reference=(oracle.value, "oracle") if oracle else None)
    axes.axvline(0.5, color=MUTED, lw=0.8, ls=":")
    axes.set(xticks=[0, 0.25, 0.5, 0.75, 1.0], xlabel="AUROC (dotted: chance)")
