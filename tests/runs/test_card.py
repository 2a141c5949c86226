"""The model card says where a run comes from, and what it can do once that was measured."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from atlas_wm.errors import UserError
from atlas_wm.evaluate.evaluate import evaluate
from atlas_wm.runs.card import write_card
from atlas_wm.runs.folder import read_run
from atlas_wm.runs.model import load_model
from atlas_wm.runs.results import EvaluationResult, PolicyResult, Protocol
from made_up_results import episode, evaluation, policy


def evaluated(rates: list[float], count: int = 10, **changes: Any) -> EvaluationResult:
    def outcome(values: list[float], planned: bool = False) -> PolicyResult:
        by_seed = dict(enumerate(values))
        return policy({seed: [episode()] * count for seed in by_seed}, {"": by_seed}, planned)

    floor, ceiling = ([value] * len(rates) for value in (34.0, 99.0))
    changes = {"offset": 25, "part": "heldout"} | changes
    return evaluation(outcome(rates, planned=True), outcome(floor), outcome(ceiling), **changes)


def test_a_run_has_a_card_and_an_evaluation_adds_its_results(run_folder, tmp_path):
    run = Path(shutil.copytree(run_folder, tmp_path / "run", ignore=shutil.ignore_patterns("evaluation")))
    write_card(run)
    card = (run / "README.md").read_text()
    model = load_model(run)
    assert model.run is not None
    for fact in (
        model.run.data.hash,
        "60 episodes",
        "12 steps with batches of 16 clips",
        "wemreg 0.2",
        "torch ",
        "license: unknown",
    ):
        assert fact in card, fact
    assert f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters" in card
    assert "Not evaluated yet" in card and str(Path(model.run.data.path).parent) not in card
    result = evaluated([90.0, 93.0], data=model.run.data.hash)
    result.write(run / "evaluation", {})
    write_card(run)
    row = "| 20 | heldout, offset 25, budget 50 | 91.5 ± 1.5 | 34.0 ± 0.0 | 99.0 ± 0.0 | – |"
    assert f"{row} `{result.name}.json` |" in (run / "README.md").read_text()
    (metric,) = ModelCard.load(run / "README.md").data.eval_results
    assert (metric.metric_type, metric.metric_value) == ("success_rate", 91.5)
    assert (metric.dataset_type, metric.dataset_revision) == ("tworoom", model.run.data.hash)


def test_the_header_is_what_the_hub_reads(run_folder, tmp_path):
    run = Path(shutil.copytree(run_folder, tmp_path / "run", ignore=shutil.ignore_patterns("evaluation")))
    write_card(run)
    data = ModelCard.load(run / "README.md").data
    assert (data.license, data.library_name, data.pipeline_tag) == ("unknown", "atlas-wm", "robotics")
    assert data.tags == ["world-model", "planning"] and not data.eval_results


def test_the_card_shows_the_most_complete_of_like_evaluations_and_says_which(run_folder, tmp_path):
    run = Path(shutil.copytree(run_folder, tmp_path / "run", ignore=shutil.ignore_patterns("evaluation")))
    hash_ = read_run(run)[0].data.hash
    complete = evaluated([90.0, 93.0], data=hash_)
    few = evaluated([10.0], count=2, data=hash_, written="2027-01-01T00:00:00+00:00")
    other_data = evaluated([50.0], data="another")
    for result in (complete, few, other_data):
        result.write(run / "evaluation", {})
    write_card(run)
    card = (run / "README.md").read_text()
    assert f"| 91.5 ± 1.5 | 34.0 ± 0.0 | 99.0 ± 0.0 | – | `{complete.name}.json` (of 2) |" in card
    assert "budget 50, data tworoom.lance (another) | 50.0 |" in card
    assert few.name not in card and "1 other is in the folder" in card


def test_a_licence_that_was_filled_in_stays(run_folder, tmp_path):
    run = Path(shutil.copytree(run_folder, tmp_path / "run"))
    card = run / "README.md"
    fields = "license: other\nlicense_name: lab-internal"
    card.write_text(card.read_text().replace("license: unknown", fields))
    write_card(run)
    data = ModelCard.load(card).data
    assert (data.license, data.license_name) == ("other", "lab-internal")
    assert "## Licence\n\nother\n" in card.read_text()


def test_a_card_with_a_damaged_header_is_not_overwritten(run_folder, tmp_path):
    run = Path(shutil.copytree(run_folder, tmp_path / "run"))
    damaged = "---\nlicense: [\n---\nby hand"
    (run / "README.md").write_text(damaged)
    with pytest.raises(UserError, match=r"README.md has a damaged YAML header"):
        write_card(run)
    assert (run / "README.md").read_text() == damaged


def test_a_damaged_older_result_does_not_spoil_an_evaluation(run_folder, tmp_path, caplog):
    run = Path(shutil.copytree(run_folder, tmp_path / "run"))
    (run / "evaluation").mkdir()
    (run / "evaluation" / "older.json").write_text("{")
    (report,) = evaluate(
        run, [Protocol(10, 12, 2, (1,))], policies=("model", "replay"), films=0, workers=1, device="cpu"
    )
    assert report.model.success_mean is not None
    assert (run / "evaluation" / f"{report.name}.json").exists()
    assert "the model card is not updated" in caplog.text and "older.json" in caplog.text
