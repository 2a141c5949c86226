"""One exception for everything a user can put right: the command line prints it without a traceback."""

import os
import sysconfig
from collections.abc import Iterable
from difflib import get_close_matches
from reprlib import Repr
from textwrap import shorten
from traceback import extract_tb
from typing import Any


class UserError(Exception):
    """The message says what is wrong and what to do about it."""


class SettingError(UserError):
    """A setting that was just given is impossible; the message names fields, such as ``train.batch``."""


class Interrupted(KeyboardInterrupt):
    """A signal ended the work after what was done had been saved; the message says how to go on."""

    def __init__(self, message: str, signal: int):
        super().__init__(message)
        self.code = 128 + signal  # what a shell reports


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """``unknown task 'tworom'``, with the nearest name and all the known ones."""
    names = sorted(known)
    return UserError(f"unknown {kind} {short(name)}.{did_you_mean(name, names)} Known: {', '.join(names)}.")


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """`` Did you mean 'tworoom'?``, empty where nothing is near."""
    near = get_close_matches(str(name), list(known), n=1, cutoff=0.4)
    return f" Did you mean {near[0]!r}?" if near else ""


def user_code_location(error: BaseException) -> str:
    """``my_task.py:12 → my_task.py:30``: the calls in the user's own code that led to an exception, empty if none.

    The user's own is what is neither in this package nor installed.
    """
    places = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed = tuple(f"{place}{os.sep}" for place in (*places, os.path.dirname(__file__)))
    frames = [(f.filename, f.lineno) for f in extract_tb(error.__traceback__)]
    own = [(file, line) for file, line in frames if not file.startswith((*installed, "<"))]
    here = os.getcwd() + os.sep
    return " → ".join(f"{file.removeprefix(here)}:{line}" for file, line in own)


def short(value: Any) -> str:
    """What somebody else's file holds, for one line."""
    return _repr.repr(value)


def reason(error: BaseException) -> str:
    """What an exception says, which may quote somebody else's file, in one line that is not too long."""
    return shorten(str(error), 300)


_repr = Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 80
