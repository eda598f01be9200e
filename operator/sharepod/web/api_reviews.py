"""Reviews (TokenReview, SubjectAccessReview) by the API server, over an own connection, opened for the first client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from sharepod.kube import ApiError, Connection

from .metrics_access import Reviews

_TIMEOUT_S = 3.0
"""Timeout of one review in seconds. Two reviews end well within a scrape's timeout."""


class ApiReviews:
    """Client for reviews. `open_connection`: opens the connection to the API server. Call `close` at the end."""

    def __init__(self, open_connection: Callable[[], Awaitable[Connection]]) -> None:
        self._open = open_connection
        self._api: Connection | None = None
        self._opening = asyncio.Lock()

    @property
    def reviews(self) -> Reviews:
        """Function for reviews, as `MetricsGuard` takes it."""
        return Reviews(self._create, (ApiError, OSError))

    async def close(self) -> None:
        """Close the connection."""
        if self._api is not None:
            await self._api.close()

    async def _create(self, path: str, body: dict[str, Any]) -> Mapping[str, Any]:
        async with self._opening:
            if self._api is None:
                self._api = await self._open()
        return await self._api.call("POST", path, body, timeout_s=_TIMEOUT_S)
