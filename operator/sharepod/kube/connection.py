"""Connection to the API server under one identity.

Guarantees:
- Bodies and answers are plain dicts.
- Every call ends within its timeout; a watch ends at the latest `WATCH_GRACE_S` after its requested duration.
- A page of a list may take ten timeouts, provided that more of it arrives within each. So a page of large objects from
  a busy server is read to its end, and not requested again from its beginning.
- Every failure is an `ApiError`.
- If many answers arrive at the same time, only some of their callers continue in one round of the event loop, so other
  tasks are not delayed.
- An object that cannot be read (too deep, too large) ends neither its list nor its watch.
- The environment is searched for a proxy once, when the connection is created.
- New connections use the certificates that the configuration's files have at that time.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import random
import ssl
import time
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from email.utils import parsedate_to_datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlencode, urlsplit

import aiohttp
from kubernetes.aio.client import Configuration
from yarl import URL

from sharepod.backoff import Backoff

from .bodies import encoded, parsed
from .credentials import Rereading, configuration
from .errors import ApiError, ErrorEventError, GoneError, SilentError, UnauthorizedError, UnavailableError, refusal
from .exchange import Answer, Exchanges
from .json_text import OBJECT_LIMIT, ListText, NotAListError, NotAnEventError, Unreadable, parse_event
from .loop_rounds import LoopRounds
from .trust import Trust

Json: TypeAlias = dict[str, Any]
TakeUnreadable: TypeAlias = Callable[[str, Unreadable], None]
"""Callback for an unreadable object: takes the type of the event (ADDED for an item of a list) and the readable part of
the object."""

JSON = "application/json"
JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"

CALL_TIMEOUT_S = 10.0
"""Default timeout of a call, in seconds."""
_PAGE_TIMEOUTS = 10
"""Longest time for a page of a list, in timeouts of one call. Within each timeout, more of the page must arrive."""
CONNECT_TIMEOUT_S = 5.0
"""Timeout in seconds for opening a connection, and for the first answer of a watch."""
WATCH_S = (20, 25)
"""Requested duration of a watch in seconds, at random within these bounds. An API server sends bookmarks only about
once a minute. So on a watch without events, only its timely end shows that the connection still works."""
WATCH_GRACE_S = 3.0
"""Seconds beyond its requested duration after which a watch counts as dead."""
_TURN_S = 0.005
"""Seconds for which a list is read before other tasks get a turn."""
_COMPARE_CLOCKS_S = 10.0
"""Seconds between two comparisons of this machine's clock with the API server's."""
_QUERIES = 64
"""Largest number of cached query strings: each kind of write uses one."""


class Connection:
    """Connection to the API server. Every call may raise `ApiError`. Call `close` at the end."""

    def __init__(self, config: Configuration, user_agent: str) -> None:
        self._config = config
        self._host = str(config.host).rstrip("/")
        self._usual = {
            "Accept": JSON,
            "Accept-Encoding": "identity",  # in a cluster, compression costs more than it saves
            "User-Agent": user_agent,
        }
        self._trust = Trust(config)
        self._proxied = config.proxy is not None or _proxy_of_environment(self._host)
        self._exchanges = Exchanges(self._host, self._trust.context, config.tls_server_name, CONNECT_TIMEOUT_S)
        self._rounds = LoopRounds()
        self._session: aiohttp.ClientSession | None = None
        self._rejected_since: float | None = None
        self._clock_compared_at = float("-inf")
        self.clock_behind_s = 0.0
        """Seconds by which this machine's clock is behind the API server's, to about a second, from the header Date of
        answers."""
        self.answered_at: float | None = None
        """Monotonic time in seconds of the last answer other than a server error (5xx) or 429; None before the
        first."""

    @classmethod
    async def open(cls, kubeconfig: Path | None, user_agent: str) -> Connection:
        """Return a connection that uses a kubeconfig file; without one, the pod's ServiceAccount. Raise
        `NoApiServerError`."""
        return cls(await configuration(kubeconfig), user_agent)

    async def close(self) -> None:
        """Close all connections."""
        self._exchanges.close()
        if self._session is not None:
            await self._session.close()

    @property
    def rejected_for_s(self) -> float:
        """Seconds since the API server began to reject the credentials, or since its certificate was not trusted; 0 if
        neither is the case."""
        return 0.0 if self._rejected_since is None else time.monotonic() - self._rejected_since

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Json:
        """Return the object, or list, at `path`."""
        return await self.call("GET", path, query=query)

    async def create(self, path: str, body: Json) -> Json:
        """Create an object in the collection at `path`; return it."""
        return await self.call("POST", path, body)

    async def patch(
        self, path: str, body: Json | list[Json], content: str, *, timeout_s: float = CALL_TIMEOUT_S
    ) -> Json:
        """Patch the object at `path`; return the patched object. `content` is the patch's content type."""
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
        """Make a call; return the JSON object of its answer."""
        call = f"{method} {path}"
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._exchange(method, path, body, query or {}, content)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise self._unavailable(call, error) from error
        await self._rounds.enter()
        self._check(call, answer.status, answer.headers, answer.body)
        return parsed(call, answer.status, answer.body)

    async def page(
        self,
        path: str,
        query: Mapping[str, str],
        *,
        take: Callable[[Json], None],
        unreadable: TakeUnreadable,
        heard: Callable[[], None] = lambda: None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Json:
        """Read one page of a list, item by item as it arrives; return the list's metadata.

        `heard`: called for each chunk that arrives. `timeout_s`: longest time without a chunk; the whole page may take
        ten times as long.
        """
        call, now = f"LIST {path}", asyncio.get_running_loop().time
        reader, decoder = ListText(), codecs.getincrementaldecoder("utf-8")("replace")
        try:
            ends = now() + _PAGE_TIMEOUTS * timeout_s
            async with asyncio.timeout(timeout_s) as silence:
                response = await self._send("GET", path, None, query, JSON)
                async with response:
                    refused = await response.read() if response.status >= 300 else b""
                    self._check(call, response.status, response.headers, refused)
                    turn = time.monotonic() + _TURN_S
                    async for chunk in response.content.iter_any():
                        silence.reschedule(min(now() + timeout_s, ends))
                        heard()
                        for item in reader.feed(decoder.decode(chunk)):
                            _hand_over(item, take, unreadable)
                            if time.monotonic() > turn:
                                await asyncio.sleep(0)
                                turn = time.monotonic() + _TURN_S
            for item in reader.close():
                _hand_over(item, take, unreadable)
        except NotAListError as error:
            raise UnavailableError(call, response.status, "NotJson", str(error)) from None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise self._unavailable(call, error) from error
        return reader.metadata

    async def watch(
        self,
        path: str,
        query: Mapping[str, str],
        since: str,
        *,
        heard: Callable[[], None] = lambda: None,
        unreadable: TakeUnreadable | None = None,
    ) -> AsyncGenerator[Json, None]:
        """Yield events (`{"type", "object"}`, including bookmarks) since a resourceVersion, until the server ends the
        watch.

        Raise `GoneError` if the version is too old, `SilentError` if the server does not end the watch in time.

        Args:
            path: path of the collection.
            query: selectors.
            since: resourceVersion.
            heard: called when the watch is answered, and for each chunk that arrives.
            unreadable: takes the objects that cannot be read; None: the first one ends the watch (`UnavailableError`).
        """
        lasts = random.randint(*WATCH_S)  # noqa: S311 - spreads load, nothing secret
        asked = {
            **query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": since,
            "timeoutSeconds": str(lasts),
        }
        call = f"WATCH {path}"
        ends = asyncio.get_running_loop().time() + lasts + WATCH_GRACE_S
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                response = await self._send("GET", path, None, asked, JSON)
            async with response:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    refused = await response.read() if response.status >= 300 else b""
                self._check(call, response.status, response.headers, refused)
                heard()
                async for line, whole in _lines(response, ends, heard):
                    event = parse_event(line, whole=whole)
                    if isinstance(event, tuple):
                        if event[0] == "ERROR":
                            raise ErrorEventError(call, response.status, "Unreadable", event[1].why)
                        if unreadable is None:
                            raise UnavailableError(call, response.status, "Unreadable", event[1].why)
                        unreadable(*event)
                        continue
                    if event["type"] == "ERROR":
                        raise _of_event(call, event["object"])
                    yield event
        except _SilenceError:
            raise SilentError(call, 0, "Silent", "the server has not ended the watch in time") from None
        except NotAnEventError as error:
            raise UnavailableError(call, 200, "NotJson", str(error)) from None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise self._unavailable(call, error) from error

    def _check(self, call: str, status: int, headers: Mapping[str, str], answer: bytes) -> None:
        """Record the time of an answer; raise the error that its status stands for."""
        if status != 401:
            self._rejected_since = None
        if status < 500 and status != 429:
            self.answered_at = now = time.monotonic()
            if now >= self._clock_compared_at + _COMPARE_CLOCKS_S:
                self._compare_clocks(headers.get("date"), now)
        if status < 300:
            return
        error: ApiError = refusal(call, status, answer, headers.get("retry-after"), headers.get("date"))
        if isinstance(error, UnauthorizedError):
            self._rejected()
        raise error

    def _compare_clocks(self, date: str | None, now: float) -> None:
        """Compare this machine's clock with the date of the API server's answer."""
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if date is not None:
                self.clock_behind_s = parsedate_to_datetime(date).timestamp() - time.time()
                self._clock_compared_at = now

    def _rejected(self) -> None:
        """Record that credentials or the certificate were rejected, so that both are read again."""
        if self._rejected_since is None:
            self._rejected_since = time.monotonic()
        if isinstance(hook := self._config.refresh_api_key_hook, Rereading):
            hook.expire()

    def _unavailable(self, call: str, error: BaseException) -> UnavailableError:
        """Return the error of a call without an answer. Timeouts of aiohttp and asyncio have no text of their own."""
        if isinstance(error, aiohttp.ClientConnectorCertificateError | ssl.SSLCertVerificationError):
            self._trust.invalidate()
            self._rejected()
        return UnavailableError(call, 0, type(error).__name__, str(error) or "no answer in time")

    async def _exchange(
        self, method: str, path: str, body: Json | list[Json] | None, query: Mapping[str, str], content: str
    ) -> Answer:
        """Make a call over a kept connection. With a proxy, use aiohttp, which supports proxies."""
        if self._proxied:
            response = await self._send(method, path, body, query, content)
            async with response:
                headers = {name.lower(): value for name, value in response.headers.items()}
                return Answer(response.status, headers, await response.read())
        headers = await self._headers(content)
        sent = encoded(body) if body is not None else None
        return await self._exchanges.exchange(method, _with_query(path, query), headers, sent)

    async def _headers(self, content: str) -> dict[str, str]:
        headers = {**self._usual, "Content-Type": content}
        token = await self._config.get_api_key_with_prefix("BearerToken", alias="authorization")
        if token:
            headers["Authorization"] = token.strip()
        return headers

    async def _send(
        self, method: str, path: str, body: Json | list[Json] | None, query: Mapping[str, str], content: str
    ) -> aiohttp.ClientResponse:
        headers = await self._headers(content)
        if self._session is None:
            self._session = _session(trust_env=self._proxied and not self._config.proxy)
        trust = self._trust.context()
        options: dict[str, Any] = {"ssl": trust if trust is not None else True}
        if self._config.tls_server_name:
            options["server_hostname"] = self._config.tls_server_name
        if self._config.proxy:
            options |= {"proxy": self._config.proxy, "proxy_headers": self._config.proxy_headers}
        sent = aiohttp.BytesPayload(encoded(body), content_type=content) if body is not None else None
        url = URL(f"{self._host}{_with_query(path, query)}", encoded=True)
        return await self._session.request(method, url, data=sent, headers=headers, **options)


def _with_query(path: str, query: Mapping[str, str]) -> str:
    return f"{path}?{_encoded(tuple(query.items()))}" if query else path


@lru_cache(_QUERIES)
def _encoded(query: tuple[tuple[str, str], ...]) -> str:
    return urlencode(query)


async def backoff(attempt: int, *, first_s: float = 0.25, longest_s: float = 15.0) -> None:
    """Wait before the `attempt`-th try (from 1): `first_s`, doubled each time up to `longest_s`, less up to half of it
    at random."""
    spread_s = Backoff(first_s, longest_s).spread_s(attempt, random.random())  # noqa: S311 - nothing secret
    await asyncio.sleep(spread_s)


def _session(*, trust_env: bool) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),  # callers limit their calls
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        trust_env=trust_env,
        read_bufsize=1 << 20,
    )


def _proxy_of_environment(url: str) -> bool:
    """Return whether the environment has a proxy for this URL. aiohttp would search the environment at each call."""
    parts = urlsplit(url)
    return parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(parts.hostname or "")


def _hand_over(item: Json | Unreadable, take: Callable[[Json], None], unreadable: TakeUnreadable) -> None:
    if isinstance(item, Unreadable):
        unreadable("ADDED", item)
    else:
        take(item)


class _SilenceError(Exception):
    """The server has not ended a watch in time."""


async def _lines(
    response: aiohttp.ClientResponse, ends: float, heard: Callable[[], None]
) -> AsyncIterator[tuple[bytes, bool]]:
    """Yield (line, whether it is complete) for each line of a response. A line longer than `OBJECT_LIMIT` is cut off
    there, and is not complete.

    Raise `_SilenceError` if the response has not ended at `ends`, on the clock of the event loop.
    """
    parts: list[bytes] = []
    length = 0
    while True:
        try:
            async with asyncio.timeout_at(ends):
                chunk = await response.content.readany()
        except TimeoutError:
            raise _SilenceError from None
        if not chunk:
            return
        heard()
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            parts.append(line)
            length += len(line)
            if length:
                yield b"".join(parts), length <= OBJECT_LIMIT
            parts, length = [], 0
        length += len(rest)
        if length <= OBJECT_LIMIT or not parts:
            parts.append(rest)


def _of_event(call: str, event_body: Json) -> ApiError:
    code = event_body.get("code")
    error = refusal(call, code if isinstance(code, int) else 500, json.dumps(event_body).encode())
    if isinstance(error, GoneError):
        return error
    return ErrorEventError(call, error.status, error.reason, error.message, retry_after_s=error.retry_after_s)
