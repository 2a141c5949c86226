"""Your own code by name: tasks, methods, loss terms and parts of a model or planner as ``module:name``.

A name that you give (a flag, an argument) is imported. A name that stands in a file is not: the file may come from
a stranger, and to import a module is to run it. So a run folder that names your own class loads only in a program
that has imported the module, by an ``import`` statement or by ``--plugin MODULE``.
"""

import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from atlas_wm.errors import UserError, short, user_code_location

T = TypeVar("T")


def import_plugin(module: str) -> ModuleType:
    """A module that the user names. Modules in the working directory are found too."""
    return _imported("module", module, module)


def import_named(kind: str, name: str) -> Any:
    """Import the object ``module:attribute``. Modules in the working directory are found too."""
    module, _, attribute = name.partition(":")
    found = _imported(kind, name, module)
    try:
        return getattr(found, attribute)
    except AttributeError as error:
        raise UserError(f"{kind} {name!r} cannot be imported ({error}): write it as module:name") from error


def _imported(kind: str, name: str, module: str) -> ModuleType:
    if not module.startswith("atlas_wm.") and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return import_module(module)
    except Exception as error:
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        where = f"in {Path.cwd()} or among the installed packages"
        if location := user_code_location(error):
            what = f"no module {absent} {where}" if absent else f"{type(error).__name__}: {error}"
            raise UserError(f"{kind} {name!r} cannot be imported, it failed at {location}: {what}") from error
        if absent and f"{module}.".startswith(f"{absent}."):
            raise UserError(
                f"{kind} {name!r} cannot be imported: no module {absent} {where}: run atlas from the folder that "
                f"holds it, or add that folder to PYTHONPATH"
            ) from error
        form = "module:name" if ":" in name or kind != "module" else "my_module or my_package.my_module"
        raise UserError(f"{kind} {name!r} cannot be imported ({error}): write it as {form}") from error


def imported_already(name: str) -> Any:
    """The object ``module:attribute`` if its module is already imported, else None. Runs no code."""
    module, _, attribute = name.partition(":")
    return getattr(sys.modules.get(module), "__dict__", {}).get(attribute)


def find_class(kind: str, name: str, known: Mapping[str, type[T]], base: Any) -> type[T]:
    """A class of the table, or your own subclass of ``base`` as ``module:Class``, already imported.

    The name may stand in a file, so nothing but a subclass of ``base`` is returned.
    """
    if name in known:
        return known[name]
    module = name.partition(":")[0]
    if module not in sys.modules:
        raise UserError(
            f"{kind} {short(name)} is not part of atlas-wm, and a file does not decide which code runs: if you "
            f"trust that code, pass --plugin {module} (in Python: import {module} first)"
        )
    found = imported_already(name)
    if not (isinstance(found, type) and issubclass(found, base)):
        what = "does not exist" if found is None else f"is not a {base.__name__}"
        raise UserError(
            f"{kind} {short(name)} {what}: derive a class from {base.__module__}.{base.__name__}, and name it as "
            f"module:Class"
        )
    return found


def build(kind: str, name: str, known: Mapping[str, type[T]], base: Any, *arguments: Any) -> T:
    """An object of the class that :func:`find_class` finds."""
    found = find_class(kind, name, known, base)
    try:
        return found(*arguments)
    except Exception as error:
        location = user_code_location(error)
        if name in known or isinstance(error, UserError) or not location:
            raise
        what = f"{type(error).__name__}: {error}"
        raise UserError(f"{kind} {name} cannot be built, it failed at {location}: {what}") from error


def loaded_modules(names: Iterable[str]) -> tuple[str, ...]:
    """The modules of ``module:Class`` names, of those that this program has imported: for a worker process."""
    return tuple(sorted({module for name in names if (module := name.partition(":")[0]) in sys.modules}))
