"""The plots, as SVG for a light and for a dark page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from results import Series, figure

from performance.figures import Figures
from performance.sections import Panel, Section, label

mpl.use("svg")

#: The colours of Okabe and Ito, distinguishable with any kind of colour vision.
_COLOURS = {
    "light": {
        "kvtier": "#0072B2",
        "variant": "#56B4E9",
        "vllm": "#D55E00",
        "client": "#E69F00",
        "limit": "#8C959F",
        "text": "#1F2328",
        "line": "#D1D9E0",
    },
    "dark": {
        "kvtier": "#56B4E9",
        "variant": "#0072B2",
        "vllm": "#E8703A",
        "client": "#E69F00",
        "limit": "#8C959F",
        "text": "#E6EDF3",
        "line": "#3D444D",
    },
}
_WIDTH_INCHES = 9.0
_BAR_INCHES = 0.2


def draw(section: Section, figures: Figures, scheme: str, file: Path) -> None:
    colours = _COLOURS[scheme]
    settings: Any = {
        # A fixed salt makes the SVG of equal figures identical.
        "svg.hashsalt": section.name,
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        # The SVG lists all these fonts, and matplotlib measures texts with the first font.
        "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
        "font.size": 10,
        "text.color": colours["text"],
        "axes.labelcolor": colours["text"],
        "axes.edgecolor": colours["line"],
        "xtick.color": colours["text"],
        "ytick.color": colours["text"],
    }
    with mpl.rc_context(settings):
        _figure(section, figures, colours).savefig(
            file, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )


def _figure(section: Section, figures: Figures, colours: dict[str, str]) -> Figure:
    panels = section.panels
    columns = min(section.columns, len(panels))
    rows = [panels[start : start + columns] for start in range(0, len(panels), columns)]
    heights = [_BAR_INCHES * max(_bars(panel, figures) for panel in row) + 0.75 for row in rows]
    drawn = Figure(figsize=(_WIDTH_INCHES, sum(heights) + 0.4), layout="constrained")
    grid: Any = drawn.subplots(
        len(rows), columns, squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for axes, panel in zip(grid.flat, panels, strict=False):
        _draw_bars(axes, panel, figures, colours)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    drawn.legend(
        handles=[Patch(color=colours[role], label=name) for role, name in section.legend().items()],
        loc="outside upper left",
        ncols=len(section.legend()),
        frameon=False,
        handlelength=1,
        handleheight=1,
    )
    return drawn


def _bars(panel: Panel, figures: Figures) -> int:
    cases = _cases(panel, figures)
    return sum(len(_measured(panel, figures, case)) + 1 for case in cases) or 1


def _cases(panel: Panel, figures: Figures) -> list[str]:
    measured = figures.cases(panel.run, panel.group, panel.quantity)
    return [case for case in panel.cases or measured if case in measured]


def _measured(panel: Panel, figures: Figures, case: str) -> list[tuple[str, Series]]:
    found = ((way.role, panel.find(figures, case, way.name)) for way in panel.ways)
    return [(role, series) for role, series in found if series]


def _draw_bars(axes: Any, panel: Panel, figures: Figures, colours: dict[str, str]) -> None:
    cases = _cases(panel, figures)
    place, ticks = 0.0, []
    bars: list[tuple[float, str, Series]] = []
    for case in cases:
        measured = _measured(panel, figures, case)
        ticks.append(place + (len(measured) - 1) / 2)
        for role, series in measured:
            bars.append((place, colours[role], series))
            place += 1
        place += 0.7
    places = [at for at, _, _ in bars]
    fills = [colour for _, colour, _ in bars]
    middles = [series.median for _, _, series in bars]
    lows = [series.quartiles[0] for _, _, series in bars]
    highs = [series.quartiles[1] for _, _, series in bars]
    lengths = [middle - panel.start for middle in middles]
    axes.barh(places, lengths, 0.86, left=panel.start, color=fills, clip_on=False)
    axes.hlines(places, lows, highs, color=colours["text"], linewidth=1.2, clip_on=False)
    for at, middle, high in zip(places, middles, highs, strict=True):
        axes.annotate(
            figure(middle),
            (max(high, middle, panel.start), at),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
        )
    most = max([*highs, *middles], default=panel.start + 1)
    least = min([panel.start, *lows])
    axes.set_xlim(least, most + (most - least) * 0.16)
    axes.locator_params(axis="x", nbins=5)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.5g}")
    axes.set_yticks(ticks, [label(case) for case in cases])
    axes.invert_yaxis()
    axes.set_xlabel(f"{panel.axis} ({panel.better} is better)", fontsize=9)
    if panel.title:
        axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold")
    axes.grid(axis="x", color=colours["line"], linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)
