"""A package that is not installed is named with what installs it, and the data are not blamed."""

import re
import sys

import pytest

from atlas_wm.cli import doctor
from atlas_wm.data.collect import collect
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.errors import UserError
from atlas_wm.tasks.base import import_harness

INSTALL = 'pip install "atlas-wm[data]"'
DATA = re.escape(INSTALL)


class Hide:
    """On sys.meta_path: as if a module, or one that another imports, were not installed."""

    def __init__(self, module: str, imported_by: str = ""):
        self.module, self.asked_for = module, imported_by or module

    def find_spec(self, name, path=None, target=None):
        if name == self.asked_for:
            raise ModuleNotFoundError(f"No module named {self.module!r}", name=self.module)


@pytest.fixture
def hide(monkeypatch):
    def hidden(module: str, imported_by: str = "") -> None:
        import_harness()
        monkeypatch.delitem(sys.modules, imported_by or module, raising=False)
        monkeypatch.setattr(sys, "meta_path", [Hide(module, imported_by), *sys.meta_path])

    return hidden


@pytest.mark.parametrize("name", ["x.h5", "folder"])
def test_an_hdf5_file_without_hdf5plugin(task, tmp_path, monkeypatch, hide, name):
    from stable_worldmodel.data import format

    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "x.h5", tmp_path / "folder" / "x.h5"):
        path.touch()
    monkeypatch.delitem(format.FORMATS, "hdf5")  # stable-worldmodel leaves it out without a word
    hide("hdf5plugin")
    with pytest.raises(UserError, match=r"\(No module named 'hdf5plugin'\): " + DATA):
        EpisodeData(tmp_path / name, task, 32, 5)


def test_stable_worldmodel_without_lancedb(task, tmp_path, hide):
    (tmp_path / "x.h5").touch()
    hide("lancedb", imported_by="stable_worldmodel")
    with pytest.raises(UserError, match=r"does not load \(No module named 'lancedb'\): " + DATA):
        EpisodeData(tmp_path / "x.h5", task, 32, 5)


@pytest.mark.parametrize(("module", "out"), [("lance", "x.lance"), ("h5py", "x.h5")])
def test_a_dataset_that_could_not_be_written_is_not_begun(task, tmp_path, hide, module, out):
    hide(module)
    with pytest.raises(UserError, match=rf"{out} cannot be written \(No module named '{module}'\): " + DATA):
        collect(task, tmp_path / out, 2)
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_names_the_module_and_its_package():
    class Said:
        def __init__(self, found: dict, error: str = ""):
            self.result = found, error

        def finding(self, name, deadline):
            return self.result

    lost = Said({}, "ModuleNotFoundError: No module named 'lancedb'")
    assert doctor.environment_row("TwoRoom", lost, 0).remedy == INSTALL
    assert {row.remedy for row in doctor.format_rows(lost, 0)} == {INSTALL}
    without = Said({"listed": ["lance"], "absent": {"lance": [], "hdf5": ["hdf5plugin"], "video": []}})
    hdf5 = next(row for row in doctor.format_rows(without, 0) if row.name == "format hdf5")
    assert (hdf5.status, hdf5.remedy) == ("missing", INSTALL) and "hdf5plugin" in hdf5.detail
