"""The fused encoder agrees with the plain one at many image and patch sizes.

Each size runs in a process of its own: an illegal memory access would spoil the CUDA context of the others.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import atlas_wm

CHECK = """
import sys
from dataclasses import replace
from atlas_wm.models.world_model import WorldModel
from atlas_wm.recipes import get_recipe
from atlas_wm.train.agreement import disagreement

image_size, patch_size, heads = map(int, sys.argv[1:])
config = get_recipe("paper")("atlas").model
encoder = replace(config.encoder, image_size=image_size, patch_size=patch_size, heads=heads, depth=2)
model = WorldModel(replace(config, encoder=encoder), 2).cuda()
assert model.encoder.fused_obstacle() == ""
sys.exit(disagreement(model, "encoder"))
"""


@pytest.mark.parametrize("heads", [3, 6])
@pytest.mark.parametrize(("image_size", "patch_size"), [(224, 14), (96, 8), (96, 12), (96, 16), (64, 16), (128, 8)])
def test_fused_and_plain_agree(image_size, patch_size, heads):
    path = os.pathsep.join([str(Path(atlas_wm.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", CHECK, str(image_size), str(patch_size), str(heads)],
        env={**os.environ, "PYTHONPATH": path, "CUDA_LAUNCH_BLOCKING": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr[-2000:]
