"""Hostile files are read or refused by one UserError. The same for long, and with limits: ``python tests/fuzz``."""

import random
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from targets import SLOW, TARGETS, attempt, make_valid


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("valid")
    make_valid(path)
    return path


@pytest.mark.parametrize("name", TARGETS)
def test_a_hostile_file_is_read_or_refused(name, folder, monkeypatch):
    monkeypatch.chdir(folder)
    target = TARGETS[name]
    valid = (folder / target.file).read_bytes()
    assert attempt(folder, target, valid) is None
    refusals = []

    @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=False))
    def read(choose: random.Random) -> None:
        refusals.append(attempt(folder, target, target.mutate(valid, choose)))

    read()
    assert "evil" not in sys.modules
    if not name.startswith("report"):  # a report names what is damaged, and goes on
        assert any(refusals)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["page probe", "page cases", "page config"])
def test_a_page_is_drawn_of_hostile_files(name, folder, monkeypatch):
    monkeypatch.chdir(folder)
    target = SLOW[name]
    valid = (folder / target.file).read_bytes()
    attempt(folder, target, target.mutate(valid, random.Random(f"test {name}")))
