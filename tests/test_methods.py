"""The table of methods: what each row says is what is built, trained and shown."""

from dataclasses import replace

import pytest
import torch

from atlas_wm.cli.app import main
from atlas_wm.cli.methods import count_parameters, describe_objective, describe_parameters
from atlas_wm.config import ModelConfig
from atlas_wm.losses import objective
from atlas_wm.methods import METHODS
from atlas_wm.models.layers import CausalAttention
from atlas_wm.models.predictors import PREDICTORS
from atlas_wm.models.world_model import WorldModel
from atlas_wm.recipes import RECIPES, demo, paper
from atlas_wm.rng import make_rng

# ---- sizes, by hand


def norm(width):
    return 2 * width


def linear(size, out):
    return size * out + out


def mlp(size, hidden, out):
    return linear(size, hidden) + linear(hidden, out)


def attention(width, inner):
    return 3 * width * inner + linear(inner, width)


ACTIONS = linear(10, 10) + linear(10, 768) + linear(768, 192)
HEAD = mlp(192, 2048, 192) + norm(2048)  # a BatchNorm has as many as a LayerNorm
ADALN = 2 * norm(192) + mlp(192, 2048, 192) + linear(192, 6 * 192)
PREDICTOR_SIZES = {
    "atlas": ACTIONS + 3 * 192 + 6 * (ADALN + attention(192, 16 * 64)) + norm(192) + HEAD,
    "fast-wm": ACTIONS
    + 3 * (2 * norm(192) + attention(192, 6 * 32) + mlp(192, 768, 192))
    + norm(192)
    + 6 * (ADALN + 192 * 16 * 64 + linear(16 * 64, 192))  # values alone in the place of attention
    + norm(192)
    + HEAD,
    "dino-wm": linear(10, 10)
    + 3 * 256 * (384 + 10)
    + 6 * (2 * norm(394) + attention(394, 16 * 64) + mlp(394, 2048, 394))
    + norm(394),
}
DINOV2_SMALL = (
    linear(3 * 14 * 14, 384)
    + (1 + 257) * 384  # the CLS token, and positions of 16×16 patches and it
    + 12 * (2 * norm(384) + linear(384, 3 * 384) + linear(384, 384) + mlp(384, 1536, 384) + 2 * 384)
    + norm(384)
)


def built(config: ModelConfig) -> WorldModel:
    with torch.device("meta"):
        return WorldModel(config, action_size=2)


@pytest.mark.parametrize("method", PREDICTOR_SIZES)
def test_predictors_have_the_size_that_follows_from_the_papers_table(method):
    predictor = built(paper(method).model).predictor
    assert sum(p.numel() for p in predictor.parameters()) == PREDICTOR_SIZES[method]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("method", METHODS)
def test_counted_parameters_are_those_of_the_model_that_is_built(method, recipe):
    config = RECIPES[recipe](method).model
    model = built(config)
    trained, frozen = count_parameters(config)
    assert trained + frozen == sum(p.numel() for p in model.parameters())
    assert frozen == (sum(p.numel() for p in model.encoder.parameters()) if method == "dino-wm" else 0)


def test_sizes_are_the_papers():
    for method in ("atlas", "lewm", "lewm+ood", "wemreg", "pldm"):
        assert describe_parameters(count_parameters(paper(method).model)) == "18.0 M"
    assert count_parameters(paper("dino-wm").model) == (PREDICTOR_SIZES["dino-wm"], DINOV2_SMALL)


def test_dino_wm_and_fast_wm_are_what_their_rows_must_say():
    dino, fast = paper("dino-wm"), paper("fast-wm")
    assert dino.model.latent_shape == (256, 384) and fast.model.latent_shape == (192,)
    p = dino.model.predictor
    assert (p.kind, p.depth, p.heads, p.head_dim, p.mlp, dino.model.action_smooth) == ("patch", 6, 16, 64, 2048, 10)
    p = fast.model.predictor
    assert (p.kind, p.prefix_depth, p.prefix_heads, p.prefix_head_dim, p.prefix_mlp) == ("prefix", 3, 6, 32, 768)
    assert (p.depth, p.heads, p.head_dim, p.mlp) == (6, 16, 64, 2048)
    assert (dino.model.clip_frames, fast.model.clip_frames) == (4, 6)


# ---- what `atlas methods` shows


@pytest.mark.parametrize("recipe", RECIPES)
def test_atlas_methods_shows_every_row_at_100_columns(recipe, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    main(["methods", "--recipe", recipe])
    shown = capsys.readouterr().out
    assert max(len(line) for line in shown.splitlines()) <= 100 and "…" not in shown
    words = set(shown.split())
    for name, method in METHODS.items():
        config = RECIPES[recipe](name)
        assert name in words
        for text in (method.summary, method.source, describe_objective(config.objective)):
            assert set(text.split()) <= words
        assert set(describe_parameters(count_parameters(config.model)).split()) <= words


def test_the_help_of_train_names_every_method(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in [*METHODS, "module:NAME"])


# ---- one step of each


def tiny(method):
    config = demo(method)
    encoder = replace(
        config.model.encoder, image_size=2 * config.model.encoder.patch_size, width=24, depth=1, heads=2
    )
    return replace(config, model=replace(config.model, encoder=encoder))


@pytest.mark.parametrize("method", METHODS)
def test_a_training_step_moves_all_that_is_trained_and_nothing_that_is_frozen(method):
    config = tiny(method)
    torch.manual_seed(0)
    model = WorldModel(config.model, action_size=2)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {
        name for name, _ in model.named_parameters() if name.startswith("encoder.") and method == "dino-wm"
    }
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    side, steps = config.model.encoder.image_size, config.model.clip_frames
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0)
    for step in range(2):  # at the first one the modulation, which starts at zero, hides what lies behind it
        frames = torch.randint(0, 256, (8, steps, 3, side, side), generator=make_rng(0, step), dtype=torch.uint8)
        actions = torch.randn(8, steps - 1, 10, generator=make_rng(1, step))
        optimizer.zero_grad()
        losses = objective(model(frames, actions), config.objective, make_rng(2, step))
        losses.total.backward()
        assert set(losses.terms) == set(config.objective.weights)
        for name, p in model.named_parameters():
            assert p.grad is None if name in frozen else p.grad.isfinite().all(), name
        optimizer.step()
    same = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    assert same == frozen


# ---- what carries information between steps


@pytest.mark.parametrize("method", ["atlas", "fast-wm", "dino-wm"])
def test_causal_attention_alone_carries_actions_from_step_to_step(method):
    """With it, an action changes its own prediction and the later ones. Silenced, its own alone: nothing else mixes
    steps."""
    config = tiny(method).model
    torch.manual_seed(0)
    predictor = WorldModel(config, action_size=2).predictor.eval().requires_grad_(False)
    for name, weight in predictor.named_parameters():
        if "modulation" in name:  # 0 at the start, and would hide the actions
            torch.nn.init.normal_(weight, std=0.5)
    steps = config.clip_frames - 1
    z = torch.randn(4, steps, *config.latent_shape, generator=make_rng(0))
    actions = torch.randn(4, steps, 10, generator=make_rng(1))

    def changed_by_the_first_action() -> list[bool]:
        other = torch.cat([actions[:, :1] + 1, actions[:, 1:]], dim=1)
        change = (predictor.predict(z, other) - predictor.predict(z, actions)).abs().flatten(2).amax(dim=(0, 2))
        return (change > 1e-5).tolist()

    assert changed_by_the_first_action() == [True] * steps
    for module in predictor.modules():
        if isinstance(module, CausalAttention):
            module.out.weight.zero_()
    assert changed_by_the_first_action() == [True] + [False] * (steps - 1)


def test_every_kind_of_predictor_has_a_method():
    assert set(PREDICTORS) == {METHODS[m].predictor.kind for m in METHODS}
