"""Files of a run: whole whoever else writes them, and readable by whoever may read the folder."""

import json
import os
from pathlib import Path
from threading import Thread

import pytest

from atlas_wm.errors import UserError
from atlas_wm.runs.files import write_atomically, write_json
from atlas_wm.runs.folder import BANK, CONFIG, DEMONSTRATIONS, new_run_folder, training_folder
from atlas_wm.runs.model import load_model, save_model

WRITES = 60


def test_two_writers_of_one_file_never_break_it(tmp_path):
    path, failed = tmp_path / "x.json", []

    def write(number: int) -> None:
        try:
            for size in range(WRITES):
                write_json(path, {"writer": number, "values": [number] * 50 * size})
        except BaseException as error:
            failed.append(error)

    write_json(path, {"writer": 0, "values": []})
    writers = [Thread(target=write, args=(number,)) for number in (1, 2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        read = json.loads(path.read_text())
        assert set(read["values"]) <= {read["writer"]}
    assert failed == [] and len(json.loads(path.read_text())["values"]) == 50 * (WRITES - 1)
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, 1)
    try:
        with write_atomically(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert json.loads(path.read_text()) == 1 and [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_every_file_of_a_run_has_the_permissions_of_the_user(trained, tmp_path):
    usual = os.umask(0o027)
    try:
        save_model(load_model(trained), tmp_path / "copy")
    finally:
        os.umask(usual)
    for folder, mode in ((trained, 0o666 & ~usual), (tmp_path / "copy", 0o640)):
        modes = {path.name: path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()}
        assert {"model.safetensors", "bank.safetensors", "config.json"} <= set(modes)
        assert set(modes.values()) == {mode}, modes


def replace_with_a_file(folder, name="new"):
    with new_run_folder(folder, overwrite=True) as staging:
        (staging / name).write_text("new")


def test_only_runs_and_empty_folders_are_overwritten(tmp_path):
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / CONFIG).write_text("{}")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    for name in ("runs", "file"):
        for make in (new_run_folder, training_folder):
            with pytest.raises(UserError, match=f"{name} is not a run folder"), make(tmp_path / name, True):
                pytest.fail("it was opened")
    assert sorted(p.name for p in tmp_path.rglob("*")) == [*sorted(["a", CONFIG, "empty", "file", "runs"])]
    for name in ("runs/a", "empty"):
        replace_with_a_file(tmp_path / name)
        assert [p.name for p in (tmp_path / name).iterdir()] == ["new"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "file", "runs"]


@pytest.mark.parametrize("folder", ["/", ".", ""])
def test_a_folder_without_a_name_is_refused(folder, working_directory):
    (working_directory / CONFIG).write_text("{}")
    with pytest.raises(UserError, match="is not a run folder"):
        replace_with_a_file(Path(folder))


def test_what_another_model_left_in_the_folder_is_removed(trained, tmp_path):
    model = load_model(trained)
    save_model(model, tmp_path)
    assert {BANK, DEMONSTRATIONS} <= {p.name for p in tmp_path.iterdir()}
    model.bank = model.demonstrations = None
    save_model(model, tmp_path)
    assert not {BANK, DEMONSTRATIONS} & {p.name for p in tmp_path.iterdir()}
