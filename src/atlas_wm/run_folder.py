"""The run folder: the only thing that passes between commands.

    config.json         RunInfo: settings, task, method, data, versions, device
    model.safetensors   weights
    normalizer.json     action standardisation
    bank.safetensors    latents of training frames, for novelty; a run may go without
    metrics.csv, tensorboard/, evaluation/*.json

A folder is built under a name that ends in ``.partial`` and renamed when it is whole: under its own name it
is complete or absent.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


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
    if folder.exists() and not overwrite:
        raise UserError(f"{folder} exists already: choose another --out, or pass --overwrite to replace it")
    staging = folder.with_name(folder.name + ".partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield staging
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    if folder.exists():
        shutil.rmtree(folder)
    staging.rename(folder)


def write_info(folder: Path, info: RunInfo, normalizer: Normalizer) -> None:
    write_json(folder / CONFIG, to_dict(info))
    write_json(folder / NORMALIZER, normalizer.to_dict())


def read_run(folder: str | Path) -> tuple[RunInfo, Normalizer]:
    """Settings and normaliser of a finished run."""
    folder = Path(folder)
    if not folder.is_dir():
        running = folder.with_name(folder.name + ".partial").is_dir()
        hint = "it is still being trained" if running else "train one with `atlas train`"
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
