"""The style of the report: colours, bars, panels, and figures as files and as inline SVG."""

import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from textwrap import fill
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure as Canvas

from atlas_wm.report.captions import Caption
from atlas_wm.report.intervals import with_seeds
from atlas_wm.report.naming import METHODS

OTHER_COLOURS = ["#8a63d2", "#44aa99", "#a6761d", "#c0506a"]  # for the user's own methods
TERM_COLOURS = {"prediction": "#77aadd", "relational": "#eedd88", "scale": "#ffaabb"}
TERM_TEXT = "#111111"  # on these colours, in both themes
GOOD, BAD = "#1a8f5f", "#d0433b"
FLAGGED = "#9aa0a6"  # plans that novelty flags
NOVELTY = LinearSegmentedColormap.from_list("novelty", ["#2c7fb8", "#9aa0a6", "#d95f02"])

# Colours that follow the theme of the page: in inline figures they become CSS variables.
INK, MUTED, LINE, PAPER = "#1c2024", "#6a717b", "#d9dce1", "#fffffe"
THEMED = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    LINE: "var(--line)",
    PAPER: "var(--paper)",
    GOOD: "var(--good)",
    BAD: "var(--bad)",
    METHODS["atlas"].colour: "var(--blue)",  # the only method colour that is too dark for a dark page
}
CLEAR: Any = {
    "facecolor": PAPER,
    "edgecolor": "none",
    "pad": 0.8,
    "alpha": 0.85,
}  # behind text that lines may cross

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
    "svg.fonttype": "none",  # text stays text: it uses the page's font and can be searched
    "svg.hashsalt": "atlas-wm",  # the same figure always gives the same file
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}
PANEL_WIDTH = 3.5  # inches: the width of a phone
ALPHAS, DASHES = (1.0, 0.55, 0.3), ("-", "--", ":")  # for several groups of one method


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval. Of several runs: their mean, for other training seeds, too."""

    value: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(
        cls,
        entries: Sequence[tuple[float | None, float | None, float | None]],
        least: float = -math.inf,
        most: float = math.inf,
    ) -> "Estimate | None":
        """From (value, low, high) of each run; None if no run has a value. ``least``, ``most``: its bounds.

        Runs are measured on the same episodes or queries, so the mean is as uncertain as each of them, and by their
        training seeds more (``with_seeds``).
        """
        known = [e for e in entries if e[0] is not None]
        values = [float(e[0]) for e in known if e[0] is not None]
        if not values:
            return None
        if len(values) == 1:
            return cls(values[0], known[0][1], known[0][2])
        lows = [value if low is None else low for value, (_, low, _) in zip(values, known, strict=True)]
        highs = [value if high is None else high for value, (_, _, high) in zip(values, known, strict=True)]
        low, high = with_seeds(mean(values), values, mean(lows), mean(highs))
        return cls(mean(values), max(low, least), min(high, most))

    def text(self, digits: int = 2) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.{digits}f}"
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def average(values: Iterable[float | None]) -> float | None:
    """Of those that are known."""
    estimate = Estimate.of([(value, None, None) for value in values])
    return estimate.value if estimate else None


@dataclass(frozen=True)
class Panel:
    """One pair of axes: separate in the page, where panels reflow, and side by side in the files."""

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
    text: str | None = None  # replaces the estimate's text
    hatched: bool = False


def bars_height(count: int) -> float:
    return 0.75 + 0.42 * count


def bars(axes: Axes, rows: Sequence[Bar], *, reference: tuple[float, str] | None = None, top: float = 0.0) -> None:
    """Horizontal bars with the name above and the number to the right, so that no label is cut off.

    ``reference``: position and label of a dashed line. ``top``: the axis extends at least to this value.
    """
    ends = [e.high if e.high is not None else e.value for b in rows if (e := b.estimate)]
    lows = [e.low if e.low is not None else e.value for b in rows if (e := b.estimate)]
    reach = max([top, *ends, *([reference[0]] if reference else [])], default=1.0) or 1.0
    left = min(0.0, *lows, 0.0)
    for index, bar in enumerate(rows):
        y = -float(index)
        axes.annotate(bar.label, (left, y), (1, 8), textcoords="offset points", va="bottom", fontsize=9, bbox=CLEAR)
        if bar.estimate is None:
            axes.annotate(bar.text or "not available", (0, y), (3, 0), textcoords="offset points", va="center",
                          fontsize=8, color=MUTED, style="italic")  # fmt: skip
            continue
        e = bar.estimate
        axes.barh(y, e.value, 0.4, color=bar.colour, alpha=bar.alpha, hatch="////" if bar.hatched else None,
                  edgecolor=bar.colour if bar.hatched else "none", fill=not bar.hatched, lw=1)  # fmt: skip
        if e.low is not None and e.high is not None and e.high > e.low:
            for colour, width in ((PAPER, 3.2), (INK, 1.3)):  # with an outline, so that it shows on the bar
                axes.plot([e.low, e.high], [y, y], color=colour, lw=width, solid_capstyle="butt")
        end = max(e.value, e.high if e.high is not None else e.value, 0)
        axes.annotate(bar.text or f"{e.value:.2f}", (end, y), (5, 0), textcoords="offset points", va="center",
                      fontsize=9, bbox=CLEAR)  # fmt: skip
    axes.set(ylim=(-len(rows) + 0.45, 0.85), xlim=(left, max(reach * 1.32, reach - 0.32 * left)), yticks=[])
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    if reference:
        axes.axvline(reference[0], color=MUTED, lw=1, ls=(0, (4, 3)))
        axes.annotate(reference[1], (reference[0], 1), (3, 0), xycoords=("data", "axes fraction"),
                      textcoords="offset points", fontsize=8, color=MUTED, va="center")  # fmt: skip


@dataclass(frozen=True)
class Figure:
    name: str  # file name
    title: str
    panels: list[Panel]
    caption: Caption
    columns: int = 4  # maximum in the files

    def write(self, folder: Path) -> None:
        """Write NAME.png and NAME.svg: all panels in one image, dark on white."""
        columns = min(self.columns, len(self.panels))
        rows = -(-len(self.panels) // columns)
        size = (columns * max(p.width for p in self.panels), rows * max(p.height for p in self.panels))
        with matplotlib.rc_context(STYLE):
            canvas, axes = plt.subplots(rows, columns, figsize=size, squeeze=False)
            canvas.set_layout_engine("constrained", w_pad=0.12, h_pad=0.12)
            for ax, panel in zip(axes.flat, self.panels, strict=False):
                panel.on(ax)
            for ax in axes.flat[len(self.panels) :]:
                ax.axis("off")
            for ending in ("png", "svg"):
                canvas.savefig(
                    folder / f"{self.name}.{ending}", dpi=160, facecolor="white", metadata=_undated(ending)
                )
                canvas.set_layout_engine("none")  # the next file has the same layout, which takes long to compute
            plt.close(canvas)

    @property
    def inline(self) -> list[str]:
        """Each panel as an SVG for the page, in the colours of the page's theme."""
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


def inline_svg(canvas: Canvas, label: str) -> str:
    """SVG without the XML header and without ids, which would repeat within the page. label: for screen readers."""
    buffer = io.StringIO()
    canvas.savefig(buffer, format="svg", dpi=160, metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = themed(text)
    label = label.replace("&", "and").replace('"', "'").replace("<", "under ").replace(">", "over ")
    return text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
