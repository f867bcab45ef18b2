"""Charts as HTML without scripts: shapes are SVG stretched to whatever width there is, text lies on top as HTML and keeps its size.

    Curve --curves--> a line per configuration, with a band over its seeds        Layer --stack--> areas on top of each other
    Bar   --bars----> who was busy when, one row per process

Values appear under the pointer by CSS alone, so a page may forbid all scripts. Texts are escaped here.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable
from typing import NamedTuple

SIZE = 1000
"""Height and width of a drawing in its own units; the browser stretches it."""


class Point(NamedTuple):
    """One place of a curve."""

    x: float
    mean: float
    low: float
    high: float


class Curve(NamedTuple):
    """What one color shows."""

    color: int
    points: list[Point]
    """By x."""


class Layer(NamedTuple):
    """One part of a whole that changes over x."""

    label: str
    style: str
    values: list[float]
    """At every x."""


class Bar(NamedTuple):
    """Something that one process did."""

    row: str
    lane: int
    begin: float
    end: float
    style: str
    text: str


class Scale(NamedTuple):
    """From values to the drawing."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        return round(SIZE * (value - self.x0) / ((self.x1 - self.x0) or 1), 1)

    def y(self, value: float) -> float:
        return round(SIZE * (self.y1 - value) / ((self.y1 - self.y0) or 1), 1)


def curves(title: str, note: str, shown: list[Curve], last: float) -> str:
    """A figure of lines and bands from x = 0 to `last`; the newest value of each stands beside the title."""
    every = [point for curve in shown for point in curve.points]
    scale = _scale(last, [p.low for p in every], [p.high for p in every])
    shapes = "".join(_band(curve, scale) for curve in shown) + "".join(_line(curve, scale) for curve in shown)
    rows: dict[float, str] = {}
    for curve in shown:
        for p in curve.points:
            spread = f" <small>{short(p.low)} to {short(p.high)}</small>" if p.low < p.high else ""
            rows[p.x] = rows.get(p.x, "") + f"<br><i class=c{curve.color}></i>{short(p.mean)}{spread}"
    newest = "".join(f"<b><i class=c{curve.color}></i>{short(curve.points[-1].mean)}</b>" for curve in shown)
    return figure(title, newest, note, _plot(scale, shapes, rows))


def stack(title: str, note: str, xs: list[float], layers: list[Layer], line: list[float]) -> str:
    """A figure of areas on top of each other, the first at the bottom, and a dashed line over them."""
    tops, below = [], [0.0] * len(xs)
    for layer in layers:
        tops.append([a + b for a, b in zip(below, layer.values, strict=True)])
        below = tops[-1]
    scale = _scale(max(xs), [0.0], below + line)
    shapes, floor = "", [0.0] * len(xs)
    for layer, top in zip(layers, tops, strict=True):
        points = [*zip(xs, top, strict=True), *reversed(list(zip(xs, floor, strict=True)))]
        shapes += f'<path class="area {layer.style}" d="M{_along(points, scale)}Z"/>'
        floor = top
    shapes += f'<path class="line ideal" d="M{_along(zip(xs, line, strict=True), scale)}h0"/>'
    rows = {}
    for i, x in enumerate(xs):
        parts = "".join(f"<br><i class={layer.style}></i>{short(layer.values[i])} {layer.label}" for layer in reversed(layers))
        rows[x] = f"<br><b>{short(below[i])}</b> s{parts}<br>{short(line[i])} ideal"
    return figure(title, "", note, legend((layer.style, layer.label) for layer in layers) + _plot(scale, shapes, rows))


def bars(title: str, note: str, shown: list[Bar], seconds: float) -> str:
    """A figure of what every process did, from 0 to `seconds`; overlapping bars of a row lie on lanes."""
    body = ""
    for row in sorted({bar.row for bar in shown}, reverse=True):
        mine = [bar for bar in shown if bar.row == row]
        lanes = 1 + max(bar.lane for bar in mine)
        shapes = "".join(_bar(bar, seconds) for bar in mine)
        look = f'viewBox="0 0 {SIZE} {lanes}" preserveAspectRatio=none style="height:{max(18, min(110, 7 * lanes))}px"'
        body += f"<div class=row><span>{html.escape(row)}</span><svg {look}>{shapes}</svg></div>"
    return figure(title, "", note, body + _marks(ticks(0, seconds, 6), seconds, " s"))


def figure(title: str, values: str, note: str, body: str) -> str:
    """A titled drawing; `values` and `body` are HTML already."""
    says = f"<p>{html.escape(note)}</p>" if note else ""
    return f"<figure><figcaption><h3>{html.escape(title)}</h3>{values}{says}</figcaption>{body}</figure>"


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """(style, label) as a line of colored marks."""
    return "<div class=legend>" + "".join(f"<span><i class={style}></i>{html.escape(label)}</span>" for style, label in entries) + "</div>"


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers from low to high, at most `most` and one."""
    if high <= low:
        return [low]
    rough = (high - low) / most
    power = 10 ** math.floor(math.log10(rough))
    step = power * next(m for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """Three digits or so."""
    if value == 0 or 0.01 <= abs(value) < 100:
        return f"{value:.3g}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    mantissa, _, power = f"{value:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(power)}"


def _scale(last: float, lows: list[float], highs: list[float]) -> Scale:
    """Includes 0, so that heights can be compared; a little air above."""
    low, high = min(0.0, *lows), max(0.0, *highs)
    return Scale(0, last or 1, low, high + 0.06 * (high - low) if high > low else low + 1)


def _plot(scale: Scale, shapes: str, rows: dict[float, str]) -> str:
    """Grid, shapes, marks on both axes and, for every x, a column that shows its row under the pointer."""
    levels = ticks(scale.y0, scale.y1, 3)
    grid = "".join(f"<path class=grid d='M0 {scale.y(level)}H{SIZE}'/>" for level in levels)
    marks = "".join(f'<span class=y style="top:{scale.y(level) / 10}%">{short(level)}</span>' for level in levels)
    below = _marks(ticks(scale.x0, scale.x1, 5), scale.x1, "")
    columns, xs = "", sorted(rows)
    for i, x in enumerate(xs):
        left = scale.x((xs[i - 1] + x) / 2 if i else scale.x0) / 10
        right = scale.x((xs[i + 1] + x) / 2 if i + 1 < len(xs) else scale.x1) / 10
        side, at = ("r" if scale.x(x) > SIZE / 2 else "l"), scale.x(x) / 10
        column = f'style="left:{left:.4g}%;width:{max(0.0, right - left):.4g}%"'
        columns += f'<div class=at {column}><p class={side} style="--x:{at:.4g}%">iteration {x:g}{rows[x]}</p></div>'
    drawing = f'<svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio=none>{grid}{shapes}</svg>'
    return f"<div class=plot>{drawing}{marks}{columns}</div>{below}"


def _marks(places: list[float], last: float, unit: str) -> str:
    """Numbers under a drawing that begins at 0."""
    marks = ""
    for at in places:
        style = "x begin" if at < 0.02 * last else "x end" if at > 0.96 * last else "x"
        marks += f'<span class="{style}" style="left:{100 * at / last:.1f}%">{short(at)}{unit}</span>'
    return f"<div class=marks>{marks}</div>"


def _band(curve: Curve, scale: Scale) -> str:
    if all(p.low == p.high for p in curve.points):
        return ""
    around = [(p.x, p.high) for p in curve.points] + [(p.x, p.low) for p in reversed(curve.points)]
    return f'<path class="band c{curve.color}" d="M{_along(around, scale)}Z"/>'


def _line(curve: Curve, scale: Scale) -> str:
    path = _along(((p.x, p.mean) for p in curve.points), scale)
    dot = " dot" * (len(curve.points) == 1)
    return f'<path class="line c{curve.color}{dot}" d="M{path}h0"/>'  # h0: the round end of a line without length


def _along(points: Iterable[tuple[float, float]], scale: Scale) -> str:
    return "L".join(f"{scale.x(x):g} {scale.y(y):g}" for x, y in points)


def _bar(bar: Bar, seconds: float) -> str:
    left, width = SIZE * bar.begin / seconds, SIZE * (bar.end - bar.begin) / seconds
    place = f'x="{left:.1f}" width="{max(width, 0.5):.1f}" y="{bar.lane + 0.05:.2f}" height=".9"'
    return f'<rect class="{bar.style}" {place}><title>{html.escape(bar.text)}</title></rect>'
