"""Settings as frozen dataclasses: checked when created, and just as strictly when read from files."""

import dataclasses
import json
import re
import sys
from collections.abc import Collection, Sequence
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from atlas_wm.errors import SettingError, UserError, did_you_mean, short, unknown

T = TypeVar("T")
Options = dict[str, int | float | str]  # settings of your own parts, by name
MOST_FLOAT = sys.float_info.max  # what is larger is infinite, or no float at all; NaN compares as neither


def require(condition: bool, message: str) -> None:
    if not condition:
        raise SettingError(message)


def check_types(where: str, config: Any) -> None:
    """Check every setting against its declared type and convert it as reading from JSON does: 1 for a float becomes
    1.0, a list for a tuple becomes a tuple."""
    for name, hint in get_type_hints(type(config)).items():
        try:
            object.__setattr__(config, name, _parse(hint, getattr(config, name), f"{where}{name}"))
        except UserError as error:
            raise SettingError(str(error)) from None


def within(where: str, config: Any, low: float, high: float, *names: str) -> None:
    """Require that the settings with these names lie in [low, high]; NaN does not."""
    for name in names:
        value = getattr(config, name)
        require(low <= value <= high, f"{where}{name} must lie between {low:g} and {high:g}, not {short(value)}")


def known_or_own(where: str, config: Any, name: str, known: Sequence[str]) -> None:
    """The setting names one of the known parts, or a class of your own as ``module:Class``."""
    value = getattr(config, name)
    require(
        value in known or re.fullmatch(r"[\w.]+:\w+", value) is not None,
        f"{where}{name} must be {' or '.join(map(repr, known))}, or your own as module:Class, not {short(value)}."
        f"{did_you_mean(value, known)}",
    )


def own_names(**named: str) -> dict[str, str]:
    """Of parts by what they are, those that name a class of your own."""
    return {part: name for part, name in named.items() if ":" in name}


def to_dict(config: Any) -> dict[str, Any]:
    return dataclasses.asdict(config)


def from_dict(cls: type[T], data: Any, where: str = "config") -> T:
    """The strict inverse of :func:`to_dict`: unknown names and wrong types raise errors that name the field."""
    if not isinstance(data, dict):
        raise UserError(f"{where} must be an object, not {type(data).__name__}")
    hints = get_type_hints(cls)
    for name in data:
        if name not in hints:
            raise unknown(f"setting in {where}", str(name), hints)
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        if f.name not in data and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise UserError(f"{where} lacks {f.name}")
    settings = {name: _parse(hints[name], value, f"{where}.{name}") for name, value in data.items()}
    try:
        return cls(**settings)
    except SettingError as error:
        raise UserError(f"{where}: {error}") from error


def with_changes(config: T, given: Sequence[str], where: str) -> T:
    """The settings after changes written as ``NAME=VALUE``, each checked against its declared type. The numbers of
    a tuple are separated by commas. Errors begin with ``where`` and list all settings."""
    hints, changes = get_type_hints(type(config)), dict[str, Any]()
    try:
        for name, value in assignments(given, "setting", hints).items():
            changes[name] = _parse(hints[name], _from_text(hints[name], value), name)
        return dataclasses.replace(config, **changes)  # type: ignore[type-var]
    except (UserError, ValueError, TypeError) as error:  # the last two: from a dataclass of the user
        end = "" if str(error).endswith((".", "?")) else "."
        raise UserError(f"{where}: {error}{end} Settings: {as_text(config)}") from error


def assignments(given: Sequence[str], kind: str, known: Collection[str]) -> dict[str, str]:
    """``["NAME=VALUE"]`` by name; the names must be known."""
    found = dict[str, str]()
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"it takes NAME=VALUE, not {short(text)}")
        if name not in known:
            raise UserError(f"there is no {kind} {short(name)}.{did_you_mean(name, known)}")
        if name in found:
            raise UserError(f"{name} is given twice")
        found[name] = value
    return found


def as_text(config: Any) -> str:
    """``targets=one (or many), action_noise=0.1``: every setting as :func:`with_changes` takes it."""
    hints, found = get_type_hints(type(config)), []
    for name, value in to_dict(config).items():
        value = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value
        others = [str(v) for v in get_args(hints[name]) if v != value] if get_origin(hints[name]) is Literal else []
        found.append(f"{name}={value}" + (f" (or {', '.join(others)})" if others else ""))
    return ", ".join(found)


def _from_text(hint: Any, text: str) -> Any:
    """What JSON would hold for a value typed on the command line."""
    if hint is str or get_origin(hint) is Literal:
        return text
    if get_origin(hint) in (list, tuple):
        return [_from_text(get_args(hint)[0], part) for part in text.split(",")]
    try:
        return json.loads({"none": "null"}.get(text.lower(), text.lower()))
    except ValueError:
        return text


def _parse(hint: Any, value: Any, where: str) -> Any:
    origin = get_origin(hint)
    if dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else from_dict(hint, value, where)  # type: ignore[arg-type]
    if origin is Literal:
        if isinstance(value, str) and value in get_args(hint):
            return value
        names = " or ".join(repr(name) for name in get_args(hint))
        raise UserError(f"{where} must be {names}, not {short(value)}.{did_you_mean(value, get_args(hint))}")
    if origin in (Union, UnionType):
        if value is None and type(None) in get_args(hint):
            return None
        choices = [a for a in get_args(hint) if a is not type(None)]
        exact = choices if len(choices) == 1 else [a for a in choices if type(value) is a]
        if exact:
            return _parse(exact[0], value, where)
    if origin in (list, tuple) and get_args(hint)[1:] in ((), (...,)) and isinstance(value, (list, tuple)):
        return origin(_parse(get_args(hint)[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is tuple and isinstance(value, (list, tuple)) and len(value) == len(get_args(hint)):
        return tuple(
            _parse(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(get_args(hint), value, strict=True))
        )
    if origin is dict and isinstance(value, dict):
        _, kind = get_args(hint)
        return {str(k): _parse(kind, v, f"{where}.{short(k)}") for k, v in value.items()}
    if hint is float and isinstance(value, (int, float)) and type(value) is not bool and abs(value) <= MOST_FLOAT:
        return float(value)
    if hint in (int, str, bool) and type(value) is hint:
        return value
    name = getattr(hint, "__name__", None) if origin is None else str(hint)
    raise UserError(f"{where} must be {name or hint}, not {short(value)}")
