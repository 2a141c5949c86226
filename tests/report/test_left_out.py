"""A method that was not run is a row that says why, and changes no other row."""

import csv

from made_up import make_run

from atlas_wm.cli.app import main
from atlas_wm.report.runs import read_study
from atlas_wm.report.success import main_section

HUB = "needs model.safetensors of timm/vit_small_patch14_dinov2.lvd142m"


def test_it_stands_below_the_methods_of_every_condition(tmp_path, without_figures):
    runs = [make_run(tmp_path / method, method) for method in ("lewm", "atlas")]
    plain = read_study(runs)
    before = main_section(plain).blocks[-1]
    main(
        ["report", *map(str, runs), "--out", str(tmp_path / "out"), "--left-out", f"dino-wm={HUB}", "mine:<b>MINE"]
    )
    plain.left_out = {"dino-wm": HUB}
    after = main_section(plain).blocks[-1]
    for table in (before, after):
        assert {table.rows[row][1] for row, _ in table.best} == {"ATLAS"}
    assert [row for row in after.rows if row[1] != "DINO-WM"] == before.rows
    first = [row[1] for row in after.rows[: len(after.rows) // 2]]
    assert first[:3] == ["LeWM", "ATLAS", "DINO-WM"] and first[3] == "Random actions"
    left_out = [row for row in after.rows if row[1] == "DINO-WM"]
    assert {row[2] for row in left_out} == {HUB} and {cell for row in left_out for cell in row[3:]} == {"–"}
    assert (after.header, after.note) == (before.header, before.note)
    rows = list(csv.DictReader((tmp_path / "out/tables/success.csv").open()))
    told = {(row["policy"], row["left_out"]) for row in rows if row["left_out"]}
    assert told == {("DINO-WM", HUB), ("<b>MINE", "not run")}
    assert {row["success_percent"] for row in rows if row["left_out"]} == {""}
    page = (tmp_path / "out/index.html").read_text()
    assert page.count(f">{HUB}<") == 2 and "<b>MINE" not in page
    assert r"vit\_small\_patch14" in (tmp_path / "out/tables/success.tex").read_text()
