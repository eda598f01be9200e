"""Continue tokens of a list, which is read page by page.

Guarantee: a list that repeats a token raises an error. Any other list is read to its end, whatever its length.
"""

from __future__ import annotations

from .bodies import Json
from .errors import UnavailableError


class PageTokens:
    """Continue tokens of one list so far. `path`: path of the list."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._given: set[str] = set()

    def after(self, page: Json) -> str:
        """Return the token for the next page, from the metadata of `page`; empty after the last page.

        Raises `UnavailableError` if an earlier page had the same token.
        """
        token = str(page.get("continue") or "")
        if token in self._given:
            message = f"page {len(self._given) + 1} continues where an earlier one did: the list would have no end"
            raise UnavailableError(f"LIST {self._path}", 200, "RepeatedContinue", message)
        if token:
            self._given.add(token)
        return token
