"""Results so far, in one file, so that the next run can continue a killed one.

A cell is one figure or a few related ones, under a key such as `shares/small/30:70`. As soon as a cell is measured, the
file is replaced by rename. Cells of another machine, GPU or kit are never mixed with these.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Cell = dict[str, Any]


class ResultsError(Exception):
    """Raised if a result file cannot be continued. The message contains the remedy."""


class OutOfTime(Exception):  # noqa: N818 - not an error: the rest is measured by the next run
    """Raised if the time of a table is up."""


class Budget:
    """Time limit of one table."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def need(self, seconds: float) -> None:
        """Raise `OutOfTime` if less than `seconds` is left."""
        if self._end - time.monotonic() < seconds:
            raise OutOfTime


class Results:
    """The file `results.json` in a folder. `about`: machine, GPU and kit, which are the same for all cells of the
    file."""

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self.folder = folder
        self._path = folder / "results.json"
        self._cells: dict[str, Cell] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self.about = dict(about)
        if not self._path.is_file():
            return
        try:
            kept = json.loads(self._path.read_text())
            self._cells = dict(kept["cells"])
            before = dict(kept["about"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ResultsError(f"{self._path} cannot be read ({error}); move it away to start again") from None
        other = sorted(name for name in {*before, *self.about} if before.get(name) != self.about.get(name))
        if other:
            changes = ", ".join(f"{name} {before.get(name)!r}, now {self.about.get(name)!r}" for name in other)
            raise ResultsError(
                f"{self._path} holds results of something else: {changes}; use another --results, or --fresh"
            )

    def __contains__(self, key: str) -> bool:
        """Return whether a cell was measured. A failed cell counts as not measured, so that it is measured again."""
        return key in self._cells and "failed" not in self._cells[key]

    def get(self, key: str) -> Cell | None:
        """Return a measured cell. None if it was not measured."""
        return self._cells.get(key)

    def under(self, prefix: str) -> dict[str, Cell]:
        """Return the cells below a key, by the rest of their keys."""
        start = prefix + "/"
        return {key[len(start) :]: cell for key, cell in self._cells.items() if key.startswith(start)}

    def measure(self, key: str, make: Callable[[], Cell]) -> Cell:
        """Return a cell. Measure it by `make` if it was not measured before."""
        if key not in self:
            self.put(key, make())
        return self._cells[key]

    def put(self, key: str, cell: Cell) -> None:
        """Store a cell."""
        self._cells[key] = {**cell, "at": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())}
        draft = self._path.with_suffix(".json.partial")
        draft.write_text(json.dumps({"about": self.about, "cells": self._cells}, indent=1) + "\n")
        draft.replace(self._path)


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table whose columns also line up on a terminal."""
    cells = [list(head), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([f"### {title}", "", lines[0], rule, *lines[1:], ""])
