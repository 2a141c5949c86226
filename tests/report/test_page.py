"""The report page: everything that is in the files, nothing that is not."""

import csv
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_up import REPRESENTATIONS, change, make_run
from PIL import Image

from atlas_wm.cli.app import main
from atlas_wm.diagnose.catalog import DIAGNOSTICS
from atlas_wm.errors import UserError
from atlas_wm.report.page import write_report
from atlas_wm.report.runs import read_study
from atlas_wm.report.section import data_warnings
from atlas_wm.report.style import Figure
from atlas_wm.report.success import REFERENCES
from made_up_results import episode, evaluation, policy

SECTIONS = {"summary", "success", "differences", "ablation", *DIAGNOSTICS, "score", "training", "settings"}
FIGURES = {"success", "differences", *DIAGNOSTICS, "decomposition", "score", "training"}


class Page(HTMLParser):
    """What a reader sees: texts, and the addresses of whatever is loaded or linked."""

    def __init__(self, path: Path):
        super().__init__()
        self.sections: dict[str, str] = {}
        self.addresses: list[str] = []
        self._where, self._hidden = "", False
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        if tag == "section":
            self._where = named["id"]
            self.sections[self._where] = ""
        self._hidden = tag in ("style", "script")
        self.addresses += [v for k, v in attrs if k in ("src", "href", "xlink:href", "action", "data", "poster")]

    def handle_data(self, data):
        if self._where and not self._hidden:
            self.sections[self._where] += " " + " ".join(data.split())


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("four")
    return [make_run(folder / method, method) for method in ("lewm", "lewm+ood", "wemreg", "atlas")]


@pytest.fixture(scope="module")
def page(four) -> Page:
    return Page(write_report(four))


def result(run: Path, what: str):
    return json.loads((run / f"diagnostics/{what}.json").read_text())["result"]


@pytest.mark.slow
def test_every_section_and_file_is_there(four, page):
    assert set(page.sections) == SECTIONS
    report = four[0].parent / "report"  # beside the runs
    for ending in ("png", "svg"):
        assert {p.stem for p in (report / "figures").glob(f"*.{ending}")} == FIGURES
    assert all(Image.open(p).size[0] > 400 for p in (report / "figures").glob("*.png"))
    tables = {p.stem for p in (report / "tables").glob("*.csv")}
    assert tables == {p.stem for p in (report / "tables").glob("*.tex")}
    assert {"success", "ablation-tworoom", "probe", "settings-by-run", "settings-shared"} <= tables


def test_like_runs_raise_no_warning(page):
    assert not [name for name, text in page.sections.items() if "Warning." in text]


def test_the_page_needs_no_network(four, page):
    for address in page.addresses:
        local = (four[0].parent / "report" / address).exists() if not address.startswith(("#", "data:")) else True
        assert local, address
    assert "@import" not in (text := (four[0].parent / "report/index.html").read_text())
    assert not re.search(r"url\((?!#|['\"]?data:)", text)


def test_the_numbers_are_those_of_the_files(four, page):
    for run in four:
        evaluation = json.loads((run / "evaluation/all_offset50_budget75.json").read_text())["model"]
        for half in ("", "_id", "_ood"):
            mean, std = evaluation[f"success{half}_mean"], evaluation[f"success{half}_std"]
            assert f"{mean:.1f} ± {std:.1f}" in page.sections["success"], run.name
        probe = result(run, "probe")["representations"]
        for name in REPRESENTATIONS:
            assert f"{probe[name]['auroc']:.2f}" in page.sections["probe"]
            assert f"[{probe[name]['low']:.2f}, {probe[name]['high']:.2f}]" in page.sections["probe"]
        for of_one in result(run, "state")["representations"].values():
            linear, mlp = of_one["linear"]["agent"], of_one["mlp"]["agent"]
            assert f"{linear['r2']:.2f} / {mlp['r2']:.2f}, {mlp['error']:.3g} px" in page.sections["state"]
        assert f"{result(run, 'rollout')['median'][-1]:.3f}" in page.sections["rollout"]
        assert f"{result(run, 'relational')['maximum']['median']:.3f}" in page.sections["relational"]
        assert f"{result(run, 'regret')['means']['relational']:.3f}" in page.sections["regret"]
        assert f"{result(run, 'geometry')['rank_correlation']:.2f}" in page.sections["geometry"]
        assert f"{result(run, 'marginal')['effective_rank']:.1f}" in page.sections["marginal"]
    assert "30b00272c8bbb44d" in page.sections["settings"] and "torch 2.15.0" in page.sections["settings"]
    assert "SIGReg 58.0 / 71.8, WEMReg 73.9 / 74.0." in page.sections["ablation"]  # of the paper
    assert "not reached in 75" in page.sections["cases"] and "reached in 48" in page.sections["cases"]


def test_csv_holds_plain_numbers_and_latex_is_balanced(four, page):
    tables = four[0].parent / "report/tables"
    rows = list(csv.DictReader((tables / "probe.csv").open()))
    shown = {(r["method"], r["representation"]): float(r["auroc"]) for r in rows}
    assert shown["ATLAS", "z"] == result(four[-1], "probe")["representations"]["z"]["auroc"]
    for path in tables.glob("*.tex"):
        text = path.read_text()
        assert text.count(r"\toprule") == text.count(r"\bottomrule") == 1
        bare = re.sub(
            r"\\[{}]|\$[^$]*\$", "", text.replace(f"tab:{path.stem}", "")
        )  # no mathematics, no printed braces
        assert bare.count("{") == bare.count("}")
        assert not re.search(r"(?<!\\)[%#_]", bare), path.name
        columns = len(re.search(r"\\begin\{tabular\}\{(\w+)\}", text).group(1))
        body = [line for line in text.splitlines() if line.endswith(r"\\")]
        assert {len(re.findall(r"(?<!\\)&", line)) for line in body} == {columns - 1}


def test_training_seeds_are_one_method_and_say_how_many(tmp_path, without_figures):
    runs = [make_run(tmp_path / f"atlas-{seed}", "atlas", seed=seed, seeds=(42,)) for seed in (1, 2, 3)]
    page = Page(write_report(runs, tmp_path / "out"))
    rates = [
        json.loads((r / "evaluation/all_offset50_budget75.json").read_text())["model"]["success_mean"] for r in runs
    ]
    assert "ATLAS (3 runs)" in page.sections["summary"]
    assert f"{sum(rates) / 3:.1f} %" in page.sections["summary"]


def test_page_csv_and_latex_have_the_same_intervals(tmp_path, without_figures):
    """Of three runs with brackets, of one with its spread over evaluation seeds; the floor has no training seed."""
    runs = [make_run(tmp_path / f"atlas-{seed}", "atlas", seed=seed) for seed in (1, 2, 3)]
    page = Page(write_report([*runs, make_run(tmp_path / "lewm", "lewm")], tmp_path / "out"))
    tables, texts = tmp_path / "out/tables", set()
    for row in csv.DictReader((tables / "success.csv").open()):
        several = row["policy"] == "ATLAS (3 runs)"
        assert row["runs"] == ("3" if several else "1")
        assert bool(row["std"]) != several == bool(row["low"])
        for half in ("", "success_id_", "success_ood_"):
            value, low, high, std = (
                float(row[name] or "nan")
                for name in (f"{half or 'success_'}percent", f"{half}low", f"{half}high", f"{half}std")
            )
            text = f"{value:.1f} [{low:.1f}, {high:.1f}]" if several else f"{value:.1f} ± {std:.1f}"
            assert text in page.sections["success"], text
            texts.add(text.replace("±", r"$\pm$"))
    latex = (tables / "success.tex").read_text()
    cells = {cell.strip() for line in latex.splitlines() if line.endswith(r"\\") for cell in line[:-2].split("&")}
    assert texts <= cells
    (of_three,) = {line for line in latex.splitlines() if "offset 50" in line and "ATLAS" in line}
    assert of_three.split("&")[5].strip() == "3"
    assert "Brackets: 95 \\% interval of the mean over n runs" in latex
    assert "for other training seeds" in page.sections["summary"]
    alone = write_report(runs[:1], tmp_path / "alone").parent / "tables/success.tex"
    assert "for other training seeds" not in Page(alone.parent.parent / "index.html").sections["summary"]
    assert "interval" not in alone.read_text() and "nothing about other training seeds" in alone.read_text()


def test_the_floor_and_the_ceiling_stand_beside_the_methods(four, page):
    for section in ("summary", "success"):
        assert "Random actions" in page.sections[section] and "Replayed actions" in page.sections[section]
    rows = list(csv.DictReader((four[0].parent / "report/tables/success.csv").open()))
    assert {r["seconds_per_plan"] for r in rows if r["policy"] in ("Random actions", "Replayed actions")} == {""}
    assert {r["seconds_per_plan"] for r in rows if r["policy"] == "ATLAS"} == {"0.5"}


def test_of_several_evaluations_the_page_shows_the_most_complete_and_says_which(tmp_path, without_figures):
    run = make_run(tmp_path / "run", "atlas")
    (large,) = run.glob("evaluation/*offset50*.json")
    few = {7: [episode(success=False)]}
    small = evaluation(policy(few), data=read_study([run]).runs[0].data_hash, written="2030-01-01T00:00:00+00:00")
    small.write(run / "evaluation", {})
    elsewhere = evaluation(policy({7: [episode()] * 9}), data="another")
    elsewhere.write(run / "evaluation", {})
    page = Page(write_report([run]))
    mean = json.loads(large.read_text())["model"]["success_mean"]
    assert f"{mean:.1f}" in page.sections["summary"]
    said = f"the page shows the most complete, {large.name} (4 episodes for 5 seeds, CEM 300×30×5"
    assert said in page.sections["success"] and f"Not shown: {small.name}.json." in page.sections["success"]
    assert "offset 50, budget 75, all episodes, data tworoom.lance (another)" in page.sections["success"]
    assert large.name in page.sections["settings"] and small.name not in page.sections["settings"]


def test_runs_evaluated_on_one_dataset_are_one_condition_whoever_was_trained_on_it(tmp_path):
    one, other = make_run(tmp_path / "one", "atlas"), make_run(tmp_path / "other", "lewm", data="0123456789abcdef")
    hash_ = read_study([one]).runs[0].data_hash
    evaluation(policy({7: [episode()] * 9}), data=hash_, method="lewm").write(other / "evaluation", {})
    study = read_study([one, other])
    shared = [name for name in study.runs[0].evaluations if name in study.runs[1].evaluations]
    assert shared == [f"all_offset50_budget75 on {hash_}"]
    assert "all_offset50_budget75 on 0123456789abcdef" in study.runs[1].evaluations


def test_missing_damaged_and_null_pieces_are_named(tmp_path, without_figure_files):
    good, poor = make_run(tmp_path / "good", "atlas"), make_run(tmp_path / "poor", "lewm")
    (poor / "diagnostics/rollout.json").unlink()
    (poor / "diagnostics/marginal.json").write_text('{"what": "marginal", ')
    change(poor / "diagnostics/relational.json", "result", "rmse", value=3)  # JSON, but not what it should be
    for name in REPRESENTATIONS:
        change(poor / "diagnostics/probe.json", "result", "representations", name, value={"auroc": None})
    change(poor / "diagnostics/probe.json", "result", "note", value="all episodes had the same outcome")
    change(poor / "diagnostics/regret.json", "result", "means", "prediction", value=None)
    page = Page(write_report([good, poor]))
    assert f"atlas diagnose {poor} --what rollout" in page.sections["rollout"]
    assert "The file is damaged: poor" in page.sections["marginal"]
    assert f"{poor / 'diagnostics/marginal.json'} cannot be read" in page.sections["summary"]
    assert "the files of poor cannot be drawn" in page.sections["relational"]
    assert f"{result(good, 'relational')['rmse']['median']:.3f}" in page.sections["relational"]
    assert (
        "not available" in page.sections["probe"]
        and "poor: all episodes had the same outcome" in page.sections["probe"]
    )
    assert "sum not available" in page.sections["regret"]


def test_runs_on_different_data_or_queries_are_flagged(tmp_path, without_figures):
    runs = [
        make_run(tmp_path / "one", "atlas"),
        make_run(tmp_path / "other", "lewm", data="0123456789abcdef", queries="q2"),
    ]
    page = Page(write_report(runs))
    assert "trained on different datasets" in page.sections["summary"]
    for data, without in (("30b00272c8bbb44d", "other"), ("0123456789abcdef", "one")):
        text = f"offset 50, budget 75, all episodes, data {data}: not measured for {without}."
        assert text in page.sections["success"]
    assert "differences" not in page.sections  # rows of different datasets are different episodes
    assert "different queries, so not comparable: one: q1; other: q2" in page.sections["rollout"]


def test_a_run_that_was_only_trained_still_has_a_page(tmp_path):
    import shutil

    run = make_run(tmp_path / "bare", "my.module:MINE")
    shutil.rmtree(run / "evaluation")
    shutil.rmtree(run / "diagnostics")
    (run / "metrics.csv").unlink()
    page = Page(write_report([run]))
    assert (run / "report/index.html").exists()
    assert "No run has been evaluated" in page.sections["summary"]
    assert f"atlas eval {run}" in page.sections["success"]
    assert "metrics.csv" in page.sections["training"]


def test_the_command_writes_where_it_is_told_and_destroys_nothing(tmp_path, capsys, without_figures):
    run, out = make_run(tmp_path / "run", "atlas"), tmp_path / "out"
    (out / "figures").mkdir(parents=True)
    (out / "figures/mine.png").write_text("keep")
    main(["report", str(run), "--out", str(out)])
    assert str(out / "index.html") in capsys.readouterr().out
    assert (out / "figures/mine.png").read_text() == "keep"
    (out / "index.html").write_text("somebody's page")
    with pytest.raises(UserError, match="not a report"):
        write_report([run], out)
    with pytest.raises(UserError, match="no run folder"):
        write_report([tmp_path / "nowhere"], tmp_path / "new")


def test_the_oracle_stands_beside_the_methods_also_those_it_was_not_run_for(tmp_path, without_figures):
    """One run has an oracle of two of its four episodes."""
    runs = {method: make_run(tmp_path / method, method, seeds=(42,)) for method in ("atlas", "lewm")}
    for method, reached in {"atlas": (0, 3), "lewm": (0, 1, 2)}.items():
        path = runs[method] / "evaluation/all_offset50_budget75.json"
        file = json.loads(path.read_text())
        (one, *_) = file["model"]["episodes"]["42"]
        file["model"]["episodes"]["42"] = [{**one, "row": row, "success": row in reached} for row in range(4)]
        if method == "atlas":
            found = {"42": [{**one, "row": row, "success": True} for row in (0, 2)]}
            oracle = {**file["model"], "success_mean": 100.0, "success_by_seed": {"42": 100.0}, "episodes": found}
            plan = {**file["plan"], "candidates": 50}
            file |= {"oracle": oracle, "oracle_plan": plan, "share_of_oracle": 50.0}
        path.write_text(json.dumps(file))
    section = Page(write_report(list(runs.values()), tmp_path / "page")).sections["success"]
    assert "Oracle planner" in section and "Of the oracle, %" in section
    assert "50 % of the oracle's 100.0 %, over the same 2 episodes (oracle: 50×30×5 with 30 elites; " in section
    rows = list(csv.DictReader((tmp_path / "page/tables/success.csv").open()))
    shares = {r["policy"]: r["of_oracle_percent"] for r in rows if "offset 50" in r["condition"]}
    assert shares == {"ATLAS": "50.0", "LeWM": "100.0", **dict.fromkeys(REFERENCES, "")}
    assert {r["of_oracle_percent"] for r in rows if "offset 25" in r["condition"]} == {""}


def test_a_varied_evaluation_stands_beside_the_plain_one(tmp_path, monkeypatch):
    write = Figure.write  # the files of the other figures take seconds
    monkeypatch.setattr(Figure, "write", lambda self, folder: self.name == "variations" and write(self, folder))
    run = make_run(tmp_path / "run", "atlas", seeds=(42,))
    plain = json.loads((run / "evaluation/all_offset50_budget75.json").read_text())
    (run / "evaluation/all_offset50_budget75.json").write_text(json.dumps({**plain, "novel_plans": 1}))
    varied = {**plain, "variation": {"door.position": [150.0]}, "novel_plans": plain["model"]["plans"]}
    varied["model"] = {**plain["model"], "success_mean": 12.5}
    (run / "evaluation/varied.json").write_text(json.dumps(varied))
    page = Page(write_report([run], tmp_path / "page"))
    assert "budget 75, all episodes, vary door.position=150" in page.sections["success"]
    assert "door.position=150 · success" in page.sections["variations"]
    assert (tmp_path / "page/figures/variations.png").exists()
    (row,) = csv.DictReader((tmp_path / "page/tables/variations.csv").open())
    assert (row["success_percent"], row["novel_plans_percent"]) == ("12.5", "100.0")
    assert float(row["success_plain_percent"]) == plain["model"]["success_mean"]
    assert float(row["novel_plans_plain_percent"]) == 100 / plain["model"]["plans"]


def test_copies_of_a_training_seed_are_told_of(tmp_path):
    runs = [make_run(tmp_path / name, "atlas", seed=seed) for name, seed in (("one", 1), ("copy", 1), ("two", 2))]
    (warning,) = data_warnings(read_study(runs))
    assert "training seed 1: one, copy." in warning.text
    assert data_warnings(read_study([runs[0], runs[2]])) == []


def test_a_dataset_that_all_evaluations_share_is_named_once(tmp_path, without_figures):
    """Such as demonstrations that a study collects for them."""
    runs = [make_run(tmp_path / name, name, data="0123456789abcdef") for name in ("atlas", "lewm")]
    for run in runs:
        for file in (run / "evaluation").glob("*.json"):
            change(file, "data", "hash", value="another")
    (success,) = (Page(write_report(runs)).sections["success"],)
    assert success.count("(another)") == 1 and "TwoRoom: evaluated on tworoom.lance (another), not" in success
    assert "offset 50, budget 75, all episodes" in success and "episodes, data" not in success
