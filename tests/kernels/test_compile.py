"""What the interpreter runs the compiler takes too, though there is no GPU to run it on."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import atlas_wm.kernels

pytestmark = pytest.mark.slow


def test_every_kernel_compiles_as_models_of_the_papers_size_call_it(tmp_path):
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_kernels.py"))],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    launched = {
        f"atlas_wm.kernels.{path.stem}.{name}"
        for path in Path(atlas_wm.kernels.__path__[0]).glob("*.py")
        for name in re.findall(r"^\s+(_\w+)\[.*\]\(", path.read_text(), re.MULTILINE)
    }
    assert len(launched) >= 16
    assert set(done.stdout.split()) == launched
