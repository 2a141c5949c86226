"""Microseconds of the kernels that train the encoder, one by one at the paper's size, beside what moving their
bytes would take. On a CUDA device only.

    python benchmarks/kernels.py [--clips 128]
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from triton.testing import do_bench

from atlas_wm.kernels import attention
from atlas_wm.kernels import encoder_triton as kernels
from atlas_wm.recipes import paper

BANDWIDTH = 4.3e12  # measured on an H200: bytes a second that a copy reads and writes


def size(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clips", type=int, default=128)
    model = paper("atlas").model
    frames, e = parser.parse_args().clips * model.clip_frames, model.encoder
    tokens, width, hidden = 1 + e.patches, e.width, int(e.width * e.mlp_ratio)
    rows = frames * tokens

    def low(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    weight, bias = torch.randn(width, device="cuda"), torch.randn(width, device="cuda")
    images = torch.randint(0, 256, (frames, 3, e.image_size, e.image_size), dtype=torch.uint8, device="cuda")
    x, later = kernels.Split(low(rows, width), low(rows, width)), kernels.Split(low(rows, width), low(rows, width))
    change, grad, h, dg, qkv = (low(rows, n) for n in (width, width, hidden, hidden, 3 * width))
    total, y, moments = kernels.add_norm(x, change, weight, bias, e.norm_eps, torch.bfloat16)
    programs = -(-rows // kernels.ROWS_A_PROGRAM)
    norm_sums, up_sums = (torch.empty(programs, *n, device="cuda") for n in ((3, width), (hidden,)))
    out, lse = attention.attend(qkv, frames, e.heads)
    cut = kernels.patches(images, e.patch_size, torch.bfloat16)
    both = [t for split in (x, later) for t in split if t is not None]
    cases: list[tuple[str, Callable[[], Any], int]] = [
        ("patches", lambda: kernels.patches(images, e.patch_size, torch.bfloat16), size(images, cut)),
        (
            "residual and norm",
            lambda: kernels.add_norm(x, change, weight, bias, e.norm_eps, torch.bfloat16),
            size(*both, change, y),
        ),
        (
            "… backward",
            lambda: kernels.add_norm_backward(grad, later, total.rounded, moments, weight, norm_sums),
            size(*both, grad, total.rounded),
        ),
        ("GELU", lambda: kernels.gelu(h), 2 * size(h)),
        ("… backward", lambda: kernels.gelu_backward(dg, h, up_sums), 3 * size(h)),
        ("attention", lambda: attention.attend(qkv, frames, e.heads), size(qkv, out)),
        (
            "… backward",
            lambda: attention.attend_backward(grad, qkv, out, lse, e.heads, only_cls=False),
            size(qkv, qkv, out, grad),
        ),
    ]
    table = Table("kernel", "µs", "its bytes, µs", "MB")
    for name, run, moved in cases:
        table.add_row(name, f"{1e3 * do_bench(run):.0f}", f"{1e6 * moved / BANDWIDTH:.0f}", f"{moved / 1e6:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
