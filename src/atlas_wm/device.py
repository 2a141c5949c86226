"""Which device to compute on: one call picks, one flag overrides; and how much of its memory was needed."""

import resource
import sys

import torch

from atlas_wm.errors import UserError, unknown

DEVICES = ("auto", "cpu", "cuda", "mps")


def pick_device(name: str = "auto") -> torch.device:
    """``auto``: CUDA where there is a card, else MPS, else the CPU."""
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
    return torch.device(name)


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that tensors took on a CUDA device, elsewhere the most this process took in all."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
