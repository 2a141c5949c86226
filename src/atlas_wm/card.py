"""The model card: what a run is, in a form that people and the Hugging Face hub read."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

from atlas_wm.errors import UserError
from atlas_wm.run_folder import WEIGHTS, RunInfo, read_json, read_run, write_atomically

CARD = "README.md"
UNKNOWN = "unknown"  # the hub's word for a licence that nobody stated
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")  # of BatchNorm: no parameters


def write_card(folder: Path) -> None:
    """Write the card of a run folder, or refresh it; a licence that was filled in stays."""
    info, _ = read_run(folder)
    path = folder / CARD
    stated = re.search(r"^license: *(\S+) *$", path.read_text(), re.M) if path.exists() else None
    reports = [read_json(file) for file in sorted((folder / "evaluation").glob("*.json"))]
    card = model_card(info, _parameters(folder / WEIGHTS), reports, licence=stated.group(1) if stated else UNKNOWN)
    with write_atomically(path) as temporary:
        temporary.write_text(card)


def model_card(
    info: RunInfo,
    parameters: int,
    reports: list[dict[str, Any]] | None = None,
    repo_id: str | None = None,
    licence: str = UNKNOWN,
) -> str:
    """reports: of evaluations. repo_id: on the hub; None for a folder. Of the path of the data, which tells about a
    machine, only the last part is named."""
    model, train, data = info.config.model, info.config.train, info.data
    load = f'from_pretrained("{repo_id}")' if repo_id else 'load("this folder")'
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
from atlas_wm import Planner, WorldModel

model = WorldModel.{load}
plan = Planner(model).plan(frame, goal)  # two (H, W, 3) uint8 pictures
```

## Data

`{Path(data.path).name}`, content hash `{data.hash}`: {data.episodes:,} episodes, {data.rows:,} rows;
{data.training_clips:,} clips to train on, {data.validation_clips:,} held out (split by {train.split}).

## Training

{length} of {train.batch} clips, AdamW with rate {train.lr:g} and weight decay {train.weight_decay:g}, seed
{train.seed}, on {info.device}. Loss terms and their weights: {weights}. `config.json` holds every setting.

## Results

{_results(reports or [])}
## Versions

{", ".join(f"{name} {number}" for name, number in info.versions.items())}

## Licence

{licence}{note}
"""


def _results(reports: list[dict[str, Any]]) -> str:
    rows = list(_rows(reports))
    if not rows:
        return "Not evaluated yet: `atlas eval` does, and adds a table here.\n"
    header = "| episodes | condition | success | random actions |\n|---|---|---|---|\n"
    note = "Success in percent, ± over evaluation seeds; `evaluation/` holds every episode."
    return f"{header}{''.join(rows)}\n{note}\n"


def _rows(reports: list[dict[str, Any]]) -> Iterator[str]:
    for report in reports:
        try:
            protocol = report["protocol"]
            success, floor = (
                _percent(report[policy]) if policy in report else "–" for policy in ("model", "random")
            )
            count = protocol["episodes"] * len(protocol["seeds"])
            where = f"{protocol['part']}, offset {protocol['offset']}, budget {protocol['budget']}"
        except (KeyError, TypeError) as error:
            raise UserError(f"evaluation/ holds a file that is no evaluation ({error!r}): remove it") from error
        yield f"| {count} | {where} | {success} | {floor} |\n"


def _percent(result: dict[str, Any]) -> str:
    mean, spread = result["success_mean"], result["success_std"]
    if mean is None:
        return "–"
    return f"{mean:.1f} ± {spread:.1f}" if len(result["success_by_seed"]) > 1 else f"{mean:.1f}"


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
