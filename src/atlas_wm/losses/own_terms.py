"""Loss terms of the user's own, named ``module:name`` in ``objective.extra``.

A term is a function of the clips, or an ``nn.Module`` class whose parameters are trained with the model's. A class
is constructed once for a model, as ``Class(config: ModelConfig, action_size: int)``; ``model.terms`` holds the
instance. Both are called as ``term(clips)``, or as ``term(clips, progress)`` if they have a parameter ``progress``,
and return a scalar tensor.
"""

from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from atlas_wm.config import ModelConfig, ObjectiveConfig
from atlas_wm.errors import UserError, user_code_location
from atlas_wm.plugins import import_named

if TYPE_CHECKING:
    from atlas_wm.losses.objective import ClipLatents, Progress


def make_terms(config: ObjectiveConfig, model: ModelConfig, action_size: int) -> nn.ModuleDict:
    """The terms of the config that are classes, constructed; functions are not in it."""
    terms = nn.ModuleDict()
    for name in config.extra:
        if name not in config.weights or not isinstance(kind := import_named("loss term", name), type):
            continue
        if not issubclass(kind, nn.Module):
            raise UserError(f"loss term {name} is a class, but not an nn.Module: make it one, or a function")
        try:
            terms[_key(name)] = kind(model, action_size)
        except Exception as error:
            raise _failure(name, error) from error
    return terms


def _key(name: str) -> str:
    return name.replace(".", "/")  # a ModuleDict accepts no dots


@torch.compiler.disable  # a term may do what the compiler cannot; a CUDA graph captures it all the same
def own_term(
    name: str, clips: "ClipLatents", progress: "Progress | None" = None, terms: nn.ModuleDict | None = None
) -> Tensor:
    """The value of a term, with errors that name it and the line in the user's code."""
    constructed = terms is not None and _key(name) in terms
    term = terms[_key(name)] if terms is not None and constructed else import_named("loss term", name)
    if isinstance(term, type):
        raise UserError(
            f"loss term {name} is a class and was not constructed: call model.prepare_training(config.objective), "
            f"and pass objective(…, terms=model.terms)"
        )
    if isinstance(term, nn.Module) and not constructed:
        raise UserError(f"loss term {name} is an instance, whose parameters are not trained: name its class")
    wanted = {"progress": progress} if _takes_progress(name, term) else {}
    if wanted and progress is None:
        raise UserError(f"loss term {name} takes progress: call objective(…, progress=Progress.at(step, total))")
    try:
        value = term(clips, **wanted)
    except Exception as error:
        raise _failure(name, error) from error
    if not isinstance(value, Tensor) or value.ndim:
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise UserError(f"loss term {name} must return a tensor with one number, not {found}")
    return value


def _failure(name: str, error: Exception) -> UserError:
    place = user_code_location(error) or "its call"
    return UserError(f"loss term {name} failed at {place}: {type(error).__name__}: {error}")


_signatures: dict[str, tuple[Any, bool]] = {}  # by name: the term that was inspected, and what was found


def _takes_progress(name: str, term: Any) -> bool:
    """Whether the term has a parameter ``progress``. Cached, because terms are called at every step."""
    known, takes = _signatures.get(name, (None, False))
    if known is not term:
        try:
            takes = "progress" in signature(term.forward if isinstance(term, nn.Module) else term).parameters
        except (TypeError, ValueError):  # not callable, or a C function without a signature
            takes = False
        _signatures[name] = (term, takes)
    return takes
