"""Is a module still built as its class builds it? Only then may a faster implementation replace it."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

SIMPLE = (bool, int, float, str, tuple, type(None))
CHANGES = {"training", "fused"}  # attributes that may differ at any time


def departure(module: nn.Module, reference: nn.Module, methods: Sequence[str] = ("forward",)) -> str:
    """The first difference between a module and the reference; "" if there is none.

    The module may be of a subclass with further submodules, if it inherits these methods. What the reference has
    must match: classes, settings, shapes, and no hooks. The reference may be on the meta device.
    """
    kind, expected = type(module), type(reference)
    if not isinstance(module, expected):
        return f"{kind.__name__} is not a {expected.__name__}"
    for name in methods:
        if name in vars(module) or getattr(kind, name) is not getattr(expected, name):
            return f"{kind.__name__} has a {name} of its own"
    found = dict(module.named_modules(remove_duplicate=False))
    for name, other in reference.named_modules(remove_duplicate=False):
        if name not in found:
            return f"there is no {name}"
        for difference in _differences(found[name], other, whole=name != ""):
            return f"{name or kind.__name__} {difference}"
    return ""


def _differences(mine: nn.Module, other: nn.Module, whole: bool) -> Iterator[str]:
    """``whole``: class and children must match, too."""
    if whole and type(mine) is not type(other):
        yield f"is {type(mine).__name__}, not {type(other).__name__}"
    if whole and "forward" in vars(mine):
        yield "has a forward of its own"
    if whole and list(mine._modules) != list(other._modules):
        yield "has other children"
    if whole and mine.extra_repr() != other.extra_repr():
        yield f"has ({mine.extra_repr()}), not ({other.extra_repr()})"
    hooks = (mine._forward_hooks, mine._forward_pre_hooks, mine._backward_hooks, mine._backward_pre_hooks)
    if any(hooks):
        yield "has hooks"
    for name, value in vars(other).items():
        if isinstance(value, SIMPLE) and name not in CHANGES and vars(mine).get(name, ...) != value:
            yield f"has another {name}"
    weights = _weights(mine)
    for name, kind in _weights(other).items():
        if weights.get(name) != kind:
            yield f"has another {name}"


def _weights(module: nn.Module) -> dict[str, Any]:
    """Shape and dtype of the module's own tensors; None for those it does without."""
    tensors = {**module._parameters, **module._buffers}
    return {name: None if t is None else (t.shape, t.dtype) for name, t in tensors.items()}
