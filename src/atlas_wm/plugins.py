"""Your own code by name: tasks, methods and loss terms as ``module:name``.

A name that you give (a flag, an argument) is imported. A name that stands in a file is not: the file may come from
a stranger, and to import a module is to run it.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from atlas_wm.errors import UserError, user_code_location


def import_named(kind: str, name: str) -> Any:
    """What ``module:attribute`` names. Modules in the working directory are found too."""
    module, _, attribute = name.partition(":")
    if not module.startswith("atlas_wm.") and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:
        if place := user_code_location(error):
            what = f"{type(error).__name__}: {error}"
            raise UserError(f"{kind} {name!r} cannot be imported, it failed at {place}: {what}") from error
        raise UserError(f"{kind} {name!r} cannot be imported ({error}): write it as module:name") from error


def imported_already(name: str) -> Any:
    """What ``module:attribute`` names if this program has imported the module, else None. Nothing is run."""
    module, _, attribute = name.partition(":")
    return getattr(sys.modules.get(module), "__dict__", {}).get(attribute)
