"""Reading for many epochs holds no more memory than reading for one."""

import gc
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from synthetic import columns

from atlas_wm.data.clips import ClipDataset, clip_index
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.data.loader import EpochBatches, make_loader
from atlas_wm.normalizer import Normalizer
from atlas_wm.recipes import demo
from atlas_wm.tasks import get_task
from preloaded import forkserver_context

STATM = Path("/proc/self/statm")
BOUND = 24 * 2**20  # bytes; the 100 measured batches hold 79 MB of frames, so that keeping a third of them fails


def resident() -> int:
    gc.collect()
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth(path: Path) -> int:
    """Bytes that 100 batches, more than twenty epochs, add to a process that has read 60 before."""
    data = EpisodeData(path, get_task("tworoom"), 64, 5)
    clips = clip_index(data.lengths, 16)
    dataset = ClipDataset(data, clips, Normalizer((0.0, 0.0), (1.0, 1.0)), demo("atlas").model)
    batches = iter(make_loader(dataset, EpochBatches(len(clips), 16, 160, seed=0), workers=0, pin=False))
    for _ in range(60):  # libraries fill their caches and allocators their arenas
        next(batches)
    before = resident()
    count = sum(1 for _ in batches)
    assert count == 100 and 16 * count > 20 * len(clips)
    return resident() - before


@pytest.mark.slow
@pytest.mark.skipif(not STATM.exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize(("name", "path"), [("hdf5", "x.h5"), ("lance", "x.lance")])
def test_memory_stays_flat_over_epochs(name, path, tmp_path):
    from stable_worldmodel.data import get_format

    stored = columns(120, image=64, state=2)
    with get_format(name).open_writer(tmp_path / path) as writer:
        for first in range(0, 120, 40):
            writer.write_episode({c: list(values[first : first + 40]) for c, values in stored.items()})
    # A process of its own: in this one, memory that earlier tests gave back would be used first and hide growth.
    with ProcessPoolExecutor(1, mp_context=forkserver_context()) as pool:
        assert pool.submit(growth, tmp_path / path).result(timeout=300) < BOUND
