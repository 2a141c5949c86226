"""The card that `atlas collect` writes next to a dataset: who recorded it, how, and a hash of what it holds."""

from pathlib import Path
from typing import Any, overload

from atlas_wm.data.dataset import EpisodeData
from atlas_wm.data.remote import bare, read_small
from atlas_wm.errors import UserError
from atlas_wm.runs.files import MOST_SETTINGS, parse_json, read_json
from atlas_wm.tasks import TASKS, task_id


@overload
def card_path(data: str) -> str: ...
@overload
def card_path(data: Path) -> Path: ...
def card_path(data: Path | str) -> Path | str:
    """The card that `atlas collect` writes next to a dataset."""
    return f"{bare(data)}.card.json" if isinstance(data, str) else data.with_name(data.name + ".card.json")


def read_card(data: Path | str) -> dict[str, Any]:
    """The card of a dataset; empty if it has none."""
    path = card_path(data)
    if isinstance(path, str):
        text = read_small(path, MOST_SETTINGS + 1)
        card = {} if text is None else parse_json(text, path, MOST_SETTINGS)
    else:
        card = read_json(path, MOST_SETTINGS) if path.exists() else {}
    if not isinstance(card, dict):
        raise UserError(f"{path} is not the card of a dataset: delete it")
    return card


def check_task(data: EpisodeData) -> None:
    """Refuse data whose card names another task of this package. Your own task may read the data of any."""
    recorded, asked = read_card(data.path).get("task"), task_id(data.task)
    if recorded != asked and data.task.has_env and {str(recorded), asked} <= TASKS.keys():
        raise UserError(
            f"{data.path} is a dataset of {recorded}, not of {asked}: pass the --data of this task, or the task of "
            f"this data"
        )


def check_card(data: EpisodeData) -> None:
    """Refuse data whose card names another task, or another hash, because they changed after collection."""
    check_task(data)
    card = read_card(data.path)
    # Another task may read other columns, which the card does not cover.
    if card.get("task") == task_id(data.task) and card.get("hash") != data.content_hash():
        raise UserError(
            f"{data.path} does not match its card {Path(card_path(data.path)).name}: it is damaged, or was "
            f"changed after collection; collect it again, or delete the card if you made the change"
        )
