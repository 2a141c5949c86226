"""Compile every Triton kernel for a GPU that is not there, as models of the paper's size call them.

    python tests/kernels/compile_kernels.py

Triton's interpreter, which the other tests use, takes programs that its compiler refuses. Kernels are compiled to
machine code (compute capability 9.0, an H200) and not launched; what lies between them runs on the CPU. Their names
are printed.
"""

from dataclasses import replace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from atlas_wm.kernels.cem import draw_candidates, refine
from atlas_wm.kernels.encoder import fused_tokens
from atlas_wm.kernels.predictor import fused_blocks
from atlas_wm.kernels.rollout_triton import TritonTerminal
from atlas_wm.models.world_model import WorldModel
from atlas_wm.recipes import paper


class NoGPU:
    """As much of a driver as the compiler asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def only_compile() -> set[str]:
    """From now on calls of kernels compile them. The names of those that were."""
    compiled, run = set(), JITFunction.run

    def compile_it(self: JITFunction, *args: Any, **options: Any) -> Any:
        compiled.add(f"{self.fn.__module__}.{self.fn.__name__}")
        return run(self, *args, **{**options, "warmup": True})

    JITFunction.run = compile_it  # type: ignore[method-assign]
    driver.set_active(NoGPU())  # type: ignore[arg-type]
    return compiled


def main() -> None:
    compiled = only_compile()
    config = paper("atlas").model
    encoder, predictor = replace(config.encoder, depth=2), replace(config.predictor, depth=1)
    model = WorldModel(replace(config, encoder=encoder, predictor=predictor), action_size=2).train()
    frames = torch.zeros(1, 3, 224, 224, dtype=torch.uint8)
    for patches_too in (False, True):
        cls, patches = fused_tokens(model.encoder.vit, frames, model.encoder.mean, model.encoder.std)
        (cls.sum() + patches.sum() if patches_too else cls.sum()).backward()
    x = torch.zeros(2, config.history, config.latent)
    fused_blocks(model.predictor, x, x).sum().backward()
    with torch.inference_mode():
        terminal = TritonTerminal(model.eval().predictor)
        mean = torch.zeros(1, 5, 10)
        number = torch.zeros(1, dtype=torch.int64)
        drawn = draw_candidates(mean, mean, number, number, samples=300)
        terminal(torch.zeros(1, config.latent), drawn)
        refine(torch.zeros(1, 300), drawn, 30, mean, mean, number)
    print(*sorted(compiled), sep="\n")


if __name__ == "__main__":
    main()
