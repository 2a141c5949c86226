"""A task that is named for an evaluation is the one that is evaluated."""

import shutil
from pathlib import Path

import pytest

from atlas_wm.cli.app import main
from atlas_wm.runs.results import read_results
from atlas_wm.tasks.tworoom import TwoRoom


class Easy(TwoRoom):
    """Whose goal every step reaches."""

    def reached(self, env, goal_state, terminated):
        return True


class Wide(TwoRoom):
    action_size = 3


class Blind(TwoRoom):
    state_columns = (("nowhere",),)


FEW = ("--offset", "10", "--budget", "12", "--episodes", "3", "--seeds", "1", "--films", "0", "--device", "cpu")


@pytest.fixture
def run(run_folder, tmp_path) -> Path:
    return Path(shutil.copytree(run_folder, tmp_path / "run", ignore=shutil.ignore_patterns("evaluation")))


@pytest.mark.usefixtures("in_this_process")
def test_the_given_task_is_evaluated_and_recorded_beside_the_runs_own(run, capsys):
    main(["eval", str(run), *FEW])
    main(["eval", str(run), *FEW, "--task", f"{__name__}:Easy"])
    by_task = {result.task: result for result in read_results(run).values()}
    assert set(by_task) == {"tworoom", f"{__name__}:Easy"}
    assert {result.trained_task for result in by_task.values()} == {"tworoom"}
    easy = by_task[f"{__name__}:Easy"]
    assert all(e.success and e.steps == 1 for policy in easy.policies.values() for e in policy.episodes["1"])
    assert by_task["tworoom"].model.episodes != easy.model.episodes
    assert f"task {__name__}:Easy" in (run / "README.md").read_text()


@pytest.mark.parametrize(
    ("command", "names", "said"),
    [
        ("eval", ["Wide"], r"needs \(rows, 3\)"),
        ("eval", ["Blind"], "has no column 'nowhere'"),
        ("eval", ["Easy", "Blind"], "--task takes one task"),
        ("diagnose", ["Easy"], "no run is of --task .*Easy, but of 'tworoom': leave it out"),
        ("bank", ["Easy"], "no run is of --task .*Easy, but of 'tworoom': leave it out"),
    ],
)
def test_a_task_that_does_not_fit_is_refused(run, command, names, said):
    with pytest.raises(SystemExit, match=f"atlas: .*{said}"):
        main([command, str(run), "--task", *(f"{__name__}:{name}" for name in names)])
    assert not (run / "evaluation").exists()
