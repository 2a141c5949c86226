"""The model card says where a run comes from, and what it can do once that was measured."""

import shutil
from pathlib import Path

from atlas_wm.card import write_card
from atlas_wm.evaluate.evaluate import evaluate
from atlas_wm.evaluate.protocol import Protocol
from atlas_wm.models.world_model import WorldModel
from atlas_wm.run_folder import write_json

RESULT = {"success_std": 1.5, "success_by_seed": {"1": 90.0, "2": 93.0}}
EVALUATION = {
    "protocol": {"offset": 25, "budget": 50, "episodes": 100, "seeds": [1, 2], "part": "heldout"},
    "model": {**RESULT, "success_mean": 91.5},
    "random": {**RESULT, "success_mean": 34.0},
}


def test_a_run_has_a_card_and_an_evaluation_adds_its_results(run_folder, tmp_path):
    run = Path(shutil.copytree(run_folder, tmp_path / "run", ignore=shutil.ignore_patterns("evaluation")))
    write_card(run)
    card = (run / "README.md").read_text()
    model = WorldModel.load(run)
    assert model.run is not None
    for fact in (
        model.run.data.hash,
        "60 episodes",
        "12 steps of 16 clips",
        "wemreg 0.2",
        "torch ",
        "license: unknown",
    ):
        assert fact in card, fact
    assert f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters" in card
    assert "Not evaluated yet" in card and str(Path(model.run.data.path).parent) not in card
    write_json(run / "evaluation" / "heldout_offset25_budget50.json", EVALUATION)
    write_card(run)
    assert "| 200 | heldout, offset 25, budget 50 | 91.5 ± 1.5 | 34.0 ± 1.5 |" in (run / "README.md").read_text()


def test_a_licence_that_was_filled_in_stays(run_folder, tmp_path):
    run = Path(shutil.copytree(run_folder, tmp_path / "run"))
    card = run / "README.md"
    card.write_text(card.read_text().replace("license: unknown", "license: mit"))
    write_card(run)
    assert "\nlicense: mit\n" in card.read_text() and "## Licence\n\nmit\n" in card.read_text()


def test_a_damaged_older_result_does_not_spoil_an_evaluation(run_folder, tmp_path, caplog):
    run = Path(shutil.copytree(run_folder, tmp_path / "run"))
    (run / "evaluation").mkdir()
    (run / "evaluation" / "older.json").write_text("{")
    (report,) = evaluate(run, [Protocol(10, 12, 2, (1,))], random_floor=False, films=0, workers=1, device="cpu")
    assert report["model"]["success_mean"] is not None
    assert (run / "evaluation" / "all_offset10_budget12.json").exists()
    assert "the model card stays as it was" in caplog.text and "older.json" in caplog.text
