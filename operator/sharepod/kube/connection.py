"""Connection to the API server under one identity.

Guarantees:
- Bodies and answers are plain dicts; every call names its content type.
- Every call ends within its timeout; a watch ends once it has been silent for `WATCH_SILENCE_S`.
- Every failure is an `ApiError`.
- Tokens are read again as the kubelet rotates them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, cast
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import load_incluster_config, load_kube_config

from .errors import UnavailableError, refusal

Json: TypeAlias = dict[str, Any]

JSON = "application/json"
JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"

CALL_TIMEOUT_S = 10.0
"""Seconds that one call may take, unless the caller says otherwise."""
CONNECT_TIMEOUT_S = 5.0
"""Seconds that a connection may take to be made."""
WATCH_S = (240, 300)
"""Seconds that a watch is asked to last, at random within these bounds: clients do not all list again together."""
WATCH_SILENCE_S = 90.0
"""Seconds of silence after which a watch counts as dead: the API server sends a bookmark about every minute."""
_LINE_LIMIT = 1 << 22
"""Longest event of a watch in bytes, 4 MiB: above etcd's limit for an object (1.5 MiB) in its JSON form."""
_TOKEN_PERIOD_S = 60.0
"""Seconds between two readings of the kubeconfig and its token: well below a token's lifetime (at least 10 min)."""


class NoApiServerError(ConnectionError):
    """API server that cannot be reached, because nothing readable says how."""


async def configuration(kubeconfig: Path | None) -> Configuration:
    """Return how to reach the API server: from a kubeconfig; without one, from the pod's ServiceAccount.

    Raise `NoApiServerError`, which says what to do, if neither can be read.
    """
    config = Configuration()
    try:
        if kubeconfig is not None:
            await _load(kubeconfig, config)
            config.refresh_api_key_hook = _reread(kubeconfig)
        else:
            load_incluster_config(client_configuration=config)
    except Exception as error:  # the loaders raise exceptions of many kinds
        source = f"kubeconfig {kubeconfig}" if kubeconfig else "the pod's ServiceAccount (set kubeconfig to use a file)"
        raise NoApiServerError(f"cannot read from {source} how to reach the API server: {error}") from error
    return config


class Connection:
    """Connection to the API server. Every call may raise `ApiError`. Close it at the end."""

    def __init__(self, config: Configuration, user_agent: str) -> None:
        self._api = ApiClient(config)
        self._host = str(config.host).rstrip("/")
        self._user_agent = user_agent

    @classmethod
    async def open(cls, kubeconfig: Path | None, user_agent: str) -> Connection:
        """Return a connection by a kubeconfig file, or as the pod's ServiceAccount. Raise `NoApiServerError`."""
        return cls(await configuration(kubeconfig), user_agent)

    async def close(self) -> None:
        """Close all connections."""
        await self._api.close()

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Json:
        """Return the object, or list, at `path`."""
        return await self.call("GET", path, query=query)

    async def create(self, path: str, body: Json) -> Json:
        """Create an object in the collection at `path`; return it."""
        return await self.call("POST", path, body)

    async def patch(
        self, path: str, body: Json | list[Json], content: str, *, timeout_s: float = CALL_TIMEOUT_S
    ) -> Json:
        """Patch the object at `path`; return it as patched. `content` is the patch's content type."""
        return await self.call("PATCH", path, body, content=content, timeout_s=timeout_s)

    async def call(
        self,
        method: str,
        path: str,
        body: Json | list[Json] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        content: str = JSON,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Json:
        """Make a call; return its answer."""
        limits = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(timeout_s, CONNECT_TIMEOUT_S))
        call = f"{method} {path}"
        try:
            response = await self._send(method, path, body, query or {}, content, limits)
            async with response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _unavailable(call, error) from error
        if response.status >= 300:
            raise refusal(call, response.status, answer)
        return _parse(call, response.status, answer)

    async def watch(self, path: str, query: Mapping[str, str], since: str) -> AsyncIterator[Json]:
        """Yield events (`{"type", "object"}`, bookmarks too) since a resourceVersion, until the server ends the watch.

        Raise `GoneError` if the version is too old, `UnavailableError` after a silence of `WATCH_SILENCE_S`.
        """
        lasts = random.randint(*WATCH_S)  # noqa: S311 - spreads load, nothing secret
        asked = {
            **query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": since,
            "timeoutSeconds": str(lasts),
        }
        limits = aiohttp.ClientTimeout(
            total=lasts + WATCH_SILENCE_S, sock_connect=CONNECT_TIMEOUT_S, sock_read=WATCH_SILENCE_S
        )
        call = f"WATCH {path}"
        try:
            response = await self._send("GET", path, None, asked, JSON, limits)
            async with response:
                if response.status >= 300:
                    raise refusal(call, response.status, await response.read())
                async for line in _lines(response):
                    event = _parse(call, response.status, line)
                    if event.get("type") == "ERROR":
                        said = event.get("object") or {}
                        raise refusal(call, int(said.get("code", 500)), json.dumps(said).encode())
                    yield event
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise _unavailable(call, error) from error

    async def _send(
        self,
        method: str,
        path: str,
        body: Json | list[Json] | None,
        query: Mapping[str, str],
        content: str,
        limits: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        headers = {"Accept": JSON, "Content-Type": content, "User-Agent": self._user_agent}
        await self._api.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        url = f"{self._host}{path}?{urlencode(query)}" if query else f"{self._host}{path}"
        answer = await self._api.call_api(method, url, header_params=headers, body=body, _request_timeout=limits)
        return cast(aiohttp.ClientResponse, answer.response)


async def backoff(attempt: int, *, first_s: float = 0.25, longest_s: float = 15.0) -> None:
    """Wait before the `attempt`-th try (from 1): `first_s`, doubled each time up to `longest_s`, less up to half of it
    at random."""
    longest = min(longest_s, first_s * 2 ** min(attempt - 1, 16))
    await asyncio.sleep(longest * random.uniform(0.5, 1.0))  # noqa: S311 - spreads load, nothing secret


async def _load(kubeconfig: Path, config: Configuration) -> None:
    await load_kube_config(config_file=str(kubeconfig), client_configuration=config, persist_config=False)


def _reread(kubeconfig: Path) -> Callable[[Any], Awaitable[None]]:
    """Return a hook that reads the kubeconfig, and its token file, again at most each `_TOKEN_PERIOD_S`.

    If that fails, the credentials stay as they are.
    """
    read_at = time.monotonic()

    async def reread(config: Any) -> None:
        nonlocal read_at
        if time.monotonic() - read_at < _TOKEN_PERIOD_S:
            return
        read_at = time.monotonic()
        with contextlib.suppress(Exception):  # for instance a file half written
            await _load(kubeconfig, config)

    return reread


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the lines of a response. A line may be longer than the reader's buffer, up to `_LINE_LIMIT`."""
    rest = b""
    async for chunk in response.content.iter_any():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            if line:
                yield line
        if len(rest) > _LINE_LIMIT:
            raise ValueError(f"a watch event of more than {_LINE_LIMIT} bytes")


def _parse(call: str, status: int, text: bytes) -> Json:
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise UnavailableError(call, status, "NotJson", str(error)) from None
    if not isinstance(parsed, dict):
        raise UnavailableError(call, status, "NotJson", "the answer is not an object")
    return parsed


def _unavailable(call: str, error: BaseException) -> UnavailableError:
    """Return the error of a call without an answer. Timeouts of aiohttp and asyncio have no text of their own."""
    return UnavailableError(call, 0, type(error).__name__, str(error) or "no answer in time")
