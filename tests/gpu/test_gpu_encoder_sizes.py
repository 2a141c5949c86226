"""The fused encoder agrees with the plain one at many image and patch sizes.

They run in a process of their own: an illegal memory access would spoil the CUDA context of other tests.
"""

import os
import subprocess
import sys
from pathlib import Path

import atlas_wm

CHECK = """
from dataclasses import replace
from itertools import product
from atlas_wm.models.world_model import WorldModel
from atlas_wm.recipes import paper
from atlas_wm.train.agreement import disagreement

config = paper("atlas").model
sizes = [(224, 14), (96, 8), (128, 8)]  # fewer patches: only in heads of 16
for (image_size, patch_size), heads in [*product(sizes, [3, 6, 12]), ((96, 12), 12), ((64, 16), 12)]:
    size = f"image {image_size}, patch {patch_size}, {heads} heads"
    encoder = replace(config.encoder, image_size=image_size, patch_size=patch_size, heads=heads, depth=2)
    model = WorldModel(replace(config, encoder=encoder), 2).cuda()
    assert model.encoder.fused_obstacle() == "", size
    print(size, "->", disagreement(model, "encoder") or "agree", flush=True)
"""


def test_fused_and_plain_agree():
    path = os.pathsep.join([str(Path(atlas_wm.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", CHECK],
        env={**os.environ, "PYTHONPATH": path, "CUDA_LAUNCH_BLOCKING": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 11 and all(line.endswith("-> agree") for line in lines), done.stdout
