"""The same seed on the same machine with as many threads: the same files from training and diagnosing.

Collecting and evaluating twice is compared in data/test_collect.py and evaluate/test_evaluate.py.
"""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from atlas_wm.diagnose.catalog import QuerySettings
from atlas_wm.diagnose.diagnose import diagnose
from atlas_wm.models import probes
from atlas_wm.train.loop import train

TIMES = {"seconds", "clips_per_second"}  # all that may differ


def trained_and_diagnosed(run: Path, task, data: Path, config) -> Path:
    train(config, task, data, run, method="atlas", recipe="demo", device="cpu")
    what = ("state", "marginal", "rollout", "relational", "regret", "geometry")
    diagnose([run], what, settings=QuerySettings(queries=2, candidates=4, offset=20), device="cpu", workers=1)
    return run


def timeless(value):
    """Without times and paths."""
    if isinstance(value, dict):
        return {key: timeless(part) for key, part in value.items() if key not in TIMES | {"path"}}
    return [timeless(part) for part in value] if isinstance(value, list) else value


def content(path: Path):
    if path.suffix == ".json":
        return timeless(json.loads(path.read_text()))
    if path.suffix == ".csv":
        return [timeless(row) for row in csv.DictReader(path.open())]
    return path.read_bytes()


@pytest.mark.slow
@pytest.mark.usefixtures("few_frames_in_banks")
def test_the_same_seed_leaves_the_same_files(task, dataset_path, tiny_config, tmp_path, monkeypatch):
    monkeypatch.setattr(probes, "STEPS", 20)
    config = replace(tiny_config, train=replace(tiny_config.train, steps=4))
    first, second = (
        trained_and_diagnosed(tmp_path / name / "run", task, dataset_path, config) for name in ("first", "second")
    )
    names = sorted(str(p.relative_to(first)) for p in first.rglob("*") if p.is_file() and "events" not in p.name)
    assert {"model.safetensors", "bank.safetensors", "metrics.csv", "diagnostics/regret.json"} <= set(names)
    for name in names:
        assert content(first / name) == content(second / name), name
