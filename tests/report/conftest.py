import pytest

from atlas_wm.report import style
from atlas_wm.report.style import Figure


@pytest.fixture
def without_figure_files(monkeypatch):
    """The page alone: its figures are in it, and their files take longer to draw than the page."""
    monkeypatch.setattr(Figure, "write", lambda self, folder: None)


@pytest.fixture
def without_figures(without_figure_files, monkeypatch):
    """For what a page says beside its figures: panels are drawn, but not turned into SVG, which takes longest."""
    monkeypatch.setattr(style, "inline_svg", lambda canvas, label: "<svg></svg>")
