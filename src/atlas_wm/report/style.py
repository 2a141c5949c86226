"""How the report looks: names and colours of the methods, panels, and their way into files and into the page."""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure as Canvas

from atlas_wm.report.captions import Caption

# Okabe and Ito's colours, told apart with any colour vision; blues have WEMReg, oranges SIGReg.
COLOURS = {
    "atlas": "#0072b2",
    "wemreg": "#56b4e9",
    "lewm": "#d55e00",
    "lewm+ood": "#e69f00",
    "pldm": "#009e73",
    "dino-wm": "#cc79a7",
    "fast-wm": "#8f8f1f",
}
OTHER_COLOURS = ["#8a63d2", "#44aa99", "#a6761d", "#c0506a"]  # methods of the user's own
TERM_COLOURS = {"prediction": "#77aadd", "relational": "#eedd88", "scale": "#ffaabb"}
TERM_TEXT = "#111111"  # on them, whatever the theme
GOOD, BAD = "#1a8f5f", "#d0433b"
NOVELTY = LinearSegmentedColormap.from_list("novelty", ["#2c7fb8", "#9aa0a6", "#d95f02"])

# Ink that follows the theme of the page: in the inline figures these become CSS variables.
INK, MUTED, LINE, PAPER = "#1c2024", "#6a717b", "#d9dce1", "#fffffe"
THEMED = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    LINE: "var(--line)",
    PAPER: "var(--paper)",
    GOOD: "var(--good)",
    BAD: "var(--bad)",
    COLOURS["atlas"]: "var(--blue)",  # the one method colour too dark for a dark page
}
CLEAR: Any = {
    "facecolor": PAPER,
    "edgecolor": "none",
    "pad": 0.8,
    "alpha": 0.85,
}  # around text that lines may cross

STYLE: Any = {  # for matplotlib.rc_context
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",  # text stays text: it takes the page's font and can be searched
    "svg.hashsalt": "atlas-wm",  # the same figure gives the same file
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}
PANEL_WIDTH = 3.5  # inches: a telephone's width
ALPHAS, DASHES = (1.0, 0.55, 0.3), ("-", "--", ":")  # of several groups with the same method


def method_colour(method: str) -> str | None:
    return COLOURS.get(method)


@dataclass(frozen=True)
class Estimate:
    """A number with its interval; of several runs their mean, and the lowest and highest of them."""

    value: float
    low: float | None = None
    high: float | None = None
    runs: int = 1

    @classmethod
    def of(cls, entries: Sequence[tuple[float | None, float | None, float | None]]) -> "Estimate | None":
        """From (value, low, high) of each run; None where no run has a value."""
        known = [e for e in entries if e[0] is not None]
        values = [float(e[0]) for e in known if e[0] is not None]
        if not values:
            return None
        if len(values) == 1:
            return cls(values[0], known[0][1], known[0][2])
        return cls(sum(values) / len(values), min(values), max(values), len(values))

    def text(self, digits: int = 2) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.{digits}f}"
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


@dataclass(frozen=True)
class Panel:
    """One pair of axes. Alone in the page, where panels flow, and side by side in the files."""

    title: str
    draw: Callable[[Axes], None]
    height: float = 2.6
    width: float = PANEL_WIDTH

    def on(self, axes: Axes) -> None:
        axes.set_title(fill(self.title, round(13 * self.width)))
        self.draw(axes)


@dataclass(frozen=True)
class Bar:
    label: str
    estimate: Estimate | None
    colour: str
    alpha: float = 1.0
    text: str | None = None  # instead of the estimate's own
    hatched: bool = False


def bars_height(count: int) -> float:
    return 0.75 + 0.42 * count


def bars(axes: Axes, rows: Sequence[Bar], *, reference: tuple[float, str] | None = None, top: float = 0.0) -> None:
    """Lying bars with the name above and the number behind each: no label can be cut off.

    ``reference``: a dashed line and its words. ``top``: the axis reaches at least this far.
    """
    ends = [e.high if e.high is not None else e.value for b in rows if (e := b.estimate)]
    lows = [e.low if e.low is not None else e.value for b in rows if (e := b.estimate)]
    reach = max([top, *ends, *([reference[0]] if reference else [])], default=1.0) or 1.0
    for place, bar in enumerate(rows):
        y = -float(place)
        axes.annotate(bar.label, (0, y), (1, 8), textcoords="offset points", va="bottom", fontsize=9, bbox=CLEAR)
        if bar.estimate is None:
            axes.annotate(bar.text or "not available", (0, y), (3, 0), textcoords="offset points", va="center",
                          fontsize=8, color=MUTED, style="italic")  # fmt: skip
            continue
        e = bar.estimate
        axes.barh(y, e.value, 0.4, color=bar.colour, alpha=bar.alpha, hatch="////" if bar.hatched else None,
                  edgecolor=bar.colour if bar.hatched else "none", fill=not bar.hatched, lw=1)  # fmt: skip
        if e.low is not None and e.high is not None and e.high > e.low:
            for colour, width in ((PAPER, 3.2), (INK, 1.3)):  # with a rim, to be seen on its bar
                axes.plot([e.low, e.high], [y, y], color=colour, lw=width, solid_capstyle="butt")
        end = max(e.value, e.high if e.high is not None else e.value, 0)
        axes.annotate(bar.text or f"{e.value:.2f}", (end, y), (5, 0), textcoords="offset points", va="center",
                      fontsize=9, bbox=CLEAR)  # fmt: skip
    axes.set(ylim=(-len(rows) + 0.45, 0.85), xlim=(min(0.0, *lows, 0.0), reach * 1.32), yticks=[])
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    if reference:
        axes.axvline(reference[0], color=MUTED, lw=1, ls=(0, (4, 3)))
        axes.annotate(reference[1], (reference[0], 1), (3, 0), xycoords=("data", "axes fraction"),
                      textcoords="offset points", fontsize=8, color=MUTED, va="center")  # fmt: skip


@dataclass(frozen=True)
class Figure:
    name: str  # of its files
    title: str
    panels: list[Panel]
    caption: Caption
    columns: int = 4  # at most, in the files
    notes: list[str] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """NAME.png and NAME.svg: all panels on one sheet, dark ink on white."""
        columns = min(self.columns, len(self.panels))
        rows = -(-len(self.panels) // columns)
        size = (columns * max(p.width for p in self.panels), rows * max(p.height for p in self.panels))
        with matplotlib.rc_context(STYLE):
            canvas, axes = plt.subplots(rows, columns, figsize=size, squeeze=False)
            canvas.set_layout_engine("constrained", w_pad=0.12, h_pad=0.12)
            for place, panel in zip(axes.flat, self.panels, strict=False):
                panel.on(place)
            for place in axes.flat[len(self.panels) :]:
                place.axis("off")
            for ending in ("png", "svg"):
                canvas.savefig(
                    folder / f"{self.name}.{ending}", dpi=160, facecolor="white", metadata=_undated(ending)
                )
            plt.close(canvas)

    @property
    def inline(self) -> list[str]:
        """Each panel as an SVG for the page, in the colours of its theme."""
        drawn = []
        for panel in self.panels:
            with matplotlib.rc_context(STYLE):
                canvas, axes = plt.subplots(figsize=(panel.width, panel.height), layout="constrained")
                panel.on(axes)
                drawn.append(inline_svg(canvas, f"{self.title}: {panel.title}"))
                plt.close(canvas)
        return drawn


def _undated(ending: str) -> dict[str, Any]:
    return {"Date": None} if ending == "svg" else {}


def themed(text: str) -> str:
    for colour, variable in THEMED.items():
        text = text.replace(colour, variable)
    return text


def inline_svg(canvas: Canvas, words: str) -> str:
    """Without the XML header and names that would repeat within the page; ``words`` for those who cannot see it."""
    buffer = io.StringIO()
    canvas.savefig(buffer, format="svg", dpi=160, metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = themed(text)
    words = words.replace("&", "and").replace('"', "'").replace("<", "under ").replace(">", "over ")
    return text.replace("<svg ", f'<svg role="img" aria-label="{words}" ', 1)
