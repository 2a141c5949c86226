import pytest

from atlas_wm.report.style import Figure


@pytest.fixture
def without_figure_files(monkeypatch):
    """The page alone: its figures are in it, and their files take longer to draw than the page."""
    monkeypatch.setattr(Figure, "write", lambda self, folder: None)
