"""Success rates as a table: on the terminal, as Markdown and as CSV."""

import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

from rich.console import Console
from rich.table import Table

from atlas_wm.report.naming import method_name

Report = dict[str, Any]  # one evaluation/*.json
HALVES = {"id": "ID half", "ood": "OOD half"}  # by novelty of the demonstration


def condition(report: Report) -> str:
    protocol = report["protocol"]
    return f"offset {protocol['offset']}, budget {protocol['budget']}"


def success_rows(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """A row for each policy and condition: success over all runs and evaluation seeds, in percent.

    The spread is over runs where there are several (training seeds), else over evaluation seeds.
    """
    rows: list[dict[str, Any]] = []
    for where in dict.fromkeys(condition(r) for r in reports):
        here = [r for r in reports if condition(r) == where]
        floors = [r["random"] for r in here if "random" in r]
        if floors:
            rows.append(success_row("Random actions", where, floors[:1]))  # the same episodes for every run
        for method in dict.fromkeys(r["method"] for r in here):
            rows.append(
                success_row(method_name(method), where, [r["model"] for r in here if r["method"] == method])
            )
    return rows


def rate(results: Sequence[dict[str, Any]], half: str = "") -> tuple[float | None, float | None]:
    """Success in percent and its spread, of all episodes or of a half: over runs, or over seeds of one run."""
    key = f"success_{half}" if half else "success"
    several = [r.get(f"{key}_mean") for r in results]
    rates = [
        v for v in (several if len(results) > 1 else results[0].get(f"{key}_by_seed", {}).values()) if v is not None
    ]
    return (mean(rates) if rates else None), (pstdev(rates) if len(rates) > 1 else None)


def success_row(name: str, where: str, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    success, spread = rate(results)
    over = "runs" if len(results) > 1 else "evaluation seeds"
    plans = sum(r["plans"] for r in results)
    return {
        "policy": name,
        "condition": where,
        "success_percent": _round(success),
        "std": _round(spread),
        "std_over": over if spread is not None else None,
        "episodes": sum(len(e) for r in results for e in r["episodes"].values()),
        "solved_at_start_percent": round(mean(r["solved_at_start"] for r in results), 2),
        **{f"success_{half}_percent": _round(rate(results, half)[0]) for half in HALVES},
        **{f"success_{half}_std": _round(rate(results, half)[1]) for half in HALVES},
        "seconds_per_plan": round(sum(r["seconds"] for r in results) / plans, 4) if plans else None,
    }


def _round(value: float | None, digits: int = 2) -> float | None:
    return None if value is None else round(value, digits)


def _cells(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """A line for each policy, a column for each condition."""
    conditions = list(dict.fromkeys(r["condition"] for r in rows))
    found = {(r["policy"], r["condition"]): r for r in rows}
    lines = []
    for policy in dict.fromkeys(r["policy"] for r in rows):
        cells = [policy]
        for where in conditions:
            row = found.get((policy, where))
            spread = f" ± {row['std']:.1f}" if row and row["std"] is not None else ""
            cells.append(f"{row['success_percent']:.1f} %{spread}" if row else "–")
        lines.append(cells)
    solved = ["already solved at the start"]
    solved += [
        f"{next(r for r in rows if r['condition'] == c)['solved_at_start_percent']:.1f} %" for c in conditions
    ]
    return ["success", *conditions], [*lines, solved]


def markdown(reports: Sequence[Report]) -> str:
    header, lines = _cells(success_rows(reports))
    text = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(text + ["| " + " | ".join(line) + " |" for line in lines]) + "\n"


def print_results(reports: Sequence[Report]) -> None:
    header, lines = _cells(success_rows(reports))
    rows = success_rows(reports)
    halves = list(HALVES) if len({r["condition"] for r in rows}) == 1 else []
    table = Table(*header, *(HALVES[half] for half in halves))
    for line in lines[:-1]:
        row = next(r for r in rows if r["policy"] == line[0])
        shares = [row[f"success_{half}_percent"] for half in halves]
        table.add_row(*line, *("–" if share is None else f"{share:.1f} %" for share in shares))
    table.add_section()
    table.add_row(*lines[-1], style="dim")
    console = Console()
    console.print(table)
    if errors := sum(r[policy].get("errors", 0) for r in reports for policy in ("model", "random") if policy in r):
        console.print(f"{errors} episodes ended with an error of the environment (field error of their records):")
        console.print("they count as failed.")


def write_csv(reports: Sequence[Report], path: Path) -> None:
    rows = success_rows(reports)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
