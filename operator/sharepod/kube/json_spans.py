"""Where the parts of a JSON value stand in its text, however deep they nest. Pure.

Guarantees:
- A part that nests too deep to be parsed is passed over like any other.
- The work is linear in the length of the text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from .json_text import blank, deep_end

_DECODER = json.JSONDecoder()


def members(text: str, at: int) -> Iterator[tuple[str, int, int]]:
    """Yield key, begin and end of each member of the object at `at`. Raise `ValueError` where there is none."""
    return _parts(text, at, "{", "}")


def elements(text: str, at: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each element of the array at `at`. Raise `ValueError` where there is none."""
    return ((begin, end) for _key, begin, end in _parts(text, at, "[", "]"))


def _parts(text: str, at: int, opening: str, closing: str) -> Iterator[tuple[str, int, int]]:
    at = blank(text, _after(opening, text, at))
    if text.startswith(closing, at):
        return
    while True:
        key = ""
        if opening == "{":
            if not text.startswith('"', at):
                raise ValueError(f"a key is missing at {at}")
            key, at = _DECODER.raw_decode(text, at)
            at = blank(text, _after(":", text, at))
        end = _end(text, at)
        yield key, at, end
        at = blank(text, end)
        if text.startswith(closing, at):
            return
        at = blank(text, _after(",", text, at))


def _after(mark: str, text: str, at: int) -> int:
    """Return the place behind a mark that has to stand at `at`, or behind blanks there."""
    at = blank(text, at)
    if not text.startswith(mark, at):
        raise ValueError(f"{mark} is missing at {at}")
    return at + 1


def _end(text: str, at: int) -> int:
    """Return where the value at `at` ends."""
    try:
        return _DECODER.raw_decode(text, at)[1]
    except RecursionError:
        return deep_end(text, at)
