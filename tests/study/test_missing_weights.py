"""A method whose pretrained weights are missing is left out before anything runs; the others run without it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pretend import Pretend
from safetensors.torch import save_file

from atlas_wm.cli.study import study
from atlas_wm.errors import UserError
from atlas_wm.models.encoders import ViTEncoder
from atlas_wm.recipes import recipe_config
from atlas_wm.study.study import STUDIES, Study, changed, leave_out, with_weights
from atlas_wm.study.units import units_of

SMALL = {"patch-size": 8, "image-size": 16, "width": 12, "heads": 2, "depth": 1}  # instead of 22 M parameters
FILE = (
    'methods = ["atlas", "dino-wm"]\nrecipes = ["demo"]\ndiagnostics = []\ndatasets.tworoom.episodes = 5\n'
    "[method_settings.dino-wm]\n" + "".join(f'"model.encoder.{name}" = {n}\n' for name, n in SMALL.items())
)


@pytest.fixture
def pretend(tmp_path, monkeypatch) -> Pretend:
    """Instead of what runs the commands of the study in mine.toml."""
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(FILE)
    pretend = Pretend()
    monkeypatch.setattr("atlas_wm.cli.study.make_launcher", lambda *_: pretend)
    monkeypatch.setattr("atlas_wm.study.rows.check_rows", lambda part: None)
    return pretend


@pytest.fixture
def no_hub(monkeypatch):
    def offline(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)


def write_weights(path: str) -> None:
    encoder = replace(
        recipe_config("demo", "dino-wm", None).model.encoder, **{n.replace("-", "_"): v for n, v in SMALL.items()}
    )
    save_file(ViTEncoder(encoder).vit.state_dict(), path)


def printed(capsys) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_the_others_run_and_the_report_names_the_file(pretend, capsys):
    study("mine.toml", encoder_weights=("dino-wm=gone.pth",))
    assert pretend.names == ["collect tworoom", "train atlas", "eval atlas 25", "eval atlas 50", "report"]
    assert dict(pretend.commands)["report"][-2:] == ("--left-out", "dino-wm=needs gone.pth")
    told = printed(capsys)
    first, last = told.index("dino-wm is left out: there is no file gone.pth: download"), told.index("was not run")
    assert first < told.index("running collect") < last and "--encoder-weights METHOD=FILE" in told


@pytest.mark.usefixtures("no_hub")
def test_without_a_file_they_come_from_the_hub(pretend, capsys):
    study("mine.toml", dry_run=True)
    told = printed(capsys)
    assert "needs model.safetensors of timm/vit_small_patch14_dinov2.lvd142m: it comes from the hub" in told
    assert "run train dino-wm (new" in told
    study("mine.toml")
    assert not any("dino" in name for name in pretend.names)
    report = dict(pretend.commands)["report"][-1]
    assert report == "dino-wm=needs model.safetensors of timm/vit_small_patch14_dinov2.lvd142m"


def test_nothing_is_done_again_while_they_are_missing_and_only_the_new_runs_when_they_are_there(pretend):
    given = ("dino-wm=w.safetensors",)
    study("mine.toml", encoder_weights=given)
    Path("runs/mine/tworoom.lance").unlink()
    before = len(pretend.names)
    study("mine.toml", encoder_weights=given)
    assert len(pretend.names) == before
    write_weights("w.safetensors")
    study("mine.toml", encoder_weights=given)
    names = pretend.names[before:]
    assert names == ["collect tworoom", "train dino-wm", "eval dino-wm 25", "eval dino-wm 50", "report"]
    assert "--left-out" not in dict(pretend.commands)["report"]
    Path("w.safetensors").unlink()  # its results still count
    study("mine.toml", encoder_weights=given)
    assert len(pretend.names) == before + 5


def test_a_file_of_other_weights_is_not_taken(pretend, capsys):
    """Another model's; one with register tokens, whose positions timm cannot resample; one that is damaged."""
    for other in ({"some": torch.zeros(3)}, {"pos_embed": torch.zeros(1, 12, 12)}, {"pos_embed": torch.zeros(3)}):
        save_file(other, "other.safetensors")
        study("mine.toml", encoder_weights=("dino-wm=other.safetensors",))
        assert "other.safetensors does not hold the weights of this encoder" in printed(capsys)
        assert "train dino-wm" not in pretend.names


def test_a_part_runs_without_them_too(pretend):
    study("mine.toml", encoder_weights=("dino-wm=gone.pth",), only=("eval",))
    assert pretend.names == ["collect tworoom", "train atlas", "eval atlas 25", "eval atlas 50"]


def test_measured_rows_are_not_dropped_for_new_ones_that_lack_weights(pretend):
    write_weights("w.safetensors")
    study("mine.toml", encoder_weights=("dino-wm=w.safetensors",), seeds=2)
    Path("w.safetensors").unlink()
    with pytest.raises(UserError, match=r"some runs of dino-wm are done, .* no file w.safetensors"):
        study("mine.toml", encoder_weights=("dino-wm=w.safetensors",), seeds=3)


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("given", [("dino-wm=typo.safetensors",), None])
def test_measured_rows_are_not_dropped_for_weights_of_another_name(pretend, given):
    write_weights("w.safetensors")
    study("mine.toml", encoder_weights=("dino-wm=w.safetensors",))
    done = len(pretend.names)
    with pytest.raises(UserError, match="some runs of dino-wm are done"):
        study("mine.toml", encoder_weights=given)
    study("mine.toml", encoder_weights=(f"dino-wm={Path.cwd()}/w.safetensors",))  # the same file
    assert len(pretend.names) == done


def test_a_study_of_nothing_else_is_refused(pretend):
    with pytest.raises(UserError, match="no method that can be trained"):
        study("mine.toml", encoder_weights=("dino-wm=gone.pth",), methods=("dino-wm",))
    assert not pretend.names


@pytest.mark.parametrize("text", ["dino-wm", "dino=w.pth", "pldm=w.pth"])
def test_a_file_needs_a_method_of_the_study(text):
    with pytest.raises(UserError, match=r"METHOD=FILE for one of the methods atlas, dino-wm, not "):
        with_weights(Study(methods=("atlas", "dino-wm")), (text,))


def test_the_papers_study_has_dino_wm_and_can_do_without(tmp_path):
    paper = STUDIES["paper"]
    commands = [u.command for u in units_of(with_weights(paper, ("dino-wm=w.pth",)), tmp_path).values()]
    given = [command for command in commands if command and command[-2:] == ("--model.encoder.weights", "w.pth")]
    assert len(given) == 9 and all("dino-wm" in command for command in given)
    rest = leave_out(paper, {"dino-wm": "needs w.pth"})
    assert len([u for u in units_of(rest, tmp_path).values() if u.kind == "train"]) == 54


def test_a_method_cannot_run_and_be_left_out():
    with pytest.raises(UserError, match="left_out names lewm, which methods names too"):
        Study(methods=("atlas", "lewm"), left_out={"lewm": "diverges"})
    without = Study(methods=("atlas",), left_out={"lewm": "diverges"})
    assert changed(without, methods=("atlas", "lewm")).left_out == {}
    assert changed(without, seeds=2).left_out == without.left_out
