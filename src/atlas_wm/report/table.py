"""Success rates as a table: on the terminal, as Markdown and as CSV."""

import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

from rich.console import Console
from rich.table import Table

Report = dict[str, Any]  # one evaluation/*.json
HALVES = {"id": "ID half", "ood": "OOD half"}  # by novelty of the demonstration
NAMES = {
    "atlas": "ATLAS",
    "lewm": "LeWM",
    "lewm+ood": "LeWM + OOD-recovery",
    "wemreg": "WEMReg alone",
    "pldm": "PLDM",
    "dino-wm": "DINO-WM",
    "fast-wm": "FAST-WM",
}


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
            rows.append(_row("Random actions", where, floors[:1]))  # the same episodes for every run
        for method in dict.fromkeys(r["method"] for r in here):
            rows.append(_row(NAMES.get(method, method), where, [r["model"] for r in here if r["method"] == method]))
    return rows


def _row(name: str, where: str, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if len(results) > 1:
        rates, spread_over = [r["success_mean"] for r in results], "runs"
    else:
        rates, spread_over = list(results[0]["success_by_seed"].values()), "evaluation seeds"
    plans = sum(r["plans"] for r in results)
    halves = {f"success_{half}_percent": _mean([r.get(f"success_{half}_mean") for r in results]) for half in HALVES}
    return {
        "policy": name,
        "condition": where,
        "success_percent": round(mean(rates), 2),
        "std": round(pstdev(rates), 2) if len(rates) > 1 else None,
        "std_over": spread_over if len(rates) > 1 else None,
        "episodes": sum(len(e) for r in results for e in r["episodes"].values()),
        "solved_at_start_percent": round(mean(r["solved_at_start"] for r in results), 2),
        **halves,
        "seconds_per_plan": round(sum(r["seconds"] for r in results) / plans, 4),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return round(mean(known), 2) if known else None


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
    Console().print(table)


def write_csv(reports: Sequence[Report], path: Path) -> None:
    rows = success_rows(reports)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
