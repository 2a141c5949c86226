"""The 2×2 ablation: success with and without ATLAS's two loss terms, in the conditions of the most arms."""

from collections.abc import Collection, Sequence
from typing import Any

from atlas_wm.report import captions
from atlas_wm.report.naming import file_name, method_name, task_name
from atlas_wm.report.page_table import Table
from atlas_wm.report.runs import Group, Study
from atlas_wm.report.section import Notice, Section
from atlas_wm.report.success import Policy, condition_text, conditions, policies_of

ARMS = {"SIGReg": ("lewm", "lewm+ood"), "WEMReg": ("wemreg", "atlas")}  # without and with OOD-recovery
HEADER = ["Condition", "Gaussian regulariser", "without OOD-recovery", "with OOD-recovery"]


def ablation_section(study: Study) -> Section:
    section = Section(
        "ablation", "Ablation", "Which of ATLAS's two loss terms helps: WEMReg, OOD-recovery, or both?"
    )
    study = study.with_repeated
    arms = [arm for pair in ARMS.values() for arm in pair]
    for task in study.tasks:
        groups = [group for group in study.of_task(task) if group.method in arms]
        evaluated = {c: {g.method for g in groups if g.evaluated(c)} for c in conditions(study, task)}
        most = max(map(len, evaluated.values()), default=0)
        if most < 2:
            section.blocks.append(_lacking(task, {group.method for group in groups}, arms))
            continue
        section.blocks.append(_two_by_two(study, groups, [c for c, has in evaluated.items() if len(has) == most]))
    return section


def _lacking(task: str, trained: Collection[str], arms: Sequence[str]) -> Notice:
    untrained = [arm for arm in arms if arm not in trained]
    text = f"{task_name(task)}: needs two of four methods, evaluated in one condition."
    if len(trained) > 1:
        names = " and ".join(method_name(arm) for arm in arms if arm in trained)
        return Notice("missing", f"{text} Evaluate {names} alike.")
    text += f" Missing: {', '.join(untrained)}."
    return Notice("missing", text, f"atlas train {task} --method {untrained[0]}")


def _two_by_two(study: Study, groups: Sequence[Group], shown: Sequence[str]) -> Table:
    """Two rows for each condition and recipe; the highest success of the four is bold."""
    task = groups[0].task
    rows: list[list[str]] = []
    data: list[dict[str, Any]] = []
    best: set[tuple[int, str]] = set()
    by_recipe: dict[str, list[Group]] = {}
    for group in groups:
        by_recipe.setdefault(group.recipe, []).append(group)
    for condition in shown:
        where = condition_text(study, task, condition)
        for recipe, mine in by_recipe.items():
            policies = {g.method: policies_of([h for h in mine if h.method == g.method], condition) for g in mine}
            means = [mean for each in policies.values() for p in each if (mean := p.rate().mean) is not None]
            for regulariser, pair in ARMS.items() if any(policies.values()) else ():
                cells = [policies.get(arm, []) for arm in pair]
                for arm, column, cell in zip(pair, HEADER[2:], cells, strict=True):
                    best |= (
                        {(len(rows), column)}
                        if max(means, default=None) in [p.rate().mean for p in cell]
                        else set()
                    )
                    data += [_record(task, where, arm, recipe, policy) for policy in cell]
                rows.append([where, regulariser, *map(_text, pair, cells)])
    title = f"{task_name(task)}: success in percent"
    rates = [policy.rate() for group in groups for c in shown for policy in policies_of([group], c)]
    note = f"{captions.spreads(rates)} {captions.ablation(task)}"
    return Table(f"ablation-{file_name(task)}", title, HEADER, rows, data, note, best=best).without_constant(
        "Condition"
    )


def _text(arm: str, policies: Sequence[Policy]) -> str:
    return "; ".join(f"{p.label}: {p.rate().text}" for p in policies) or f"{method_name(arm)}: not measured"


def _record(task: str, where: str, arm: str, recipe: str, policy: Policy) -> dict[str, Any]:
    named = {"task": task, "condition": where, "arm": arm, "recipe": recipe, "policy": policy.label}
    rate = policy.rate()
    return (
        named
        | {"runs": len(policy.results), "success_percent": rate.mean}
        | {what: getattr(rate, what) for what in ("low", "high", "std")}
    )
