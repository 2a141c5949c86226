"""Success rates as a table: on the terminal, as Markdown and as CSV."""

import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from atlas_wm.report.intervals import success_interval, success_over_runs
from atlas_wm.report.naming import ORACLE, RANDOM, REPLAY, method_name
from atlas_wm.runs.results import EvaluationResult, Half, PolicyResult

MOST_COLUMNS = 6  # of conditions on a terminal; more of them are rows
SPREADS = "Brackets: 95 % interval over runs and demonstrations. ±: standard deviation over evaluation seeds."
HALVES: dict[Half, str] = {"id": "ID half", "ood": "OOD half"}  # by novelty of the demonstration


def condition(report: EvaluationResult) -> str:
    rest = report.condition_suffix(report.data.hash)
    return f"offset {report.protocol.offset}, budget {report.protocol.budget}{rest}"


def success_rows(reports: Sequence[EvaluationResult]) -> list[dict[str, Any]]:
    """One row per policy and condition: success over all runs and evaluation seeds, in percent.

    Of several runs (training seeds) with the 95 % interval of their mean, of one with the standard deviation over
    evaluation seeds.
    """
    rows: list[dict[str, Any]] = []
    for where in dict.fromkeys(condition(r) for r in reports):
        here = [r for r in reports if condition(r) == where]
        known, left_out = references(here), here[0].protocol.leave_out_solved
        rows += [success_row(RANDOM, where, [known[RANDOM]], left_out)] if RANDOM in known else []
        for method in dict.fromkeys(r.method for r in here):
            mine = [r for r in here if r.method == method]
            shares = [share for r in mine if (share := share_of_oracle(r, known.get(ORACLE))) is not None]
            rows.append(success_row(method_name(method), where, [r.model for r in mine], left_out, shares))
        rows += [success_row(name, where, [known[name]], left_out) for name in (REPLAY, ORACLE) if name in known]
    return rows


def references(reports: Sequence[EvaluationResult]) -> dict[str, PolicyResult]:
    """The floor and the ceilings of one condition, if measured; all runs have the same episodes."""
    known = {
        RANDOM: [r.random for r in reports if r.random is not None],
        REPLAY: [r.replay for r in reports if r.replay is not None],
        ORACLE: [r.oracle for r in reports if r.oracle is not None],
    }
    return {name: max(results, key=lambda r: r.count) for name, results in known.items() if results}


def share_of_oracle(report: EvaluationResult, oracle: PolicyResult | None) -> float | None:
    """Successes in percent of the oracle's, over its episodes: of the run's own, else of the one given."""
    if report.oracle is not None or oracle is None:
        return report.share_of_oracle
    return report.model.share_of(oracle, report.protocol.leave_out_solved)


def interval_line(report: EvaluationResult) -> str:
    """How sure the model's success rate is; empty if no episode counts."""
    success, low, high = success_interval([report])
    return "" if success is None else f"{method_name(report.method)}: 95 % interval {low:.1f} to {high:.1f} %"


def ceiling_line(report: EvaluationResult) -> str:
    """How much of the oracle's success the model has; empty if it was not run."""
    oracle, plan = report.oracle, report.oracle_plan
    if oracle is None or plan is None or oracle.success_mean is None:
        return ""
    share = report.share_of_oracle
    found = f"{share:.0f} % of the oracle's {oracle.success_mean:.1f} %" if share is not None else "the oracle: 0 %"
    search = f"{plan.candidates}×{plan.iterations}×{plan.horizon} with {plan.elites} elites"
    spent = f"{oracle.plans} plans, {oracle.seconds_per_plan or 0:.1f} s each"
    return f"{found}, over the same {oracle.count} episodes (oracle: {search}; {spent})"


def plain_counterpart(report: EvaluationResult, others: Sequence[EvaluationResult]) -> EvaluationResult | None:
    """The newest evaluation of the same episodes and planner without a variation."""

    def compared(result: EvaluationResult) -> dict[str, Any]:
        apart = ("variation", "policies", "oracle", "oracle_episodes")
        return {name: value for name, value in result.settings.items() if name not in apart}

    same = [r for r in others if not r.variation and compared(r) == compared(report)]
    return max(same, key=lambda r: r.written, default=None)


def beside_plain(report: EvaluationResult, others: Sequence[EvaluationResult]) -> str:
    """One line: success and flagged plans under a variation, and without it where that was evaluated."""
    plain = plain_counterpart(report, others)

    def text(result: EvaluationResult) -> str:
        success, novel = result.model.success_mean, result.novel_share
        reached = "success not available" if success is None else f"success {success:.1f} %"
        return reached + (
            ", novelty not measured" if novel is None else f", novelty flags {novel:.1f} % of the plans"
        )

    before = f"{text(plain)} without it" if plain else "not evaluated without it (the same command without --vary)"
    return f"vary {report.variation_text}: {text(report)}; {before}"


def risk_line(report: EvaluationResult) -> str:
    """How well the risk and the remaining distance alone predict failure; empty if not measured."""
    measured = [("risk", report.risk_auroc), ("remaining distance", report.remaining_auroc)]
    texts = [f"{name} {value:.2f}" for name, value in measured if value is not None]
    return f"AUROC of the first plan for failure: {', '.join(texts)}" if texts else ""


class Rate(NamedTuple):
    """Mean success in percent. Of several runs with the ends of its 95 % interval (``success_over_runs``); of one
    with the standard deviation over evaluation seeds, which divides by their number, as the paper's does."""

    mean: float | None
    low: float | None = None
    high: float | None = None
    std: float | None = None

    @property
    def text(self) -> str:
        if self.mean is None:
            return "not available"
        if self.low is not None and self.high is not None:
            return f"{self.mean:.1f} [{self.low:.1f}, {self.high:.1f}]"
        return f"{self.mean:.1f}" + ("" if self.std is None else f" ± {self.std:.1f}")

    @property
    def ends(self) -> tuple[float, ...]:
        """Of the line on its bar; nothing for one run and one seed."""
        if self.low is not None and self.high is not None:
            return self.low, self.high
        return () if self.mean is None or self.std is None else (self.mean - self.std, self.mean + self.std)


def rate(results: Sequence[PolicyResult], leave_out_solved: bool, half: Half = "") -> Rate:
    """Of all episodes or of a half, over runs or over the evaluation seeds of one."""
    known = [rates.mean for r in results if (rates := r.rates(half)).mean is not None]
    if not known:
        return Rate(None)
    if len(results) == 1:
        one = results[0].rates(half)
        return Rate(one.mean, std=one.std if sum(v is not None for v in one.by_seed.values()) > 1 else None)
    return Rate(mean(known), *(success_over_runs(results, leave_out_solved, half) or ()))


def seconds_per_plan(results: Sequence[PolicyResult]) -> float | None:
    """Planning time over plans; None for a policy that does not plan."""
    planned = [(r.planning_seconds, r.plans) for r in results if r.planning_seconds is not None and r.plans]
    return sum(seconds for seconds, _ in planned) / sum(plans for _, plans in planned) if planned else None


def success_row(
    name: str, where: str, results: Sequence[PolicyResult], leave_out_solved: bool, shares: Sequence[float] = ()
) -> dict[str, Any]:
    """shares: of the oracle, in percent, for each run that is compared with one."""
    rates: dict[Half, Rate] = {half: rate(results, leave_out_solved, half) for half in ("", *HALVES)}
    every = rates[""]
    return {
        "policy": name,
        "condition": where,
        "success_percent": _round(every.mean),
        "low": _round(every.low),
        "high": _round(every.high),
        "std": _round(every.std),
        "std_over": "evaluation seeds" if every.std is not None else None,
        "runs": len(results),
        "episodes": sum(r.count for r in results),
        "solved_at_start_percent": round(mean(r.solved_at_start for r in results), 2),
        **{
            f"success_{half}_{what}": _round(getattr(rates[half], "mean" if what == "percent" else what))
            for what in ("percent", "low", "high", "std")
            for half in HALVES
        },
        "seconds_per_plan": _round(seconds_per_plan(results), 4),
        "of_oracle_percent": _round(mean(shares) if shares else None),
    }


def row_rate(row: dict[str, Any], half: Half = "") -> Rate:
    """Of a row of :func:`success_row`, or of the same row read from a CSV file, which may be older."""
    start = f"success_{half}_" if half else ""
    percent = row[f"success_{half}_percent" if half else "success_percent"]
    return Rate(percent, *(row.get(f"{start}{what}") for what in ("low", "high", "std")))


def _round(value: float | None, digits: int = 2) -> float | None:
    return None if value is None else round(value, digits)


def _cells(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """One line per policy, with its number of episodes; one column per condition."""
    conditions = list(dict.fromkeys(r["condition"] for r in rows))
    found = {(r["policy"], r["condition"]): r for r in rows}
    lines = []
    for policy in dict.fromkeys(r["policy"] for r in rows):
        counts = dict.fromkeys(r["episodes"] for r in rows if r["policy"] == policy)
        cells = [policy, ", ".join(map(str, counts))]
        for where in conditions:
            row = found.get((policy, where))
            if row is None or row["success_percent"] is None:
                cells.append("–")
                continue
            share = row.get("of_oracle_percent")
            of_oracle = "" if share is None else f" ({share:.0f} % of the oracle's)"
            number, _, rest = row_rate(row).text.partition(" ")
            cells.append(f"{number} %{rest and ' '}{rest}{of_oracle}")
        lines.append(cells)
    solved = ["already solved at the start", ""]
    solved += [
        f"{next(r for r in rows if r['condition'] == c)['solved_at_start_percent']:.1f} %" for c in conditions
    ]
    return ["success", "episodes", *conditions], [*lines, solved]


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A table of :func:`success_rows`, or of the same rows read from a CSV file."""
    header, lines = _cells(rows)
    text = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(text + ["| " + " | ".join(line) + " |" for line in lines]) + "\n"


def print_results(reports: Sequence[EvaluationResult]) -> None:
    rows = success_rows(reports)
    header, lines = _cells(rows)
    halves = list(HALVES) if len({r["condition"] for r in rows}) == 1 else []
    table = Table(*header, *(HALVES[half] for half in halves))
    for line in lines[:-1]:
        row = next(r for r in rows if r["policy"] == line[0])
        shares = [row[f"success_{half}_percent"] for half in halves]
        table.add_row(*line, *("–" if share is None else f"{share:.1f} %" for share in shares))
    table.add_section()
    table.add_row(*lines[-1], style="dim")
    if len(header) - 2 > MOST_COLUMNS:
        table = Table("condition", *(line[0] for line in lines))
        for condition_name, *cells in zip(header[2:], *(line[2:] for line in lines), strict=True):
            table.add_row(condition_name, *cells)
    if any(row["std"] is not None or row["low"] is not None for row in rows):
        table.caption = SPREADS
    console = Console()
    console.print(table)
    if errors := sum(result.errors for r in reports for result in r.policies.values()):
        console.print(
            f"{errors} episodes ended with an environment error (see their field `error`) and count as failed."
        )


def write_csv(reports: Sequence[EvaluationResult], path: Path) -> None:
    rows = success_rows(reports)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
