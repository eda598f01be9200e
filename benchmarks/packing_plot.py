"""Plot of the allocated against the arrived part of the capacity, with one line for each policy: as text and as an SVG
file."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

Curve = Mapping[int, float]
"""Allocated per cent of the capacity, by whole per cent of the capacity that has arrived."""

_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")
_WIDTH, _HEIGHT = 720, 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 20, 40, 50


def text_plot(curves: Mapping[str, Curve], title: str) -> str:
    """Draw the curves as text. Rows are steps of 5 per cent of arrived capacity, columns are 80 to 100 per cent of
    allocated capacity. The initial of a policy marks its curve."""
    lines = [f"{title}: % allocated (80 to 100 across) against % arrived"]
    for percent in range(70, 131, 5):
        line = [" "] * 61
        for name, curve in curves.items():
            value = curve.get(percent)
            if value is not None and 80 <= value <= 100:
                line[round((value - 80) * 3)] = name[0]
        lines.append(f"{percent:4} |{''.join(line).rstrip()}")
    lines.append("     " + ", ".join(f"{name[0]} = {name}" for name in curves))
    return "\n".join(lines)


def svg_plot(curves: Mapping[str, Curve], title: str) -> str:
    """Draw the curves as SVG. The picture begins where the first curve falls below the arrivals (a refusal), and ends
    with the longest curve."""
    points = [(percent, value) for curve in curves.values() for percent, value in curve.items()]
    behind = [percent for percent, value in points if value < percent - 1]
    left = max(min(behind, default=70) - 10, 0) // 10 * 10
    right = max((percent for percent, _ in points), default=130)
    right = max(right, left + 10)
    bottom = int(min((value for percent, value in points if percent >= left), default=0)) // 5 * 5

    def x(percent: float) -> float:
        return _LEFT + (percent - left) / (right - left) * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - bottom) / max(100 - bottom, 1) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">',
        "<style>text { font-size: 12px }</style>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_WIDTH / 2}" y="20" text-anchor="middle">{escape(title)}</text>',
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 12}" text-anchor="middle">% of the GPU time that has arrived</text>',
        f'<text transform="translate(16 {_HEIGHT / 2}) rotate(-90)" text-anchor="middle">% allocated</text>',
    ]
    for value in range(bottom, 101, 5):
        parts.append(f'<path d="M{x(left):.1f} {y(value):.1f}H{x(right):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value}</text>')
    for percent in range(left, right + 1, 10):
        parts.append(f'<path d="M{x(percent):.1f} {y(bottom):.1f}v4" stroke="#888"/>')
        parts.append(f'<text x="{x(percent):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{percent}</text>')
    for number, (name, curve) in enumerate(curves.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        drawn = " ".join(f"{x(p):.1f},{y(value):.1f}" for p, value in sorted(curve.items()) if p >= left)
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(f'<path d="M{_WIDTH - 130} {_HEIGHT - 130 + 18 * number}h20" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{_WIDTH - 104}" y="{_HEIGHT - 126 + 18 * number}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])
