"""Ways to plan: the same models and episodes with another cost, start or rate of replanning."""

from collections.abc import Sequence
from functools import partial
from statistics import mean
from typing import Any, NamedTuple

from matplotlib.axes import Axes

from atlas_wm.plan_config import COST_KINDS, PlanConfig
from atlas_wm.report import captions
from atlas_wm.report.intervals import paired, success_interval
from atlas_wm.report.naming import PARTS, REPLAY
from atlas_wm.report.page_table import Table
from atlas_wm.report.runs import Group, Run, Study
from atlas_wm.report.section import Section, per_task
from atlas_wm.report.style import ALPHAS, Bar, Estimate, Figure, Panel, bars, bars_height
from atlas_wm.report.table import rate, references, row_rate, seconds_per_plan
from atlas_wm.runs.results import EvaluationResult, PolicyResult

HEADER = ["Offset", "Plan", "Success, %", "Against the first, points", "Won, lost", "Of replayed actions, %"]
HEADER += ["Steps", "ms per plan", "Episodes"]


class Way(NamedTuple):
    name: str
    by_run: dict[str, EvaluationResult]  # of one group

    @property
    def results(self) -> list[EvaluationResult]:
        return list(self.by_run.values())


def way_name(plan: PlanConfig) -> str:
    if not plan.replanning:
        return "terminal (the paper's)"
    parts = [plan.cost, *([f"replanned every {plan.execute}"] if plan.execute != plan.horizon else [])]
    parts += [plan.start] if plan.start != "zero" else []
    return ", ".join([*parts, *([plan.solver] if plan.solver != "cem" else [])])


def ways_of(group: Group) -> dict[str, list[Way]]:
    """By the condition without its plan, where there are several plans: all of them, the paper's or the simplest
    first."""
    found: dict[str, dict[str, Way]] = {}
    for run in group.runs:
        for one in run.evaluations.values():
            result = one.result
            if not result.variation and not result.weights:
                ways = found.setdefault(_episodes(run, result), {})
                name = way_name(result.plan)
                ways.setdefault(name, Way(name, {})).by_run[run.name] = result
    return {
        title: sorted(ways.values(), key=lambda way: _order(way.results[0].plan))
        for title, ways in sorted(found.items(), key=lambda item: _offset(item[1]))
        if len(ways) > 1
    }


def compared_ways(group: Group) -> list[EvaluationResult]:
    """Evaluations that this section compares with another one, which the main section shows."""
    return [result for ways in ways_of(group).values() for way in ways[1:] for result in way.results]


def ways_section(study: Study) -> Section:
    """Empty where every condition was planned in one way."""
    section = Section("ways", "Ways to plan", "Does the same model reach more goals with another way to plan?")
    panels: list[Panel] = []
    tables: list[Table] = []
    for group in study.groups:
        compared = ways_of(group)
        for title, ways in compared.items():
            draw = partial(_draw, group=group, ways=ways)
            name = f"{per_task(group.label, group.task, study)}, {title}"
            panels.append(Panel(name, draw, bars_height(len(ways)) + 0.3))
        if compared:
            tables.append(_table(group, compared, study, len(tables)))
    if panels:
        section.blocks += [Figure("ways", "Success of every way to plan", panels, captions.WAYS, 3), *tables]
    return section


def _episodes(run: Run, result: EvaluationResult) -> str:
    """Which episodes, as text: those of one condition are the same for all plans."""
    protocol = result.protocol
    rest = [", without episodes solved at the start"] if protocol.leave_out_solved else []
    rest += [f", task {result.task}"] if result.task != result.trained_task else []
    rest += [f", data {result.data.hash}"] if result.data.hash != (run.data_hash or result.data.hash) else []
    return f"offset {protocol.offset}, budget {protocol.budget}, {PARTS[protocol.part]}{''.join(rest)}"


def _offset(ways: dict[str, Way]) -> tuple[int, int]:
    protocol = next(iter(ways.values())).results[0].protocol
    return protocol.offset, protocol.steps


def _order(plan: PlanConfig) -> tuple[bool, int, str, int]:
    known = COST_KINDS.index(plan.cost) if plan.cost in COST_KINDS else len(COST_KINDS)
    return plan.replanning != "", known, "" if plan.start == "zero" else plan.start, plan.execute


def _draw(axes: Axes, group: Group, ways: Sequence[Way]) -> None:
    rows = []
    for way in ways:
        value, low, high = success_interval(way.results)
        estimate = None if value is None else Estimate(value, low, high)
        text = "not available" if value is None else f"{value:.1f}"
        rows.append(Bar(way.name, estimate, group.colour, ALPHAS[min(group.variant, 2)], text))
    bars(axes, rows, top=100)
    axes.set(xticks=[0, 25, 50, 75, 100], xlabel="success, %")


def _table(group: Group, compared: dict[str, list[Way]], study: Study, number: int) -> Table:
    data: list[dict[str, Any]] = []
    best: set[tuple[int, str]] = set()
    for title, ways in compared.items():
        replay = references([result for way in ways for result in way.results]).get(REPLAY)
        records = [_record(group, title, way, ways[0], replay) for way in ways]
        top = max((r["success_percent"] for r in records if r["success_percent"] is not None), default=None)
        best |= {(len(data) + i, "Success, %") for i, r in enumerate(records) if r["success_percent"] == top}
        data += records
    title = per_task(f"{group.label}: every way to plan", group.task, study)
    spreads = captions.spreads([row_rate(record) for record in data])
    note = (
        "Against the first: the difference in success to the first plan of the offset, on the episodes and runs "
        "that both have, with a 95 % interval: of a bootstrap over demonstrations, with several runs for other "
        "training seeds, too. Steps: a failure counts as the whole budget. ms per plan: planning time over plans, "
        "as they came together in the evaluation."
    )
    return Table(
        f"ways-{number + 1}",
        title,
        HEADER,
        [_cells(record) for record in data],
        data,
        f"{spreads} {note}".strip(),
        best=best,
    )


def _record(group: Group, title: str, way: Way, first: Way, replay: PolicyResult | None) -> dict[str, Any]:
    policies, protocol = [result.model for result in way.results], way.results[0].protocol
    success = rate(policies, protocol.leave_out_solved)
    change = None if way is first else paired(way.by_run, first.by_run)
    shares = [p.share_of(replay, protocol.leave_out_solved) for p in policies] if replay else []
    known = [share for share in shares if share is not None]
    seconds = seconds_per_plan(policies)
    return {
        "task": group.task,
        "runs": group.label,
        "condition": title,
        "offset": protocol.offset,
        "plan": way.name,
        "success_percent": success.mean,
        "low": success.low,
        "high": success.high,
        "std": success.std,
        "difference": change and change.points,
        "difference_low": change and change.low,
        "difference_high": change and change.high,
        "difference_seeds_low": change and change.seeds_low,
        "difference_seeds_high": change and change.seeds_high,
        "won": change and change.won,
        "lost": change and change.lost,
        "of_replayed_percent": mean(known) if known else None,
        "steps": mean(policy.steps for policy in policies),
        "ms_per_plan": None if seconds is None else 1000 * seconds,
        "episodes": sum(policy.count for policy in policies),
    }


def _cells(record: dict[str, Any]) -> list[str]:
    def number(key: str, digits: int = 1, sign: str = "") -> str:
        return "–" if record[key] is None else f"{record[key]:{sign}.{digits}f}"

    change = "–"
    if record["difference"] is not None:
        over = "difference_seeds" if record["difference_seeds_low"] is not None else "difference"
        low, high = number(f"{over}_low", sign="+"), number(f"{over}_high", sign="+")
        change = f"{number('difference', sign='+')} [{low}, {high}]"
    return [
        str(record["offset"]),
        record["plan"],
        row_rate(record).text,
        change,
        "–" if record["won"] is None else f"{record['won']}, {record['lost']}",
        number("of_replayed_percent"),
        number("steps"),
        number("ms_per_plan"),
        str(record["episodes"]),
    ]
