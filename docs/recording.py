"""Recording of `make taste` for README.md: writes docs/taste.svg, an animation of key frames.

python docs/recording.py           # or make docs; runs `make taste` for twenty seconds

- The text is that of a real run in a pseudo-terminal. Rows that do not change are stored once.
- Colours follow the reader's light or dark scheme. A reader who prefers reduced motion sees one still frame.
- A run with the words of the present file leaves that file as it is: only figures and bars differ between runs.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from html import escape
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = Path(__file__).parent / "taste.svg"
COLUMNS, ROWS = 80, 11
PROMPT = "$ make taste"
SCENES = (
    ("", 5.0, 3),
    ("a", 0.9, 1),
    ("", 1.0, 1),
    ("", 1.2, 1),
    ("", 2.0, 3),
    ("m", 1.6, 4),
    ("b", 1.0, 1),
    ("", 1.0, 1),
    ("", 2.0, 2),
)
"""Scenes: the key to press, the seconds until the frame is taken, and the seconds for which the recording shows
the frame."""
STILL = 0
"""Number of the scene for readers who prefer reduced motion."""
START_S = 60.0
"""Seconds within which the bars must appear. They may appear late, because other builds may keep the machine busy."""
WIDTH, LINE, CHARACTER, MARGIN = 700, 19, 8.4, 14
"""Pixels: width of the picture, height of a line, width of a character, and width of the margin."""
STYLE = """
text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre }
.window { fill: #f6f8fa; stroke: #d0d7de }
.c-, .bold { fill: #24292f } .bold { font-weight: bold } .dim { fill: #57606a }
.key { fill: #57606a; text-anchor: end }
.green { fill: #1a7f37 } .yellow { fill: #9a6700 } .red { fill: #cf222e } .cyan { fill: #1b7c83 }
.rest { fill: #d0d7de }
@media (prefers-color-scheme: dark) {
  .window { fill: #161b22; stroke: #30363d }
  .c-, .bold { fill: #e6edf3 } .dim, .key { fill: #8b949e }
  .green { fill: #3fb950 } .yellow { fill: #d29922 } .red { fill: #ff7b72 } .cyan { fill: #39c5cf }
  .rest { fill: #30363d }
}
"""
_NAMES = {31: "red", 32: "green", 33: "yellow", 36: "cyan", 1: "bold", 2: "dim"}
_FULL_SCREEN = "\x1b[?1049h"
"""Control sequence that switches to the screen of the bars."""
_BARS = {"━": (0.0, 1.0), "╸": (0.0, 0.5), "╺": (0.5, 1.0)}
"""Part of its cell that each bar character fills, as the start and the end from left to right."""
_SEQUENCE = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])")

Cell = tuple[str, str]
"""Character and class of `STYLE`."""
Screen = tuple[tuple[Cell, ...], ...]


class RecordingError(Exception):
    """Failure to record a run. The message has the reason."""


class Terminal:
    """Screen of a terminal, for the control sequences of `make taste`.

    Raises `RecordingError` for any other sequence, so that no frame is drawn wrong.
    """

    def __init__(self) -> None:
        self._clear()
        self._style = ""

    def feed(self, output: str) -> str:
        """Draw the output. Return its last control sequence if that is incomplete."""
        at = 0
        while at < len(output):
            if output[at] == "\x1b":
                match = _SEQUENCE.match(output, at)
                if match is None:
                    if len(output) - at < 16:
                        return output[at:]
                    raise RecordingError(f"unknown control sequence {output[at : at + 16]!r}")
                self._control(match[1], match[2])
                at = match.end()
            else:
                self._draw(output[at])
                at += 1
        return ""

    def screen(self) -> Screen:
        """Return the present characters."""
        return tuple(map(tuple, self._cells))

    def _clear(self) -> None:
        self._cells: list[list[Cell]] = [[(" ", "")] * COLUMNS for _ in range(ROWS)]
        self._row = self._column = 0

    def _control(self, arguments: str, kind: str) -> None:
        match kind:
            case "m":
                for code in (int(part or 0) for part in arguments.split(";")):
                    self._style = _NAMES.get(code, "rest" if code == 38 else "" if code in (0, 39, 22) else self._style)
            case "H" if not arguments:
                self._row = self._column = 0
            case "h" if arguments == "?1049":
                self._clear()
            case "h" | "l" if arguments in ("?25", "?1049"):
                pass
            case _:
                raise RecordingError(f"unknown control sequence ESC[{arguments}{kind}")

    def _draw(self, character: str) -> None:
        match character:
            case "\r":
                self._column = 0
            case "\n":
                self._row = min(self._row + 1, ROWS - 1)
            case _ if self._column < COLUMNS:
                self._cells[self._row][self._column] = (character, self._style)
                self._column += 1


def record() -> tuple[str, list[Screen]]:
    """Run `make taste` in a pseudo-terminal; return its first line, and the screen of each scene.

    Raises `RecordingError` if the bars do not appear, or if the run fails.
    """
    control, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    unset = ("NO_COLOR", "COLORTERM", "COLUMNS", "LINES", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    process = subprocess.Popen(
        ["make", "--no-print-directory", "taste"],
        cwd=ROOT,
        env=environment | {"TERM": "xterm-256color"},
        stdin=inside,
        stdout=inside,
        stderr=inside,
        start_new_session=True,
    )
    os.close(inside)
    try:
        output = _first(control)
        lines = _SEQUENCE.sub("", output[: output.index(_FULL_SCREEN)]).split("\r\n")
        return next(line for line in reversed(lines) if line), list(_scenes(control, output))
    finally:
        with suppress(OSError):
            os.write(control, b"q")
        _drain(control, process)
        os.close(control)


def _first(control: int) -> str:
    """Read until the bars are shown. Return the output so far."""
    output, until = "", time.monotonic() + START_S
    while _FULL_SCREEN not in output:
        if time.monotonic() > until:
            raise RecordingError(f"no bars within {START_S:g} s; the output was {output[-400:]!r}")
        output += _read(control, 1.0)
    return output


def _scenes(control: int, output: str) -> Iterator[Screen]:
    """Press the keys of `SCENES`. Yield the screen of each scene."""
    terminal, rest = Terminal(), output[output.index(_FULL_SCREEN) :]
    for key, seconds, _ in SCENES:
        os.write(control, key.encode())
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            rest = terminal.feed(rest + _read(control, left))
        yield terminal.screen()


def _read(control: int, seconds: float) -> str:
    """Return the output of some seconds. Empty if there is none."""
    if not select.select([control], [], [], seconds)[0]:
        return ""
    try:
        output = bytearray(os.read(control, 65536))
        while output[-1] >= 0x80 and not _whole(output):
            output += os.read(control, 1)
    except OSError as error:
        raise RecordingError("`make taste` ended before the recording") from error
    return output.decode()


def _whole(output: bytes | bytearray) -> bool:
    """Return whether the output ends with a complete UTF-8 character."""
    try:
        output[-4:].decode("utf-8", errors="strict")
    except UnicodeDecodeError as error:
        return error.reason != "unexpected end of data"
    return True


def _drain(control: int, process: subprocess.Popen[bytes]) -> None:
    """Read until the process ends. After ten seconds, interrupt the process."""
    end = time.monotonic() + 10
    while process.poll() is None and time.monotonic() < end:
        with suppress(RecordingError):
            _read(control, 0.2)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=20)


def words(lines: Sequence[str]) -> set[str]:
    """Return the words of a recording, without figures and paths."""
    return {word for word in " ".join(lines).split() if not re.search(r"[\d/]", word)}


def rows(screens: Sequence[Screen]) -> list[list[str]]:
    """Return the lines of each screen as SVG elements. A line without text is an empty string."""
    return [[_row(cells, row) for row, cells in enumerate(screen)] for screen in screens]


def _row(cells: Sequence[Cell], row: int) -> str:
    """Return a line as one SVG text element, with a part for each style."""
    plain = "".join(character for character, _ in cells)
    if not plain.strip():
        return ""
    y = MARGIN + (row + 3) * LINE
    parts, bars, column = "", "", 0
    for kind, run in groupby(cells, key=lambda cell: cell[1] if cell[0] != " " else None):
        content = "".join(character for character, _ in run)
        x: float = MARGIN + column * CHARACTER
        if content[0] in _BARS:
            begin, end = _BARS[content[0]][0], len(content) - 1 + _BARS[content[-1]][1]
            at, width = x + begin * CHARACTER, (end - begin) * CHARACTER
            bars += f'<rect x="{at:.1f}" y="{y - 9}" width="{width:.1f}" height="8" class="{kind or "rest"}"/>'
        elif kind is not None:
            length = f' textLength="{len(content) * CHARACTER:.1f}"' if len(content) > 1 else ""
            parts += f'<tspan x="{x:.1f}" class="{kind or "c-"}"{length}>{escape(content)}</tspan>'
        column += len(content)
    return f'<text y="{y}">{parts}</text>{bars}'


def drawn(first: str, screens: Sequence[Screen]) -> str:
    """Return the animation."""
    shown = rows(screens)
    height = MARGIN * 2 + (3 + max(row for lines in shown for row, line in enumerate(lines) if line)) * LINE
    ends: list[float] = []
    total = float(sum(seconds for *_, seconds in SCENES))
    for *_, seconds in SCENES:
        ends.append((ends[-1] if ends else 0.0) + seconds / total * 100)
    style = STYLE + f".f {{ visibility: hidden; animation: {total:g}s step-end infinite }}\n"
    for scene, (begin, end) in enumerate(zip([0.0, *ends], ends, strict=False)):
        before = "" if begin == 0 else "0% { visibility: hidden } "
        after = "" if scene == len(ends) - 1 else f"{end:.2f}% {{ visibility: hidden }} "
        style += f"@keyframes s{scene} {{ {before}{begin:.2f}% {{ visibility: visible }} {after}}}\n"
        style += f".s{scene} {{ animation-name: s{scene} }}\n"
    style += (
        f"@media (prefers-reduced-motion: reduce) {{ .f {{ animation: none }} .s{STILL} {{ visibility: visible }} }}\n"
    )
    head = MARGIN + LINE * 0.8
    body = [f'<text y="{head:.1f}"><tspan x="{MARGIN}" class="bold">{PROMPT}</tspan></text>']
    body.append(f'<text y="{head + LINE:.1f}"><tspan x="{MARGIN}" class="c-">{escape(first)}</tspan></text>')
    common = set.intersection(*(set(lines) for lines in shown))
    body += [line for line in shown[0] if line and line in common]
    pressed = ""
    for scene, (lines, (key, *_)) in enumerate(zip(shown, SCENES, strict=True)):
        pressed = key or pressed
        own = "\n".join(line for line in lines if line and line not in common)
        if pressed:
            own += f'\n<text x="{WIDTH - MARGIN}" y="{head:.1f}" class="key">key {pressed}</text>'
        body.append(f'<g class="f s{scene}">\n{own}\n</g>')
    label = "Recording of make taste: three programs share a simulated GPU; requests change, and shares follow"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        f' role="img" aria-label="{label}">\n<style>{style}</style>\n'
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="6" class="window"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def main() -> int:
    try:
        picture = drawn(*record())
    except RecordingError as error:
        print(f"recording: {error}", file=sys.stderr)
        return 1
    before = re.findall(r">([^<>]+)</tspan>", FILE.read_text()) if FILE.exists() else []
    if words(before) == words(re.findall(r">([^<>]+)</tspan>", picture)):
        print(f"{FILE.name}: same words, kept")
    else:
        FILE.write_text(picture)
        print(f"{FILE.name}: {len(picture.encode())} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
