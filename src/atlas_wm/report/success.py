"""Success: the ID/OOD bars and table, and the summary at the top of the page."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Literal, NamedTuple

from matplotlib.axes import Axes

from atlas_wm.report import captions
from atlas_wm.report.cost import minutes
from atlas_wm.report.intervals import paired
from atlas_wm.report.naming import ORACLE, PARTS, RANDOM, REPLAY, method_name, task_name
from atlas_wm.report.page_table import Table
from atlas_wm.report.runs import Group, Run, Study
from atlas_wm.report.section import Notice, Section, differing_values, names, per_task
from atlas_wm.report.style import ALPHAS, MUTED, Bar, Estimate, Figure, Panel, bars, bars_height
from atlas_wm.report.table import (
    HALVES,
    Rate,
    ceiling_line,
    rate,
    references,
    risk_line,
    row_rate,
    share_of_oracle,
    success_row,
)
from atlas_wm.report.ways import compared_ways
from atlas_wm.runs.results import EvaluationResult, Half, PolicyResult, SelectedEvaluation

REFERENCES = (RANDOM, REPLAY, ORACLE)
OF_ORACLE = (
    " Of the oracle: successes in percent of those of the oracle planner, which searches in the environment, "
    "over the episodes that it ran."
)
TIMES = {  # what the columns of minutes say
    "steps_minutes": " Steps: minutes of a run's training steps alone; the devices are in the settings below.",
    "commands_minutes": " Commands: minutes of the study's commands, from their start (on SLURM from their "
    "submission, so with the time in the queue) to their end, failed attempts included: a run's training, with its "
    "validations, its temporal head if the plans use it, and this evaluation, without tries of weights.",
}
OPTIONAL = {  # columns
    "Of the oracle, %": ("of_oracle_percent", 0),
    "Steps, min": ("steps_minutes", 1),
    "Commands, min": ("commands_minutes", 1),
}


class Policy(NamedTuple):
    label: str
    colour: str
    alpha: float
    results: list[PolicyResult]  # of each run
    leave_out_solved: bool

    def rate(self, half: Half = "") -> Rate:
        return rate(self.results, self.leave_out_solved, half)


def main_section(study: Study) -> Section:
    section = Section("success", "Success in the environment", "How often does the planner reach the goal?")
    section.blocks += _notices(study)
    study = study.with_repeated
    panels: list[Panel] = []
    rows: list[list[str]] = []
    data: list[dict[str, Any]] = []
    best: set[tuple[int, str]] = set()
    for task in study.tasks:
        for condition in conditions(study, task):
            policies = _policies(study.of_task(task), condition)
            title = per_task(condition_text(study, task, condition), task, study)
            if not _drawn_elsewhere(study, task, condition):
                panels.append(Panel(title, partial(_draw, policies=policies), bars_height(2 * len(policies)) + 0.3))
            shares = _shares(study.of_task(task), condition)
            where = condition_text(study, task, condition)
            took = {group.label: minutes(group.runs, condition) for group in study.of_task(task)}
            records = [
                {
                    **success_row(p.label, where, p.results, p.leave_out_solved, shares.get(p.label, ())),
                    **took.get(p.label, dict.fromkeys(TIMES)),
                }
                for p in policies
            ]
            measured = sum(r["policy"] not in REFERENCES for r in records)
            records[measured:measured] = [_unmeasured(records[0], *one) for one in study.left_out.items()]
            for column, key in (
                ("Success, %", "success"),
                ("ID half, %", "success_id"),
                ("OOD half, %", "success_ood"),
            ):
                rates = [r[f"{key}_percent"] for r in records if r["policy"] not in REFERENCES]
                known = [value for value in rates if value is not None]
                best |= {
                    (len(rows) + i, column)
                    for i, r in enumerate(records)
                    if len(known) > 1 and r["policy"] not in REFERENCES and r[f"{key}_percent"] == max(known)
                }
            rows += [[task_name(task), *_cells(record)] for record in records]
            data += [{"task": task, **record} for record in records]
    if panels:
        section.blocks += [
            Figure("success", "Success on the ID and OOD halves", panels, captions.success(study.task_names), 3)
        ]
    if rows:
        section.blocks += [_table(rows, data, best)]
    return section


def _drawn_elsewhere(study: Study, task: str, condition: str) -> bool:
    """Whether another section has the figure: variations of the environment, and other ways to plan."""
    results = [result for _, result in _evaluated(study, task, condition)]
    others = [id(result) for group in study.of_task(task) for result in compared_ways(group)]
    return bool(results[0].variation) or all(id(result) in others for result in results)


def _draw(axes: Axes, policies: Sequence[Policy]) -> None:
    rows = []
    for policy in policies:
        for half, name in HALVES.items():
            found = policy.rate(half)
            estimate = None if found.mean is None else Estimate(found.mean, *found.ends)
            label, hatched = f"{policy.label} · {name}", half == "ood"
            rows.append(Bar(label, estimate, policy.colour, policy.alpha, found.text, hatched))
    bars(axes, rows, top=100)
    axes.set(xticks=[0, 25, 50, 75, 100], xlabel="success, %")


def policies_of(groups: Sequence[Group], condition: str) -> list[Policy]:
    """Of the groups that have the condition."""
    found = []
    for group in groups:
        if reports := group.evaluated(condition):
            alpha, left_out = ALPHAS[min(group.variant, 2)], reports[0].protocol.leave_out_solved
            found.append(Policy(group.label, group.colour, alpha, [r.model for r in reports], left_out))
    return found


def _policies(groups: Sequence[Group], condition: str) -> list[Policy]:
    """With the floor and the ceilings."""
    everyone = [result for group in groups for result in group.evaluated(condition)]
    left_out = any(result.protocol.leave_out_solved for result in everyone)
    known = references(everyone).items()
    return [
        *policies_of(groups, condition),
        *(Policy(name, MUTED, 1.0, [result], left_out) for name, result in known),
    ]


def _shares(groups: Sequence[Group], condition: str) -> dict[str, list[float]]:
    """By label: how much of the oracle's success each run has, in percent."""
    reports = {group.label: group.evaluated(condition) for group in groups}
    oracle = references([result for mine in reports.values() for result in mine]).get(ORACLE)
    found = {label: [share_of_oracle(result, oracle) for result in mine] for label, mine in reports.items()}
    return {label: [share for share in mine if share is not None] for label, mine in found.items()}


def _evaluated(study: Study, task: str, condition: str) -> list[tuple[Run, EvaluationResult]]:
    return [
        (run, run.evaluations[condition].result)
        for run in study.runs
        if run.task == task and condition in run.evaluations
    ]


def conditions(study: Study, task: str) -> list[str]:
    found = {name: one.result.protocol for r in study.runs if r.task == task for name, one in r.evaluations.items()}
    return sorted(found, key=lambda name: (found[name].offset, found[name].steps, name))


def primary(study: Study, task: str) -> str | None:
    """The condition of the summary and the ablation: the paper's offset 50, else the largest offset."""

    def weight(condition: str) -> tuple[bool, bool, int, int, int]:
        found = _evaluated(study, task, condition)
        own = not any(_suffix(run, result) for run, result in found)
        protocol = found[0][1].protocol
        return protocol.offset == 50, own, protocol.offset, len(found), found[0][1].model.count

    return max(conditions(study, task), key=weight, default=None)


def _suffix(run: Run, result: EvaluationResult) -> str:
    return result.condition_suffix(run.data_hash or result.data.hash)


def one_dataset(study: Study, task: str) -> str:
    """``, data NAME (HASH)`` if all results of a task are on one dataset that no run was trained on, else ""."""
    found = {
        result.data_suffix(run.data_hash or result.data.hash)
        for condition in conditions(study, task)
        for run, result in _evaluated(study, task, condition)
    }
    return found.pop() if len(found) == 1 else ""


def condition_text(study: Study, task: str, condition: str) -> str:
    """With the dataset where nothing else tells it from another condition, or where they have different ones."""

    def text(name: str) -> str:
        return max((evaluated_as(run, result) for run, result in _evaluated(study, task, name)), key=len)

    own = text(condition)
    if sum(text(name) == own for name in conditions(study, task)) == 1:
        return own.removesuffix(one_dataset(study, task))
    return f"{own}, data {_evaluated(study, task, condition)[0][1].data.hash}"


def evaluated_as(run: Run, result: EvaluationResult) -> str:
    protocol = result.protocol
    where = f"offset {protocol.offset}, budget {protocol.budget}, {PARTS[protocol.part]}"
    return where + _suffix(run, result)


def _cells(record: dict[str, Any]) -> list[str]:
    first = [record["condition"], record["policy"]]
    if "left_out" in record:
        return [*first, record["left_out"], *("–" for _ in range(5)), *("–" for _ in OPTIONAL)]
    return [
        *first,
        row_rate(record).text,
        row_rate(record, "id").text,
        row_rate(record, "ood").text,
        "–" if record["policy"] in REFERENCES else str(record["runs"]),
        str(record["episodes"]),
        f"{record['solved_at_start_percent']:.1f}",
        *("–" if record[key] is None else f"{record[key]:.{digits}f}" for key, digits in OPTIONAL.values()),
    ]


def _unmeasured(other: dict[str, Any], method: str, why: str) -> dict[str, Any]:
    """The row of a method that was not run, beside another of its condition."""
    return dict.fromkeys(other) | {"condition": other["condition"], "policy": method_name(method), "left_out": why}


def _table(rows: list[list[str]], data: list[dict[str, Any]], best: set[tuple[int, str]]) -> Table:
    header = ["Task", "Condition", "Policy", "Success, %", "ID half, %", "OOD half, %", "Runs", "Episodes"]
    header += ["Solved at start, %", *OPTIONAL]
    shown = [any(record[key] is not None for record in data) for key, _ in OPTIONAL.values()]
    columns = [True] * (len(header) - len(shown)) + shown
    header, *rows = ([cell for cell, show in zip(r, columns, strict=True) if show] for r in (header, *rows))
    compared, *timed = shown
    times = "".join(text for text, show in zip(TIMES.values(), timed, strict=True) if show)
    return Table(
        "success",
        "Success in percent",
        header,
        rows,
        data,
        captions.spreads([row_rate(record) for record in data]) + " The highest mean of each condition is bold. "
        "Solved at start: episodes whose first state already counts as success. The success rates include them "
        "unless the condition says otherwise." + OF_ORACLE * compared + times,
        best=best,
    ).without_constant("Task", "Condition", "Runs")


def _notices(study: Study) -> list[Notice]:
    notices = []
    for run in study.runs:
        if not run.evaluations:
            notices.append(Notice("missing", f"Not measured: {run.name}.", f"atlas eval {run.folder}"))
    for task in study.tasks:
        if data := one_dataset(study, task).removeprefix(", data "):
            notices.append(Notice("note", f"{task_name(task)}: evaluated on {data}, not on the training data."))
        for condition in conditions(study, task):
            found = _evaluated(study, task, condition)
            runs = [run for run, _ in found]
            without = [r for r in study.runs if r.task == task and r.evaluations and condition not in r.evaluations]
            if without and not _drawn_elsewhere(study, task, condition):
                notices.append(
                    Notice("note", f"{condition_text(study, task, condition)}: not measured for {names(without)}.")
                )
            for run, result in found:
                notices += [
                    Notice(kind, f"{condition_text(study, task, condition)}: {text}")
                    for kind, text in _remarks(run, result, run.evaluations[condition])
                ]
            risks = [f"{line} ({run.name})" for run, result in found if (line := risk_line(result))]
            if risks:  # one notice for many runs
                text = "; ".join([risks[0], *(line.partition(": ")[2] for line in risks[1:])])
                notices.append(Notice("note", f"{condition_text(study, task, condition)}: {text}."))
            for what, key in (("episodes", _episodes_of), ("planner settings", _plan_of)):
                if different := differing_values(runs, [key(result) for _, result in found]):
                    where = f"{task_name(task)}, {condition_text(study, task, condition)}"
                    text = f"{where}: evaluated with different {what}, so not comparable: {different}."
                    notices.append(Notice("warning", text))
    return notices


def _remarks(
    run: Run, result: EvaluationResult, selected: SelectedEvaluation
) -> Iterator[tuple[Literal["warning", "note"], str]]:
    if result.model.errors:
        errors = f"{result.model.errors} episodes of {run.name} ended with an environment error"
        yield "warning", f"{errors} and count as failed."
    if line := ceiling_line(result):
        yield "note", f"{run.name}: {line}."
    if selected.others:
        shown = f"the page shows the most complete, {selected.name}.json ({result.summary})"
        others = ", ".join(f"{name}.json" for name in selected.others)
        yield "note", f"{run.name} has {1 + len(selected.others)} evaluations; {shown}. Not shown: {others}."
    if run.data_hash and result.novelty_bank.data != run.data_hash:
        yield (
            "warning",
            f"the ID and OOD halves of {run.name} compare with the evaluated data, not with the training data.",
        )


def _episodes_of(result: EvaluationResult) -> str:
    seeds = ", ".join(map(str, result.protocol.seeds))
    return f"dataset {result.data.hash}, {result.protocol.episodes} for each of the seeds {seeds}"


def _plan_of(result: EvaluationResult) -> str:
    settings = {k: v for k, v in asdict(result.plan).items() if k != "candidate_chunk"}
    return json.dumps({**settings, "precision": result.precision, "plain": result.plain})


def headlines(study: Study) -> list[dict[str, Any]]:
    """The summary of each task: success at its primary condition, best policy first."""
    study, found = study.with_repeated, []
    for task in study.tasks:
        condition = primary(study, task)
        if condition is None:
            continue
        policies = _policies(study.of_task(task), condition)
        lines: list[dict[str, Any]] = [
            {"label": p.label, "colour": p.colour, "rate": rate,
             "reference": p.label in REFERENCES, "id": p.rate("id").mean, "ood": p.rate("ood").mean}
            for p in policies
            if (rate := p.rate()).mean is not None
        ]  # fmt: skip
        lines.sort(key=lambda line: (line["reference"], -line["rate"].mean))
        by_label = {group.label: group for group in study.of_task(task)}
        best = [by_label[line["label"]] for line in lines if not line["reference"]][:2]
        found.append(
            {
                "lead": _lead(best[0], best[1], condition) if len(best) > 1 else "",
                "task": task_name(task),
                "condition": condition_text(study, task, condition),
                "lines": lines,
                "solved": policies[0].results[0].solved_at_start,
            }
        )
    return found


def _lead(first: Group, second: Group, condition: str) -> str:
    """The lead of the best method, on the same episodes and training seeds."""
    difference = paired(first.by_seed(condition), second.by_seed(condition))
    if difference is None:
        return f"{first.label} and {second.label} have no training seed with the same episodes in common."
    low, high = difference.interval
    seeds = len(difference.by_run)
    over = f"{seeds} training seeds and the demonstrations" if seeds > 1 else "demonstrations, one training seed"
    lead = f"{first.label} minus {second.label}: {difference.points:+.1f} points"
    chance = " Chance may explain it." if low <= 0 <= high else ""
    return f"{lead}, 95 % interval {low:+.1f} to {high:+.1f} over {over}.{chance}"
