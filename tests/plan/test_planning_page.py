"""The Python of README.md and docs/guides/planning.md, executed as a reader would."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from atlas_wm.models.temporal_head import TemporalHead
from atlas_wm.runs.model import save_temporal_head

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs" / "guides" / "planning.md"]
NOT_RUN = ("push_to_hub",)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_page_works_as_written(page, trained, task, tmp_path, monkeypatch):
    run = shutil.copytree(trained, tmp_path / "runs" / "tworoom-atlas-demo")
    save_temporal_head(TemporalHead.initial(torch.randn(9, 32), torch.Generator()), run)
    monkeypatch.chdir(tmp_path)
    frames = task.draw(np.array([[60, 60], [80, 70], [50, 90]], np.float32), 224)
    images = frames.permute(0, 2, 3, 1).numpy()
    steps: list[np.ndarray] = []
    stops: list[bool] = []
    names = {
        "frame": images[0],
        "next_frame": images[1],
        "goal": images[2],
        "frames": frames[:2],
        "goals": frames[1:],
        "rngs": [torch.Generator().manual_seed(i) for i in range(2)],
        "env": SimpleNamespace(step=steps.append),
        "robot": SimpleNamespace(stop=lambda: stops.append(True)),
    }
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    assert blocks
    for block in blocks:
        if not any(word in block for word in NOT_RUN):
            exec(compile(block, str(page), "exec"), names)
    assert np.shape(steps) == (25, 2) and len(stops) == (max(names["plan"].novelty) > 99)
    if "plans" in names:
        assert [plan.actions.shape for plan in names["plans"]] == [(5, 2)] * 2  # execute=1
