"""Tokens of the pages of a list, by which the list is read to its end.

Guarantee: a list whose pages repeat ends with an error; any other list is read to its end, whatever its length.
"""

from __future__ import annotations

from .bodies import Json
from .errors import UnavailableError


class PageTokens:
    """Tokens `continue` of one list. `path`: of the list."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._given: set[str] = set()

    def after(self, page: Json) -> str:
        """Return the token of the page after this one, whose metadata is given; empty after the last.

        Raises `UnavailableError` if an earlier page had the same token.
        """
        token = str(page.get("continue") or "")
        if token in self._given:
            message = f"page {len(self._given) + 1} continues where an earlier one did: the list would have no end"
            raise UnavailableError(f"LIST {self._path}", 200, "RepeatedContinue", message)
        if token:
            self._given.add(token)
        return token
