"""Latent prediction: the mean squared error of the next latent.

Gradient flows into both sides: no stop-gradient, no averaged target, no decoder.
"""

from torch import Tensor
from torch.nn.functional import mse_loss


def prediction(predicted: Tensor, latents: Tensor) -> Tensor:
    """predicted: (..., d) for the latents of the same shape, averaged over everything."""
    return mse_loss(predicted.float(), latents.float())
