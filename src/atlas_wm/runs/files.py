"""Atomic writes, checked JSON, and locks: a file is complete or absent."""

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

MOST_JSON, MOST_SETTINGS = 64 << 20, 1 << 20  # bytes of a file with results, of a file with settings
LOCK = "lock"


@contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder, and rename it to ``path`` if the block succeeds.

    The temporary name is unique: with several writers, the last one to finish wins.
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
    """Flush a file's content, or a folder's entries, to the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a .safetensors file with the usual permissions, which save_file does not set."""
    with write_atomically(path) as temporary:
        temporary.write_bytes(save(tensors))


def write_json(path: Path, data: Any, indent: int | None = 2) -> None:
    with write_atomically(path) as temporary:
        temporary.write_text(json.dumps(data, indent=indent, allow_nan=False) + "\n")


def read_json(path: Path, most: int = MOST_JSON) -> Any:
    """Read a file of at most ``most`` bytes. NaN and infinity, which JSON does not have, are refused."""
    try:
        with path.open("rb") as file:
            text = file.read(most + 1)
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {reason(error)}") from error
    return parse_json(text, path, most)


def parse_json(text: bytes, path: str | Path, most: int) -> Any:
    """The content of a file, of which at least its first ``most`` + 1 bytes were read."""
    if len(text) > most:
        raise UserError(f"{path} is larger than {most:,} bytes: atlas-wm writes no such file")
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise UserError(f"{path} cannot be read: it is nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{path} cannot be read: {reason(error)}") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")


@contextmanager
def writing(folder: Path, afterwards: str = "") -> Iterator[None]:
    """Turn errors of the file system, such as a full disk or a read-only folder, into a UserError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        full = any(os.strerror(code) in why for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
        remedy = "free some space" if full else "make it writable, or choose another folder"
        raise UserError(f"{folder} cannot be written ({why}): {remedy}{afterwards}") from error


saving = partial(writing, afterwards="; then run the same command again to resume from the last checkpoint")


@contextmanager
def locked(staging: Path, done: str) -> Iterator[None]:
    """Create a staging folder if needed and lock it for one process. done: what that process does, for errors."""
    staging.mkdir(parents=True, exist_ok=True)
    with (staging / LOCK).open("a+") as lock:
        _acquire(lock, staging, done)
        yield


def _acquire(lock: IO[str], staging: Path, done: str) -> None:
    """The system releases the lock when the process ends, however it ends; child processes do not inherit it."""
    import fcntl

    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX: the lock is held
        lock.seek(0)
        raise UserError(
            f"{staging} is being {done} by process {lock.read().strip() or 'unknown'}: wait for it, or choose "
            f"another --out"
        ) from None
    own = os.fstat(lock.fileno())
    if not (staging / LOCK).exists() or not os.path.samestat(own, (staging / LOCK).stat()):  # finished just now
        raise UserError(f"{staging} was finished by another process: choose another --out")
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
