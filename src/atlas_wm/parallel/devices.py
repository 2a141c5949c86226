"""Which device to compute on: one call picks, one flag overrides; and how much of its memory was needed."""

import os
import resource
import sys

import torch

from atlas_wm.errors import UserError, unknown
from atlas_wm.parallel.launch import process_info

DEVICES = ("auto", "cpu", "cuda", "mps")


def pick_device(name: str = "auto") -> torch.device:
    """``auto``: CUDA where there is a card, else MPS, else the CPU. Of several processes each gets a card."""
    if name.split(":")[0] not in DEVICES:
        raise unknown("device", name, DEVICES)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(
            "--device cuda was asked for, but torch sees no CUDA device: check `nvidia-smi`, or use --device cpu"
        )
    if name == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device mps was asked for, but this machine has none: use --device cpu")
    return torch.device(name) if process_info().size == 1 else _own_device(name)


def _own_device(name: str) -> torch.device:
    """For one of several processes."""
    if name == "cpu":
        return torch.device(name)
    if name != "cuda":
        raise UserError(
            f"several processes cannot share the device {name}: use --device cuda or cpu, or one process"
        )
    cards, here = torch.cuda.device_count(), process_info()
    alone = cards == 1 and "SLURM_LOCALID" in os.environ  # SLURM may show each process no card but its own
    index = 0 if alone else here.local_rank
    if index >= cards:
        raise UserError(f"{here.local_size} processes on a machine with {cards} GPUs: start one for each GPU")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that tensors took on a CUDA device, elsewhere the most this process took in all."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
