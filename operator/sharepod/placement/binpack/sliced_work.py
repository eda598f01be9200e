"""Slices: work in parts of at most some milliseconds, between which decisions are made."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

_T = TypeVar("_T")
Slices = Generator[None, None, _T]
"""Work that yields after each slice; it returns its result after the last."""
