"""The losses in someone else's training: plain DDP, gloo, nothing of ours but the losses.

``python plain_ddp.py FILE``: what 4 processes find with a part each, and what one finds with all of it.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from forked import fork
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from atlas_wm.losses import gathered, relational, sigreg, wemreg
from atlas_wm.rng import make_rng

ROWS, SIZE, PROCESSES = 512, 16, 4
SHARES = {"equal": [128, 128, 128, 128], "unequal": [100, 128, 140, 144]}


def regulariser(z: Tensor, anchor: Tensor, directions: Tensor) -> Tensor:
    """z: (B, 2, d), two steps of time."""
    over_time = wemreg(z.transpose(0, 1), directions) + sigreg(z.transpose(0, 1), directions)
    return over_time + relational(z, anchor)


def drawn(key: int) -> Tensor:
    return nn.functional.normalize(torch.randn(SIZE, 32, generator=make_rng(5, key)), dim=0)


def found(encoder: nn.Module, loss: Tensor, value: Tensor) -> dict[str, Any]:
    loss.backward()
    return {"value": value.detach(), "gradients": [p.grad.clone() for p in encoder.parameters()]}


def learn(kind: str, first: int, count: int, direction: int, among: bool) -> dict[str, Any]:
    """One backward pass on some rows of the batch."""
    torch.manual_seed(0)
    encoder: nn.Module = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, SIZE))
    encoder = DistributedDataParallel(encoder) if among else encoder
    x = torch.randn(ROWS, 2, 8, generator=make_rng(1))[first : first + count]
    anchor = torch.randn(ROWS, 2, 5, generator=make_rng(2))[first : first + count]
    z = encoder(x)
    value = regulariser(gathered(z), gathered(anchor), drawn(direction))
    if kind == "equal":  # a mean over clips, as any loss of one's own: DDP's mean is right for that as it is
        return found(encoder, value + z.square().mean(), value)
    over_time = wemreg(gathered(z.transpose(0, 1), dim=-2), drawn(direction))
    return found(encoder, value + over_time, value)


def one_of_several(file: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results = {}
    for kind, shares in SHARES.items():
        results[kind] = learn(kind, sum(shares[:rank]), shares[rank], 0, among=True)
    results["own directions"] = learn("unequal", 128 * rank, 128, rank, among=True)
    shard = torch.randn(ROWS, SIZE, generator=make_rng(3))[128 * rank : 128 * (rank + 1)]
    results["alone"], results["together"] = wemreg(shard, drawn(0)), wemreg(gathered(shard), drawn(0))
    torch.save(results, f"{file}.{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if any(fork(PROCESSES, lambda: one_of_several(sys.argv[1]))):
        sys.exit("a process failed")
    whole = {kind: learn(kind, 0, ROWS, 0, among=False) for kind in SHARES}
    whole["own directions"] = [learn("unequal", 0, ROWS, rank, among=False) for rank in range(PROCESSES)]
    torch.save(whole, sys.argv[1])
