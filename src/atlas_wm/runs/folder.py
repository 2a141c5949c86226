"""The run folder: the only thing that passes between commands.

    config.json         RunInfo: settings, task, method, data, versions, device
    model.safetensors   weights
    terms.safetensors   parameters of your own loss terms, if they have any; no command reads them
    normalizer.json     action standardisation
    bank.safetensors    latents and colours of training frames, for novelty (optional)
    frames.webp         small images of the bank's frames (optional; `atlas bank RUN --frames`)
    demonstrations.safetensors  latents and actions of training episodes, for retrieval and risk (optional)
    temporal_head.safetensors   model steps between latents, for plan.cost temporal (optional; `atlas head`)
    states.safetensors  a sample of the training states, for the ID/OOD split (optional)
    README.md           model card
    metrics.csv, tensorboard/, evaluation/*.json
    weights/            weights of other steps: best planning score, every train.save_every steps
    checkpoints/        only during training

A folder is built under a name that ends in ``.partial`` and renamed when complete: under its own name it is
complete or absent.
"""

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from atlas_wm import __version__
from atlas_wm.config import FORMAT, RunInfo
from atlas_wm.errors import UserError, reason, short
from atlas_wm.normalizer import Normalizer
from atlas_wm.runs.files import LOCK, MOST_JSON, MOST_SETTINGS, locked, read_json, saving, sync, write_json, writing
from atlas_wm.settings import from_dict, to_dict

SPACE = 1 << 20  # bytes that must be free
CONFIG, WEIGHTS, NORMALIZER, METRICS = "config.json", "model.safetensors", "normalizer.json", "metrics.csv"
BANK = "bank.safetensors"
BANK_FRAMES = "frames.webp"
DEMONSTRATIONS = "demonstrations.safetensors"
TEMPORAL_HEAD = "temporal_head.safetensors"
MADE_BY = {BANK: "atlas bank", DEMONSTRATIONS: "atlas bank", TEMPORAL_HEAD: "atlas head"}
TERMS = "terms.safetensors"
STATES = "states.safetensors"
CHECKPOINTS, NOT_FINITE = "checkpoints", "not-finite.json"
OTHER_WEIGHTS, BEST = "weights", "best"


def writable_folder(run: Path, name: str) -> Path:
    """Create a results folder in the run folder and test it, before the work begins.

    A link out of the run folder is refused: the folder may come from an untrusted source.
    """
    folder = run / name
    if not folder.resolve().is_relative_to(run.resolve()):
        raise UserError(f"{folder} is a link out of the run folder, to {folder.resolve()}: remove it")
    with writing(folder):
        folder.mkdir(exist_ok=True)
        with TemporaryFile(dir=folder) as file:
            file.write(bytes(SPACE))
    return folder


@contextmanager
def new_run_folder(folder: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield a staging folder that becomes ``folder`` if the block succeeds, and is removed if it fails."""
    staging = _staging(folder, overwrite)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield staging
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    _finish(staging, folder)


@contextmanager
def training_folder(folder: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield a staging folder, locked for one process. If the block fails, the folder stays if it holds a checkpoint
    from which the same command resumes, or the record of losses that were not finite."""
    staging = _staging(folder, overwrite)
    with ExitStack() as stack:
        with saving(staging):
            stack.enter_context(locked(staging, "trained"))
        try:
            yield staging
        except BaseException:
            if not any((staging / name).exists() for name in (CHECKPOINTS, NOT_FINITE)):
                shutil.rmtree(staging, ignore_errors=True)
            raise
        with saving(staging):
            (staging / LOCK).unlink()
            _finish(staging, folder)


def _staging(folder: Path, overwrite: bool) -> Path:
    if folder.exists() and not overwrite:
        raise UserError(f"{folder} exists already: choose another --out, or pass --overwrite to replace it")
    if folder.exists() and not _replaceable(folder):
        raise UserError(f"{folder} is not a run folder, so --overwrite leaves it alone: choose another --out")
    return staging_folder(folder)


def _replaceable(folder: Path) -> bool:
    """Whether it is a run or empty, and can be renamed."""
    if not folder.is_dir() or folder.name in ("", ".."):
        return False
    return (folder / CONFIG).is_file() or not any(folder.iterdir())


def staging_folder(folder: Path) -> Path:
    """Where a run is built until it is complete."""
    return folder.with_name(folder.name + ".partial")


def _finish(staging: Path, folder: Path) -> None:
    """Flush the staging folder to the disk and rename it; a folder that it replaces is never half deleted."""
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
        running = staging_folder(folder).is_dir()
        hint = "train one with `atlas train`"
        if running:
            hint = "training is running, or was interrupted; the same `atlas train` command resumes it"
        raise UserError(f"there is no run folder {folder}: {hint}")
    data = read_json(folder / CONFIG, MOST_SETTINGS)
    if not isinstance(data, dict) or data.get("format") not in (2, FORMAT):
        found = data.get("format") if isinstance(data, dict) else None
        version = data.get("atlas_wm", "unknown") if isinstance(data, dict) else "unknown"
        raise UserError(
            f"{folder} was written by another version (format {short(found)}, atlas-wm {short(version)}); this is "
            f"atlas-wm {__version__} with format {FORMAT}: train again, or install the version that wrote it"
        )
    if data["format"] == 2:
        data = _from_format_2(data)
    info = from_dict(RunInfo, data, str(folder / CONFIG))
    numbers = read_json(folder / NORMALIZER, MOST_SETTINGS)
    try:
        return info, Normalizer.from_dict(numbers)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error


def _from_format_2(data: dict[str, Any]) -> dict[str, Any]:
    """Settings under their present names."""
    renamed = {
        "train": {"keep_tokens": "cache_tokens", "keep_frames": "cache_frames", "keep_every": "save_every"},
        "plan": {"rule": "cost"},
    }
    config = data.get("config")
    for part, names in renamed.items():
        if isinstance(config, dict) and isinstance(config.get(part), dict):
            config = {**config, part: {names.get(name, name): value for name, value in config[part].items()}}
    return {**data, "config": config, "format": FORMAT}


def step_name(step: int) -> str:
    """Of the file with the weights of a step, in the order of the steps."""
    return f"step-{step:08}"


def other_weights(folder: str | Path) -> dict[str, Path]:
    """Weights of a run besides the final ones, by name: ``best``, ``step-2000``."""
    found = {}
    for path in sorted((Path(folder) / OTHER_WEIGHTS).glob("*.safetensors")):
        step = re.fullmatch(r"step-0*(\d+)", path.stem)
        found[f"step-{step[1]}" if step else path.stem] = path
    return found


def weights_path(folder: str | Path, name: str | None) -> Path:
    """The file with the weights of this name; None: the final ones."""
    if name is None:
        return Path(folder) / WEIGHTS
    found = other_weights(folder)
    if name not in found:
        known = f"its other weights are {', '.join(found)}" if found else "it has the final weights only"
        best = ". Training writes `best` only if an earlier validation beat the final one" if name == BEST else ""
        raise UserError(
            f"{folder} has no weights {short(name)}: {known}{best}. Leave --weights out for the final weights"
        )
    return found[name]


def read_weights(path: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights, if they have the names and shapes of those expected, which may be on the meta device.

    The header is compared first, before any weights are read and before a model takes memory.
    """
    try:
        with safe_open(path, "pt") as stored:
            shapes = {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118
        wanted = {name: tuple(tensor.shape) for name, tensor in expected.items()}
        if shapes != wanted:
            raise UserError(f"{path} does not fit its {CONFIG}: {_first_difference(shapes, wanted)}")
        weights = load_file(path)
    except FileNotFoundError:
        raise UserError(f"{path} is missing: the run folder is incomplete") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged: {reason(error)}") from error
    for name, tensor in weights.items():
        if tensor.is_complex() or not bool(tensor.float().isfinite().all()):
            raise UserError(f"{path} is damaged, or training failed: {name} is not finite")
    return weights


def _first_difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    name = next(name for name in sorted({*found, *wanted}) if found.get(name) != wanted.get(name))
    return f"{short(name)} has shape {found.get(name)} and should have {wanted.get(name)}"


def read_states(folder: str | Path) -> bytes | None:
    """The bytes of the training-states file, saved with the model (data/states.py parses them)."""
    path = Path(folder) / STATES
    if not path.exists():
        return None
    try:
        with path.open("rb") as file:
            stored = file.read(MOST_JSON + 1)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {reason(error)}") from error
    if len(stored) > MOST_JSON:
        raise UserError(f"{path} is larger than {MOST_JSON:,} bytes: this is no file that atlas-wm wrote")
    return stored


def read_bank(folder: str | Path, name: str = BANK) -> dict[str, Tensor] | None:
    """The tensors of BANK, DEMONSTRATIONS or TEMPORAL_HEAD."""
    path = Path(folder) / name
    try:
        return load_file(path) if path.exists() else None
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} is damaged ({reason(error)}): delete it and make it again with `{MADE_BY[name]} {folder}`"
        ) from error
