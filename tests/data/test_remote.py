"""Datasets in a real object store: the same rows as from a disk, also over a connection that breaks."""

import json
import pickle
import re
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from object_store import Proxy, hub_server, moto_server
from synthetic import columns, write_h5

from atlas_wm.cli.app import main
from atlas_wm.data import remote
from atlas_wm.data.collect import collect
from atlas_wm.data.dataset import EpisodeData, find_dataset
from atlas_wm.data.training_set import open_training_set
from atlas_wm.errors import UserError
from atlas_wm.runs.folder import read_run
from atlas_wm.tasks import OfflineTask
from atlas_wm.train.loop import train

pytest.importorskip("moto", reason="moto, the object store of these tests, is not installed")
s3fs = pytest.importorskip("s3fs")
LENGTHS = [24] * 10
DOWN = r"s3://data/x\.%s cannot be read, %d attempts failed \(.*\): .* run the same command again to resume"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """x.h5 and x.lance: the same episodes of random pixels, but for JPEG."""
    from stable_worldmodel.data import get_format

    folder = tmp_path_factory.mktemp("datasets")
    rows = columns(sum(LENGTHS))
    write_h5(folder / "x.h5", LENGTHS, rows)
    episodes = [{name: list(v[start : start + 24]) for name, v in rows.items()} for start in range(0, 240, 24)]
    with get_format("lance").open_writer(folder / "x.lance") as writer:
        writer.write_episodes(episodes)
    return folder


@pytest.fixture(scope="module")
def running(folder, tmp_path_factory) -> Proxy:
    """The bucket ``data`` with both datasets, behind a proxy."""
    with moto_server() as port, pytest.MonkeyPatch.context() as patch:
        proxy = Proxy(port)
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "any")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_MAX_ATTEMPTS", "1")  # these tests do not wait for botocore
        patch.setattr(s3fs.S3FileSystem, "retries", 1)
        s3fs.S3FileSystem.clear_instance_cache()
        files = s3fs.S3FileSystem()
        files.mkdir("data")
        files.put(str(folder / "x.h5"), "data/x.h5")
        files.put(str(folder / "x.lance"), "data/x.lance", recursive=True)
        yield proxy
        proxy.close()
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def store(running, tmp_path, monkeypatch) -> Proxy:
    """Nothing is copied yet, and further attempts come soon."""
    running.cuts, running.down = 0, False
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "WAITS", (0.01, 0.01, 0.01))
    return running


def opened(path: str | Path) -> EpisodeData:
    return EpisodeData(path, OfflineTask(), 32, 5)


def assert_same(one: EpisodeData, other: EpisodeData) -> None:
    assert one.lengths.tolist() == other.lengths.tolist() == LENGTHS
    assert np.array_equal(one.actions, other.actions) and one.content_hash() == other.content_hash()
    rows = np.random.default_rng(0).permutation(len(one.actions))
    assert torch.equal(one.frames_of(rows), other.frames_of(rows))


def copies(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache").rglob("x.h5*") if path.is_file()]


@pytest.mark.parametrize("name", ["x.h5", "x.lance"])
def test_rows_are_those_of_the_local_file(store, folder, name):
    data = opened(f"s3://data/{name}")
    assert data.path == f"s3://data/{name}"
    assert_same(data, opened(folder / name))


def test_an_hdf5_file_is_copied_once(store, folder, tmp_path):
    opened("s3://data/x.h5")
    (copy,) = copies(tmp_path)
    assert copy.read_bytes() == (folder / "x.h5").read_bytes()
    written = copy.stat().st_mtime_ns
    opened(Path("s3://data/x.h5"))  # pathlib drops a slash
    assert [path.stat().st_mtime_ns for path in copies(tmp_path)] == [written]


def test_a_file_that_changed_is_copied_again(store, folder, tmp_path):
    before = opened("s3://data/x.h5").actions
    changed = columns(sum(LENGTHS))
    changed["action"] += 1
    files, other = s3fs.S3FileSystem(), write_h5(tmp_path / "other.h5", LENGTHS, changed)
    files.put(str(other), "data/x.h5")
    try:
        assert np.array_equal(opened("s3://data/x.h5").actions, before + 1)
    finally:
        files.put(str(folder / "x.h5"), "data/x.h5")
    assert len(copies(tmp_path)) == 2


def test_a_loader_process_opens_its_own_table(store, folder):
    data = opened("s3://data/x.lance")
    data.frame(0)
    assert_same(pickle.loads(pickle.dumps(data)), opened(folder / "x.lance"))


@pytest.mark.parametrize("name", ["x.h5", "x.lance"])
def test_training_gives_the_weights_of_the_local_file(store, folder, tmp_path, tiny_config, name):
    short = replace(tiny_config.train, steps=2, batch=8, log_every=1, validate_every=2)
    config, runs = replace(tiny_config, train=short), []
    for where, data in (("disk", folder / name), ("store", f"s3://data/{name}")):
        train(config, OfflineTask(), data, tmp_path / where, method="atlas", recipe="demo", device="cpu")
        runs.append((tmp_path / where / "model.safetensors").read_bytes())
    assert runs[0] == runs[1]
    assert read_run(tmp_path / "store")[0].data.path == f"s3://data/{name}"


@pytest.mark.parametrize("name", ["x.h5", "x.lance"])
def test_reads_survive_cut_connections(store, folder, monkeypatch, name):
    monkeypatch.setattr(remote, "BLOCK", 1 << 14)
    store.cuts = 3  # while it opens
    data = opened(f"s3://data/{name}")
    assert store.cuts == 0
    store.cuts = 4  # while frames are read, of which the copy of an HDF5 file needs no connection
    assert_same(data, opened(folder / name))
    assert store.cuts == (4 if name == "x.h5" else 0)


def test_a_copy_goes_on_where_it_stopped(store, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "BLOCK", 1 << 14)
    monkeypatch.setattr(remote, "AT_ONCE", 1)
    read, asked = remote._read_range, []

    def fail_later(url, files, start, end):
        asked.append(start)
        store.down = len(asked) > 5 and "again" not in asked
        return read(url, files, start, end)

    monkeypatch.setattr(remote, "_read_range", fail_later)
    with pytest.raises(UserError, match=DOWN % ("h5", 4)):
        opened("s3://data/x.h5")
    (part,) = copies(tmp_path)
    assert part.name == "x.h5.part" and part.stat().st_size == 5 << 14
    store.down = False
    asked[:] = ["again"]
    assert_same(opened("s3://data/x.h5"), opened(folder / "x.h5"))
    assert asked[1] == 4 << 14  # the last block may not have been on the disk
    assert [path.name for path in copies(tmp_path)] == ["x.h5"]


def test_a_store_that_stays_down_is_named_with_what_to_do(store, folder, monkeypatch):
    monkeypatch.setattr(remote, "WAITS", (0.01,))  # Lance itself tries for seconds each time
    data = opened("s3://data/x.lance")
    store.down = True
    with pytest.raises(UserError, match=DOWN % ("lance", 2)):
        data.frame(0)
    for name in ("h5", "lance"):
        with pytest.raises(UserError, match=DOWN % (name, 2)):
            opened(f"s3://data/x.{name}")
    store.down = False
    assert_same(data, opened(folder / "x.lance"))


@pytest.mark.parametrize(
    "url", ["s3://data/none.h5", "s3://data/none.lance", "s3://none/x.h5", "s3://none/x.lance"]
)
def test_a_wrong_name_is_no_network_error(store, url, caplog):
    with pytest.raises(UserError, match=rf"there is no dataset {url} \(.*\): check the URL"):
        opened(url)
    assert not caplog.records  # no further attempts


@pytest.mark.parametrize("name", ["x.h5", "x.lance"])
def test_wrong_credentials(store, name, caplog):
    def check_keys_after(requests: str) -> None:
        where = f"http://127.0.0.1:{store.port}/moto-api/reset-auth"
        asked = urllib.request.Request(where, requests.encode(), {"Content-Type": "text/plain"})
        urllib.request.urlopen(asked).close()

    check_keys_after("0")
    try:
        with pytest.raises(UserError, match=rf"s3://data/{name} may not be read \(.*\): set AWS_ACCESS_KEY_ID"):
            opened(f"s3://data/{name}")
    finally:
        check_keys_after("inf")
    assert not caplog.records


def test_no_credentials(store, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        with pytest.raises(UserError, match=r"may not be read \(NoCredentialsError.*: set AWS_ACCESS_KEY_ID"):
            opened("s3://data/x.h5")
    finally:
        s3fs.S3FileSystem.clear_instance_cache()


def test_a_signed_web_address_is_read_and_its_signature_not_stored(store, folder, monkeypatch):
    url = s3fs.S3FileSystem().sign("data/x.h5")
    assert url.startswith("http://") and "Signature=" in url
    monkeypatch.setattr(remote, "BLOCK", 1 << 14)
    store.cuts = 3
    data = opened(url)
    assert store.cuts == 0 and data.path == url.partition("?")[0]
    assert_same(data, opened(folder / "x.h5"))
    store.down = True
    with pytest.raises(UserError, match="cannot be read, 4 attempts failed") as error:
        opened(url)
    assert "Signature" not in str(error.value)
    store.down = False
    with pytest.raises(UserError, match=r"there is no dataset http.*404"):
        opened(url.replace("x.h5", "none.h5"))


@pytest.fixture
def hub(folder, tmp_path, monkeypatch) -> Proxy:
    """Has the repository USER/REPO with both datasets."""
    remote._from_hub.cache_clear()
    with hub_server(folder) as port:
        proxy = Proxy(port)
        constants, address = huggingface_hub.constants, f"http://127.0.0.1:{proxy.port}"
        files = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(remote, "WAITS", (0.01, 0.01, 0.01))
        yield proxy
        proxy.close()
    remote._from_hub.cache_clear()


@pytest.mark.parametrize("name", ["x.h5", "x.lance"])
def test_the_hugging_face_hub(hub, folder, name):
    url = f"hf://datasets/USER/REPO/{name}"
    hub.cuts = 1
    assert_same(opened(url), opened(folder / name))
    assert hub.cuts == 0
    hub.close()
    remote._from_hub.cache_clear()
    assert opened(url).path == url  # the copy is used
    with pytest.raises(UserError, match=r"hf://datasets/USER/OTHER/x\.h5 cannot be read, 4 attempts failed"):
        opened("hf://datasets/USER/OTHER/x.h5")


def test_what_is_not_on_the_hub(hub):
    for url in ("hf://datasets/USER/REPO/none.h5", "hf://datasets/USER/OTHER/x.h5"):
        with pytest.raises(UserError, match=f"there is no dataset {url}"):
            opened(url)


def test_the_card_beside_the_dataset_is_checked(store, tiny_config):
    files = s3fs.S3FileSystem()
    files.pipe("data/x.lance.card.json", json.dumps({"task": "offline", "hash": "other"}).encode())
    try:
        with pytest.raises(UserError, match=r"s3://data/x\.lance does not match its card x\.lance\.card\.json"):
            open_training_set("s3://data/x.lance", OfflineTask(), tiny_config)
    finally:
        files.rm("data/x.lance.card.json")


def test_commands_take_a_url(store, working_directory, capsys):
    main(["doctor", "s3://data/x.lance", "--task", "offline"])
    assert "s3://data/x.lance: 10 episodes, 240 rows" in capsys.readouterr().out
    main(["show", "s3://data/x.h5", "--task", "offline", "--episodes", "0"])
    assert "s3://data/x.h5" in (working_directory / "x.h5.html").read_text()


def test_what_is_not_a_dataset_is_refused_without_a_request(task, tmp_path):
    for url, why in (
        ("s3://bucket/x", r"must end in \.lance, \.h5 or \.hdf5"),
        ("https://host/x.lance", "a Lance table is a folder"),
        ("hf://USER/REPO/x.h5", "expected hf://datasets/USER/REPO/FILE"),
        ("nonsense://bucket/x.h5", "use s3://, hf:// or https://"),
    ):
        with pytest.raises(UserError, match=why):
            find_dataset(url)
    with pytest.raises(UserError, match="is a URL: collect to a local path"):
        collect(task, Path("s3://bucket/x.h5"), 1)


def test_s3_without_s3fs(monkeypatch):
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UserError, match=re.escape('pip install "atlas-wm[cloud]"')):
        find_dataset("s3://bucket/x.h5")


def test_a_path_is_not_a_url():
    for path in ("data/x.h5", "/data/x.h5", "C:/data/x.h5", "x.h5", "a:b/x.h5"):
        assert remote.as_url(path) is None
    assert (
        remote.as_url(Path("s3://bucket/x.lance/"))
        == remote.as_url("s3://bucket/x.lance/")
        == "s3://bucket/x.lance"
    )
    assert remote.bare("https://me:secret@host:1/x.h5?signature=1") == "https://host:1/x.h5"
