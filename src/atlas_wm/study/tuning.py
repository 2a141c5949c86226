"""What a study tunes: the weight of each method's regulariser, by the same factors for every method."""

from itertools import product
from typing import NamedTuple

from atlas_wm.methods import get_method
from atlas_wm.recipes import recipe_config, untuned
from atlas_wm.study.study import Flags, Study, file_name

UNKNOWN = "CHOSEN"  # instead of a weight in a command, as long as its tries are not over


class Tuned(NamedTuple):
    """All its runs have the same weight."""

    task: str
    method: str
    recipe: str

    def try_name(self, factor: float) -> str:
        return "-".join((file_name(self.task), file_name(self.method), untuned(self.recipe), f"{factor:g}"))


def all_tuned(study: Study) -> list[Tuned]:
    every = map(Tuned._make, product(study.tasks, study.methods, study.recipes))
    return [one for one in every if one.recipe != untuned(one.recipe)]


def weights(study: Study, one: Tuned, factor: float = 1.0) -> dict[str, float]:
    """By term: the factor times the weight of the recipe, or of the study's settings."""
    objective = recipe_config(one.recipe, one.method, one.task).objective
    terms, settings = get_method(one.method).regulariser_of(objective), study.settings_of(one.method)
    return {term: factor * float(settings.get(_setting(term), weight)) for term, weight in terms.items()}


def weight_settings(study: Study, one: Tuned, factor: float | None) -> Flags:
    """As settings of `atlas train`. None: not known yet."""
    if factor is None:
        return {_setting(term): UNKNOWN for term in weights(study, one)}
    return {_setting(term): f"{weight:g}" for term, weight in weights(study, one, factor).items()}


def _setting(term: str) -> str:
    return f"objective.extra.{term}" if ":" in term else f"objective.{term.replace('_', '-')}"
