"""The model card: what a run is, in a form that people and the Hugging Face hub read."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from safetensors import safe_open
from yaml import YAMLError

from atlas_wm.config import RunInfo
from atlas_wm.errors import UserError, reason
from atlas_wm.runs.files import write_atomically
from atlas_wm.runs.folder import WEIGHTS, read_run
from atlas_wm.runs.results import (
    POLICIES,
    EvaluationResult,
    PolicyResult,
    SelectedEvaluation,
    most_complete,
    read_results,
)

CARD = "README.md"
UNKNOWN = "unknown"  # the hub's word for a licence that nobody stated
LICENSE_FIELDS = ("license", "license_name", "license_link")
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")  # of BatchNorm: no parameters


def write_card(folder: Path) -> None:
    """Write the card of a run folder, or update it. A licence that someone filled in stays."""
    info, _ = read_run(folder)
    path = folder / CARD
    card = model_card(info, _parameters(folder / WEIGHTS), read_results(folder), licence=_stated_licence(path))
    with write_atomically(path) as temporary:
        temporary.write_text(card)


def _stated_licence(path: Path) -> dict[str, Any]:
    """The licence fields of an existing card."""
    if not path.exists():
        return {}
    try:
        data = ModelCard.load(path, ignore_metadata_errors=True).data.to_dict()
    except (ValueError, YAMLError) as error:
        raise UserError(
            f"{path} has a damaged YAML header ({reason(error)}): repair it or delete the file"
        ) from error
    return {name: data[name] for name in LICENSE_FIELDS if name in data}


def model_card(
    info: RunInfo,
    parameters: int,
    results: Mapping[str, EvaluationResult] | None = None,
    repo_id: str | None = None,
    licence: Mapping[str, Any] | None = None,
) -> str:
    """The text of a card.

    results: evaluations by file name. repo_id: repository on the hub; None for a folder. licence: LICENSE_FIELDS.
    The card names only the last part of the data path: the rest may reveal details of a machine.
    """
    model, train, data = info.config.model, info.config.train, info.data
    name = f"{info.method} on {info.task}"
    selected = most_complete(results or {})
    header = ModelCardData(
        **({"license": UNKNOWN} | dict(licence or {})),
        library_name="atlas-wm",
        pipeline_tag="robotics",
        tags=["world-model", "planning"],
        model_name=name,
        eval_results=[_eval_result(one, info) for one in selected if one.result.model.success_mean is not None],
    )
    length = f"{train.steps:,} steps" if train.steps else f"{train.epochs} epochs"
    weights = ", ".join(f"{term} {weight:g}" for term, weight in info.config.objective.weights.items())
    stated = header.license != UNKNOWN
    return f"""---
{header.to_yaml()}
---

# {name}

A latent world model that plans to a goal image, written by atlas-wm {info.atlas_wm} (recipe `{info.recipe}`):
{parameters / 1e6:.2f} M parameters, {model.encoder.image_size}×{model.encoder.image_size} pixels,
{info.action_size} action coordinates, {model.frameskip} actions per model step.

```python
from atlas_wm import Planner, load_model

model = load_model("{repo_id or "path/to/this/folder"}")
plan = Planner(model).plan(frame, goal)  # two (H, W, 3) uint8 images
```

## Data

`{Path(data.path).name}`, content hash `{data.hash}`: {data.episodes:,} episodes, {data.rows:,} rows;
{data.training_clips:,} clips for training, {data.validation_clips:,} held out (split by {train.split}).

## Training

{length} with batches of {train.batch} clips, AdamW with learning rate {train.lr:g} and weight decay
{train.weight_decay:g}, seed {train.seed}, on {info.device}. Loss terms and weights: {weights}. `config.json` holds
every setting.

## Results

{_results(selected, len(results or {}), info)}
## Versions

{", ".join(f"{package} {number}" for package, number in info.versions.items())}

## Licence

{header.license}{"" if stated else " (not stated yet: fill in `license` in the header before you publish)"}
"""


def _condition(result: EvaluationResult, info: RunInfo) -> str:
    protocol, suffix = result.protocol, result.condition_suffix(info.data.hash)
    return f"{protocol.part}, offset {protocol.offset}, budget {protocol.budget}{suffix}"


def _eval_result(selected: SelectedEvaluation, info: RunInfo) -> EvalResult:
    """One line of the hub's leaderboard metadata."""
    result = selected.result
    return EvalResult(
        task_type="robotics",
        dataset_type=result.task,
        dataset_name=result.task,
        dataset_config=_condition(result, info),
        dataset_revision=result.data.hash,
        metric_type="success_rate",
        metric_name="success, %",
        metric_value=round(result.model.success_mean or 0.0, 2),
    )


def _results(selected: list[SelectedEvaluation], files: int, info: RunInfo) -> str:
    if not selected:
        return "Not evaluated yet: `atlas eval` adds a table here.\n"
    header = (
        "| episodes | condition | success | random actions | replayed actions | oracle | file in `evaluation/` |\n"
    )
    note = (
        "Success in percent, ± standard deviation over evaluation seeds. The files hold every setting and episode."
    )
    if others := files - len(selected):
        note += (
            " The table shows the most complete evaluation of each condition (most episodes, then the newest); "
            f"{others} other{'s are' if others > 1 else ' is'} in the folder."
        )
    return f"{header}|---|---|---|---|---|---|---|\n{''.join(_row(one, info) for one in selected)}\n{note}\n"


def _row(selected: SelectedEvaluation, info: RunInfo) -> str:
    result = selected.result
    success = " | ".join(_percent(result.policies.get(name)) for name in POLICIES)
    file = f"`{selected.name}.json`" + (f" (of {1 + len(selected.others)})" if selected.others else "")
    return f"| {result.model.count} | {_condition(result, info)} | {success} | {file} |\n"


def _percent(result: PolicyResult | None) -> str:
    if result is None or result.success_mean is None:
        return "–"
    several = len(result.success_by_seed) > 1
    return f"{result.success_mean:.1f}" + (f" ± {result.success_std:.1f}" if several else "")


def _parameters(weights: Path) -> int:
    with safe_open(weights, "pt") as file:
        names = [name for name in file.keys() if not name.endswith(BUFFERS)]  # noqa: SIM118 (it is no dict)
        return sum(math.prod(file.get_slice(name).get_shape()) for name in names)
