"""Minutes of a run: its training steps, and the commands of the study that made it."""

from dataclasses import replace

import pytest
from made_up import change, make_run

from atlas_wm.report.page_table import Table
from atlas_wm.report.runs import read_study
from atlas_wm.report.success import main_section
from atlas_wm.study.records import Records
from atlas_wm.study.units import Unit

FILE = "all_offset50_budget75.json"


def rows(runs) -> dict[tuple[str, str], tuple]:
    (table,) = (b for b in main_section(read_study(runs)).blocks if isinstance(b, Table))
    return {(r["policy"], r["condition"][:9]): (r["steps_minutes"], r["commands_minutes"]) for r in table.data}


def test_commands_are_those_of_the_training_and_of_this_evaluation(tmp_path):
    """Steps: 8,000 batches of 128 at 1,300 clips/s. As the study writes its records."""
    records, runs = Records(tmp_path), [make_run(tmp_path / f"atlas-{seed}", "atlas", seed=seed) for seed in (1, 2)]
    steps = round(8000 * 128 / 1300 / 60, 2)
    assert set(rows(runs).values()) == {(steps, None), (None, None)}  # no study
    for seed, run in enumerate(runs, 1):
        trained = Unit(
            f"train {run.name}", "train", ("train", "tworoom"), run / "model.safetensors", (), "key", None
        )
        records.write(trained, "done", 60.0 * 10 * seed)
        for offset in (50, 25):
            command = ("eval", str(run), "--offset", str(offset))
            unit = replace(trained, name=f"eval {run.name} {offset}", kind="eval", command=command)
            records.write(unit, "done", 60.0 * offset)
        change(run / "evaluation" / FILE, "command", value=["eval", str(run), "--offset", "50"])
    found = rows(runs)
    assert found["ATLAS (2 runs)", "offset 50"] == (steps, 65)  # (10 + 20) / 2 + 50
    assert found["ATLAS (2 runs)", "offset 25"] == (steps, None)  # not evaluated by the study
    assert found["Random actions", "offset 50"] == (None, None)
    for run in runs:  # plans by time, whose head has a command of its own
        change(run / "evaluation" / FILE, "temporal_head", value="0" * 16)
    assert rows(runs)["ATLAS (2 runs)", "offset 50"] == (steps, 65)  # training fitted it
    head = replace(trained, name=f"head {runs[0].name}", kind="head", command=("head", str(runs[0])))
    records.write(head, "done", 60.0 * 4)
    assert rows(runs)["ATLAS (2 runs)", "offset 50"] == (steps, 67)  # 4 minutes of one of two runs
    records.write(head, "failed", 60.0)
    assert rows(runs)["ATLAS (2 runs)", "offset 50"] == (steps, None)
    records.write(head, "done", 60.0)
    records.write(trained, "running", 60.0)
    assert rows(runs)["ATLAS (2 runs)", "offset 50"] == (steps, None)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"state": "done", "seconds": "1", "command": ["train"]}'])
def test_a_damaged_record_is_unknown(tmp_path, text):
    run = make_run(tmp_path / "atlas", "atlas", seeds=(42,))
    (tmp_path / "units").mkdir()
    for name in ("train_atlas", "eval_atlas_50"):
        (tmp_path / f"units/{name}.json").write_text(text)
    assert {commands for _, commands in rows([run]).values()} == {None}
