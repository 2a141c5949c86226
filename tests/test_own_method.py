"""docs/guides/own-method.md, executed as a reader would, and what is said when a name is wrong."""

import sys
from pathlib import Path

import pytest
import torch
from stable_worldmodel.wm.loss import TemporalStraighteningLoss

from atlas_wm.cli.app import main
from atlas_wm.config import ObjectiveConfig
from atlas_wm.errors import UserError
from atlas_wm.losses import ClipLatents, Progress, objective
from atlas_wm.methods import METHODS, get_method
from atlas_wm.recipes import demo
from atlas_wm.rng import make_rng
from tutorials import read_blocks, run_block

BLOCKS = read_blocks("guides/own-method.md")
BROKEN = """
def raising(clips):
    return clips.z[99]

def no_scalar(clips):
    return clips.z.mean(dim=0)

def no_tensor(clips):
    return 0.5

def no_argument():
    return 0.5

number = 3
"""


@pytest.fixture
def my_method(tmp_path, monkeypatch):
    """The tutorial's module and a broken one in the working directory, forgotten afterwards."""
    (tmp_path / "my_method.py").write_text("".join(text for _, text in BLOCKS[:3]))
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in ("my_method", "broken"):
        sys.modules.pop(name, None)


@pytest.fixture
def clips():
    z = torch.randn(6, 4, 5, generator=make_rng(0))
    return ClipLatents(z, z, z[:, 1:], torch.zeros(6, 3, 2))


@pytest.mark.slow
def test_the_tutorial_works_as_written(my_method):
    assert [kind for kind, _ in BLOCKS] == ["python"] * 3 + ["sh", "python", "sh"]
    for kind, text in BLOCKS[3:]:
        if "atlas eval" in text:  # a term matters in training alone
            Path("my_method.py").unlink()
            del sys.modules["my_method"]
        run_block(kind, text)
    assert len(list(Path("runs/tworoom-STRAIGHT-demo/evaluation").glob("*.json"))) == 1


def test_the_row_is_atlas_and_one_more_term(my_method, clips):
    config = demo("my_method:STRAIGHT")
    assert config.objective.weights == {**demo("atlas").objective.weights, "my_method:straightening": 0.1}
    assert METHODS["atlas"].objective.extra == {}
    total, terms = objective(clips, config.objective, make_rng(1))
    straightening = terms["my_method:straightening"]
    torch.testing.assert_close(straightening, TemporalStraighteningLoss()(clips.z))
    without = objective(clips, demo("atlas").objective, make_rng(1)).total
    torch.testing.assert_close(total - without, 0.1 * straightening)


@pytest.mark.parametrize(("step", "share"), [(1, 0.02), (25, 0.5), (50, 1), (100, 1)])
def test_the_schedule_of_the_tutorial_sets_in_over_the_first_half(my_method, clips, step, share):
    config = ObjectiveConfig(extra={"my_method:straightening": 1.0, "my_method:later": 1.0})
    terms = objective(clips, config, progress=Progress.at(step, 100)).terms
    torch.testing.assert_close(terms["my_method:later"], share * terms["my_method:straightening"])


@pytest.mark.parametrize(
    ("method", "flag", "weight"),
    [
        ("my_method:STRAIGHT", (), 0.1),
        ("my_method:STRAIGHT", ("--objective.extra.my_method:straightening", "0.3"), 0.3),
        ("lewm", ("--objective.extra", "my_method:straightening", "0.2"), 0.2),
    ],
)
def test_flags_set_the_weight_of_a_term(my_method, monkeypatch, method, flag, weight):
    asked = []
    monkeypatch.setattr("atlas_wm.cli.train.train_with_progress", lambda *given, **_: asked.append(given))
    main(["train", "tworoom", "--method", method, "--recipe", "demo", *flag])
    (config, _task, _data, out, named), *_ = asked
    assert config.objective.extra == {"my_method:straightening": weight}
    assert named == method and out == Path(f"runs/tworoom-{method.removeprefix('my_method:')}-demo")


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("nowhere:NAME", "method 'nowhere:NAME' cannot be imported: no module nowhere in "),
        (
            "my_method:BENT",
            "method 'my_method:BENT' cannot be imported (module 'my_method' has no attribute 'BENT')",
        ),
        ("my_method:straightening", "my_method:straightening is a function, not an atlas_wm.methods.Method"),
        (":NAME", "method ':NAME' cannot be imported (Empty module name)"),
    ],
)
def test_a_wrong_method_gets_one_clear_line(my_method, method, message):
    with pytest.raises(SystemExit) as stopped:
        main(["train", "tworoom", "--method", method, "--recipe", "demo"])
    said = str(stopped.value.code)
    assert said.startswith("atlas: ") and message in said and "\n" not in said


def test_a_row_with_a_term_that_is_not_there_is_refused_before_the_data_is_read(my_method):
    path = Path("my_method.py")
    path.write_text(path.read_text().replace('"my_method:straightening"', '"my_method:bending"'))
    with pytest.raises(UserError, match="loss term 'my_method:bending' cannot be imported"):
        get_method("my_method:STRAIGHT")


@pytest.mark.parametrize(
    ("term", "message"),
    [
        ("nowhere:term", r"loss term 'nowhere:term' cannot be imported: no module nowhere in .*: run atlas from"),
        ("broken:absent", r"loss term 'broken:absent' cannot be imported \(.*no attribute 'absent'\)"),
        ("broken:raising", r"loss term broken:raising failed at .*broken\.py:3: IndexError: index 99"),
        ("broken:no_argument", r"loss term broken:no_argument failed at .*: TypeError: no_argument\(\) takes 0"),
        ("broken:number", r"loss term broken:number failed at .*: TypeError: 'int' object is not callable"),
        ("broken:no_scalar", r"must return a tensor with one number, not shape \(4, 5\)"),
        ("broken:no_tensor", r"must return a tensor with one number, not float"),
    ],
)
def test_a_wrong_term_gets_one_clear_line(my_method, clips, term, message):
    with pytest.raises(UserError, match=message) as raised:
        objective(clips, ObjectiveConfig(extra={term: 1.0}))
    assert "\n" not in str(raised.value)


def test_a_term_without_a_module_is_refused():
    with pytest.raises(UserError, match=r"objective\.extra names a term as module:name, not 'straightening'"):
        ObjectiveConfig(extra={"straightening": 1.0})
