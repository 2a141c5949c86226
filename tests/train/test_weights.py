"""Other weights of a run than the final ones: loaded, evaluated and reported under their name."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from short_runs import short_config, short_train

from atlas_wm.cli.app import main
from atlas_wm.errors import UserError
from atlas_wm.evaluate.evaluate import evaluate
from atlas_wm.evaluate.protocol import Protocol
from atlas_wm.runs.model import load_model
from atlas_wm.runs.results import EvaluationResult, most_complete, read_results

PROTOCOL = Protocol(offset=10, budget=10, episodes=2, seeds=(1,))


@pytest.fixture(scope="module")
def saved(dataset_path, tmp_path_factory):
    """A run with the weights of steps 4 and 8."""
    out = tmp_path_factory.mktemp("weights") / "run"
    return short_train(short_config(steps=12, save_every=4, validate_every=1000), dataset_path, out)


def test_weights_are_loaded_by_name(saved):
    final, earlier = load_model(saved), load_model(saved, weights="step-4")
    stored = load_file(saved / "weights" / "step-00000004.safetensors")
    for name, tensor in earlier.state_dict().items():
        assert torch.equal(tensor, stored[name])
    assert not torch.equal(final.projector.norm.weight, earlier.projector.norm.weight)
    assert final.bank is not None and earlier.bank is None  # the bank holds latents of the final weights


def test_best_weights_are_loaded_where_they_are_not_the_final_ones(saved, tmp_path):
    run = shutil.copytree(saved, tmp_path / "run")
    with pytest.raises(UserError, match="Training writes `best` only if an earlier validation beat the final one"):
        load_model(run, weights="best")
    shutil.copy(run / "weights" / "step-00000008.safetensors", run / "weights" / "best.safetensors")
    assert torch.equal(
        load_model(run, weights="best").projector.norm.weight,
        load_model(run, weights="step-8").projector.norm.weight,
    )


@pytest.mark.parametrize("name", ["step-5", "step-00000004", "../model", "", "final"])
def test_unknown_weights_are_refused_with_the_known_ones(saved, name):
    with pytest.raises(UserError, match=r"has no weights .*: its other weights are step-4, step-8"):
        load_model(saved, weights=name)
    with pytest.raises(UserError, match=r"has no weights .*: its other weights are step-4, step-8"):
        evaluate(saved, [PROTOCOL], weights=name, device="cpu")


def test_a_run_without_other_weights_says_so(saved, tmp_path):
    run = shutil.copytree(saved, tmp_path / "run", ignore=shutil.ignore_patterns("weights"))
    with pytest.raises(UserError, match="it has the final weights only"):
        load_model(run, weights="step-4")


def test_weights_of_another_model_are_refused(saved, tmp_path):
    run = shutil.copytree(saved, tmp_path / "run")
    shutil.copy(run / "bank.safetensors", run / "weights" / "step-00000004.safetensors")
    with pytest.raises(UserError, match=r"step-00000004\.safetensors does not fit its config\.json"):
        load_model(run, weights="step-4")


@pytest.mark.usefixtures("in_this_process")
def test_evaluations_of_other_weights_stand_beside_that_of_the_final_ones(saved, tmp_path, capsys):
    run = shutil.copytree(saved, tmp_path / "run")
    options = {"films": 0, "device": "cpu", "policies": ("model",)}
    (final,) = evaluate(run, [PROTOCOL], **options)
    flags = [
        "--offset",
        "10",
        "--budget",
        "10",
        "--episodes",
        "2",
        "--seeds",
        "1",
        "--films",
        "0",
        "--device",
        "cpu",
    ]
    main(["eval", str(run), *flags, "--policy", "model", "--weights", "step-4"])
    assert "weights step-4" in capsys.readouterr().out
    results = read_results(run)
    other = next(r for r in results.values() if r.weights == "step-4")
    assert len(results) == 2 and final.weights is None and "weights" not in final.settings
    assert other.name.startswith("all_offset10_budget10_step-4-")
    assert len(most_complete(results)) == 2
    assert other.model.episodes != final.model.episodes
    card = (run / "README.md").read_text()
    assert "budget 10, weights step-4 |" in card and "budget 10 |" in card


def test_a_file_names_weights_or_is_refused(saved, tmp_path):
    from atlas_wm.settings import to_dict
    from made_up_results import episode, evaluation, policy

    data = to_dict(evaluation(policy({1: [episode(0)]}), None, None))
    del data["weights"]  # as written before there was a choice
    assert EvaluationResult.parse(data, tmp_path).weights is None
    for wrong in ("<b>", "step-", "../x", 3):
        with pytest.raises(UserError, match="is damaged"):
            EvaluationResult.parse({**data, "weights": wrong}, tmp_path)


def test_plans_come_from_the_weights_that_are_named(saved, tmp_path, capsys):
    rng = np.random.default_rng(0)
    for name in ("frame.png", "goal.png"):
        Image.fromarray(rng.integers(0, 255, (224, 224, 3), dtype=np.uint8)).save(tmp_path / name)
    images = ["--frame", str(tmp_path / "frame.png"), "--goal", str(tmp_path / "goal.png"), "--device", "cpu"]
    found = []
    for flags in ([], ["--weights", "step-4"]):
        main(["plan", str(saved), *images, *flags])
        said = capsys.readouterr()
        found.append(json.loads(said.out))
        assert said.err == ""
    assert found[0]["actions"] != found[1]["actions"]
    assert found[0]["novelty"] is not None and found[1]["novelty"] is None
