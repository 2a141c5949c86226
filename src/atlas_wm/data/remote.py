"""Datasets at a URL: s3://, hf://, https:// and what else fsspec reads.

Training reads single frames in random order. Lance fetches the rows of a batch in parallel, so a table in an object
store is read where it is. HDF5 fetches one frame after another, each a round trip over the network, so such a file
is copied to this machine once. So is anything from the Hugging Face hub, which limits the number of requests.
Credentials and endpoints come from the environment variables of these libraries.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import textwrap
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from atlas_wm.errors import UserError
from atlas_wm.runs.files import sync, writing
from atlas_wm.runs.versions import install_command

log = logging.getLogger(__name__)
WAITS = (1.0, 4.0, 15.0)  # seconds before each further attempt, beside those of s3fs and Lance themselves
BLOCK, AT_ONCE = 8 << 20, 8  # bytes of a request, requests side by side
VERSION = ("size", "ETag", "Last-Modified", "LastModified", "mtime", "generation")  # what changes with a file
ON_HUB = re.compile(r"hf://datasets/([^/]+/[^/@]+)(?:@([^/]+))?/(.+)")
CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "hf": "log in with `hf auth login`, or set HF_TOKEN",
}
Result = TypeVar("Result")


def as_url(path: str | Path) -> str | None:
    """The URL that a path is, else None. pathlib turns ``s3://bucket`` into ``s3:/bucket``."""
    found = re.match(r"([a-z][a-z0-9+.-]+):/+(?=[^/])", str(path))
    return found and f"{found[1]}://{str(path)[found.end() :].rstrip('/')}"


def bare(url: str) -> str:
    """A URL without user, password and query, which may hold a signature: what messages and files show."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def check_dataset(url: str) -> None:
    """Refuse what is not the URL of a dataset."""
    name, scheme = Path(bare(url)).name, urlsplit(url).scheme
    if not name.endswith((".lance", ".h5", ".hdf5")):
        raise UserError(f"{bare(url)} is not the URL of a dataset: it must end in .lance, .h5 or .hdf5")
    if name.endswith(".lance") and scheme in ("http", "https"):
        raise UserError(
            f"{bare(url)}: a Lance table is a folder, which cannot be read over {scheme}: put it into an object "
            f"store (s3://) or on the Hugging Face hub (hf://), or download it"
        )
    if scheme == "hf" and not ON_HUB.fullmatch(url):
        raise UserError(f"{bare(url)}: expected hf://datasets/USER/REPO/FILE, or REPO@REVISION")
    if scheme == "hf":
        if not _from_hub(url).exists():
            raise UserError(f"there is no dataset {bare(url)}: check the URL")
    else:
        retried(url, _file_system(url).info, f"{url}/_versions" if name.endswith(".lance") else url)


def to_open(url: str) -> Path | str:
    """What readers open: a copy on this machine, or the URL of a Lance table."""
    if url.startswith("hf://"):
        return _from_hub(url)
    if not bare(url).endswith(".lance"):
        return _copied(url)
    os.environ.setdefault("LANCE_LOG", "error")  # else it writes several lines for every request that fails
    if os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"):  # enough for s3fs, but not for Lance
        os.environ.setdefault("AWS_ALLOW_HTTP", "true")
    return url


def read_small(url: str, most: int) -> bytes | None:
    """The first ``most`` bytes of a file; None if there is none."""
    if url.startswith("hf://"):
        found = _from_hub(url)
        return found.read_bytes()[:most] if found.exists() else None
    files = _file_system(url)

    def read() -> bytes | None:
        try:
            with files.open(url, "rb") as file:
                return bytes(file.read(most))
        except Exception as error:
            if _refusal(error) == "missing":
                return None
            if _refusal(error) == "denied":  # how a store answers for a missing file, if it may not be listed
                log.warning("%s may not be read: its dataset is used without it", bare(url))
                return None
            raise

    return retried(url, read)


def retried(url: str, read: Callable[..., Result], *args: Any) -> Result:
    """``read(*args)``, again after a pause where the connection failed. A UserError names the URL."""
    for wait in (*WAITS, None):
        try:
            return read(*args)
        except UserError:
            raise
        except Exception as error:  # every library has its own kinds
            said = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ else error
            why = textwrap.shorten(f"{type(said).__name__}: {said}".replace(url, bare(url)), 300)
            refusal = _refusal(error)
            if refusal == "missing":
                raise UserError(f"there is no dataset {bare(url)} ({why}): check the URL") from error
            if refusal == "denied":
                remedy = CREDENTIALS.get(urlsplit(url).scheme, "check the credentials")
                raise UserError(f"{bare(url)} may not be read ({why}): {remedy}") from error
            if wait is None:
                raise UserError(
                    f"{bare(url)} cannot be read, {len(WAITS) + 1} attempts failed ({why}): check the network and "
                    f"the endpoint, then run the same command again to resume"
                ) from error
            log.warning("%s: a read failed (%s); next attempt in %g s", bare(url), why, wait)
            time.sleep(wait)
    raise AssertionError


def _refusal(error: Exception) -> str | None:
    """``missing`` or ``denied`` if the server said so; None if it did not answer, or not yet."""
    for e in (error, error.__cause__):
        status = getattr(e, "status", None) or getattr(getattr(e, "response", None), "status_code", None)
        if isinstance(status, int):
            return {401: "denied", 403: "denied", 404: "missing", 410: "missing"}.get(status)
    if isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
        return "denied"
    # Over HTTP, fsspec and the hub's library call a file missing whatever went wrong, which is the cause.
    answered = error.__cause__ is None or type(error.__cause__).__module__.startswith("botocore")
    return "missing" if isinstance(error, FileNotFoundError) and answered else None


def _file_system(url: str) -> Any:
    import fsspec

    scheme = urlsplit(url).scheme
    try:
        return fsspec.filesystem(scheme, use_listings_cache=False)
    except ImportError as error:
        remedy = install_command("s3fs") if scheme in ("s3", "http", "https") else f"install what reads {scheme}://"
        raise UserError(f"{bare(url)} cannot be read ({error}): {remedy}") from error
    except ValueError as error:
        raise UserError(f"{bare(url)} cannot be read ({error}): use s3://, hf:// or https://") from error


@cache
def _from_hub(url: str) -> Path:
    """A file or folder of a dataset repository, in the cache of huggingface_hub; no such path if it has none.

    Without a network, the copy that is there is used.
    """
    from huggingface_hub import snapshot_download

    found = ON_HUB.fullmatch(url)
    assert found is not None  # check_dataset
    repository, revision, path = found.groups()

    def fetch() -> str:
        patterns = [path, f"{path}/*"]
        return snapshot_download(repository, repo_type="dataset", revision=revision, allow_patterns=patterns)

    return Path(retried(url, fetch), path)


def _copied(url: str) -> Path:
    """The copy of a file in the user's cache folder. A file that changes at its URL is copied again.

    Processes wait for one another. An interrupted copy goes on where it stopped.
    """
    files = _file_system(url)
    size, version = _version(url, files)
    target = _cache_folder() / version / Path(bare(url)).name
    part = target.with_name(target.name + ".part")
    with writing(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_name("lock").open("w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            if target.exists():
                return target
            _copy(url, files, size, part)
            if _version(url, files) != (size, version):
                part.unlink()
                raise UserError(f"{bare(url)} changed while it was copied: run the same command again")
            sync(part)
            part.rename(target)
            sync(target.parent)
    return target


def _version(url: str, files: Any) -> tuple[int, str]:
    """The size of a file in bytes, and a name for its present content."""
    info = retried(url, files.info, url)
    if info.get("type") != "file" or not info.get("size"):
        raise UserError(
            f"{bare(url)} is empty, a folder, or of a size that its server does not tell: check the URL"
        )
    known = [bare(url), *(str(info.get(key)) for key in VERSION)]
    return int(info["size"]), hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "atlas-wm", "datasets")


def _copy(url: str, files: Any, size: int, part: Path) -> None:
    step = BLOCK * AT_ONCE
    with part.open("ab") as file:
        # The machine may have stopped before the last step was on its disk.
        done = max(file.tell() - 1, 0) // step * step
        file.truncate(done)
        free = shutil.disk_usage(part.parent).free
        if free < size - done:
            raise UserError(
                f"{bare(url)} takes {size / 1e9:.1f} GB, {part.parent} has {free / 1e9:.1f} GB free: free some "
                f"space, or set XDG_CACHE_HOME to a folder on another disk"
            )
        log.info("copying %s (%.2f GB) to %s", bare(url), size / 1e9, part.parent)
        for start in range(done, size, step):
            file.write(retried(url, _read_range, url, files, start, min(start + step, size)))
            file.flush()
            os.fsync(file.fileno())
            tenth = 10 * min(start + step, size) // size
            if size > 10 * step and tenth > 10 * start // size:
                log.info("%d %% of %s copied", 10 * tenth, bare(url))


def _read_range(url: str, files: Any, start: int, end: int) -> bytes:
    starts = list(range(start, end, BLOCK))
    ends = [min(begin + BLOCK, end) for begin in starts]
    blocks = files.cat_ranges([url] * len(starts), starts, ends, on_error="return")
    for begin, stop, block in zip(starts, ends, blocks, strict=True):
        if isinstance(block, Exception):
            raise block
        if len(block) != stop - begin:
            raise OSError(f"{len(block)} bytes came instead of {stop - begin}")
    return b"".join(blocks)
