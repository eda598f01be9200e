"""The agent's calls to the API server: plain JSON, every call bounded in time, every failure one of two kinds.

`Refused`: the server answered, and not with what was asked for. `Unreachable`: there was no usable answer; trying again
may help. Tokens are read again as the kubelet rotates them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio import client, config
from kubernetes.aio.config.incluster_config import SERVICE_CERT_FILENAME, SERVICE_TOKEN_FILENAME, InClusterConfigLoader

Json: TypeAlias = dict[str, Any]

MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
_JSON = "application/json"

CALL_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 5.0
WATCH_S = (240, 300)
"""How long a watch is asked to last, at random within these bounds, so that agents do not all come back together."""
WATCH_SILENCE_S = 90.0
"""A watch that says nothing for so long is dead: the server sends a bookmark about every minute."""
_TOKEN_PERIOD_S = 60.0


class ApiFailure(Exception):  # noqa: N818 - the base of what can come back instead of an answer
    """A call that did not do what it was for."""


class Unreachable(ApiFailure):
    """No usable answer: connection, TLS, timeout, or the server itself failing."""


class Refused(ApiFailure):
    """The server's answer, as `code` (HTTP), `reason` (a word of the API's) and the message."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(f"{message or reason} ({code})")
        self.code = code
        self.reason = reason


class NoApiServerError(OSError):
    """Nothing readable says how to reach the API server."""


class ApiServer:
    """A connection to the API server under one identity. Close it at the end."""

    def __init__(self, configuration: Any, user_agent: str) -> None:
        self._client = client.ApiClient(configuration)
        self._client.user_agent = user_agent

    @classmethod
    async def connect(cls, kubeconfig: Path | None, user_agent: str) -> ApiServer:
        """With a kubeconfig file, or as the pod's ServiceAccount. Raises `NoApiServerError`."""
        configuration = client.Configuration()
        try:
            if kubeconfig is not None:
                await _load(kubeconfig, configuration)
                configuration.refresh_api_key_hook = _reread(kubeconfig)
            else:
                loader = InClusterConfigLoader(SERVICE_TOKEN_FILENAME, SERVICE_CERT_FILENAME)
                loader.load_and_set(configuration)
            return cls(configuration, user_agent)
        except Exception as error:  # the loaders raise whatever they stumble over
            source = (
                f"kubeconfig {kubeconfig}" if kubeconfig else "the pod's ServiceAccount (set kubeconfig to use a file)"
            )
            raise NoApiServerError(f"cannot learn from {source} how to reach the API server: {error}") from error

    async def close(self) -> None:
        """Ends all connections."""
        await self._client.close()

    async def get(self, path: str) -> Json:
        """The object, or list, at `path`."""
        return await self._call("GET", path)

    async def create(self, path: str, body: Json) -> Json:
        """Creates an object in the collection at `path`."""
        return await self._call("POST", path, body=body, content_type=_JSON)

    async def patch(
        self, path: str, body: Json | list[Json], content_type: str, timeout_s: float = CALL_TIMEOUT_S
    ) -> Json:
        """Patches the object at `path`; returns it as it is then."""
        return await self._call("PATCH", path, body=body, content_type=content_type, timeout_s=timeout_s)

    async def watch(self, path: str, query: Mapping[str, str], resource_version: str) -> AsyncIterator[Json]:
        """Events after `resource_version`, bookmarks included, until the server ends the watch.

        An ERROR event is raised as `Refused` (410 where the version is too old).
        """
        lasts = random.randint(*WATCH_S)  # noqa: S311 - spreads load, nothing secret
        asked = {
            **query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(lasts),
        }
        timeout = aiohttp.ClientTimeout(
            total=lasts + WATCH_SILENCE_S, sock_connect=CONNECT_TIMEOUT_S, sock_read=WATCH_SILENCE_S
        )
        response = await self._send("GET", f"{path}?{urlencode(asked)}", None, None, timeout)
        try:
            while True:
                try:
                    line = await response.content.readline()
                except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
                    raise Unreachable(f"the watch of {path} broke: {_words(error)}") from error
                if not line:
                    return
                event = _parse(line, path)
                if event.get("type") == "ERROR":
                    raise _refusal(event.get("object"), 500)
                yield event
        finally:
            response.close()

    async def _call(
        self,
        method: str,
        path: str,
        *,
        body: Json | list[Json] | None = None,
        content_type: str | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Json:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        response = await self._send(method, path, body, content_type, timeout)
        try:
            return _parse(await response.read(), path)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"no whole answer to {method} {path}: {_words(error)}") from error
        finally:
            response.release()

    async def _send(
        self,
        method: str,
        path: str,
        body: Json | list[Json] | None,
        content_type: str | None,
        limits: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        headers = {"Accept": _JSON}
        if content_type is not None:
            headers["Content-Type"] = content_type
        method, url, headers, body, _ = await self._client.param_serialize(
            method, path, header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        try:
            answer = await self._client.call_api(method, url, headers, body, _request_timeout=limits)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"cannot {method} {path}: {_words(error)}") from error
        response: aiohttp.ClientResponse = answer.response
        if response.status < 300:
            return response
        try:
            text = await response.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"no whole answer to {method} {path}: {_words(error)}") from error
        finally:
            response.release()
        try:
            status = json.loads(text)
        except ValueError:
            status = {"message": text.decode(errors="replace").strip()[:500]}
        refusal = _refusal(status, response.status)
        if response.status >= 500 or response.status == 429:
            raise Unreachable(f"cannot {method} {path}: {refusal}") from refusal
        raise refusal


async def _load(kubeconfig: Path, configuration: Any) -> None:
    await config.load_kube_config(config_file=str(kubeconfig), client_configuration=configuration, persist_config=False)


def _reread(kubeconfig: Path) -> Callable[[Any], Awaitable[None]]:
    """A hook that reads the file (and a token file that it names) again, at most each minute; keeps what it has if that
    fails.
    """
    read_at = time.monotonic()

    async def reread(configuration: Any) -> None:
        nonlocal read_at
        if time.monotonic() - read_at < _TOKEN_PERIOD_S:
            return
        read_at = time.monotonic()
        with contextlib.suppress(Exception):  # half written, for instance
            await _load(kubeconfig, configuration)

    return reread


def _refusal(status: object, code: int) -> Refused:
    fields = status if isinstance(status, Mapping) else {}
    return Refused(int(fields.get("code") or code), str(fields.get("reason") or ""), str(fields.get("message") or ""))


def _parse(text: bytes, path: str) -> Json:
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise Unreachable(f"the answer for {path} is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise Unreachable(f"the answer for {path} is not an object")
    return parsed


def _words(error: BaseException) -> str:
    """aiohttp's and asyncio's timeouts have no text of their own."""
    return str(error) or type(error).__name__


async def backoff(attempt: int, *, first_s: float = 0.25, longest_s: float = 15.0) -> None:
    """Waits before the `attempt`-th try (from 1): twice as long each time, at random between half and all of it."""
    longest = min(longest_s, first_s * 2 ** min(attempt - 1, 16))
    await asyncio.sleep(longest * random.uniform(0.5, 1.0))  # noqa: S311 - spreads load, nothing secret
