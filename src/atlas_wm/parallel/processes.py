"""Communication between the processes of a job. With a single process, every function is the identity.

All processes compute one loss: each encodes its part of the batch, gathers the latents of all parts and computes
the whole objective. Its gradient with respect to its own rows is one part of the full gradient, so gradients of the
weights are summed over the processes, not averaged.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
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


def several() -> bool:
    """Whether there is another process to communicate with."""
    return world_size() > 1


@contextmanager
def alone() -> Iterator[None]:
    """Inside the block, this process acts as if it were the only one."""
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
    """The part of this rank. The parts, in rank order, make up the list; their lengths differ by at most 1."""
    first = sum(shard_sizes(len(items))[: rank()])
    return items[first : first + shard_sizes(len(items))[rank()]]


def shard_sizes(count: int) -> list[int]:
    """The length of each rank's part of ``count`` items."""
    ends = [count * r // world_size() for r in range(world_size() + 1)]
    return [last - first for first, last in pairwise(ends)]


def has_nccl() -> bool:
    """Whether GPUs talk through NCCL, whose messages can be part of a CUDA graph. gloo, for several processes on
    one GPU, goes through the CPU."""
    return "nccl" in dist.get_backend_config()


class _Gather(torch.autograd.Function):
    """Rows of all processes, in rank order. All processes compute the same function of the result, so the gradient
    is known everywhere and each process takes its own rows of it."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, sizes: list[int]) -> Tensor:
        first = sum(sizes[: rank()])
        ctx.own = slice(first, first + len(mine))
        if mine.is_cuda and not has_nccl():  # gloo gathers nothing that is on a GPU, but adds it
            whole = mine.new_zeros(sum(sizes), *mine.shape[1:])
            whole[ctx.own] = mine
            dist.all_reduce(whole)
            return whole
        most = max(sizes)  # NCCL gathers equal sizes only
        padded = torch.cat([mine, mine.new_zeros(most - len(mine), *mine.shape[1:])])
        whole = mine.new_empty(len(sizes) * most, *mine.shape[1:])
        dist.all_gather_into_tensor(whole, padded)
        if min(sizes) == most:
            return whole
        return torch.cat([part[:size] for part, size in zip(whole.split(most), sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][ctx.own], None


def gather_rows(tensors: Sequence[Tensor | None], sizes: list[int] | None = None) -> list[Tensor | None]:
    """Tensors (n, …) with the same n rows → the rows of all processes. n may differ between processes.

    ``sizes``: n of each process, where it is known, as from :func:`shard_sizes`; asking for it makes GPUs wait.
    Every process must compute the same function of the result: see :class:`_Gather`.
    """
    if not several():
        return list(tensors)
    given = [t for t in tensors if t is not None]
    sizes = sizes or from_all(len(given[0]))
    if len(given[0]) != sizes[rank()]:
        raise ValueError(f"process {rank()} has {len(given[0])} rows, not {sizes[rank()]}")
    packed = torch.cat([t.flatten(1) for t in given], dim=1)  # one message for all of them
    whole = _Gather.apply(packed, sizes).split([t.shape[1:].numel() for t in given], dim=1)
    gathered = (part.reshape(sum(sizes), *t.shape[1:]) for part, t in zip(whole, given, strict=True))
    return [None if t is None else next(gathered) for t in tensors]


class _GatherForMean(_Gather):
    """The same if gradients of the weights are averaged over the processes, as DDP does. A row is part of every
    process's loss, so its gradient is the sum over processes."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone()
        dist.all_reduce(total)
        return total[ctx.own], None


def gathered(x: Tensor, dim: int = 0) -> Tensor:
    """The rows of all processes, in rank order, for a loss that is a statistic of the whole batch.

    Under plain DDP, ``wemreg(gathered(z))`` equals the loss of one process with the whole batch, and so does the
    gradient that DDP leaves in the weights. Do not scale the loss by the number of processes: DDP averages. Gather
    every input of a loss (``relational(gathered(z), gathered(anchor))``), call it in every process, and give
    ``wemreg`` and ``sigreg`` the same directions everywhere. With different directions the processes compute
    different losses, and the gradient is that of their mean.

    ``dim``: the batch axis, -2 if time comes first. Processes may hold different numbers of rows. Without
    ``torch.distributed``, or in a single process, returns x. (Our own trainer sums gradients: see gather_rows.)
    """
    if world_size() == 1:
        return x
    rows = x.movedim(dim, 0)
    counts = [torch.zeros(1, dtype=torch.int64, device=x.device) for _ in range(world_size())]
    dist.all_gather(counts, torch.tensor([len(rows)], device=x.device))  # NCCL only takes tensors on a GPU
    return _GatherForMean.apply(rows, torch.cat(counts).tolist()).movedim(0, dim)


class _Sum(torch.autograd.Function):
    """The sum over processes. Each computes a different function of it, so gradients are summed too."""

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
    return _Sum.apply(x) if several() else x


def same_weights(model: nn.Module) -> None:
    """Copy the weights and statistics of the main process to all others."""
    if world_size() > 1:
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, 0)


def from_main(value: T) -> T:
    """The value of the main process, in all processes. The values of the others are ignored."""
    if world_size() == 1:
        return value
    box = [value if is_main() else None]
    dist.broadcast_object_list(box, 0)
    return box[0]  # type: ignore[return-value]


def from_all(value: T) -> list[T]:
    """The values of all processes, in rank order."""
    values: list[Any] = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value)
    return values


def sharded_map(items: list[Item], work: Callable[[list[Item]], list[T]]) -> list[T]:
    """Each process works on its shard of the items; all processes get all results, in order.

    A UserError in one process is raised in all of them.
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
        dist.all_reduce(torch.zeros(1))  # on the CPU, so GPUs need not wait
