"""Charts as inline SVG, coloured by the page's style sheet so that they follow its light and dark themes. No dependency.

A chart is drawn on a grid of user units, about the pixels it will have, and scales with the page. Classes ``c0``, ``c1``, ...
are the colours of runs, ``k0``, ``k1``, ... those of kinds of work.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]
SMALL, LARGE = (330, 190), (1080, 320)
"""Width and height of a panel, and of a chart as wide as the page."""
LEFT, RIGHT, TOP, BOTTOM = 50, 10, 10, 28


@dataclass(frozen=True)
class Line:
    """One run's values over steps."""

    label: str
    colour: int
    points: Sequence[Point]
    intervals: Sequence[tuple[float, float]] = ()
    """One (low, high) per point: shaded, and the points are marked."""
    dashed: bool = False


@dataclass(frozen=True)
class Part:
    """One piece of a stacked bar."""

    label: str
    colour: int
    value: float


@dataclass
class Axes:
    """From data to user units."""

    x: tuple[float, float]
    y: tuple[float, float]
    size: tuple[int, int]
    ticks: list[float]

    @property
    def right(self) -> int:
        """End of the horizontal axis."""
        return self.size[0] - RIGHT

    @property
    def bottom(self) -> int:
        """Place of the horizontal axis."""
        return self.size[1] - BOTTOM

    def px(self, x: float) -> float:
        """Horizontal position."""
        return LEFT + (x - self.x[0]) / (self.x[1] - self.x[0]) * (self.right - LEFT)

    def py(self, y: float) -> float:
        """Vertical position."""
        return self.bottom - (y - self.y[0]) / (self.y[1] - self.y[0]) * (self.bottom - TOP)


def line_chart(
    title: str,
    lines: Sequence[Line],
    text: Callable[[float], str],
    boundaries: Sequence[float] = (),
    bounds: tuple[float | None, float | None] = (None, None),
    size: tuple[int, int] = SMALL,
) -> str:
    """Values over steps: noisy ones thin with their moving mean on top, evaluated ones with their intervals.

    Args:
        title: for screen readers.
        lines: at least one with a point.
        text: how a value is written on the axis and in the tooltip.
        boundaries: steps at which segments end.
        bounds: fixed ends of the vertical axis; None follows the data.
        size: SMALL or LARGE.
    """
    axes = _axes(lines, bounds, size)
    body = [_grid(axes, text), *(_boundary(axes, x) for x in boundaries if axes.x[0] <= x <= axes.x[1])]
    body += [_band(axes, line) for line in lines if line.intervals]
    body += [_curve(axes, line) for line in lines if line.points]
    data = [{"label": line.label, "colour": line.colour, "points": _tooltips(line, text)} for line in lines]
    attributes = escape(json.dumps({"x": axes.x, "left": LEFT, "right": axes.right, "lines": data}))
    return (
        f'<svg class="chart" viewBox="0 0 {size[0]} {size[1]}" role="img" aria-label="{escape(title)}" '
        f'data-chart="{attributes}">{"".join(body)}'
        f'<line class="cursor" y1="{TOP}" y2="{axes.bottom}" x1="-9" x2="-9"/></svg>'
    )


def range_bar(
    start: tuple[float, float, float] | None, end: tuple[float, float, float] | None, colour: int
) -> str:
    """Two shares between 0 and 1 with their intervals (value, low, high): hollow the first, filled the second."""

    width = SMALL[0]

    def px(share: float) -> float:
        return 8 + share * (width - 16)

    body = [f'<line class="rail" x1="8" x2="{width - 8}" y1="20" y2="20"/>']
    for share in (0, 0.25, 0.5, 0.75, 1):
        body.append(f'<line class="grid" x1="{px(share)}" x2="{px(share)}" y1="15" y2="25"/>')
    if start and end:
        body.append(f'<line class="gain c{colour}" x1="{px(start[0])}" x2="{px(end[0])}" y1="20" y2="20"/>')
    for share, kind in ((start, "hollow"), (end, "dot")):
        if share:
            body.append(
                f'<line class="whisker c{colour}" x1="{px(share[1])}" x2="{px(share[2])}" y1="20" y2="20"/>'
            )
            body.append(f'<circle class="{kind} c{colour}" cx="{px(share[0])}" cy="20" r="6.5"/>')
    return f'<svg class="range" viewBox="0 0 {width} 40" aria-hidden="true">{"".join(body)}</svg>'


def stacked_bars(title: str, bars: Sequence[tuple[str, Sequence[Part]]], text: Callable[[float], str]) -> str:
    """One bar per row, its parts side by side, all on one scale; the row's total stands at its end."""
    longest = max((sum(part.value for part in parts) for _, parts in bars), default=0.0) or 1.0
    room = LARGE[0] - 230
    rows = []
    for row, (label, parts) in enumerate(bars):
        y, x = 8 + 38 * row, 130.0
        rows.append(f'<text class="row" x="120" y="{y + 17}" text-anchor="end">{escape(label)}</text>')
        for part in parts:
            width = part.value / longest * room
            tip = escape(f"{part.label}: {text(part.value)}")
            rows.append(
                f'<rect class="k{part.colour}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="24"><title>{tip}</title></rect>'
            )
            if width > 62:
                rows.append(
                    f'<text class="inside" x="{x + width / 2:.1f}" y="{y + 16}">{escape(text(part.value))}</text>'
                )
            x += width
        total = text(sum(part.value for part in parts))
        rows.append(f'<text class="total" x="{x + 10:.1f}" y="{y + 17}">{escape(total)}</text>')
    height = 8 + 38 * len(bars)
    return f'<svg class="bars" viewBox="0 0 {LARGE[0]} {height}" role="img" aria-label="{escape(title)}">{"".join(rows)}</svg>'


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About ``count`` round numbers from at or below ``low`` to at or above ``high``."""
    if high <= low:
        low, high = low - (abs(low) or 1) * 0.1, high + (abs(high) or 1) * 0.1
    raw = (high - low) / count
    magnitude = 10 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def moving_mean(points: Sequence[Point], window: int) -> list[Point]:
    """Mean over ``window`` points around each one (fewer at the ends)."""
    half = window // 2
    means = []
    for i, (x, _) in enumerate(points):
        near = [y for _, y in points[max(0, i - half) : i + half + 1]]
        means.append((x, sum(near) / len(near)))
    return means


def _axes(lines: Sequence[Line], bounds: tuple[float | None, float | None], size: tuple[int, int]) -> Axes:
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points] + [
        y for line in lines for pair in line.intervals for y in pair
    ]
    low = min(ys) if bounds[0] is None else bounds[0]
    high = max(ys) if bounds[1] is None else bounds[1]
    ticks = nice_ticks(low, low + 1 if bounds[0] is not None and high <= low else high)
    first, last = min(xs), max(xs)
    return Axes((first, last if last > first else first + 1), (ticks[0], ticks[-1]), size, ticks)


def _grid(axes: Axes, text: Callable[[float], str]) -> str:
    parts = []
    for tick in axes.ticks:
        y = axes.py(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{axes.right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(text(tick))}</text>'
        )
    for tick in nice_ticks(*axes.x, count=6):
        if axes.x[0] <= tick <= axes.x[1] and tick == int(tick):
            parts.append(
                f'<text class="tick" x="{axes.px(tick):.1f}" y="{axes.bottom + 19}" text-anchor="middle">{int(tick)}</text>'
            )
    return "".join(parts)


def _boundary(axes: Axes, x: float) -> str:
    position = axes.px(x)
    return (
        f'<line class="boundary" x1="{position:.1f}" x2="{position:.1f}" y1="{TOP}" y2="{axes.bottom}">'
        f"<title>a segment ends at step {x:g}</title></line>"
    )


def _band(axes: Axes, line: Line) -> str:
    upper = [
        (axes.px(x), axes.py(high)) for (x, _), (_, high) in zip(line.points, line.intervals, strict=True)
    ]
    lower = [(axes.px(x), axes.py(low)) for (x, _), (low, _) in zip(line.points, line.intervals, strict=True)]
    return f'<path class="band c{line.colour}" d="{_path(upper + lower[::-1])}Z"/>'


def _curve(axes: Axes, line: Line) -> str:
    dashed = " dashed" if line.dashed else ""
    points = [(axes.px(x), axes.py(y)) for x, y in line.points]
    if line.intervals:
        marks = "".join(
            f'<circle class="dot c{line.colour}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in points
        )
        return f'<path class="line c{line.colour}{dashed}" d="{_path(points)}"/>{marks}'
    if len(points) < 8:
        return f'<path class="line c{line.colour}{dashed}" d="{_path(points)}"/>'
    smooth = moving_mean(points, max(3, len(points) // 12))
    return (
        f'<path class="raw c{line.colour}" d="{_path(points)}"/>'
        f'<path class="line c{line.colour}{dashed}" d="{_path(smooth)}"/>'
    )


def _path(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _tooltips(line: Line, text: Callable[[float], str]) -> list[tuple[float, str]]:
    if not line.intervals:
        return [(x, text(y)) for x, y in line.points]
    return [
        (x, f"{text(y)} ({text(low)} to {text(high)})")
        for (x, y), (low, high) in zip(line.points, line.intervals, strict=True)
    ]
