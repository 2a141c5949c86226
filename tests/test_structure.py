"""Structure: imports point one way, files stay small, light imports stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "atlas_wm"

BASICS = {
    *("config", "errors", "images", "image_remedies", "normalizer", "plan_config", "plugins", "rng", "settings"),
    "task_table",
}
# What each part may import of the others. The order is that of the data; nothing reaches back.
ALLOWED = {
    "parallel": {"errors"},
    "losses": {"config", "errors", "plugins", "parallel"},
    "theory": {"losses"},
    "kernels": {"config", "errors"},
    "models": BASICS | {"parallel", "losses", "kernels"},
    "runs": BASICS | {"models"},
    "tasks": BASICS | {"runs"},
    "data": BASICS | {"parallel", "runs", "tasks"},
    "convert": BASICS | {"runs", "models", "tasks", "data", "methods"},
    "train": BASICS | {"parallel", "losses", "kernels", "models", "runs", "tasks", "data", "convert"},
    "plan": BASICS | {"parallel", "kernels", "models", "runs"},
    "evaluate": BASICS | {"parallel", "runs", "models", "tasks", "data", "plan"},
    "diagnose": BASICS | {"parallel", "losses", "runs", "models", "tasks", "data", "plan", "evaluate"},
    "client": set(),
    "serve": BASICS | {"client", "plan"},
    "play": BASICS | {"parallel", "runs", "models", "tasks", "data", "plan", "evaluate", "serve", "report"},
    "study": BASICS | {"data", "methods", "recipes", "runs"},
    "report": {"errors", "plan_config", "runs", "task_table", "diagnose"},  # of diagnose only the catalog
    "show": BASICS | {"runs", "tasks", "data", "report"},
}


def imported(path: Path) -> set[str]:
    """The parts of atlas_wm that a file imports at run time."""
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if not isinstance(node, ast.If)]  # if TYPE_CHECKING
    names = []
    for node in ast.walk(tree):
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


def test_the_report_imports_no_diagnostic():
    for path in (SOURCE / "report").glob("*.py"):
        assert path.read_text().count("atlas_wm.diagnose") == path.read_text().count("atlas_wm.diagnose.catalog")


@pytest.mark.parametrize(
    "statement",
    [
        *(
            "import atlas_wm",
            "import atlas_wm.cli.app",
            "import atlas_wm.client",
            "import atlas_wm.diagnose.catalog",
        ),
        "import atlas_wm.play.app",  # the page opens before the model is loaded
    ],
)
def test_light_imports_do_not_pull_in_torch(statement):
    code = f"import sys; {statement}; sys.exit(any(m in sys.modules for m in ('torch', 'stable_worldmodel')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_public_names_are_there():
    import atlas_wm
    from atlas_wm.losses import relational, sigreg, wemreg

    assert atlas_wm.load_model and atlas_wm.Planner.plan
    assert callable(wemreg) and callable(relational) and callable(sigreg)
    with pytest.raises(AttributeError):
        _ = atlas_wm.nonsense


def test_no_file_is_longer_than_400_lines():
    for path in [*SOURCE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        assert len(path.read_text().splitlines()) <= 400, path
