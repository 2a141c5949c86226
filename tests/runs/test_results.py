"""The files of evaluations: none is overwritten by another, all of it is read back, and older files too."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas_wm.config import PlanConfig
from atlas_wm.errors import UserError
from atlas_wm.evaluate.evaluate import evaluate
from atlas_wm.runs.films import films_path
from atlas_wm.runs.results import (
    EvaluatedData,
    EvaluationResult,
    Protocol,
    most_complete,
    read_results,
)
from atlas_wm.settings import to_dict
from made_up_results import episode, evaluation, policy

FILM = np.zeros((3, 8, 8, 3), np.uint8)


def made(count: int = 3, seeds: tuple[int, ...] = (1, 2), **changes: Any) -> EvaluationResult:
    episodes = {seed: [episode(row) for row in range(count)] for seed in seeds}
    return evaluation(policy(episodes), policy(episodes, planned=False), policy(episodes, planned=False), **changes)


def earlier(result: EvaluationResult) -> dict[str, Any]:
    """The file that the version before format numbers would have written."""
    data = to_dict(replace(result, replay=None))
    for name in ("trained_task", "precision", "plain", "film_every", "written", "format", "replay"):
        del data[name]
    data["novelty_bank"] = {"states": 1000, "neighbours": 50, "seed": 0}
    for name in ("model", "random"):
        data[name]["seconds"] = data[name].pop("wall_seconds")
    for name in ("planning_seconds", "seconds_per_plan", "peak_memory"):
        del data["random"][name]
    return data


OTHER_SETTINGS = {
    "seeds": made(seeds=(1,)),
    "episodes": made(count=2),
    "part": made(part="heldout"),
    "offset": made(offset=25),
    "precision": made(precision="bf16"),
    "plain": made(plain=True),
    "data": made(data="another"),
    "task": made(task="moved:Moved"),
    "no floor": replace(made(), random=None),
    "weights": replace(made(), weights="best"),
    **{
        name: made(plan=replace(PlanConfig(), **{name: value}))
        for name, value in {
            "candidates": 100,
            "iterations": 10,
            "elites": 20,
            "horizon": 6,
            "execute": 1,
            "cost": "nearest",
        }.items()
    },
}


def test_results_with_other_settings_stand_side_by_side(tmp_path):
    results = [made(), *OTHER_SETTINGS.values()]
    files = [result.write(tmp_path / "evaluation", {7: FILM}) for result in results]
    assert len(set(files)) == len(results)
    assert read_results(tmp_path) == {file.stem: result for file, result in zip(files, results, strict=True)}
    assert all(films_path(file).exists() for file in files)


def test_a_result_with_the_same_settings_is_replaced_with_its_films(tmp_path):
    first = made()
    again = replace(
        first, written="2027-01-01T00:00:00+00:00", device="cuda:1", data=EvaluatedData("moved", "0" * 16)
    )
    assert first.write(tmp_path, {7: FILM}) == again.write(tmp_path, {})
    assert EvaluationResult.read(tmp_path / f"{first.name}.json") == again
    assert [file.suffix for file in tmp_path.iterdir()] == [".json"]


def test_of_one_condition_the_most_complete_is_chosen_then_the_newest():
    complete, few, other = made(), made(count=2, written="2028"), made(part="heldout")
    newer = made(plan=PlanConfig(candidates=100), written="2027")
    alone = replace(made(precision="bf16"), random=None, replay=None, written="2029")
    by_name = {r.name: r for r in (few, alone, complete, newer, other)}
    chosen = {one.result.protocol.part: one for one in most_complete(by_name)}
    assert chosen["all"].name == newer.name
    assert set(chosen["all"].others) == {few.name, complete.name, alone.name}
    assert chosen["heldout"] == (other.name, other, ())


def test_data_and_tasks_of_their_own_are_conditions_of_their_own():
    results = {r.name: r for r in (made(), made(data="another", count=9), made(task="moved:Moved", count=9))}
    assert {one.result.data.hash + one.result.task for one in most_complete(results)} == {
        "0" * 16 + "tworoom",
        "anothertworoom",
        "0" * 16 + "moved:Moved",
    }


def test_a_file_of_the_earlier_layout_is_read_and_what_it_lacks_is_not_made_up(tmp_path):
    result = made()
    path = tmp_path / "all_offset50_budget75.json"
    path.write_text(json.dumps(earlier(result)))
    read = EvaluationResult.read(path)
    assert (read.precision, read.plain, read.replay, read.written) == (None, None, None, "")
    assert (read.novelty_bank.source, read.novelty_bank.data) == ("evaluated data", read.data.hash)
    assert (read.model, read.random) == (result.model, result.random)
    assert (read.protocol, read.plan, read.trained_task) == (result.protocol, result.plan, "tworoom")


@pytest.mark.parametrize("numbered", [True, False])
def test_the_cost_of_plans_was_called_rule(tmp_path, numbered):
    result = made(plan=PlanConfig(cost="nearest", execute=1))
    data = to_dict(result) if numbered else earlier(result)
    data["plan"] = {"rule" if name == "cost" else name: value for name, value in to_dict(result.plan).items()}
    if numbered:
        data = {"stages" if name == "environments" else name: value for name, value in data.items()} | {"format": 1}
    path = tmp_path / "old.json"
    path.write_text(json.dumps(data))
    assert EvaluationResult.read(path).plan.cost == "nearest"


def damage(**changes: Any) -> str:
    return json.dumps({**to_dict(made()), **changes})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read"),
        ("[]", "damaged"),
        ("{}", "damaged"),
        (damage(format=3), "has format 3, but this version reads 2: run `atlas eval` again"),
        (damage(format=0), "has format 0"),
        (damage(extra=1), "unknown setting in the evaluation 'extra'"),
        (damage(precision="auto"), "precision must be"),
        (damage(plain=1), "plain must be bool"),
        (damage(model=None), "model must be an object"),
        (damage(plan={"elites": 1}), "plan.elites must lie between"),
        (damage(protocol={"seeds": [1, 2], "episodes": 2}), "the episodes of model are not those of its protocol"),
        (damage(protocol={"seeds": [-1], "episodes": 3}), "--seeds must be different numbers from 0 on"),
        (damage(protocol={"seeds": [1, 2], "episodes": 3, "budget": 10**9}), "at most 1,000,000 steps"),
        (damage(random={**to_dict(made().model), "success_mean": "high"}), "random.success_mean must be float"),
    ],
)
def test_a_file_that_is_no_result_is_refused_in_one_line(tmp_path, text, said):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        EvaluationResult.read(path)
    assert said in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.usefixtures("in_this_process")
def test_settings_are_recorded_as_they_were_used_and_nothing_is_lost(run_folder, tmp_path):
    """A smaller evaluation after a larger one, as from the command line."""
    run = Path(shutil.copytree(run_folder, tmp_path / "run", ignore=shutil.ignore_patterns("evaluation")))
    options = {"films": 1, "workers": 1, "device": "cpu", "environments": "local"}
    (large,) = evaluate(run, [Protocol(10, 12, 4, (1, 2))], **options)
    (small,) = evaluate(run, [Protocol(10, 12, 2, (1,))], plain=True, precision="bf16", **options)
    assert read_results(run) == {r.name: r for r in (large, small)}
    assert (large.precision, large.plain) == ("float32", False)
    assert (small.precision, small.plain) == ("float32", True)  # the plain search knows no other
    assert large.policies.keys() == {"model", "random", "replay"} and large.replay.success_mean == 100
    card = (run / "README.md").read_text()
    assert f"`{large.name}.json` (of 2)" in card and f"{small.name}" not in card


@pytest.mark.parametrize("wrong", [{"part": "held"}, {"offset": 2.5}, {"seeds": ("42",)}, {"leave_out_solved": 1}])
def test_a_protocol_is_checked_where_it_is_built(wrong):
    with pytest.raises(UserError, match=f"protocol.{next(iter(wrong))}"):
        Protocol(**wrong)
