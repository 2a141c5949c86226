"""Sums gradients over the processes while the backward pass still computes the others."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atlas_wm.parallel.processes import several, world_size

MESSAGE_BYTES = 16 * 2**20  # large enough to use the whole bandwidth, small enough to start early


class GradientSum:
    """Sends the gradients of a group of parameters as one message as soon as all of them are there. The groups go
    from the last parameter to the first, as the backward pass does, and in that order in every process.

    ``averaged``: parameters whose whole gradient every process has, such as those of loss terms, which see the
    whole batch.

    >>> gradients = GradientSum(model.parameters())
    >>> gradients.backward(loss)  # now every process has the gradient of the whole batch
    """

    def __init__(self, parameters: Iterable[nn.Parameter], averaged: Iterable[nn.Parameter] = ()):
        self.averaged = {id(p) for p in averaged}
        self.groups: list[list[nn.Parameter]] = []
        room = 0
        for p in reversed([p for p in parameters if p.requires_grad] if several() else []):
            if p.nbytes > room:
                self.groups.append([])
                room = MESSAGE_BYTES
            self.groups[-1].append(p)
            room -= p.nbytes
        self.group_of = {id(p): i for i, group in enumerate(self.groups) for p in group}
        for group in self.groups:
            for p in group:
                p.register_post_accumulate_grad_hook(self._arrived)
        self.active = False

    def backward(self, loss: Tensor) -> None:
        """Like ``loss.backward()``, with the gradients of all processes in the end."""
        self.missing = [len(group) for group in self.groups]
        self.waiting = list(self.groups)
        self.sent: list[tuple[dist.Work, Tensor, list[Tensor]]] = []
        self.active = True
        try:
            loss.backward()
        finally:
            self.active = False  # another user of the model may call backward too
        while self.waiting:  # some of their parameters had no part in the loss
            self._send()
        for work, message, grads in self.sent:
            work.wait()
            for grad, part in zip(grads, message.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))

    def _arrived(self, p: Tensor) -> None:
        if not self.active:
            return
        if id(p) in self.averaged:
            assert p.grad is not None
            p.grad /= world_size()
        self.missing[self.group_of[id(p)]] -= 1
        while self.waiting and self.missing[-len(self.waiting)] == 0:
            self._send()

    @torch.no_grad()
    def _send(self) -> None:
        grads = [p.grad for p in self.waiting.pop(0) if p.grad is not None]
        if grads:
            message = torch.cat([grad.flatten() for grad in grads])
            work = dist.all_reduce(message, async_op=True)
            assert work is not None
            self.sent.append((work, message, grads))
