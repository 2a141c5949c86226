"""`atlas show` writes one page that needs no other file; `atlas doctor DATA` prints its findings."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from atlas_wm.cli.app import main
from atlas_wm.data.findings import open_to_inspect
from atlas_wm.report.page import GENERATOR
from atlas_wm.show.page import write_page

sys.path.append(str(Path(__file__).parent.parent / "data"))
from lerobot_layout import make_episodes, write_lerobot
from synthetic import columns, write_h5


@pytest.fixture(scope="module")
def page(dataset_path, tmp_path_factory) -> str:
    """Of a dataset without frames: they are drawn from states."""
    out = tmp_path_factory.mktemp("page") / "page.html"
    steps = []
    path, found = write_page(
        open_to_inspect(dataset_path), out, episodes=2, on_step=lambda *step: steps.append(step)
    )
    assert path == out and steps[-1][0] == steps[-1][1] == len(steps) - 1
    assert all(finding.level == "note" for finding in found)
    return out.read_text()


def test_the_page_needs_no_other_file(page):
    addresses = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert all(address.startswith(("#", "data:")) for address in addresses)
    assert not re.search(r"url\((?!#)|@import|<script src", page)
    assert GENERATOR in page


def test_the_page_has_the_numbers_of_the_dataset(page, dataset_path):
    data = open_to_inspect(dataset_path)
    text = re.sub(r"<[^>]*>", " ", page)
    for number in (
        f"{len(data.lengths)}",
        f"{len(data.actions):,}",
        data.content_hash(),
        f"{data.lengths.mean():.3g}",
    ):
        assert number in text, number
    assert "stable_worldmodel two_room ExpertPolicy" in text  # from the card
    assert f"longest: episode {data.lengths.argmax()}" in text
    assert text.count("step 0") == 5  # two random episodes and three extreme ones
    assert page.count("<image") == 2 + 2  # two panels of films, the coverage of states and of actions


def test_a_lerobot_dataset(tmp_path):
    path = write_lerobot(tmp_path / "robot", make_episodes([31, 40, 45, 50]), stored="image")
    out, _ = write_page(open_to_inspect(path), episodes=0)
    assert out == tmp_path / "robot.html"
    text = out.read_text()
    assert "Offline data" in text and "64×48" in text and "There is no card" in text
    assert "state_0, state_1" in text and "Random episodes" not in text


def test_a_dataset_with_nan_still_has_a_page(tmp_path):
    values = columns(90, state=4)
    values["state"][40] = values["action"][5] = np.nan
    out, found = write_page(open_to_inspect(write_h5(tmp_path / "x.h5", [30, 30, 30], values), "offline"))
    text = out.read_text()
    assert [f.level for f in found if "NaN" in f.text] == ["error", "error"]
    assert "<b>Error.</b>" in text and "is NaN or infinite in 1 of 90 rows" in text


@pytest.mark.parametrize("lengths", [[], [1] * 30, [30]])
def test_a_dataset_with_little_in_it_still_has_a_page(tmp_path, lengths):
    values = columns(30, state=3)
    values["action"][:] = np.nan
    out, found = write_page(open_to_inspect(write_h5(tmp_path / "x.h5", lengths, values), "offline"))
    assert found[0].level == "error" and "<b>Error.</b>" in out.read_text()


def test_show_prints_where_the_page_is(dataset_path, tmp_path, capsys):
    out = tmp_path / "new" / "page.html"
    main(["show", str(dataset_path), "--out", str(out), "--episodes", "0"])
    assert f"open {out} in a browser" in capsys.readouterr().out and out.exists()
    other = tmp_path / "mine.html"
    other.write_text("<p>mine</p>")
    with pytest.raises(SystemExit, match="is not a page of this command: choose another --out"):
        main(["show", str(dataset_path), "--out", str(other)])
    with pytest.raises(SystemExit, match="--episodes must be between 0 and 100"):
        main(["show", str(dataset_path), "--episodes", "-1"])


def test_the_doctor_ends_with_0_after_notes_and_warnings(tmp_path, capsys):
    values = columns(400, state=2)
    values["action"][:, 1] = 3.0
    main(["doctor", str(write_h5(tmp_path / "x.h5", [100] * 4, values)), "--task", "offline"])
    said = " ".join(capsys.readouterr().out.split())
    assert "4 episodes, 400 rows; 1 warning" in said and "is always 3" in said


def test_the_doctor_ends_with_1_if_the_data_cannot_be_trained_on(tmp_path, capsys):
    values = columns(400, state=2)
    values["action"][7] = np.inf
    with pytest.raises(SystemExit) as stop:
        main(["doctor", str(write_h5(tmp_path / "x.h5", [100] * 4, values)), "--task", "offline"])
    assert stop.value.code == 1 and "1 error" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="there is no dataset"):
        main(["doctor", str(tmp_path / "nothing.h5")])
    with pytest.raises(SystemExit, match="--task needs a dataset"):
        main(["doctor", "--task", "offline"])
