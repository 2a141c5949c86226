"""The run folder: the only thing that passes between commands.

    config.json         RunInfo: settings, task, method, data, versions, device
    model.safetensors   weights
    normalizer.json     action standardisation
    bank.safetensors    latents of training frames, for novelty; a run may go without
    README.md           model card
    metrics.csv, tensorboard/, evaluation/*.json
    weights/            of other steps: the best validation, every train.keep_every
    checkpoints/        only while it is trained

A folder is built under a name that ends in ``.partial`` and renamed when it is whole: under its own name it
is complete or absent.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from atlas_wm import __version__
from atlas_wm.config import RunConfig, from_dict, to_dict
from atlas_wm.errors import UserError
from atlas_wm.normalize import Normalizer

FORMAT = 2
CONFIG, WEIGHTS, NORMALIZER, METRICS = "config.json", "model.safetensors", "normalizer.json", "metrics.csv"
BANK = "bank.safetensors"
CHECKPOINTS, NOT_FINITE = "checkpoints", "not-finite.json"
LOCK = "lock"


@dataclass(frozen=True)
class DataInfo:
    """Where the training data came from and which part of it was held out."""

    path: str
    hash: str
    episodes: int
    rows: int
    training_clips: int
    validation_clips: int


@dataclass(frozen=True)
class RunInfo:
    task: str
    method: str
    recipe: str
    action_size: int
    config: RunConfig
    data: DataInfo
    device: str
    versions: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT
    atlas_wm: str = field(default=__version__)


@contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """All of it or nothing: a place beside the target to write to, renamed over it when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
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


@contextmanager
def writable(folder: Path) -> Iterator[None]:
    """What the file system refuses while a run is written becomes one line."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        full = any(os.strerror(code) in reason for code in (errno.ENOSPC, errno.EDQUOT))
        remedy = "free some space" if full else "make it writable, or choose another --out"
        raise UserError(
            f"{folder} cannot be written ({reason}): {remedy}; the same command goes on from what was saved last"
        ) from error


def write_json(path: Path, data: Any, indent: int | None = 2) -> None:
    with write_atomically(path) as temporary:
        temporary.write_text(json.dumps(data, indent=indent, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except (ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


@contextmanager
def new_run_folder(folder: Path, overwrite: bool = False) -> Iterator[Path]:
    """A staging folder that becomes ``folder`` when the block ends well, and is removed when it does not."""
    staging = _staging(folder, overwrite)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield staging
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    _put_in_place(staging, folder)


@contextmanager
def training_folder(folder: Path, overwrite: bool = False) -> Iterator[Path]:
    """A staging folder for one process at a time. Where the block does not end well, it stays for the same command
    to go on with, once there is a checkpoint in it, or the record of losses that were no numbers."""
    staging = _staging(folder, overwrite)
    with writable(staging):
        staging.mkdir(parents=True, exist_ok=True)
        lock = (staging / LOCK).open("a+")
    with lock:
        with writable(staging):
            _take(lock, staging)
        try:
            yield staging
        except BaseException:
            if not any((staging / name).exists() for name in (CHECKPOINTS, NOT_FINITE)):
                shutil.rmtree(staging, ignore_errors=True)
            raise
        with writable(staging):
            (staging / LOCK).unlink()
            _put_in_place(staging, folder)


def _take(lock: IO[str], staging: Path) -> None:
    """The lock of a staging folder. It ends with the process, however that ends, and loader processes do not
    inherit it."""
    import fcntl

    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # as POSIX has it for a lock that is held
        lock.seek(0)
        raise UserError(
            f"{staging} is being trained by process {lock.read().strip() or 'unknown'}: wait for it, or choose "
            f"another --out"
        ) from None
    if not (staging / LOCK).exists():  # it was finished and renamed just now
        raise UserError(f"{staging} was finished by another process: choose another --out")
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()


def _staging(folder: Path, overwrite: bool) -> Path:
    if folder.exists() and not overwrite:
        raise UserError(f"{folder} exists already: choose another --out, or pass --overwrite to replace it")
    return folder.with_name(folder.name + ".partial")


def _put_in_place(staging: Path, folder: Path) -> None:
    """Rename the whole folder, all of it on the disk; what it replaces is never half there."""
    for path in staging.rglob("*"):
        sync(path)
    replaced = folder.with_name(folder.name + ".replaced")
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
    staging.rename(folder)
    sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def write_info(folder: Path, info: RunInfo, normalizer: Normalizer) -> None:
    write_json(folder / CONFIG, to_dict(info))
    write_json(folder / NORMALIZER, normalizer.to_dict())


def read_run(folder: str | Path) -> tuple[RunInfo, Normalizer]:
    """Settings and normaliser of a finished run."""
    folder = Path(folder)
    if not folder.is_dir():
        running = folder.with_name(folder.name + ".partial").is_dir()
        hint = "train one with `atlas train`"
        if running:
            hint = "it is being trained, or was interrupted, and the same `atlas train` command goes on"
        raise UserError(f"there is no run folder {folder}: {hint}")
    data = read_json(folder / CONFIG)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else None
        version = data.get("atlas_wm", "unknown") if isinstance(data, dict) else "unknown"
        raise UserError(
            f"{folder} was written by another version (format {found}, atlas-wm {version}); this is "
            f"atlas-wm {__version__} with format {FORMAT}: train again, or install the version that wrote it"
        )
    info = from_dict(RunInfo, data, str(folder / CONFIG))
    return info, Normalizer.from_dict(read_json(folder / NORMALIZER))


def read_weights(folder: str | Path) -> dict[str, Tensor]:
    path = Path(folder) / WEIGHTS
    try:
        return load_file(path)
    except FileNotFoundError:
        raise UserError(f"{path} is missing: the run folder is not complete") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged: {error}") from error


def read_bank(folder: str | Path) -> dict[str, Tensor] | None:
    path = Path(folder) / BANK
    try:
        return load_file(path) if path.exists() else None
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} is damaged ({error}): delete it, and make it again with `atlas bank {folder}`"
        ) from error
