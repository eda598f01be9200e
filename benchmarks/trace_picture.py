"""Picture of turns and of co-running, docs/trace.svg, from two traces of the simulated GPU.

Two programs that need half of their time for work on the host share a GPU: once in exclusive turns, and once
concurrently. Each panel shows 120 ms of `kubectl sharepod trace`: when each tenant waited, held and drained.
"""

from __future__ import annotations

import json
import tempfile
import time
from html import escape
from pathlib import Path
from typing import Any

from hook.world.agent_node import GPUS, PROGRAMS, ROOT, Program, running, tenant
from share_gaps import SETTLE_S, SLEPT, SLICE_US, SWITCH_US

_SHOWN_US = 120_000
_KIND = "e45"
_NAMES = ("alpha", "beta")
_COLOURS = {"waits": "#f2c14e", "holds": "#2e8b57", "drains": "#1b5e3b", "overruns": "#b23a48"}
_LEFT, _WIDTH, _ROW, _PANEL = 90, 560, 26, 110


def traced(mode: str) -> dict[str, Any]:
    """Run two programs with gaps under a setting of `sharing`, and return the trace of the GPU."""
    rows = [tenant(name, 0.5, memory=64 << 20) for name in _NAMES]
    with tempfile.TemporaryDirectory(prefix="sh") as directory, running(Path(directory), *rows, sharing=mode) as node:
        slices = {"FAKE_CUDA_SLICE_US": str(SLICE_US), "FAKE_CUDA_SWITCH_US": str(SWITCH_US)}
        programs: list[Program] = []
        try:
            for seed, name in enumerate(_NAMES, 1):
                arguments = [str(PROGRAMS / "gaps"), _KIND, "--slept", SLEPT, "--seed", str(seed)]
                programs.append(Program(arguments, node.environment(name) | slices))
            time.sleep(2 * SETTLE_S)
            found: dict[str, Any] = json.loads(node.read(f"/trace?gpu={GPUS[0]}&seconds=1"))
        finally:
            for program in programs:
                program.close()
    return found


def panel(title: str, trace: dict[str, Any], top: int) -> list[str]:
    """Return the shapes of one panel, its last `_SHOWN_US`, with the top at `top`."""
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    names = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    begin = max(event["ts"] + event["dur"] for event in events) - _SHOWN_US
    shapes = [f'<text x="0" y="{top + 12}" font-weight="bold">{escape(title)}</text>']
    for number, track in enumerate(track for track in sorted(names) if track):
        y = top + 20 + number * _ROW
        shapes.append(f'<text x="0" y="{y + 15}">{escape(names[track].partition("/")[2])}</text>')
        for event in (each for each in events if each["tid"] == track):
            left, right = max(event["ts"], begin), event["ts"] + event["dur"]
            if right <= begin:
                continue
            x, width = _LEFT + (left - begin) * _WIDTH / _SHOWN_US, (right - left) * _WIDTH / _SHOWN_US
            inset = 0 if event["name"] == "holds" else 4
            shapes.append(
                f'<rect x="{x:.1f}" y="{y + inset}" width="{width:.1f}" height="{20 - 2 * inset}" '
                f'fill="{_COLOURS[event["name"]]}"/>'
            )
    return shapes


def main() -> None:
    """Measure and write the picture."""
    titles = {"Exclusive": "sharing: Exclusive, turns", "Concurrent": "sharing: Concurrent, co-running"}
    shapes: list[str] = []
    for number, (mode, title) in enumerate(titles.items()):
        shapes += panel(title, traced(mode), number * _PANEL)
    y = len(titles) * _PANEL
    for number, name in enumerate(name for name, colour in _COLOURS.items() if any(colour in one for one in shapes)):
        shapes.append(f'<rect x="{_LEFT + number * 90}" y="{y}" width="12" height="12" fill="{_COLOURS[name]}"/>')
        shapes.append(f'<text x="{_LEFT + number * 90 + 18}" y="{y + 11}">{name}</text>')
    shapes.append(f'<text x="{_LEFT + _WIDTH}" y="{y + 11}" text-anchor="end">{_SHOWN_US // 1000} ms</text>')
    size = f'width="{_LEFT + _WIDTH}" height="{y + 18}"'
    style = 'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12"'
    path = ROOT / "docs" / "trace.svg"
    paper = '<rect width="100%" height="100%" fill="white"/>'
    path.write_text("\n".join([f"<svg {style} {size}>", paper, *shapes, "</svg>"]) + "\n")
    print(path)


if __name__ == "__main__":
    main()
