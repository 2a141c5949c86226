"""Tables in the docs are those of the files they come from: `<!-- FILE -->` above a table names its CSV file."""

import csv
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

from atlas_wm.report.intervals import with_seeds
from atlas_wm.report.table import markdown

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
TABLE = re.compile(r"<!-- (docs/results/\S+\.csv) -->\n\n((?:\|.*\n)+)")
FOUND = [(page, *match) for page in PAGES for match in TABLE.findall(page.read_text())]
WORDS = {"policy", "condition", "std_over"}


def rows_of(path: Path) -> list[dict]:
    with path.open(newline="") as file:
        return [
            {k: v if k in WORDS else (float(v) if "." in v else int(v)) if v else None for k, v in row.items()}
            for row in csv.DictReader(file)
        ]


@pytest.mark.parametrize(
    ("page", "source", "table"), FOUND, ids=[f"{page.name}-{Path(source).name}" for page, source, _ in FOUND]
)
def test_a_table_is_the_one_of_its_file(page, source, table):
    assert table == markdown(rows_of(ROOT / source))


def test_the_tables_of_the_demo_name_their_file():
    assert {page.name for page, *_ in FOUND} >= {"README.md", "demo.md"}


def test_the_table_of_scores_is_the_one_of_its_file():
    """The note leaves rows out, and changes none."""
    tool = [sys.executable, str(ROOT / "tools/score_table.py"), "--csv", str(ROOT / "docs/results/score.csv")]
    printed = subprocess.run(tool, capture_output=True, text=True, timeout=120, check=True).stdout.splitlines()
    note = (ROOT / "docs/notes/score.md").read_text()
    rows = [line for line in note.splitlines() if line.count("|") == printed[0].count("|")]
    assert len(rows) > 20 and set(rows) <= set(printed)


def test_the_overview_of_the_results_has_no_number_of_its_own():
    """Each is on a page that it links to, together with its interval or its ±."""
    overview = ROOT / "docs/results.md"
    linked = {overview.parent / path for path in re.findall(r"\]\(([\w/-]+\.md)", overview.read_text())}
    page, pages = overview.read_text(), "\n".join(page.read_text() for page in linked)
    found, known = (set(re.findall(r"\d+\.\d+", text)) for text in (page, pages))
    assert len(found) > 40 and found <= known
    found, known = sure_numbers(page), sure_numbers(pages)
    assert len(found) > 15 and found <= known, found - known


def sure_numbers(text: str) -> set[str]:
    """``6.0 [−4.4, 16.4]`` and ``63.4 ± 1.7``, without units. Some tables have the interval for other seeds in a
    column of its own: ``| 6.0 [4.0, 8.3] | 39, 3 | 2.5 to 10.5 | −4.4 to 16.4 |``."""
    number = r"−?\d+\.\d+"
    plain = re.sub(r" (points|%)|[*+]", "", re.sub(r"\s+", " ", text))
    apart = rf"({number}) \[[^]]*\] \| \d+, \d+ \|(?: [^|]+ \|)? ({number}) to ({number}) \|"
    joined = re.sub(apart, r"\g<0> \1 [\2, \3]", plain)
    return set(re.findall(rf"{number} \[{number}, {number}\]|{number} ± {number}", joined))


def test_the_drawn_differences_are_those_of_the_runs_and_of_the_pages():
    pages = "\n".join(page.read_text() for page in (ROOT / "docs/results").glob("*.md"))
    for row in read("docs/results/differences.csv"):
        runs = read(row["study"].replace(".toml", ".csv"))

        def success(method: str, recipe: str, runs: list[dict] = runs, row: dict = row) -> float:
            of = [r for r in runs if (r["method"], r["recipe"]) == (method, recipe)]
            return mean(
                float(r["success"]) for r in of if all(r.get(k, row[k]) == row[k] for k in ("cost", "start"))
            )

        assert success(row["method"], "demo") - success(row["less"], row["less_recipe"]) == pytest.approx(
            float(row["points"]), abs=0.051
        )
        columns = ("points", "low", "high", "seeds_low", "seeds_high")
        *numbers, low, high = (f"{float(row[name]):+.1f}".replace("-", "−") for name in columns)
        shown = "{} [{}, {}] | {}, {} |".format(*numbers, row["won"], row["lost"])
        assert shown in pages
        if "fair-demo" in row["study"]:
            assert re.search(rf"{re.escape(shown)}[^|]*\| {re.escape(f'{low} to {high}')} \|", pages)


def test_the_intervals_for_other_seeds_are_those_of_the_runs():
    for row in read("docs/results/differences.csv"):
        runs = read(row["study"].replace(".toml", ".csv"))
        by_seed: dict[tuple[str, str], dict[str, float]] = {}
        for run in runs:
            if all(run.get(k, row[k]) == row[k] for k in ("cost", "start")):
                by_seed.setdefault((run["method"], run["recipe"]), {})[run["seed"]] = float(run["success"])
        first, second = by_seed[row["method"], "demo"], by_seed[row["less"], row["less_recipe"]]
        points, low, high = (float(row[name]) for name in ("points", "low", "high"))
        expected = with_seeds(points, [first[seed] - second[seed] for seed in first], low, high)
        assert (float(row["seeds_low"]), float(row["seeds_high"])) == pytest.approx(expected, abs=0.051)


def read(name: str) -> list[dict]:
    with (ROOT / name).open(newline="") as file:
        return list(csv.DictReader(file))
