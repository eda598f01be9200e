"""Sliced work: long computations in slices of at most some milliseconds. Decisions are made between two slices."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

_T = TypeVar("_T")
Slices = Generator[None, None, _T]
"""Work that yields after each slice; it returns its result after the last."""
