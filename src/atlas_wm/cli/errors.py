"""How a command of ``atlas`` ends when something is wrong: one line that speaks of flags, or a traceback."""

import os
import re
import select
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from atlas_wm.config import RunConfig
from atlas_wm.errors import Interrupted, SettingError, UserError
from atlas_wm.runs.versions import EXTRAS, install_command

DEBUG = "ATLAS_DEBUG"  # in the environment: as --debug


def split_debug(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """The arguments without --debug, which any command takes in any place, and whether it was asked for."""
    rest = [argument for argument in arguments if argument != "--debug"]
    return rest, len(rest) < len(arguments) or os.environ.get(DEBUG, "0") not in ("", "0")


@contextmanager
def errors_in_one_line(flags: Mapping[str, str], debug: bool) -> Iterator[None]:
    """What the user can put right is said in one line. flags: what the user calls a setting, by its name."""
    try:
        with _pipe_may_close():
            yield
    except UserError as error:
        if debug:
            traceback.print_exception(error)
        sys.exit(f"atlas: {name_flags(str(error), flags) if isinstance(error, SettingError) else error}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if debug or missing not in EXTRAS:
            raise
        sys.exit(f"atlas: the Python package {missing} is not installed: {install_command(missing)}")
    except Interrupted as stop:
        print(f"atlas: {stop}", file=sys.stderr)
        sys.exit(stop.code)
    except KeyboardInterrupt:
        if debug:
            raise
        print("\natlas: stopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)


def name_flags(message: str, flags: Mapping[str, str]) -> str:
    """``train.batch must be …`` → ``--train.batch must be …``; settings without a flag keep their name."""
    return re.sub(r"\b[a-z]+\.[a-z_]+\b", lambda found: flags.get(found[0], found[0]), message)


def setting_flags(config: type[Any] = RunConfig, path: str = "") -> dict[str, str]:
    """The flag of each setting as ``atlas train`` has it, by the name that errors use: ``encoder.image_size`` →
    ``--model.encoder.image-size``."""
    found: dict[str, str] = {}
    hints = get_type_hints(config)
    for setting in fields(config):
        where = f"{path}.{setting.name}" if path else setting.name
        if is_dataclass(hints[setting.name]):
            found |= setting_flags(hints[setting.name], where)
        else:
            found[".".join(where.split(".")[-2:])] = f"--{where.replace('_', '-')}"
    return found


@contextmanager
def _pipe_may_close() -> Iterator[None]:
    """A reader of the output that has seen enough, such as ``head``, ends the command without a word."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # here, and not when the interpreter ends
    except BrokenPipeError:
        looked = select.poll()
        looked.register(sys.stdout.fileno(), 0)
        if not looked.poll(0):  # its reader is there: another pipe broke
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
