"""Download and upload run folders: the files of a model and its card, on the Hugging Face hub."""

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atlas_wm.errors import UserError
from atlas_wm.runs.card import CARD
from atlas_wm.runs.folder import BANK, CONFIG, DEMONSTRATIONS, NORMALIZER, STATES, TEMPORAL_HEAD, WEIGHTS

FILES = [CONFIG, WEIGHTS, NORMALIZER, BANK, DEMONSTRATIONS, TEMPORAL_HEAD, STATES]  # the last four are optional


def fetch(repo_id: str, revision: str | None = None) -> Path:
    """Download the files of a model, and only those. Returns a local folder."""
    from huggingface_hub import snapshot_download

    with _one_line(f"there is no run folder {repo_id}, and it cannot be fetched from the Hugging Face hub"):
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=FILES))


def publish(folder: Path, repo_id: str, private: bool | None = None) -> str:
    """Upload the files of a model and its card. Returns the URL."""
    from huggingface_hub import HfApi

    api = HfApi()
    with _one_line(f"{repo_id} cannot be written on the Hugging Face hub"):
        url = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo_id, folder_path=folder, allow_patterns=[*FILES, CARD])
    return str(url)


@contextmanager
def _one_line(failure: str) -> Iterator[None]:
    """Turn any exception of the hub's library into a UserError of one line."""
    try:
        yield
    except Exception as error:
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 200)
        remedy = "check the name and the network, and log in with `hf auth login` if it is private"
        raise UserError(f"{failure} ({reason}): {remedy}") from error
