"""The picture: efficiency by number of devices, and the largest number beside what was published. SVG, no library."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as ET

Point = tuple[float, float]

_WIDTH, _HEIGHT = 860, 400
_TOP, _BOTTOM = 64, 336
_CURVES = (56, 456)  # left and right of each half
_BARS = (520, 840)
_COLOURS = ("#1b6ca8", "#d1642b", "#3c8d40", "#7d4fa0")
_GREY = "#666666"
_TICKS = (0, 20, 40, 60, 80, 100)  # per cent


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Efficiency of one model, 0 to 1, by devices.

    upper, lower: with all that can run beside compute hidden, and with nothing. bars: label → efficiency at the right.
    """

    name: str
    upper: tuple[Point, ...]
    lower: tuple[Point, ...]
    bars: tuple[tuple[str, float], ...]


def draw(title: str, curves: Sequence[Curve]) -> str:
    """The picture as SVG text."""
    ET.register_namespace("", "http://www.w3.org/2000/svg")
    size = {"width": str(_WIDTH), "height": str(_HEIGHT), "viewBox": f"0 0 {_WIDTH} {_HEIGHT}"}
    root = ET.Element(
        "svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img", "font-family": "sans-serif", **size}
    )
    ET.SubElement(root, "title").text = title
    root.append(_shape("rect", x=0, y=0, width=_WIDTH, height=_HEIGHT, fill="#ffffff"))
    root.append(_text(_CURVES[0], 24, title, size=15, weight="bold"))
    root.extend(_scale(_CURVES))
    root.extend(_scale(_BARS))
    root.extend(_draw_curves(curves))
    root.extend(_draw_bars(curves))
    ET.indent(root)
    return ET.tostring(root, encoding="unicode") + "\n"


def _scale(span: tuple[int, int]) -> Iterator[ET.Element]:
    for tick in _TICKS:
        yield _shape("line", x1=span[0], x2=span[1], y1=_y(tick / 100), y2=_y(tick / 100), stroke="#dddddd")
        yield _text(span[0] - 6, _y(tick / 100) + 4, f"{tick} %", anchor="end", fill=_GREY)


def _draw_curves(curves: Sequence[Curve]) -> Iterator[ET.Element]:
    counts = sorted({devices for curve in curves for devices, _ in curve.upper})

    def x(devices: float) -> float:
        most = math.log2(counts[-1]) or 1.0
        return _CURVES[0] + 8 + math.log2(devices) / most * (_CURVES[1] - _CURVES[0] - 16)

    for count in counts:
        yield _text(x(count), _BOTTOM + 18, f"{count:g}", anchor="middle", fill=_GREY)
    yield _text(sum(_CURVES) / 2, _BOTTOM + 38, "GPUs, four a node", anchor="middle", fill=_GREY)
    for curve, colour in zip(curves, _COLOURS, strict=False):
        around = [*curve.upper, *reversed(curve.lower)] if curve.lower else []
        yield _shape("polygon", points=_points(around, x), fill=colour, fill_opacity=0.12)
    for place, (curve, colour) in enumerate(zip(curves, _COLOURS, strict=False)):
        yield _shape("polyline", points=_points(curve.upper, x), fill="none", stroke=colour, stroke_width=2.5)
        yield from (_shape("circle", cx=x(at), cy=_y(part), r=3, fill=colour) for at, part in curve.upper)
        left = _CURVES[0] + 12 + 110 * place
        yield _shape("line", x1=left, x2=left + 18, y1=44, y2=44, stroke=colour, stroke_width=2.5)
        yield _text(left + 23, 48, curve.name)


def _draw_bars(curves: Sequence[Curve]) -> Iterator[ET.Element]:
    """A group of bars for each model: prediction dark, then lighter, what was published with an outline only."""
    room = (_BARS[1] - _BARS[0]) / max(len(curves), 1)
    for place, (curve, colour) in enumerate(zip(curves, _COLOURS, strict=False)):
        left, width = _BARS[0] + room * place + 8, (room - 16) / max(len(curve.bars), 1)
        for number, (label, part) in enumerate(curve.bars):
            x, is_published = left + width * number, number == len(curve.bars) - 1
            bar = _shape("rect", x=x + 2, y=_y(part), width=width - 4, height=_BOTTOM - _y(part), stroke=colour)
            bar.set("fill", "#ffffff" if is_published else colour)
            bar.set("fill-opacity", "0.6" if number and not is_published else "1")
            ET.SubElement(bar, "title").text = f"{curve.name}, {label}: {100 * part:.1f} %"
            yield bar
            yield _text(x + width / 2, _y(part) - 5, f"{100 * part:.0f}", anchor="middle")
        yield _text(left + (room - 16) / 2, _BOTTOM + 18, curve.name, anchor="middle", fill=_GREY)
    labels = " · ".join(label for label, _ in curves[0].bars) if curves else ""
    yield _text(sum(_BARS) / 2, _BOTTOM + 38, labels, anchor="middle", fill=_GREY)


def _y(part: float) -> float:
    return _BOTTOM - part * (_BOTTOM - _TOP)


def _points(points: Iterable[Point], x: Callable[[float], float]) -> str:
    return " ".join(f"{x(devices):.1f},{_y(part):.1f}" for devices, part in points)


def _shape(kind: str, **attributes: str | float) -> ET.Element:
    named = {name.replace("_", "-"): value for name, value in attributes.items()}
    return ET.Element(kind, {name: value if isinstance(value, str) else f"{value:g}" for name, value in named.items()})


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 12,
    anchor: str = "start",
    weight: str = "normal",
    fill: str = "#222222",
) -> ET.Element:
    element = _shape("text", x=x, y=y, font_size=size, text_anchor=anchor, font_weight=weight, fill=fill)
    element.text = text
    return element
