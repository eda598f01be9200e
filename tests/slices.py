"""Slices: equal parts of a suite, of which a run takes one."""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]


def parsed(text: str) -> tuple[int, int]:
    """Return K and N of a slice `K/N`. In `commit/N` the checked-out commit chooses K.

    Raises `argparse.ArgumentTypeError` if the text is no slice.
    """
    found = re.fullmatch(r"(commit|[1-9]\d{0,3})/([1-9]\d{0,3})", text)
    count = int(found[2]) if found is not None else 0
    number = 0 if found is None else _of_commit(count) if found[1] == "commit" else int(found[1])
    if not 0 < number <= count:
        raise argparse.ArgumentTypeError(f"{text!r} is no slice: write K/N with K from 1 to N, as in 3/8, or commit/8")
    return number, count


def in_slice(name: str, number: int, count: int) -> bool:
    """Return whether `name` belongs to slice `number` (from 1) of `count` slices. Each name belongs to exactly
    one slice."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % count == number - 1


def spread(names: Sequence[str], percent: int) -> list[str]:
    """Return `percent` percent of the names, at least one, at even distances and beginning with the first."""
    count = max(1, len(names) * percent // 100)
    return [names[number * len(names) // count] for number in range(count)] if names else []


def _of_commit(count: int) -> int:
    """Return the number of the slice that the checked-out commit chooses; 1 outside a checkout."""
    try:
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=_ROOT, capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return 1
    return int(head, 16) % count + 1
