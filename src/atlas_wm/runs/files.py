"""Files that are whole or absent: atomic writes, JSON that is checked, one writer at a time."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import IO, Any

from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from atlas_wm.errors import UserError, reason

MOST_JSON, MOST_SETTINGS = 64 << 20, 1 << 20  # bytes of a file of results, of one with settings
LOCK = "lock"


@contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """All of it or nothing: a place beside the target to write to, renamed over it when the block ends well.

    The place has a name that nobody else writes to: of several writers the last one to end stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{token_hex(8)}.tmp")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """A file's content, or a folder's names, reach the disk before anything else happens."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """A .safetensors file with the permissions of every other file, which save_file does not give it."""
    with write_atomically(path) as temporary:
        temporary.write_bytes(save(tensors))


def write_json(path: Path, data: Any, indent: int | None = 2) -> None:
    with write_atomically(path) as temporary:
        temporary.write_text(json.dumps(data, indent=indent, allow_nan=False) + "\n")


def read_json(path: Path, most: int = MOST_JSON) -> Any:
    """A file of at most ``most`` bytes. NaN and infinity, which JSON does not have, are refused."""
    try:
        with path.open("rb") as file:
            text = file.read(most + 1)
        if len(text) > most:
            raise UserError(f"{path} is larger than {most:,} bytes: this is no file that atlas-wm wrote")
        return json.loads(text, parse_constant=_refuse_constant)
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except RecursionError:
        raise UserError(f"{path} cannot be read: it is nested too deeply") from None
    except (ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read: {reason(error)}") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number that JSON has")


@contextmanager
def writing(folder: Path, afterwards: str = "") -> Iterator[None]:
    """What the file system refuses, a full disk or a read-only folder, becomes one line."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        full = any(os.strerror(code) in why for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
        remedy = "free some space" if full else "make it writable, or choose another place"
        raise UserError(f"{folder} cannot be written ({why}): {remedy}{afterwards}") from error


saving = partial(writing, afterwards="; then run the same command again to resume from the last checkpoint")


@contextmanager
def locked(staging: Path, done: str) -> Iterator[None]:
    """A staging folder, made where there is none, for one process at a time. done: what that process does to it."""
    staging.mkdir(parents=True, exist_ok=True)
    with (staging / LOCK).open("a+") as lock:
        _take(lock, staging, done)
        yield


def _take(lock: IO[str], staging: Path, done: str) -> None:
    """The lock ends with the process, however that ends, and other processes that it starts do not inherit it."""
    import fcntl

    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # as POSIX has it for a lock that is held
        lock.seek(0)
        raise UserError(
            f"{staging} is being {done} by process {lock.read().strip() or 'unknown'}: wait for it, or choose "
            f"another --out"
        ) from None
    held = os.fstat(lock.fileno())
    if not (staging / LOCK).exists() or not os.path.samestat(held, (staging / LOCK).stat()):  # finished just now
        raise UserError(f"{staging} was finished by another process: choose another --out")
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
