"""Parts of a suite, for machines that are too slow for all of it at each commit: the commit chooses which."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]


def chosen(name: str, one_in: int, seed: str) -> bool:
    """Return whether what has this name belongs to the part of about one in so many that `seed` chooses; another seed
    chooses others.
    """
    return int(hashlib.sha256(f"{seed} {name}".encode()).hexdigest(), 16) % one_in == 0


def commit() -> str:
    """Return twelve digits of the commit that is checked out: the seed where none is named.

    Raises `OSError` or `subprocess.SubprocessError` where there is no git, or no repository.
    """
    return subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=_ROOT, capture_output=True, text=True, check=True, timeout=20
    ).stdout.strip()
