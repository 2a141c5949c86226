"""Every kind of model goes through: a collapsed one, latents of patch tokens, predictors with an end."""

import numpy as np
import pytest
from run_folders import WANDERED, evaluation_of

from atlas_wm.diagnose.catalog import DIAGNOSTICS


@pytest.mark.parametrize("run", ["collapsed", "patches"])
def test_all_numbers_of_all_files_are_finite_or_null(diagnosed, run):
    """Diagnosed.read refuses NaN and infinity."""
    for what in DIAGNOSTICS:
        assert diagnosed.read(run, what)["result"]


def test_a_collapsed_encoder_is_shown_as_one(diagnosed):
    read = {what: diagnosed.read("collapsed", what)["result"] for what in DIAGNOSTICS}
    assert evaluation_of(diagnosed.collapsed).exists() and 0 < read["probe"]["failures"] < 10
    z = read["probe"]["representations"]["z"]
    assert (z["auroc"], z["low"], z["high"]) == (0.5, 0.5, 0.5)
    assert read["probe"]["representations"]["oracle"]["auroc"] is not None
    assert read["marginal"]["covariance_error"] == pytest.approx(1, abs=1e-6)
    assert read["marginal"]["effective_rank"] == pytest.approx(1)
    assert read["rollout"]["median"] == [None] * 5 and read["relational"]["maximum"]["median"] is None
    assert read["regret"]["bound"] == [None] * 4 and read["geometry"]["rank_correlation"] is None
    for what in ("rollout", "relational", "regret", "geometry"):
        assert "constant" in read[what]["note"]


def test_of_patch_tokens_the_latent_is_the_anchor(diagnosed):
    """z is their mean, and so is the anchor: nothing is distorted, and both tell the same."""
    probe = diagnosed.read("patches", "probe")["result"]["representations"]
    assert list(probe) == ["L1", "L2", "L3", "patch", "cls", "z", "oracle"] and probe["z"] == probe["patch"]
    relational = diagnosed.read("patches", "relational")["result"]
    np.testing.assert_allclose(relational["maximum"]["per_query"], 0, atol=1e-4)
    assert min(min(row) for row in diagnosed.read("patches", "rollout")["result"]["per_query"]) > 0


def test_a_predictor_that_ends_before_the_candidates_is_told_and_the_rest_goes_on(diagnosed):
    for what in ("rollout", "relational", "regret"):
        said = f"short: no {what}: 5 action chunks are more than the 3 that this model was trained on"
        assert said in diagnosed.said
        assert not (diagnosed.short / f"diagnostics/{what}.json").exists()
    assert diagnosed.read("short", "marginal")["result"]["frames"] == 10 * WANDERED
    assert diagnosed.read("short", "probe")["result"]["episodes"] == 10
