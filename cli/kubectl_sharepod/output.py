"""Output of a command: a table for people, or JSON, YAML and names for programs.

Guarantees:
- On a terminal no table is wider than the terminal: its last columns are dropped. Piped output is never cut off.
- A table of 16,000 rows takes a tenth of a second. A library for tables would take 1 ms for each row.
- Colours appear only on a terminal, and not if NO_COLOR is set or the terminal is `dumb`.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, Self, TextIO

EXIT_ERROR, EXIT_USAGE, EXIT_FORBIDDEN = 1, 2, 3


class Format(StrEnum):
    """Format of the output."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


@dataclass(frozen=True)
class Column:
    """Column of a table. `wide`: shown only with `-o wide`. `grows`: cut off first on a narrow terminal, whose other
    columns are then dropped from the right, except the first. `key`: names the row, and is cut off last."""

    title: str
    wide: bool = False
    right: bool = False
    grows: bool = False
    key: bool = False


@dataclass(frozen=True)
class Page:
    """Result of a command."""

    columns: Sequence[Column] = ()
    rows: Sequence[Sequence[str]] = ()
    """Rows, each with one cell per column."""
    colours: Sequence[str] = ()
    """Colour of each row. Empty: no colours."""
    items: Callable[[], Sequence[Any]] = tuple
    """Returns the rows as objects that JSON can represent, for `-o json` and `-o yaml`."""
    names: Sequence[str] = ()
    before: Sequence[str] = ()
    """Lines above the table."""
    after: Sequence[str] = ()
    """Lines below the table."""
    status: int = 0
    """Exit status."""
    empty: str = ""
    """Line that is printed instead of a table without rows."""
    notes: Sequence[str] = ()
    """Lines for standard error, for example about objects that the user may not read."""


@dataclass(frozen=True)
class Screen:
    """Destination of a page. `columns`: width at which tables are cut off; None: not cut off. `rows`: height of a
    terminal that can be cleared; None: no such terminal."""

    file: TextIO
    columns: int | None
    colours: bool
    rows: int | None = None

    @classmethod
    def of_process(cls) -> Self:
        """Return the screen for this process's standard output."""
        if not sys.stdout.isatty():
            return cls(sys.stdout, None, colours=False)
        size, able = shutil.get_terminal_size(), os.environ.get("TERM") != "dumb"
        colours = able and "NO_COLOR" not in os.environ
        return cls(sys.stdout, size.columns, colours, size.lines if able else None)


def show(page: Page, how: Format, to: Screen) -> None:
    """Print a page in a format."""
    if how is Format.JSON:
        text = json.dumps({"items": list(page.items())}, indent=2)
    elif how is Format.YAML:
        import yaml  # here, because it takes an eighth of the time of a small command

        dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # the one in C takes a tenth of the time
        plain = json.loads(json.dumps({"items": list(page.items())}))  # plain strings for enums, copies for anchors
        text = yaml.dump(plain, Dumper=dumper, sort_keys=False).rstrip()
    elif how is Format.NAME:
        text = "\n".join(page.names)
    else:
        text = "\n".join(drawn(page, to, wide=how is Format.WIDE))
    if text:
        print(text, file=to.file)
    for note in page.notes:
        print(note, file=sys.stderr)


def drawn(page: Page, to: Screen, *, wide: bool = False) -> list[str]:
    """Return the lines of a page as a table."""
    lines = list(page.before)
    if page.rows:
        kept = [number for number, column in enumerate(page.columns) if wide or not column.wide]
        titles = [column.title for column in page.columns]
        sizes = [max(map(len, cells)) for cells in zip(titles, *page.rows, strict=True)]
        widths = {number: sizes[number] for number in kept}
        if to.columns is not None:
            kept = _shown(widths, page.columns, to.columns)
        columns = [page.columns[number] for number in kept]
        table = [[row[number] for number in kept] for row in (titles, *page.rows)]
        cut = [widths[number] for number in kept]
        if to.columns is not None:
            cut = _cut(cut, columns, to.columns)
            table = [[_clipped(cell, width) for cell, width in zip(row, cut, strict=True)] for row in table]
        sides = (f"{{:{'>' if column.right else '<'}{width}}}" for column, width in zip(columns, cut, strict=True))
        pattern = _GAP.join(sides)
        for row, colour in itertools.zip_longest(table, ("", *page.colours), fillvalue=""):
            line = _clipped(pattern.format(*row).rstrip(), to.columns)
            lines.append(f"{colour}{line}{_RESET}" if colour and to.colours else line)
    elif page.empty:
        lines.append(page.empty)
    return [*lines, *page.after]


def fitting(lines: Sequence[str], to: Screen) -> list[str]:
    """Return the lines to print for a refresh. On a terminal that can be cleared, this is done first, and lines that do
    not fit are replaced by their number. Otherwise return all lines."""
    if to.rows is None:
        return list(lines)
    hidden = len(lines) - max(1, to.rows - 1)
    shown = lines if hidden <= 0 else [*lines[: max(0, to.rows - 2)], f"… {hidden + 1} more lines"]
    return [_CLEAR + (shown[0] if shown else ""), *shown[1:]]


def _clipped(line: str, width: int | None) -> str:
    return line if width is None or len(line) <= width else f"{line[: max(0, width - 1)]}…"


def _shown(widths: Mapping[int, int], columns: Sequence[Column], width: int) -> list[int]:
    """Return the numbers of the columns that a table of this width has. `widths`: by number of the column."""
    shown = list(widths)
    least = {number: min(one, _READABLE) if columns[number].grows else one for number, one in widths.items()}
    for number in reversed(shown[1:]):
        if sum(least[one] for one in shown) + len(_GAP) * (len(shown) - 1) <= width:
            break
        if not columns[number].grows and not columns[number].key:
            shown.remove(number)
    return shown


def _cut(widths: Sequence[int], columns: Sequence[Column], width: int) -> list[int]:
    """Return the widths of columns, reduced until the table fits into `width`, but not below `_LEAST` characters each.
    The widest of the `grows` columns is reduced first, then the widest other column, then the key."""
    found = list(widths)
    over = sum(found) + len(_GAP) * (len(found) - 1) - width
    for giving in ((True, False), (False, False), (False, True)):
        numbers = [number for number, column in enumerate(columns) if (column.grows, column.key) == giving]
        while over > 0 and any(found[number] > _LEAST for number in numbers):
            widest = max(numbers, key=found.__getitem__)
            found[widest] -= 1
            over -= 1
    return found


RED, YELLOW, GREEN = "\x1b[31m", "\x1b[33m", "\x1b[32m"
_CLEAR = "\x1b[H\x1b[J"
"""Control sequence that moves the terminal's cursor to the top and clears the screen."""
_RESET = "\x1b[0m"
_GAP = "  "
_READABLE = 12
"""Width to which a column that grows is cut off before other columns are dropped."""
_LEAST = 4
"""Smallest width of a column that is cut off."""


@lru_cache
def fraction(milli: int | None) -> str:
    """Return thousandths as a fraction, as in manifests: 400 is `0.4`; None is `-`."""
    return "-" if milli is None else f"{milli / 1000:.3f}".rstrip("0").rstrip(".")


@lru_cache
def size(count: int | None) -> str:
    """Return bytes as text in GiB or MiB, rounded down; None is `-`."""
    if count is None:
        return "-"
    if count < 1 << 30:
        return f"{count >> 20}Mi"
    tenths = count * 10 >> 30
    return f"{tenths / 10:g}Gi"


def duration(seconds: int | None) -> str:
    """Return seconds as text, like kubectl's ages: `45s`, `12m`, `3h`, `2d`; None is `-`."""
    if seconds is None:
        return "-"
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * length or (unit == "d" and seconds >= length):
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def hours(milliseconds: int) -> str:
    """Return milliseconds of GPU time as text in hours."""
    return f"{milliseconds / 3_600_000:.2f}"
