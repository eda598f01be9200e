"""Pictures of docs/concepts.md: writes docs/pictures/*.svg.

python docs/pictures.py            # or make pictures

Colours follow the reader's light or dark scheme. Equal sources give equal files.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent / "pictures"
STYLE = """
text { font: 13px sans-serif; fill: #24292f }
.small { font-size: 11px }
.line { stroke: #57606a; fill: none }
.frame { stroke: #57606a; fill: #f6f8fa }
.a { fill: #2e8b57 } .b { fill: #4a7ebb } .c { fill: #c98a1b } .free { fill: #d0d7de } .no { fill: #b23a48 }
.may { stroke: #57606a; stroke-dasharray: 4 3; fill: none }
.inside { fill: #ffffff }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .line, .may { stroke: #8b949e }
  .frame { stroke: #8b949e; fill: #161b22 } .free { fill: #30363d }
}
"""


def rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    """Return an SVG rectangle with a class of `STYLE`. Lengths are in pixels."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{kind}"/>'


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    """Return a line of text whose baseline is at `y` pixels."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(content)}</text>'


def share() -> Iterable[str]:
    """Return the shapes of the picture of shares: the requests of three tenants within one GPU, and the limit
    of each."""
    scale, left = 480, 110
    yield text(0, 24, "requests")
    x: float = left
    for kind, name, request in (("a", "training 0.5", 0.5), ("b", "service 0.3", 0.3), ("c", "0.1", 0.1)):
        yield rect(x, 8, request * scale, 26, kind)
        yield text(x + request * scale / 2, 25, name, "inside", "middle")
        x += request * scale
    yield rect(x, 8, 0.1 * scale, 26, "free")
    yield text(x + 0.05 * scale, 25, "free", "small", "middle")
    for row, (kind, name, request, limit) in enumerate(
        (("a", "training", 0.5, 1.0), ("b", "service", 0.3, 0.6), ("c", "notebook", 0.1, 0.5))
    ):
        y = 52 + 30 * row
        yield text(0, y + 16, name)
        yield rect(left, y, request * scale, 22, kind)
        yield rect(left + request * scale, y, (limit - request) * scale, 22, "may")
        yield text(left + limit * scale - 6, y + 15, f"limit {limit:g}", "small", "end")
    for part in (0, 0.5, 1):
        yield text(
            left + part * scale,
            158,
            f"{part:g} of the GPU's time",
            "small",
            "middle" if 0 < part < 1 else "start" if not part else "end",
        )


def memory() -> Iterable[str]:
    """Return the shapes of the picture of memory: a tenant has 4 GiB of a GPU's 16 GiB, and one allocation is
    refused."""
    scale, left = 36, 10
    yield rect(left, 30, 16 * scale, 30, "frame")
    yield text(left, 20, "memory of the GPU, 16 GiB")
    yield rect(left, 30, 0.5 * scale, 30, "c")
    yield rect(left + 0.5 * scale, 30, 2 * scale, 30, "a")
    yield rect(left, 30, 4 * scale, 30, "may")
    yield text(left + 4 * scale + 8, 50, "memory of other tenants, and free memory", "small")
    for row, (kind, line) in enumerate(
        (("c", "CUDA context, 0.5 GiB: counts"), ("a", "allocations, 2 GiB"), ("free", "left to the tenant, 1.5 GiB"))
    ):
        yield rect(left, 76 + 20 * row, 12, 12, kind)
        yield text(left + 20, 87 + 20 * row, line, "small")
    yield rect(300, 76, 2 * scale, 26, "no")
    yield text(300 + scale, 93, "+2 GiB", "inside", "middle")
    yield text(300 + 2 * scale + 10, 93, "refused: out of memory", "small")
    yield text(300, 122, "limit 4 GiB: its program sees a GPU of 4 GiB", "small")


def placement() -> Iterable[str]:
    """Return the shapes of the picture of placement: four tenants on four GPUs, by both policies."""
    for column, (title, gpus) in enumerate(
        (
            ("Binpack", ((("a", 0.5), ("b", 0.3)), (("c", 0.4), ("a", 0.5)), (), ())),
            ("Spread", ((("a", 0.5),), (("b", 0.3),), (("c", 0.4),), (("a", 0.5),))),
        )
    ):
        left = 10 + 310 * column
        yield text(left, 18, title)
        for number, tenants in enumerate(gpus):
            y = 30 + 26 * number
            yield text(left, y + 15, f"GPU {number}", "small")
            yield rect(left + 50, y, 220, 20, "frame")
            x: float = left + 50
            for kind, request in tenants:
                yield rect(x, y, request * 220, 20, kind)
                yield text(x + request * 110, y + 14, f"{request:g}", "inside small", "middle")
                x += request * 220
    yield text(60, 150, "room for two whole GPUs", "small")
    yield text(370, 150, "each GPU has idle time to lend", "small")


def budget() -> Iterable[str]:
    """Return the shapes of the picture of budgets: GPU hours used in a month of 30 days. The budget of 1,000 hours is
    spent on day 24."""
    left, bottom, day, hour = 60, 140, 18, 0.11
    yield f'<path class="line" d="M{left} 10 V{bottom} H{left + 30 * day}"/>'
    yield f'<path class="may" d="M{left} {bottom - 1000 * hour:g} H{left + 30 * day}"/>'
    yield text(left - 6, bottom - 1000 * hour + 4, "1,000 h", "small", "end")
    points = ((0, 0), (5, 160), (7, 190), (12, 480), (14, 500), (19, 790), (21, 830), (24, 1000))
    line = " ".join(f"L{left + at * day:g} {bottom - used * hour:g}" for at, used in points)
    yield f'<path d="M{left} {bottom} {line} V{bottom} Z" class="a" opacity="0.8"/>'
    yield rect(left + 24 * day, bottom - 1000 * hour, 6 * day, 1000 * hour, "free")
    yield text(left + 27 * day, bottom - 60, "spent:", "small", "middle")
    yield text(left + 27 * day, bottom - 44, "Borrow, Queue", "small", "middle")
    yield text(left + 27 * day, bottom - 28, "or Notify", "small", "middle")
    for at in (1, 10, 20, 30):
        yield text(left + at * day, bottom + 16, f"day {at}", "small", "middle")


PICTURES = {"share": (share, 165), "memory": (memory, 142), "placement": (placement, 160), "budget": (budget, 164)}
"""For each picture, by name: the function that yields its shapes, and its height in pixels."""


def drawn(name: str) -> str:
    """Return a picture as SVG."""
    shapes, height = PICTURES[name]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="620" height="{height}" viewBox="0 0 620 {height}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *shapes(), "</svg>"]) + "\n"


def main() -> None:
    """Write all pictures."""
    for name in PICTURES:
        (FOLDER / f"{name}.svg").write_text(drawn(name), encoding="utf-8")


if __name__ == "__main__":
    main()
