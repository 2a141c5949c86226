"""The figure of varied environments: a row for each variation, with its frame."""

import json
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from made_up import make_run

from atlas_wm.report.intervals import wilson
from atlas_wm.report.page_table import Table
from atlas_wm.report.runs import read_study
from atlas_wm.report.section import Notice
from atlas_wm.report.style import Figure
from atlas_wm.report.success import main_section
from atlas_wm.report.table import risk_line
from atlas_wm.report.variations import variations_section
from atlas_wm.runs.results import EvaluationResult

VARIATIONS = {"agent": {"agent.color": [0.0, 0.0, 255.0]}, "door": {"door.position": [150.0]}}


@pytest.fixture
def run(tmp_path) -> Path:
    """A plain evaluation, and two varied ones in which every episode failed and every plan was flagged."""
    run = make_run(tmp_path / "run", "atlas", seeds=(42,))
    plain = json.loads((run / "evaluation/all_offset50_budget75.json").read_text())
    failed = [{**episode, "success": False} for episode in plain["model"]["episodes"]["42"]]
    varied = {**plain, "model": {**plain["model"], "episodes": {"42": failed}}}
    varied |= {"novel_plans": plain["model"]["plans"], "remaining_auroc": 0.614, "risk_auroc": 0.914}
    for name, variation in VARIATIONS.items():
        (run / f"evaluation/{name}.json").write_text(json.dumps({**varied, "variation": variation}))
        np.savez_compressed(run / f"evaluation/{name}.films.npz", row7=np.full((3, 16, 16, 3), 200, np.uint8))
    return run


def drawn(run: Path) -> tuple[list[str], list[str], int]:
    """Titles, texts and the number of images of the figure's only panel, from the top."""
    (figure,) = (b for b in variations_section(read_study([run])).blocks if isinstance(b, Figure))
    (panel,) = figure.panels
    canvas, axes = plt.subplots()
    panel.draw(axes)
    texts = [text.get_text() for text in axes.texts]
    images = [inset for inset in axes.child_axes if inset.images]
    plt.close(canvas)
    return [panel.title], texts, len(images)


def test_each_variation_is_a_row_below_the_plain_evaluation(run):
    titles, texts, images = drawn(run)
    assert titles == ["ATLAS, offset 50, budget 75, all episodes"]
    assert [text for text in texts if "·" in text] == [
        "plain · success",
        "agent.color=0,0,255 · success",
        "door.position=150 · success",
    ]
    assert texts[-4:] == ["door.position=150 · success", "0 %", "plans flagged", "100 %"]
    assert images == 2  # the plain evaluation has no film
    (table,) = (b for b in variations_section(read_study([run])).blocks if isinstance(b, Table))
    assert table.header[-2:] == ["AUROC of remaining", "AUROC of risk"]
    assert [row[-2:] for row in table.rows] == [["0.61", "0.91"]] * 2
    notes = [b.text for b in main_section(read_study([run])).blocks if isinstance(b, Notice)]
    assert (
        sum("AUROC of the first plan for failure: risk 0.91, remaining distance 0.61" in note for note in notes)
        == 2
    )
    older = EvaluationResult.read(run / "evaluation/door.json")
    assert risk_line(replace(older, risk_auroc=None)).endswith("for failure: remaining distance 0.61")


def test_the_note_on_risk_says_which_numbers_are_of_which_run(tmp_path):
    runs = [make_run(tmp_path / method, method, seeds=(42,)) for method in ("lewm", "atlas")]
    for run, remaining in zip(runs, (0.914, 0.614), strict=True):
        file = run / "evaluation/all_offset50_budget75.json"
        result = json.loads(file.read_text())
        file.write_text(json.dumps(result | {"remaining_auroc": remaining, "risk_auroc": 0.91}))
    notes = [b.text for b in main_section(read_study(runs)).blocks if isinstance(b, Notice)]
    each = "risk 0.91, remaining distance 0.91 (lewm); risk 0.91, remaining distance 0.61 (atlas)."
    assert sum(note.endswith(f": AUROC of the first plan for failure: {each}") for note in notes) == 1


def test_no_variation_no_section(run):
    for name in VARIATIONS:
        (run / f"evaluation/{name}.json").unlink()
    assert not variations_section(read_study([run])).blocks


@pytest.mark.parametrize("film", [b"PK no film", np.zeros((3, 4, 4), np.uint8), np.zeros((2, 4, 4, 3))])
def test_a_damaged_film_is_named_and_its_bars_stay(run, film):
    path = run / "evaluation/door.films.npz"
    if isinstance(film, bytes):
        path.write_bytes(film)
    else:
        np.savez_compressed(path, row7=film)
    (notice,) = (b for b in variations_section(read_study([run])).blocks if isinstance(b, Notice))
    assert "door.films.npz is damaged" in notice.text
    _, texts, images = drawn(run)
    assert "door.position=150 · success" in texts and images == 1


def test_wilson_intervals():
    """8 of 10: 49.0 to 94.3; 0 of n: up to 1.96² / (n + 1.96²)."""
    assert wilson(80, 10) == pytest.approx((80, 49.0, 94.3), abs=0.1)
    assert wilson(0, 20) == pytest.approx((0, 0, 100 * 3.8416 / 23.8416))
    assert wilson(None, 10) == wilson(50, 0) == (None, None, None)
