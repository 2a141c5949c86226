"""Loss terms of a user's own."""

import torch


def ramp(clips, progress):
    """Rises from 0 to 1 over training."""
    return progress.step / progress.total + 0 * clips.z.mean()


def noisy(clips):
    """With random numbers of its own."""
    return (clips.z.detach() + torch.randn_like(clips.z)).square().mean()


def waiting(clips):
    """Waits for the device, which a CUDA graph cannot."""
    return clips.z.square().mean() * (2.0 if clips.z.mean().item() > 1e6 else 1.0)
