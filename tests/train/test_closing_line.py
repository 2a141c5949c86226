"""The last validation comes after the last line of progress, so the command says what it measured."""

import pytest
from short_runs import metrics, short_config

from atlas_wm.cli.train import train_with_progress
from atlas_wm.tasks import get_task


@pytest.mark.usefixtures("few_frames_in_banks", "one_thread")
def test_the_command_ends_with_what_the_last_validation_measured(dataset_path, tmp_path, capsys):
    seen = []
    run = train_with_progress(
        short_config(steps=8),
        *(get_task("tworoom"), dataset_path, tmp_path / "run", "atlas"),
        recipe="demo",
        device="cpu",
        on_metrics=lambda step, row: seen.append(step),
    )
    last = metrics(run)[-1]
    score, rank = (float(last[name]) for name in ("val_score", "val_rank"))
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"planning score {score:.3g}, effective rank {rank:.3g} (last validation)"
    assert seen == [7, 8]  # who else asked for metrics gets them
