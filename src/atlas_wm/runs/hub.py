"""Run folders on the Hugging Face hub: the files that make a model, and a card."""

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atlas_wm.errors import UserError
from atlas_wm.runs.card import CARD
from atlas_wm.runs.folder import BANK, CONFIG, NORMALIZER, STATES, WEIGHTS

FILES = [CONFIG, WEIGHTS, NORMALIZER, BANK, STATES]  # the last two where they are there


def fetch(repo_id: str, revision: str | None = None) -> Path:
    """A local folder with the files of a model; only those are fetched."""
    from huggingface_hub import snapshot_download

    with _one_line(f"there is no run folder {repo_id}, and it cannot be fetched from the Hugging Face hub"):
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=FILES))


def publish(folder: Path, repo_id: str, private: bool | None = None) -> str:
    """Upload the files of a model and its card. Returns where they are."""
    from huggingface_hub import HfApi

    api = HfApi()
    with _one_line(f"{repo_id} cannot be written on the Hugging Face hub"):
        url = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo_id, folder_path=folder, allow_patterns=[*FILES, CARD])
    return str(url)


@contextmanager
def _one_line(otherwise: str) -> Iterator[None]:
    """Whatever the hub or the network makes its library raise becomes one line."""
    try:
        yield
    except Exception as error:
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 200)
        remedy = "check the name and the network, and log in with `hf auth login` if it is private"
        raise UserError(f"{otherwise} ({reason}): {remedy}") from error
