"""Latent prediction: the mean squared error of the next latent.

As in LeWM, gradient flows into both the prediction and its target: there is no stop-gradient, no target network and
no decoder. ``objective.target`` chooses another target.
"""

from torch import Tensor
from torch.nn.functional import mse_loss


def prediction(predicted: Tensor, latents: Tensor) -> Tensor:
    """predicted: (..., d) for the latents of the same shape, averaged over everything."""
    return mse_loss(predicted.float(), latents.float())
