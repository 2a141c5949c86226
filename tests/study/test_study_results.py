"""Every number of a study's tables is of a unit that is done, with the settings that the study has now."""

import shutil
from dataclasses import replace
from itertools import pairwise

import pytest
from pretend import Pretend, run

from atlas_wm.errors import UserError
from atlas_wm.runs.results import read_results
from atlas_wm.study.records import Records
from atlas_wm.study.results import evaluated, study_rows
from atlas_wm.study.study import Dataset, Evaluation, Study
from atlas_wm.study.tries import start
from atlas_wm.study.units import Unit, units_of
from made_up_results import episode, evaluation, policy

STUDY = Study(
    methods=("atlas", "lewm"), recipes=("demo",), evaluations=(Evaluation(50, episodes=4),), diagnostics=()
)


class Measuring(Pretend):
    """Writes a result for each evaluation, as `atlas eval` does it; ``data``: the hash of what it evaluates on."""

    data = "0" * 16

    def start(self, units):
        for unit in units:
            if unit.kind == "eval":
                unit.makes.mkdir(parents=True, exist_ok=True)
                self.measured(unit).write(unit.makes, {})
        return super().start(units)

    def measured(self, unit: Unit):
        flags = dict(pairwise(unit.command))
        found = policy({42: [episode(row) for row in range(int(flags["--episodes"]))]})
        return evaluation(found, offset=int(flags["--offset"]), command=unit.command, data=self.data)


def rows(study: Study, out) -> list[tuple]:
    found = study_rows(study, start(study, out, Records(out)))
    return [(row["method"], row["offset"], row["episodes"]) for row in found]


def files(out) -> list[int]:
    """The numbers of episodes in the results of one run."""
    return sorted(result.protocol.episodes for result in read_results(out / "atlas").values())


def test_a_changed_evaluation_replaces_the_old_one(tmp_path):
    run(STUDY, tmp_path, Measuring())
    assert rows(STUDY, tmp_path) == [("atlas", 50, 4), ("lewm", 50, 4)]
    fewer = replace(STUDY, evaluations=(Evaluation(50, episodes=3),))
    assert rows(fewer, tmp_path) == []  # not measured yet
    run(fewer, tmp_path, Measuring())
    assert rows(fewer, tmp_path) == [("atlas", 50, 3), ("lewm", 50, 3)] and files(tmp_path) == [3]


def test_other_episodes_of_the_same_protocol_replace_those_before(tmp_path):
    apart = replace(STUDY, datasets={"tworoom": Dataset(episodes=9, eval_episodes=5)})
    run(apart, tmp_path, Measuring())
    others, again = replace(apart, datasets={"tworoom": Dataset(episodes=9, eval_episodes=6)}), Measuring()
    again.data = "1" * 16
    run(others, tmp_path, again)
    assert "train atlas" not in again.names
    assert [r.data.hash for r in read_results(tmp_path / "atlas").values()] == ["1" * 16]


def test_an_evaluation_that_was_dropped_leaves_the_folder_and_the_users_own_stay(tmp_path):
    both = replace(STUDY, evaluations=(Evaluation(50, episodes=4), Evaluation(25, episodes=3)))
    run(both, tmp_path, Measuring())
    folder = tmp_path / "atlas" / "evaluation"
    mine = Measuring().measured(units_of(STUDY, tmp_path)["eval atlas 50"])
    replace(mine, command=("eval", "runs/atlas", "--seeds", "7"), weights="best").write(folder, {})
    assert files(tmp_path) == [3, 4, 4]
    only_lewm = [unit for unit in units_of(STUDY, tmp_path).values() if "lewm" in unit.name]
    Records(tmp_path).remove_dropped(only_lewm)
    assert files(tmp_path) == [3, 4, 4]  # --only lewm leaves other runs alone
    Records(tmp_path).remove_dropped(units_of(STUDY, tmp_path).values())
    assert files(tmp_path) == [4, 4]
    assert rows(STUDY, tmp_path) == [("atlas", 50, 4), ("lewm", 50, 4)]


def test_a_run_that_has_to_be_trained_again_is_in_no_table(tmp_path):
    run(STUDY, tmp_path, Measuring())
    longer = replace(STUDY, settings={"train.steps": 5})
    run(longer, tmp_path, Measuring(), only=["lewm"])
    assert rows(longer, tmp_path) == [("lewm", 50, 4)]


def test_varied_environments_are_in_no_table(tmp_path):
    class Varied(Measuring):
        def measured(self, unit):
            return replace(super().measured(unit), variation={"door.position": (150.0,)})

    run(STUDY, tmp_path, Varied())
    assert rows(STUDY, tmp_path) == []


def test_a_study_may_be_moved_or_called_by_another_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, _ = run(STUDY, tmp_path / "a", Measuring())
    assert len(first.names) == 6
    shutil.move(tmp_path / "a", tmp_path / "b")
    again = Measuring()
    run(STUDY, (tmp_path / "b").relative_to(tmp_path), again)
    assert again.names == []
    assert rows(STUDY, tmp_path / "b") == [("atlas", 50, 4), ("lewm", 50, 4)]
    assert len(evaluated(start(STUDY, tmp_path / "b", Records(tmp_path / "b")))) == 2


def test_evaluations_that_differ_only_in_their_protocol_are_all_run(tmp_path):
    ways = (Evaluation(50, 75), Evaluation(50, 150), Evaluation(50, seeds=(7,)), Evaluation(25))
    named = [unit.name for unit in units_of(replace(STUDY, evaluations=ways), tmp_path).values()]
    assert [n.removeprefix("eval atlas ") for n in named if n.startswith("eval atlas")] == [
        "offset 50 budget 75 episodes 200 seeds 42,43,44,45,46",
        "offset 50 budget 150 episodes 200 seeds 42,43,44,45,46",
        "offset 50 episodes 200 seeds 7",
        "25",
    ]
    with pytest.raises(UserError, match="two units of the study are named `eval atlas offset 50"):
        units_of(replace(STUDY, evaluations=(Evaluation(50), Evaluation(50))), tmp_path)


def test_the_seconds_of_all_attempts_count(tmp_path, monkeypatch):
    clock = iter(range(10_000))
    monkeypatch.setattr("atlas_wm.study.schedule.time.monotonic", lambda: next(clock))
    run(STUDY, tmp_path, Measuring(**{"train atlas": 1}))
    units, records = units_of(STUDY, tmp_path), Records(tmp_path)
    once, twice = (records.read(units[f"train {name}"]) for name in ("lewm", "atlas"))
    assert (once.attempts, twice.attempts) == (1, 2) and twice.seconds > once.seconds > 0


def test_a_try_that_runs_again_leaves_those_with_longer_names_alone(tmp_path):
    tuned = replace(STUDY, methods=("atlas",), recipes=("demo+tuned",), tries=(1.5, 1.0))
    run(tuned, tmp_path, Measuring())
    unit = units_of(tuned, tmp_path)["try tworoom-atlas-demo-1"]
    Records(tmp_path).clear(replace(unit, key="another"))
    assert not unit.makes.exists() and (tmp_path / "tries" / "tworoom-atlas-demo-1.5" / "metrics.csv").exists()


def test_a_deleted_dataset_is_collected_again_for_a_new_evaluation_and_nothing_is_trained(tmp_path):
    run(STUDY, tmp_path, Measuring())
    units_of(STUDY, tmp_path)["collect tworoom"].makes.unlink()
    more = replace(STUDY, evaluations=(*STUDY.evaluations, Evaluation(100, episodes=2)))
    again, states = run(more, tmp_path, Measuring())
    assert again.names == ["collect tworoom", "eval atlas 100", "eval lewm 100", "report"]
    assert set(states.values()) == {"done"}


def test_diagnostics_do_without_the_first_run_and_see_the_evaluated_episodes(tmp_path):
    apart = replace(
        STUDY,
        diagnostics=("probe",),
        datasets={"tworoom": Dataset(eval_episodes=5)},
        evaluations=(Evaluation(100),),
    )
    pretend, states = run(apart, tmp_path, Pretend(**{"train atlas": 2}))
    assert states["diagnose tworoom"] == "done"
    command = " ".join(dict(pretend.commands)["diagnose tworoom"])
    assert f"--data {tmp_path / 'tworoom-evaluation.lance'} --offset 100" in command
