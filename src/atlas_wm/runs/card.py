"""The model card: what a run is, in a form that people and the Hugging Face hub read."""

import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open

from atlas_wm.config import RunInfo
from atlas_wm.runs.files import write_atomically
from atlas_wm.runs.folder import WEIGHTS, read_run
from atlas_wm.runs.results import POLICIES, Chosen, EvaluationResult, PolicyResult, most_complete, read_results

CARD = "README.md"
UNKNOWN = "unknown"  # the hub's word for a licence that nobody stated
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")  # of BatchNorm: no parameters


def write_card(folder: Path) -> None:
    """Write the card of a run folder, or refresh it; a licence that was filled in stays."""
    info, _ = read_run(folder)
    path = folder / CARD
    stated = re.search(r"^license: *(\S+) *$", path.read_text(), re.M) if path.exists() else None
    results = read_results(folder)
    card = model_card(info, _parameters(folder / WEIGHTS), results, licence=stated.group(1) if stated else UNKNOWN)
    with write_atomically(path) as temporary:
        temporary.write_text(card)


def model_card(
    info: RunInfo,
    parameters: int,
    results: Mapping[str, EvaluationResult] | None = None,
    repo_id: str | None = None,
    licence: str = UNKNOWN,
) -> str:
    """results: of evaluations, by the names of their files. repo_id: on the hub; None for a folder. Of the path of
    the data, which tells about a machine, only the last part is named."""
    model, train, data = info.config.model, info.config.train, info.data
    source = repo_id or "this folder"
    length = f"{train.steps:,} steps" if train.steps else f"{train.epochs} epochs"
    weights = ", ".join(f"{name} {weight:g}" for name, weight in info.config.objective.weights.items())
    note = "" if licence != UNKNOWN else " (nobody stated one: fill in `license` above before you publish)"
    return f"""---
library_name: atlas-wm
license: {licence}
tags:
- world-model
- planning
---

# {info.method} on {info.task}

A latent world model that plans to a goal image, written by atlas-wm {info.atlas_wm} (recipe `{info.recipe}`):
{parameters / 1e6:.2f} M parameters, frames of {model.encoder.image_size} pixels a side, {info.action_size} action
coordinates, {model.frameskip} actions a model step.

```python
from atlas_wm import Planner, load_model

model = load_model("{source}")
plan = Planner(model).plan(frame, goal)  # two (H, W, 3) uint8 images
```

## Data

`{Path(data.path).name}`, content hash `{data.hash}`: {data.episodes:,} episodes, {data.rows:,} rows;
{data.training_clips:,} clips to train on, {data.validation_clips:,} held out (split by {train.split}).

## Training

{length} of {train.batch} clips, AdamW with rate {train.lr:g} and weight decay {train.weight_decay:g}, seed
{train.seed}, on {info.device}. Loss terms and their weights: {weights}. `config.json` holds every setting.

## Results

{_results(results or {}, info)}
## Versions

{", ".join(f"{name} {number}" for name, number in info.versions.items())}

## Licence

{licence}{note}
"""


def _results(results: Mapping[str, EvaluationResult], info: RunInfo) -> str:
    chosen = most_complete(results)
    if not chosen:
        return "Not evaluated yet: `atlas eval` does, and adds a table here.\n"
    header = "| episodes | condition | success | random actions | replayed actions | file in `evaluation/` |\n"
    note = "Success in percent, ± over evaluation seeds; the files hold every setting and episode."
    others = len(results) - len(chosen)
    if others:
        kept = f"{others} other{'s' if others > 1 else ''}"
        note += f" Of each condition the most complete evaluation is shown (most episodes, then the newest); {kept}"
        note += f" {'are' if others > 1 else 'is'} in the folder."
    return f"{header}|---|---|---|---|---|---|\n{''.join(_row(one, info) for one in chosen)}\n{note}\n"


def _row(chosen: Chosen, info: RunInfo) -> str:
    result, protocol = chosen.result, chosen.result.protocol
    success, floor, ceiling = (_percent(result.policies.get(name)) for name in POLICIES)
    where = f"{protocol.part}, offset {protocol.offset}, budget {protocol.budget}{result.besides(info.data.hash)}"
    file = f"`{chosen.name}.json`" + (f" (of {1 + len(chosen.others)})" if chosen.others else "")
    return f"| {result.model.count} | {where} | {success} | {floor} | {ceiling} | {file} |\n"


def _percent(result: PolicyResult | None) -> str:
    if result is None or result.success_mean is None:
        return "–"
    several = len(result.success_by_seed) > 1
    return f"{result.success_mean:.1f}" + (f" ± {result.success_std:.1f}" if several else "")


def _parameters(weights: Path) -> int:
    total = 0
    with safe_open(weights, "pt") as file:
        for name in file.keys():  # noqa: SIM118 (it is no dict)
            if not name.endswith(BUFFERS):
                count = 1
                for size in file.get_slice(name).get_shape():
                    count *= size
                total += count
    return total
