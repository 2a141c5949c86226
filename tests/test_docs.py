"""The documentation builds without a broken link, works offline, and its reference is that of the code."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OUTSIDE_THE_SITE = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stdout + built.stderr
    return out


def test_every_page_is_built(site):
    pages = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")}


def test_a_page_loads_nothing_from_the_network(site):
    for path in site.rglob("*.html"):
        loaded = re.findall(r"""<(?:script|img|iframe)[^>]*\ssrc=["']?(https?:[^"'\s>]+)""", path.read_text())
        loaded += re.findall(r"""<link[^>]*\shref=["']?(https?:[^"'\s>]+)""", path.read_text())
        assert loaded == [], path


def test_the_reference_is_that_of_the_code():
    spec = importlib.util.spec_from_file_location("reference_pages", ROOT / "tools" / "reference_pages.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    for path, text in tool.pages().items():
        assert path.read_text() == text, f"{path.name} is out of date: run `make docs` and commit it"


@pytest.mark.parametrize("name", OUTSIDE_THE_SITE)
def test_links_outside_the_site_lead_somewhere(name):
    for target, anchor in re.findall(r"\]\(([^)#:]+)(?:#([^)]*))?\)", (ROOT / name).read_text()):
        assert (ROOT / target).exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", (ROOT / target).read_text(), re.M)
            assert anchor in {
                re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings
            }


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120 and len(text.split()) <= 1100
