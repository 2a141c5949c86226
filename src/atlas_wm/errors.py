"""One exception for everything a user can fix: the command line prints it without a traceback."""

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
    """A setting that the user gave is invalid; the message names fields, such as ``train.batch``."""


class Interrupted(KeyboardInterrupt):
    """A signal stopped the work after it was saved; the message says how to resume."""

    def __init__(self, message: str, signal: int):
        super().__init__(message)
        self.code = 128 + signal  # the exit status of a shell


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """``unknown task 'tworom'``, with the nearest known name and all known names."""
    names = sorted(known)
    return UserError(f"unknown {kind} {short(name)}.{did_you_mean(name, names)} Known: {', '.join(names)}.")


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """`` Did you mean 'tworoom'?``, or empty if no name is similar."""
    near = get_close_matches(str(name), list(known), n=1, cutoff=0.4)
    return f" Did you mean {near[0]!r}?" if near else ""


def user_code_location(error: BaseException) -> str:
    """``my_task.py:12 → my_task.py:30``: the calls in the user's own code that led to an exception, or empty.

    The user's own code is neither in this package nor installed.
    """
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed = tuple(f"{folder}{os.sep}" for folder in (*folders, os.path.dirname(__file__)))
    frames = [(f.filename, f.lineno) for f in extract_tb(error.__traceback__)]
    own = [(file, line) for file, line in frames if not file.startswith((*installed, "<"))]
    current = os.getcwd() + os.sep
    return " → ".join(f"{file.removeprefix(current)}:{line}" for file, line in own)


def short(value: Any) -> str:
    """A value from an untrusted file, shortened to fit a message."""
    return _repr.repr(value)


def reason(error: BaseException) -> str:
    """The message of an exception, which may quote an untrusted file, shortened to one line."""
    return shorten(str(error), 300)


_repr = Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 80
