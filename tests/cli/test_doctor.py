"""The doctor: what is missing is a row with a remedy, and nothing makes it fall over."""

import time
from importlib.metadata import PackageNotFoundError, version

import pytest

from atlas_wm.cli import doctor
from atlas_wm.cli.doctor import Check, Probe
from atlas_wm.tasks import rendering

SOON = 20.0  # seconds


class Said:
    """A probe that has ended."""

    def __init__(self, found: dict, error: str = ""):
        self._result = found, error

    def finding(self, name, deadline):
        return self._result


def row(rows, name: str) -> Check:
    return next(r for r in rows if r.name == name)


@pytest.mark.slow
def test_this_machine_is_diagnosed_within_a_minute():
    started = time.monotonic()
    rows = doctor.diagnose_machine()
    assert time.monotonic() - started < 60
    names = [r.name for r in rows]
    assert len(names) == len(set(names))
    assert {"Python", "cores", "memory", "device", "precision", "packages", "disk", "renderer"} <= set(names)
    assert {"env TwoRoom", "env PushT", "env Cube", "format lance", "format hdf5", "format video"} <= set(names)
    assert all(r.remedy for r in rows if r.status == "missing")
    if not any("no answer" in r.detail for r in rows):  # a machine busy beyond all measure
        assert row(rows, "env TwoRoom") == Check("env TwoRoom", "ok", "reset, step and a frame of 224×224")
        cube = "ok" if row(rows, "renderer").status == "ok" else "warn"
        assert row(rows, "env Cube").status == cube
        assert row(rows, "format hdf5").status == "ok"


def test_a_missing_package_is_named_with_its_remedy(monkeypatch):
    def without_h5py(name):
        if name == "h5py":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(doctor, "version", without_h5py)
    rows = list(doctor.check_packages())
    found = row(rows, "package h5py")
    assert found.status == "missing" and found.remedy.startswith("pip install h5py==")
    assert row(rows, "packages").status == "warn"


def test_another_version_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda name: "0.0.1" if name == "timm" else version(name))
    found = row(doctor.check_packages(), "package timm")
    assert found.status == "warn" and "0.0.1; tested with" in found.detail
    assert found.remedy == f"pip install timm=={dict(doctor.read_lock(doctor.find_lock()))['timm']}"


def test_the_lock_is_read_for_this_machine(tmp_path):
    lock = tmp_path / "requirements.lock"
    lock.write_text(
        "# comment\n\na==1.0\nB.c[x]==2.0+cu1  # why\n"
        'no==1 ; sys_platform == "nowhere"\nyes==2 ; sys_platform != "nowhere"\n'
    )
    assert list(doctor.read_lock(lock)) == [("a", "1.0"), ("B.c", "2.0+cu1"), ("yes", "2")]


def test_without_a_lock_nothing_is_compared(monkeypatch):
    monkeypatch.setattr(doctor, "find_lock", lambda: None)
    rows = list(doctor.check_packages())
    assert [r.name for r in rows] == ["packages"] and "not compared" in rows[0].detail


def test_no_renderer_is_a_row_with_its_remedy(monkeypatch):
    monkeypatch.setattr(rendering, "pick_renderer", lambda: None)
    monkeypatch.setattr(rendering, "try_renderer", lambda backend: "no library")
    monkeypatch.setattr(rendering, "asked_for", lambda: "")
    found = doctor.check_renderer()
    assert found.status == "missing" and "no library" in found.detail
    assert "apt-get install libegl1" in found.remedy
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    assert '"atlas-wm[envs]"' in doctor.check_renderer().remedy


def test_cube_without_frames_is_half_a_cube():
    found = doctor.environment_row("Cube", Said({"frame": None}), 0)
    assert found.status == "warn" and found.remedy == "see renderer"


def test_an_environment_that_does_not_work_names_what_it_needs():
    found = doctor.environment_row("PushT", Said({}, "ModuleNotFoundError: No module named 'pymunk'"), 0)
    assert found.status == "missing" and "pymunk" in found.detail and '"atlas-wm[envs]"' in found.remedy


def test_formats_without_their_packages():
    said = Said({"listed": ["lance", "folder"], "absent": {"lance": [], "hdf5": ["h5py"], "video": ["decord"]}})
    statuses = {r.name: r.status for r in doctor.format_rows(said, 0)}
    assert statuses == {"format lance": "ok", "format hdf5": "missing", "format video": "warn"}
    broken = list(doctor.format_rows(Said({}, "ImportError: operator torchvision::nms does not exist"), 0))
    assert all(r.status == "missing" and "nms" in r.detail and r.remedy for r in broken)


def test_a_check_that_fails_is_a_row():
    def broken():
        yield Check("first", "ok", "")
        raise RuntimeError("driver too old")

    (found,) = doctor._guarded("device", broken)
    assert found.name == "device" and found.status == "missing" and found.remedy
    assert "RuntimeError: driver too old" in found.detail


def test_a_process_that_dies_keeps_what_it_found():
    probe = Probe("print('noise'); print('{\"one\": {\"frame\": 1}}', flush=True)\nimport os; os.abort()")
    deadline = time.monotonic() + SOON
    assert probe.finding("one", deadline) == ({"frame": 1}, "")
    found, error = probe.finding("two", deadline)
    assert found == {} and "ended with status" in error
    assert "no such thing" in Probe("raise ValueError('no such thing')").finding("one", deadline)[1]


def test_a_process_that_hangs_is_ended():
    probe = Probe("import time; time.sleep(600)")
    started = time.monotonic()
    _, error = probe.finding("one", started + 0.5)
    assert "no answer" in error and time.monotonic() - started < SOON
    assert doctor.environment_row("Cube", Said({}, error), 0).remedy == doctor.WAIT


def test_little_disk_space_and_spinning_threads_are_warned_of(monkeypatch):
    monkeypatch.setattr(doctor, "LOW_DISK", 1e9)
    assert doctor.check_disk().status == "warn" and doctor.check_disk().remedy
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert doctor.check_wait_policy().status == "warn"
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert doctor.check_wait_policy().status == "ok"


def test_the_table_shows_every_row(monkeypatch, capsys):
    rows = [Check("a", "ok", "fine [not markup]"), Check("b", "missing", "gone", "pip install b")]
    monkeypatch.setattr(doctor, "diagnose_machine", lambda: rows)
    assert doctor.print_doctor() == rows
    shown = capsys.readouterr().out
    assert "[not markup]" in shown and "missing" in shown and "pip install b" in shown
