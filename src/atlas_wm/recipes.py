"""Named runs, each derived from the paper's. The named recipe is the run that was reported."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from atlas_wm.config import RunConfig
from atlas_wm.errors import UserError, unknown
from atlas_wm.methods import get_method

# Weights at the demo's size, tuned on episodes that the demo never evaluates (docs/results/demo.md).
DEMO_WEIGHTS = {"wemreg": 0.2, "sigreg": 0.03, "relational": 0.1}


def paper(method: str) -> RunConfig:
    """The run of the paper: 18.0 M parameters, 224×224, 10 epochs, CEM 300×30.

    Its plans are the paper's to the letter: actions are not clipped and may leave the action space.
    """
    run = get_method(method).run_config
    return replace(run, plan=replace(run.plan, clip_actions=False))


def small(method: str) -> RunConfig:
    """For a laptop with a GPU, or to explore: 9.3 M parameters, 96×96 frames, 40,000 steps, actions clipped."""
    base = paper(method)
    if not base.model.encoder.frozen:
        encoder = replace(base.model.encoder, image_size=96, patch_size=8, depth=5, positions="sincos")
    else:  # a pretrained encoder keeps its own shape: it can only look at fewer patches
        encoder = replace(base.model.encoder, image_size=7 * base.model.encoder.patch_size)
    predictor = replace(base.model.predictor, heads=8, mlp=1024)
    return replace(
        base,
        model=replace(base.model, encoder=encoder, predictor=predictor, hidden=1024),
        train=replace(base.train, steps=40_000, lr=4e-4, split="episodes", validate_every=2000),
        plan=replace(base.plan, clip_actions=True),
    )


def demo(method: str) -> RunConfig:
    """Minutes on a laptop: 0.27 M parameters, 32×32 frames, 800 steps, CEM with 10 iterations, actions clipped."""
    base = paper(method)
    weights: dict[str, Any] = {name: w for name, w in DEMO_WEIGHTS.items() if getattr(base.objective, name) > 0}
    if not base.model.encoder.frozen:
        encoder = replace(
            base.model.encoder,
            image_size=32,
            patch_size=4,
            width=48,
            depth=2,
            heads=3,
            # Decides everything at this size: from a random start latent distance saturates 20 px away.
            positions="sincos",
            pixel_mean=(1.0, 1.0, 1.0),  # white, the floor of TwoRoom, is 0
            pixel_std=(1.0, 1.0, 1.0),
        )
    else:  # a pretrained encoder keeps its own shape: it can only look at fewer patches
        encoder = replace(base.model.encoder, image_size=4 * base.model.encoder.patch_size)
    predictor = replace(
        base.model.predictor,
        width=64,
        depth=2,
        heads=2,
        head_dim=32,
        mlp=256,
        positions_std=0.02,
        prefix_depth=2,
        prefix_heads=2,
        prefix_mlp=128,
    )
    return replace(
        base,
        model=replace(base.model, encoder=encoder, predictor=predictor, latent=32, hidden=256, action_hidden=64),
        objective=replace(base.objective, directions=256, **weights),
        train=replace(
            base.train,
            steps=800,
            batch=64,
            lr=1e-3,
            warmup=50 / 800,
            split="episodes",
            validate_every=200,
        ),
        plan=replace(base.plan, iterations=10, clip_actions=True),
    )


def tuned_tworoom() -> RunConfig:
    """The paper's size with a tenth of its WEMReg: a state of two dimensions can fill 192 only by folding."""
    base = paper("atlas")
    return replace(
        base,
        objective=replace(base.objective, wemreg=0.3),
        train=replace(base.train, steps=6500, split="episodes"),
        plan=replace(base.plan, cost="nearest", execute=1, clip_actions=True),
    )


def tuned_with_contact() -> RunConfig:
    """``small`` with a sixth layer, the paper's predictor and inverse dynamics, where objects are moved.

    Plans start from retrieved actions: a search from zero wins fewer episodes.
    """
    base, whole = small("atlas"), paper("atlas").model
    encoder = replace(base.model.encoder, depth=6)
    return replace(
        base,
        model=replace(
            base.model, encoder=encoder, predictor=whole.predictor, hidden=whole.hidden, inverse_hidden=512
        ),
        objective=replace(base.objective, inverse=1.0),
        plan=replace(base.plan, cost="nearest", execute=1, start="retrieval"),
    )


def tuned_cube() -> RunConfig:
    """For 1,000 demonstrations."""
    base = tuned_with_contact()
    return replace(base, train=replace(base.train, steps=20_000))


RECIPES: dict[str, Callable[[str], RunConfig]] = {"paper": paper, "small": small, "demo": demo}
TUNED: dict[tuple[str, str], Callable[[], RunConfig]] = {  # by task and method
    ("tworoom", "atlas"): tuned_tworoom,
    ("pusht", "atlas"): tuned_with_contact,  # demonstrations with white_noise=0.4 (docs/notes/pusht-noise.md)
    ("cube", "atlas"): tuned_cube,  # with targets=many and action_noise=0.3 (docs/notes/cube.md)
}


def get_recipe(name: str) -> Callable[[str], RunConfig]:
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]


def untuned(recipe: str) -> str:
    """The recipe that a study tunes, or the recipe itself."""
    return recipe.removesuffix("+tuned")


def recipe_config(recipe: str, method: str, task: str | None) -> RunConfig:
    """The settings of a recipe; those of ``tuned`` depend on the task.

    ``RECIPE+tuned`` has the settings of RECIPE: a study passes the weights that it chose as flags. The name is that
    of its runs.
    """
    recipe = untuned(recipe)
    if recipe != "tuned":
        if recipe not in RECIPES:
            raise unknown("recipe", recipe, [*RECIPES, "tuned"])
        return RECIPES[recipe](method)
    if task is None:
        raise UserError("--recipe tuned depends on the task: name it first, `atlas train pusht --recipe tuned`")
    if (task, method) not in TUNED:
        known = ", ".join(f"{m} on {t}" for t, m in TUNED)
        raise UserError(f"there is no --recipe tuned for {method} on {task}, only for {known}: use --recipe small")
    return TUNED[task, method]()
