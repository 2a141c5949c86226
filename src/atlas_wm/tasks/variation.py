"""Variations of an environment, as stable-worldmodel defines them: colours, sizes, the position of a door.

A varied environment restores the given values at every reset, where it would restore its defaults."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import gymnasium as gym
import numpy as np

from atlas_wm.errors import UserError, did_you_mean, reason, short
from atlas_wm.settings import assignments
from atlas_wm.tasks.base import Task

Variation = Mapping[str, Sequence[float]]  # by name, such as door.position; the numbers of an array in C order

NO_VARIATION: Variation = MappingProxyType({})


def make_varied_env(task: Task, variation: Variation) -> gym.Env:
    env = task.make_env()
    if variation:
        spaces = _spaces(task, env)
        for name, values in variation.items():
            if name not in spaces:
                raise UserError(f"{task.name} has no variation {short(name)}.{did_you_mean(name, spaces)}")
            spaces[name].set_init_value(_typed(spaces[name], values))
    return env


def parse_variation(task: Task, given: Sequence[str]) -> dict[str, list[float]]:
    """``["door.position=100", "agent.color=0,0,255"]`` → the values, checked against the environment. One number
    stands for all numbers of an array."""
    env = task.make_env()
    spaces, found = _spaces(task, env), dict[str, list[float]]()
    listed = _listed(spaces)  # before the defaults change
    try:
        for name, value in assignments(given, "variation", spaces).items():
            found[name] = _numbers(name, spaces[name], value)
            spaces[name].set_init_value(_typed(spaces[name], found[name]))
        env.reset(seed=0)  # constraints between values
    except UserError as error:
        end = "" if str(error).endswith((".", "?")) else "."
        raise UserError(f"--vary of {task.name}: {error}{end} Variations: {listed}") from error
    except Exception as error:
        raise UserError(f"--vary of {task.name}: the environment refuses these values ({reason(error)})") from error
    finally:
        env.close()
    return found


def list_variations(task: Task) -> str:
    """A line for each: its default, how many numbers it has and their range."""
    env = task.make_env()
    text = _listed(_spaces(task, env), "\n")
    env.close()
    return text


def variation_ranges(task: Task, names: Sequence[str]) -> dict[str, tuple[list[float], list[float], list[float]]]:
    """By name: the default, the lowest and the highest value of each number."""
    env = task.make_env()
    spaces = _spaces(task, env)
    found = {name: (np.ravel(spaces[name].init_value).tolist(), *_range(spaces[name])) for name in names}
    env.close()
    return found


def _spaces(task: Task, env: gym.Env) -> dict[str, Any]:
    space: Any = getattr(env.unwrapped, "variation_space", None)
    if space is None:
        raise UserError(
            f"the environment of {task.name} has no variation_space, so --vary cannot change it: "
            f"leave it out, or write one (stable_worldmodel.spaces.Dict)"
        )
    found = {}
    for name in space.names():
        found[name] = space
        for key in name.split("."):
            found[name] = found[name][key]
    return found


def _numbers(name: str, space: Any, text: str) -> list[float]:
    size = math.prod(space.shape)
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{name} must be numbers, separated by commas, not {short(text)}") from None
    if len(values) == 1:
        values *= size
    if len(values) != size:
        raise UserError(f"{name} has {size} numbers, not {len(values)}")
    low, high = _range(space)
    whole = np.issubdtype(space.dtype, np.integer)
    for value, least, most in zip(values, low, high, strict=True):
        if not least <= value <= most or (whole and value != int(value)):
            kind = "whole numbers" if whole else "numbers"
            raise UserError(f"{name} must be {kind} from {least:g} to {most:g}, not {value:g}")
    return values


def _typed(space: Any, values: Sequence[float]) -> Any:
    if isinstance(space, gym.spaces.Discrete):
        return int(values[0])
    return np.array(values, space.dtype).reshape(space.shape)


def _range(space: Any) -> tuple[list[float], list[float]]:
    """The lowest and the highest value of each number."""
    if isinstance(space, gym.spaces.Discrete):
        return [float(space.start)], [float(space.start + space.n - 1)]
    if isinstance(space, gym.spaces.MultiDiscrete):
        return np.ravel(space.start).tolist(), np.ravel(space.start + space.nvec - 1).tolist()
    return np.ravel(space.low).tolist(), np.ravel(space.high).tolist()


def _listed(spaces: Mapping[str, Any], separator: str = ", ") -> str:
    found = []
    for name, space in spaces.items():
        low, high = _range(space)
        count = f"{len(low)} numbers " if len(low) > 1 else ""
        default = ",".join(f"{v:g}" for v in np.ravel(space.init_value).tolist())
        found.append(f"{name}={default} ({count}from {min(low):g} to {max(high):g})")
    return separator.join(found)
