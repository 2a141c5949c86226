"""``atlas methods``: encoder, predictor, losses, size and source of each method"""

from typing import NamedTuple

from atlas_wm.config import EncoderConfig, ModelConfig, ObjectiveConfig
from atlas_wm.recipes import get_recipe

ACTION_SIZE = 2  # of TwoRoom and PushT
KINDS = {
    "causal": "step by step",
    "prefix": "all action prefixes at once",
    "patch": "patch tokens, step by step",
}


def methods(recipe: str = "paper") -> None:
    """List the methods: encoder, predictor, loss weights, number of parameters, source.

    Train one with `atlas train TASK --method NAME`.

        atlas methods
        atlas methods --recipe demo

    Args:
        recipe: The recipe whose model sizes to show: paper, small or demo.
    """
    get_recipe(recipe)  # an unknown name is an error before torch is imported
    print_methods(recipe)


class Parameters(NamedTuple):
    trained: int
    frozen: int


def count_parameters(config: ModelConfig, action_size: int = ACTION_SIZE) -> Parameters:
    """Of the model as it is built; no memory is taken for it."""
    import torch

    from atlas_wm.models.world_model import WorldModel

    with torch.device("meta"):
        parameters = list(WorldModel(config, action_size).parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    return Parameters(trained, sum(p.numel() for p in parameters) - trained)


def describe_encoder(config: EncoderConfig) -> str:
    if ":" in config.kind:
        return config.kind
    name = "frozen DINOv2" if config.frozen else "ViT"
    return f"{name} {config.depth}×{config.width}, {config.image_size} px, patch {config.patch_size}"


def describe_predictor(config: ModelConfig) -> str:
    p = config.predictor
    if ":" in p.kind:
        return p.kind
    width = p.width if p.kind != "patch" else config.latent_shape[-1] + config.action_smooth
    depth = f"{p.prefix_depth}+{p.depth}" if p.kind == "prefix" else f"{p.depth}"
    return f"{KINDS[p.kind]}: {depth}×{width}, {p.heads}×{p.head_dim} heads, MLP {p.mlp}"


def describe_objective(config: ObjectiveConfig) -> str:
    return "\n".join(f"{weight:g} {name}" for name, weight in config.weights.items())


def describe_parameters(count: Parameters) -> str:
    frozen = f"\n+ {_millions(count.frozen)} frozen" if count.frozen else ""
    return f"{_millions(count.trained)}{frozen}"


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count / 1e6:.2f} M"


def print_methods(recipe: str) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from atlas_wm.methods import METHODS

    columns = ("method", "what, and where from", "encoder → predictor", "loss", "parameters")
    table = Table(
        *columns, show_lines=True, title=f"Methods at the size of --recipe {recipe}", title_justify="left"
    )
    for name, method in METHODS.items():
        config = get_recipe(recipe)(name)
        table.add_row(
            f"[bold]{name}[/]",
            f"{escape(method.summary)}\n[dim]{escape(method.source)}[/]",
            f"{describe_encoder(config.model.encoder)}\n→ {describe_predictor(config.model)}",
            describe_objective(config.objective),
            describe_parameters(count_parameters(config.model)),
        )
    console = Console()
    console.print(table)
    console.print(
        "Parameters: for 2 action coordinates. Your own: docs/guides/own-method.md, docs/guides/own-model.md",
        style="dim",
    )
