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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from atlas_wm import __version__
from atlas_wm.config import RunConfig, from_dict, to_dict, within
from atlas_wm.errors import UserError, reason, short
from atlas_wm.normalize import Normalizer

FORMAT = 2
SPACE = 1 << 20  # bytes that there must be room for
MOST_ACTIONS = 4096
MOST_JSON, MOST_SETTINGS = 64 << 20, 1 << 20  # bytes of a file of results, of one with settings
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

    def __post_init__(self) -> None:
        within("", self, 1, MOST_ACTIONS, "action_size")


@contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """All of it or nothing: a place beside the target to write to, renamed over it when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # a link, in a folder that came from a stranger, would lead elsewhere
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, data: Any, indent: int | None = 2) -> None:
    with write_atomically(path) as temporary:
        temporary.write_text(json.dumps(data, indent=indent, allow_nan=False) + "\n")


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """A full disk, a read-only folder and their like become one line."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror or error}") from error


def writable_folder(run: Path, name: str) -> Path:
    """A folder of the run for results, made and tried before the work that leads to them.

    A link out of the run folder, which may come from a stranger, is refused.
    """
    folder = run / name
    if not folder.resolve().is_relative_to(run.resolve()):
        raise UserError(f"{folder} is a link out of the run folder, to {folder.resolve()}: remove it")
    with writing(folder):
        folder.mkdir(exist_ok=True)
        with TemporaryFile(dir=folder) as file:
            file.write(bytes(SPACE))
    return folder


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
    data = read_json(folder / CONFIG, MOST_SETTINGS)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else None
        version = data.get("atlas_wm", "unknown") if isinstance(data, dict) else "unknown"
        raise UserError(
            f"{folder} was written by another version (format {short(found)}, atlas-wm {short(version)}); this is "
            f"atlas-wm {__version__} with format {FORMAT}: train again, or install the version that wrote it"
        )
    info = from_dict(RunInfo, data, str(folder / CONFIG))
    numbers = read_json(folder / NORMALIZER, MOST_SETTINGS)
    try:
        return info, Normalizer.from_dict(numbers)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error


def read_weights(folder: str | Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights, if they have the names and shapes of those expected, which may be on the meta device.

    The header is compared before anything is read, and so before a model of the size that the settings ask for
    takes any memory.
    """
    path = Path(folder) / WEIGHTS
    try:
        with safe_open(path, "pt") as stored:
            shapes = {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118
        wanted = {name: tuple(tensor.shape) for name, tensor in expected.items()}
        if shapes != wanted:
            raise UserError(f"{path} does not fit its {CONFIG}: {_first_difference(shapes, wanted)}")
        weights = load_file(path)
    except FileNotFoundError:
        raise UserError(f"{path} is missing: the run folder is not complete") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged: {reason(error)}") from error
    for name, tensor in weights.items():
        if tensor.is_complex() or not bool(tensor.float().isfinite().all()):
            raise UserError(f"{path} is damaged, or training failed: {name} is not finite")
    return weights


def _first_difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    name = next(name for name in sorted({*found, *wanted}) if found.get(name) != wanted.get(name))
    return f"{short(name)} has shape {found.get(name)} and should have {wanted.get(name)}"


def read_bank(folder: str | Path) -> dict[str, Tensor] | None:
    path = Path(folder) / BANK
    try:
        return load_file(path) if path.exists() else None
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} is damaged ({reason(error)}): delete it, and make it again with `atlas bank {folder}`"
        ) from error
