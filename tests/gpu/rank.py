"""One process of a job on one device: ``rank.py FILE PRECISION``. Rank 0 saves what the updates computed."""

import sys

import torch
import torch.distributed as dist
from on_device import clips, config_of, random_model, step_of, updates

from atlas_wm.data.clips import Batch
from atlas_wm.models import layers
from atlas_wm.parallel import gradients, processes
from atlas_wm.parallel.launch import process_info
from atlas_wm.parallel.launch import processes as all_processes
from atlas_wm.train import step as step_module
from atlas_wm.train.step import WARM_UP

REPLAYS, BATCH, RATE = 4, 16, 1e-4
gradients.MESSAGE_BYTES = 200_000  # several messages


def pretend_to_be_several(store: str) -> None:
    """A job of one process that sends all messages, to itself, through NCCL."""
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.FileStore(store, 1), rank=0, world_size=1)
    for module in (processes, gradients, layers, step_module):
        module.several = lambda: True


@all_processes()
def measure(file: str, precision: str) -> None:
    config = config_of(precision, batch=BATCH)
    model = random_model(config)
    step = step_of(model, config)
    rows = processes.shard(list(range(BATCH)))
    batches = [Batch(b.frames[rows], b.actions[rows]) for b in clips(config, WARM_UP + REPLAYS, BATCH)]
    found = [(result.numbers, result.gradients) for result in updates(step, model, batches, RATE)]
    if processes.is_main():
        torch.save(
            {"updates": found, "captured": getattr(step, "graph", None) is not None, "fused": model.encoder.fused},
            file,
        )


if __name__ == "__main__":
    if process_info().size == 1:
        pretend_to_be_several(f"{sys.argv[1]}.store")
    measure(*sys.argv[1:3])
