"""Training, evaluation and diagnosis in two processes give one result, that of one; and they end together."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from atlas_wm.cli.app import main
from atlas_wm.errors import UserError
from atlas_wm.parallel.launch import ProcessInfo, first_node, process_info
from preloaded import run_script

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def out(dataset_path, run_folder, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    run_script(HERE / "commands.py", str(dataset_path), str(run_folder), str(folder), said=folder / "said")
    return folder


def ended(folder: Path) -> tuple[list[int], float]:
    return json.loads((folder / "ended.json").read_text())


def messages(folder: Path) -> list[str]:
    """What the processes said in all: the lines on their way out."""
    return [
        line for file in sorted(folder.glob("*.err")) for line in file.read_text().splitlines() if "atlas:" in line
    ]


def test_both_processes_end_well(out):
    for name in ("alone", "together", "under-slurm"):
        statuses, _ = ended(out / name)
        assert set(statuses) == {0}, [file.read_text() for file in (out / name).glob("*.err")]


def test_one_run_folder_is_written_with_the_same_metrics(out):
    alone, together, slurm = (out / name / "trained" for name in ("alone", "together", "under-slurm"))
    optional = {"weights"}  # where the best validation is not the last, which depends on the dropout masks
    for folder in (together, slurm):
        assert {f.name for f in folder.iterdir()} - optional == {f.name for f in alone.iterdir()} - optional
        assert not folder.with_name("trained.partial").exists()
        assert len(list((folder / "tensorboard").iterdir())) == 1
    rows = [(folder / "metrics.csv").read_text().splitlines() for folder in (alone, together)]
    assert [[row.split(",")[0] for row in some] for some in rows] == [["step", "2", "4"]] * 2
    # With dropout, of which each process has its own masks, the weights are others.
    weights = [load_file(folder / "model.safetensors") for folder in (alone, together, slurm)]
    assert all(weights[1][name].equal(weights[2][name]) for name in weights[0])


def test_a_job_whose_processes_were_killed_goes_on_with_the_same_command(out):
    assert set(ended(out / "broken-off")[0]) != {0} and set(ended(out / "goes-on")[0]) == {0}
    run = out / "broken-off" / "trained"
    assert not run.with_name("trained.partial").exists()
    metrics = (run / "metrics.csv").read_text().splitlines()
    undisturbed = (out / "together" / "trained" / "metrics.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in metrics] == ["step", "2", "4"]
    same = slice(1, 6)  # epoch and losses, which the first part of the run wrote
    assert metrics[1].split(",")[same] == undisturbed[1].split(",")[same]


def test_kept_tokens_are_written_by_one_and_read_by_all(out):
    alone, together = (out / name / "from-tokens" for name in ("alone", "together"))
    assert {f.name for f in together.iterdir()} == {f.name for f in alone.iterdir()}  # no file of tokens is left
    one, other = (np.genfromtxt(folder / "metrics.csv", delimiter=",", names=True) for folder in (alone, together))
    for name in ("total", "grad_norm", "val_total"):
        np.testing.assert_allclose(one[name], other[name], rtol=1e-4)
    assert np.isfinite(one["val_total"]).sum() == 2


def without_times(report):
    """All but how long it took, what memory it took, and in how many processes."""
    times = ("seconds", "wall_seconds", "planning_seconds", "seconds_per_plan", "peak_memory", "written")
    times += ("workers", "processes")
    if isinstance(report, dict):
        return {k: without_times(v) for k, v in report.items() if k not in times}
    return report


def test_evaluation_gives_every_process_the_report_of_one(out):
    (alone,) = (json.loads((out / "alone" / "0.json").read_text())["reports"],)
    for rank in (0, 1):
        reports = json.loads((out / "together" / f"{rank}.json").read_text())["reports"]
        assert without_times(reports[0]) == without_times(alone[0])
        assert without_times(reports[1]) == without_times(alone[1])
    assert (alone[0]["processes"], reports[0]["processes"]) == (1, 2)
    written = [sorted((out / name / "run" / "evaluation").iterdir()) for name in ("alone", "together")]
    assert [f.name for f in written[0]] == [f.name for f in written[1]]
    for one, other in zip(*written, strict=True):
        if one.suffix == ".json":
            assert without_times(json.loads(one.read_text())) == without_times(json.loads(other.read_text()))
        else:
            with np.load(one) as a, np.load(other) as b:
                assert all(np.array_equal(a[key], b[key]) for key in a)


def test_diagnostics_are_those_of_one_process(out):
    names = {"marginal.json", "rollout.json", "regret.json"}
    for rank in (0, 1):
        assert set(json.loads((out / "together" / f"{rank}.json").read_text())["files"]) == names
    for name in names:
        one, other = (
            json.loads((out / folder / "run" / "diagnostics" / name).read_text())
            for folder in ("alone", "together")
        )
        assert without_times(one) == without_times(other)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one-fails", "atlas: the disk is full (process 1 of 2)"),
        ("one-fails-under-slurm", "atlas: the disk is full (process 1 of 2)"),
        (
            "one-is-killed",
            "atlas: another process of this job died without a message: did the system kill it (out of memory)?",
        ),
        ("all-fail", "atlas: there is no dataset nowhere.h5"),
    ],
)
def test_they_end_together_with_one_message(out, name, message):
    statuses, seconds = ended(out / name)
    assert 0 not in statuses and seconds < 60
    (line,) = messages(out / name)
    assert line.startswith(message)
    assert {f.name for f in (out / name).glob("trained*")} == set()  # nothing half done is left


def test_after_a_signal_all_have_its_status_and_one_says_where_it_saved(out):
    assert ended(out / "all-are-stopped")[0] == [143, 143]
    (line,) = messages(out / "all-are-stopped")
    assert "SIGTERM after step" in line and list((out / "all-are-stopped").glob("trained.partial/checkpoints/*"))


def test_a_place_that_is_told_by_halves_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"RANK.* are not set: start with torchrun"):
        process_info()


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_a_variable_that_is_no_number_is_named(monkeypatch, name):
    monkeypatch.setenv(name, "abc")
    with pytest.raises(UserError, match=f"the environment variable {name} must be a number, not 'abc'"):
        process_info()


def test_other_commands_are_refused_in_several_processes(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    with pytest.raises(SystemExit, match="only train, eval and diagnose"):
        main(["collect", "tworoom"])


def test_the_script_of_a_slurm_job_is_one_process(monkeypatch):
    """Whatever number of tasks it may start."""
    for name, value in {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}.items():
        monkeypatch.setenv(name, value)
    assert process_info() == ProcessInfo()
    for name, value in {
        "STEP_NUM_TASKS": "8",
        "PROCID": "5",
        "LOCALID": "1",
        "STEP_TASKS_PER_NODE": "4(x2)",
    }.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert process_info() == ProcessInfo(5, 8, 1, 4)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("localhost", "localhost"),
        ("gpu3,gpu7", "gpu3"),
        ("gpu[03-05,9],cpu1", "gpu03"),
        ("gpu[7,9]", "gpu7"),
        ("gpu[7]", "gpu7"),
        ("cpu1,gpu[03-05]", "cpu1"),
        ("rack[0-1]n[2-4]", "rack0n2"),
        ("node-a[1-2]-ib", "node-a1-ib"),
    ],
)
def test_the_first_node_of_a_slurm_list(nodes, first):
    assert first_node(nodes) == first
