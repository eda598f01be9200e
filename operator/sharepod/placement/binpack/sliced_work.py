"""Sliced work: a long computation that yields after some milliseconds, so that decisions are made in between."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

_T = TypeVar("_T")
Slices = Generator[None, None, _T]
"""Generator that yields after each slice of work. It returns its result after the last."""
