"""The house rules: imports point one way, files stay small, the light names stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "atlas_wm"

LEAVES = {
    *("errors", "imports", "config", "versions", "streams", "device", "normalize", "frames", "run_folder", "card"),
    *("images", "results"),
    *("distributed", "launch", "workers"),
}
# What each part of the house may import of the others; nothing reaches back along the way of the data.
ALLOWED = {
    "losses": {"config", "errors", "imports", "distributed"},
    "models": LEAVES | {"losses", "hub", "geometry"},
    "tasks": LEAVES,
    "data": LEAVES | {"tasks"},
    "train": LEAVES | {"losses", "models", "tasks", "data", "geometry"},
    "geometry": {"losses"},
    "plan": LEAVES | {"models", "geometry"},
    "convert": LEAVES | {"models", "tasks", "data", "methods"},
    "evaluate": LEAVES | {"models", "tasks", "data", "plan", "geometry"},
    "diagnose": LEAVES | {"losses", "models", "tasks", "data", "plan", "evaluate", "geometry"},
    "report": {"run_folder", "errors", "results"},
}


def imported(path: Path, top_level_only: bool = False) -> set[str]:
    """The parts of atlas_wm that a file imports."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    names = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return {name.split(".")[1] for name in names if name.startswith("atlas_wm.")}


@pytest.mark.parametrize("part", ALLOWED)
def test_imports_point_one_way(part):
    files = list((SOURCE / part).glob("*.py")) or list(SOURCE.glob(f"{part}.py"))
    assert files
    for path in files:
        assert imported(path) <= ALLOWED[part] | {part}, path.name


def test_the_command_line_imports_nothing_heavy_at_the_top():
    light = {"cli_errors", "cli_models", "cli_plan", "cli_results", "config", "errors", "recipes"}
    for name in ("cli.py", "cli_errors.py", "cli_models.py", "cli_plan.py", "cli_results.py"):
        assert imported(SOURCE / name, top_level_only=True) <= light


@pytest.mark.parametrize("statement", ["import atlas_wm", "import atlas_wm.cli"])
def test_light_imports_do_not_pull_in_torch(statement):
    code = f"import sys; {statement}; sys.exit(any(m in sys.modules for m in ('torch', 'stable_worldmodel')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_public_names_are_there():
    import atlas_wm
    from atlas_wm.losses import relational, sigreg, wemreg

    assert atlas_wm.WorldModel.load and atlas_wm.Planner.plan
    assert callable(wemreg) and callable(relational) and callable(sigreg)
    with pytest.raises(AttributeError):
        _ = atlas_wm.nonsense


def test_no_file_is_longer_than_400_lines():
    for path in [*SOURCE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        assert len(path.read_text().splitlines()) <= 400, path
