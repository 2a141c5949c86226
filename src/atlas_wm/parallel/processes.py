"""What the processes of one job tell one another. In a single process everything here is the identity.

One loss for all: each process encodes its part of the batch, gathers the latents of all parts and computes the
whole objective of them. Its gradient by a process's own rows is a part of the one gradient, so those of the weights
are summed over the processes, not averaged.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atlas_wm.errors import UserError

T = TypeVar("T")
Item = TypeVar("Item")


_alone = False


def world_size() -> int:
    return 1 if _alone or not dist.is_available() or not dist.is_initialized() else dist.get_world_size()


@contextmanager
def alone() -> Iterator[None]:
    """Within, this process does as if there were no others."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


def rank() -> int:
    return dist.get_rank() if world_size() > 1 else 0


def is_main() -> bool:
    """Whether this is the process that writes."""
    return rank() == 0


def shard(items: list[T]) -> list[T]:
    """This process's part. All parts in the order of the ranks are the list; their lengths differ by 1 at most."""
    first, last = (len(items) * r // world_size() for r in (rank(), rank() + 1))
    return items[first:last]


class _Gather(torch.autograd.Function):
    """Rows of all processes in the order of the ranks. Every process computes the same of the result, so that its
    gradient is known everywhere: each takes its own rows of it."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, sizes: list[int]) -> Tensor:
        first = sum(sizes[: rank()])
        ctx.own = slice(first, first + len(mine))
        padded = mine.new_zeros(max(sizes), *mine.shape[1:])  # NCCL gathers equal sizes only
        padded[: len(mine)] = mine
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][ctx.own], None


def gather_rows(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Tensors (n, …) that hold the same n rows, n different between processes → those of all processes' rows.

    What is computed of them must be the same in every process: see :class:`_Gather`.
    """
    if world_size() == 1:
        return list(tensors)
    given = [t for t in tensors if t is not None]
    counts: list[Tensor] = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size())]
    dist.all_gather(counts, torch.tensor([len(given[0])]))
    sizes = [int(count) for count in counts]
    packed = torch.cat([t.flatten(1) for t in given], dim=1)  # one message for all of them
    whole = _Gather.apply(packed, sizes).split([t.shape[1:].numel() for t in given], dim=1)
    gathered = (part.reshape(sum(sizes), *t.shape[1:]) for part, t in zip(whole, given, strict=True))
    return [None if t is None else next(gathered) for t in tensors]


class _GatherForMean(_Gather):
    """The same where gradients of the weights are averaged over the processes, as DDP does. A row takes part in the
    loss of every process, so that its gradient is the sum of theirs."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone()
        dist.all_reduce(total)
        return total[ctx.own], None


def gathered(x: Tensor, dim: int = 0) -> Tensor:
    """The rows of all processes, in the order of the ranks, for a loss that is a statistic of the whole batch.

    ``wemreg(gathered(z))`` under plain DDP is the loss of one process with the whole batch, and so is the gradient
    that DDP leaves in the weights: differentiate the loss as it is, without a factor for the number of processes,
    and let DDP average. Gather all that a loss takes (``relational(gathered(z), gathered(anchor))``), call it in
    every process, and give ``wemreg`` and ``sigreg`` the same directions everywhere: with directions of their own
    the processes compute different losses, and the gradient is that of their mean.

    ``dim``: the axis of the batch, -2 where time leads. Processes may hold different numbers of rows. Without
    ``torch.distributed``, or in a single process, x itself. (Our own trainer sums gradients: see gather_rows.)
    """
    if world_size() == 1:
        return x
    rows = x.movedim(dim, 0)
    counts = [torch.zeros(1, dtype=torch.int64, device=x.device) for _ in range(world_size())]
    dist.all_gather(counts, torch.tensor([len(rows)], device=x.device))  # NCCL alone sees tensors of a GPU only
    return _GatherForMean.apply(rows, torch.cat(counts).tolist()).movedim(0, dim)


class _Sum(torch.autograd.Function):
    """The sum over processes, of which each makes something else: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        total = grads[0].clone()
        dist.all_reduce(total)
        return total


def summed(x: Tensor) -> Tensor:
    """The sum of x over the processes, with its gradient."""
    return x if world_size() == 1 else _Sum.apply(x)


@torch.no_grad()
def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """In place: every process then has the gradient of the whole batch."""
    if world_size() == 1:
        return
    grads = [p.grad for p in parameters if p.grad is not None]
    total = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(total)
    for grad, part in zip(grads, total.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def same_weights(model: nn.Module) -> None:
    """Every process starts from the main one's weights and statistics."""
    if world_size() > 1:
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, 0)


def from_main(value: T) -> T:
    """The main process's value, everywhere. Of the others only the call counts."""
    if world_size() == 1:
        return value
    box = [value if is_main() else None]
    dist.broadcast_object_list(box, 0)
    return box[0]  # type: ignore[return-value]


def from_all(value: T) -> list[T]:
    """Every process's value, in the order of the ranks."""
    values: list[Any] = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value)
    return values


def share_out(items: list[Item], work: Callable[[list[Item]], list[T]]) -> list[T]:
    """Each process works on its part of the items; the results of all, in order, are known to all.

    An error that a user can mend is raised in all of them, wherever it happened.
    """
    outcome: list[T] | UserError
    try:
        outcome = work(shard(items))
    except UserError as error:
        outcome = error
    results: list[T] = []
    for part in from_all(outcome):
        if isinstance(part, UserError):
            raise part
        results += part
    return results


def wait_for_all() -> None:
    if world_size() > 1:
        dist.all_reduce(torch.zeros(1))  # between CPUs, also beside GPUs: a GPU need not wait
