"""Success: the ID/OOD bars and table, the 2×2 ablation, and the summary at the top of the page."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

from matplotlib.axes import Axes

from atlas_wm.report import captions
from atlas_wm.report.naming import ORACLE, PARTS, RANDOM, REPLAY, file_name, method_name, task_name
from atlas_wm.report.page_table import Table
from atlas_wm.report.runs import Group, Run, Study
from atlas_wm.report.section import Notice, Section, differing_values, names, per_task
from atlas_wm.report.style import ALPHAS, MUTED, Bar, Estimate, Figure, Panel, bars, bars_height
from atlas_wm.report.table import (
    HALVES,
    ceiling_line,
    rate,
    references,
    risk_line,
    share_of_oracle,
    success_row,
)
from atlas_wm.report.ways import compared_ways
from atlas_wm.runs.results import EvaluationResult, PolicyResult, SelectedEvaluation

REFERENCES = (RANDOM, REPLAY, ORACLE)
ARMS = {"SIGReg": ("lewm", "lewm+ood"), "WEMReg": ("wemreg", "atlas")}  # without and with OOD-recovery
OF_ORACLE = (
    " Of the oracle: successes in percent of those of the oracle planner, which searches in the environment, "
    "over the episodes that it ran."
)
TIMED = " Training: minutes of a run's steps, without validations; the devices are in the settings below."
OPTIONAL = {"Of the oracle, %": ("of_oracle_percent", 0), "Training, min": ("training_minutes", 1)}  # columns
Policy = tuple[str, str, float, list[PolicyResult]]  # label, colour, alpha, results


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
            minutes = {g.label: _minutes(g.runs) for g in study.of_task(task)}
            records = [
                {**success_row(label, where, r, shares.get(label, ())), "training_minutes": minutes.get(label)}
                for label, _, _, r in policies
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
    for label, colour, alpha, results in policies:
        for half, name in HALVES.items():
            average, spread = rate(results, half)
            text, estimate = None, None
            if average is not None:
                text = f"{average:.1f}" + ("" if spread is None else f" ± {spread:.1f}")
                estimate = Estimate(average, *((average - spread, average + spread) if spread is not None else ()))
            rows.append(Bar(f"{label} · {name}", estimate, colour, alpha, text, hatched=half == "ood"))
    bars(axes, rows, top=100)
    axes.set(xticks=[0, 25, 50, 75, 100], xlabel="success, %")


def _policies(groups: Sequence[Group], condition: str) -> list[Policy]:
    found: list[Policy] = []
    for group in groups:
        reports = [run.evaluations[condition].result for run in group.runs if condition in run.evaluations]
        if reports:
            found.append((group.label, group.colour, ALPHAS[min(group.variant, 2)], [r.model for r in reports]))
    everyone = [run.evaluations[condition].result for g in groups for run in g.runs if condition in run.evaluations]
    return [*found, *((name, MUTED, 1.0, [result]) for name, result in references(everyone).items())]


def _shares(groups: Sequence[Group], condition: str) -> dict[str, list[float]]:
    """By label: how much of the oracle's success each run has, in percent."""
    reports = {
        g.label: [r.evaluations[condition].result for r in g.runs if condition in r.evaluations] for g in groups
    }
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


def condition_text(study: Study, task: str, condition: str) -> str:
    """With the dataset where nothing else tells it from another condition."""

    def text(name: str) -> str:
        return max((evaluated_as(run, result) for run, result in _evaluated(study, task, name)), key=len)

    own = text(condition)
    if sum(text(name) == own for name in conditions(study, task)) == 1:
        return own
    return f"{own}, data {_evaluated(study, task, condition)[0][1].data.hash}"


def evaluated_as(run: Run, result: EvaluationResult) -> str:
    protocol = result.protocol
    where = f"offset {protocol.offset}, budget {protocol.budget}, {PARTS[protocol.part]}"
    return where + _suffix(run, result)


def _cells(record: dict[str, Any]) -> list[str]:
    def share(key: str, spread: str) -> str:
        value, std = record[key], record[spread]
        return "not available" if value is None else f"{value:.1f}" + ("" if std is None else f" ± {std:.1f}")

    first, over = [record["condition"], record["policy"]], record["std_over"] or "one seed"
    if "left_out" in record:
        return [*first, record["left_out"], "–", "–", over, "–", "–", *("–" for _ in OPTIONAL)]
    return [
        *first,
        share("success_percent", "std"),
        share("success_id_percent", "success_id_std"),
        share("success_ood_percent", "success_ood_std"),
        over,
        str(record["episodes"]),
        f"{record['solved_at_start_percent']:.1f}",
        *("–" if record[key] is None else f"{record[key]:.{digits}f}" for key, digits in OPTIONAL.values()),
    ]


def _unmeasured(other: dict[str, Any], method: str, why: str) -> dict[str, Any]:
    """The row of a method that was not run, beside another of its condition."""
    shared = {name: other[name] for name in ("condition", "std_over")}
    return dict.fromkeys(other) | shared | {"policy": method_name(method), "left_out": why}


def _minutes(runs: Sequence[Run]) -> float | None:
    """The mean over runs."""
    known = [run.training_minutes for run in runs]
    return round(sum(each) / len(each), 2) if (each := [m for m in known if m is not None]) else None


def _table(rows: list[list[str]], data: list[dict[str, Any]], best: set[tuple[int, str]]) -> Table:
    header = ["Task", "Condition", "Policy", "Success, %", "ID half, %", "OOD half, %", "± over", "Episodes"]
    header += ["Solved at start, %", *OPTIONAL]
    shown = [any(record[key] is not None for record in data) for key, _ in OPTIONAL.values()]
    columns = [True] * (len(header) - len(shown)) + shown
    header, *rows = ([cell for cell, show in zip(r, columns, strict=True) if show] for r in (header, *rows))
    compared, timed = shown
    return Table(
        "success",
        "Success in percent",
        header,
        rows,
        data,
        "Mean ± standard deviation; the highest mean of each condition is bold. "
        "Solved at start: episodes whose first state already counts as success. The success rates include them "
        "unless the condition says otherwise." + OF_ORACLE * compared + TIMED * timed,
        best=best,
    ).without_constant("Task", "Condition", "± over")


def _notices(study: Study) -> list[Notice]:
    notices = []
    for run in study.runs:
        if not run.evaluations:
            notices.append(Notice("missing", f"Not measured: {run.name}.", f"atlas eval {run.folder}"))
    for task in study.tasks:
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
            risks: dict[str, list[str]] = {}  # by what they are of: one notice for many runs
            for run, result in found:
                text, _, value = risk_line(result).rpartition(" ")
                risks.setdefault(text, []).append(f"{value} ({run.name})")
            where = condition_text(study, task, condition)
            notices += [Notice("note", f"{where}: {text} {', '.join(v)}.") for text, v in risks.items() if text]
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


def ablation_section(study: Study) -> Section:
    section = Section(
        "ablation", "Ablation", "Which of ATLAS's two loss terms helps: WEMReg, OOD-recovery, or both?"
    )
    arms = [arm for pair in ARMS.values() for arm in pair]
    for task in study.tasks:
        condition = primary(study, task)
        present = {g.method for g in study.of_task(task) if g.method in arms}
        if condition is None or len(present) < 2:
            lacking = [arm for arm in arms if arm not in present]
            text = f"{task_name(task)}: needs two of four methods, evaluated. Missing: {', '.join(lacking)}."
            section.blocks.append(
                Notice("missing", text, f"atlas train {task} --method {lacking[0]}" if lacking else "")
            )
            continue
        section.blocks.append(_two_by_two(study, task, condition))
    return section


def _two_by_two(study: Study, task: str, condition: str) -> Table:
    policies = {g.method: [] for g in study.of_task(task)}  # type: dict[str, list[Policy]]
    for group in study.of_task(task):
        policies[group.method] += [p for p in _policies([group], condition) if p[0] not in REFERENCES]
    data = []

    def cell(arm: str) -> str:
        texts = []
        for label, _, _, results in policies.get(arm, []):
            average, spread = rate(results)
            data.append({"task": task, "condition": condition, "arm": arm, "runs": label,
                         "success_percent": average, "std": spread})  # fmt: skip
            share = "not available" if average is None else f"{average:.1f} %"
            texts.append(f"{label}: {share}" + ("" if spread is None else f" ± {spread:.1f}"))
        return "; ".join(texts) or f"{method_name(arm)}: not measured"

    rows = [[regulariser, *map(cell, pair)] for regulariser, pair in ARMS.items()]
    return Table(
        f"ablation-{file_name(task)}",
        f"{task_name(task)}, {condition_text(study, task, condition)}",
        ["Gaussian regulariser", "without OOD-recovery", "with OOD-recovery"],
        rows,
        data,
        captions.ablation(task),
    )


def headlines(study: Study) -> list[dict[str, Any]]:
    """The summary of each task: success at its primary condition, best policy first."""
    study, found = study.with_repeated, []
    for task in study.tasks:
        condition = primary(study, task)
        if condition is None:
            continue
        policies = _policies(study.of_task(task), condition)
        lines: list[dict[str, Any]] = [
            {"label": label, "colour": colour, "mean": average, "std": spread, "reference": label in REFERENCES,
             "id": rate(results, "id")[0], "ood": rate(results, "ood")[0],
             "runs": len(results), "seeds": len(results[0].success_by_seed)}
            for label, colour, _, results in policies
            for average, spread in [rate(results)]
            if average is not None
        ]  # fmt: skip
        lines.sort(key=lambda line: (line["reference"], -line["mean"]))
        solved = policies[0][3][0].solved_at_start
        found.append(
            {
                "lead": _lead([line for line in lines if not line["reference"]]),
                "task": task_name(task),
                "condition": condition_text(study, task, condition),
                "lines": lines,
                "solved": solved,
            }
        )
    return found


def _lead(lines: Sequence[dict[str, Any]]) -> str:
    """The lead of the best method, compared with the standard deviations."""
    if len(lines) < 2:
        return ""
    first, second = lines[:2]
    lead = f"{first['label']} is {first['mean'] - second['mean']:.1f} points ahead of {second['label']}"
    spreads = [line["std"] for line in (first, second) if line["std"] is not None]
    if not spreads:
        return f"{lead}. With one run and one seed each, this may be chance."
    inside = first["mean"] - second["mean"] <= max(spreads)
    return f"{lead}, {'less' if inside else 'more'} than one standard deviation of either."
