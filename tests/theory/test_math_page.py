"""docs/reference/math.md names functions and tests that exist."""

import re
from functools import reduce
from importlib import import_module
from pathlib import Path

TESTS = Path(__file__).parent.parent
NAMES = re.findall(r"`([\w./:]+)`", (TESTS.parent / "docs" / "reference" / "math.md").read_text())


def test_named_tests_exist():
    named = [name.split("::") for name in NAMES if "::" in name]
    assert len(named) > 40
    for path, function in named:
        assert f"def {function}(" in (TESTS / path).read_text(), function


def test_named_functions_exist():
    named = [name.split(".") for name in NAMES if re.match(r"(theory|losses|models|diagnose)\.\w", name)]
    assert len(named) > 20
    for first, *rest in named:
        modules = [part for part in rest if (TESTS.parent / "src" / "atlas_wm" / first / f"{part}.py").exists()][:1]
        module = import_module(".".join(["atlas_wm", first, *modules]))
        assert reduce(getattr, rest[len(modules) :], module)
