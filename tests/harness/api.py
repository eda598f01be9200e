"""Plain client of one API server: requests with plain dicts, and watches.

Small on purpose: tests should not read the cluster through the client library that they test. The server's certificate
is always checked.

Guarantees:
- Every request has a timeout.
- A refusal is an ApiError with the server's own Status.
- A request is repeated once if the server closed a kept-alive connection without an answer.
- An `Api` may be used from several threads; each has its own connection.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from harness.errors import HarnessError

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
JSON_PATCH = "application/json-patch+json"
APPLY = "application/apply-patch+yaml"

Object = dict[str, Any]


class ApiError(HarnessError):
    """Refusal of a call by the API server. `code`: the HTTP status; `reason` and `message`: from its Status object."""

    def __init__(self, request: str, code: int, body: bytes) -> None:
        try:
            status = json.loads(body)
        except ValueError:
            status = {}
        self.code = code
        self.reason: str = status.get("reason", "")
        self.message: str = status.get("message", body.decode(errors="replace"))
        self.details: Object = status.get("details") or {}
        super().__init__(f"{request}: {code} {self.reason}: {self.message}")


class _Connection(http.client.HTTPSConnection):
    """Connection of one thread. It is closed when the thread has ended or its `Api` is deleted."""

    def __del__(self) -> None:
        self.close()


class Api:
    """Access of one user to one API server, by bearer token."""

    def __init__(self, server: str, ca: Path, token: str) -> None:
        self.server = server
        self._host = urlsplit(server).netloc
        self._headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        self._tls = ssl.create_default_context(cafile=str(ca))
        self._own = threading.local()

    def _connect(self, timeout: float) -> http.client.HTTPSConnection:
        connection = _Connection(self._host, timeout=timeout, context=self._tls)
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        timeout: float = 30.0,
    ) -> Any:
        """Make one request; return the decoded answer (text if it is not JSON). Raises ApiError if refused, OSError if
        the server cannot be reached."""
        target = f"{path}?{urlencode(query)}" if query else path
        content = None if body is None else json.dumps(body).encode()
        headers = self._headers if body is None else self._headers | {"Content-Type": content_type}
        connection: http.client.HTTPSConnection | None = getattr(self._own, "connection", None)
        for fresh in (connection is None, True):
            if fresh or connection is None:
                connection = self._connect(timeout)
                self._own.connection = connection
            connection.sock.settimeout(timeout)
            try:
                connection.request(method, target, content, headers)
                response = connection.getresponse()
                answer = response.read()
                break
            except (http.client.RemoteDisconnected, ConnectionError, ssl.SSLError):
                self._drop()
                if fresh:
                    raise
            except BaseException:
                self._drop()
                raise
        if response.will_close:
            self._drop()
        if response.status >= 400:
            raise ApiError(f"{method} {target}", response.status, answer)
        if response.headers.get_content_type() != "application/json":
            return answer.decode()
        return json.loads(answer)

    def _drop(self) -> None:
        connection = getattr(self._own, "connection", None)
        self._own.connection = None
        if connection is not None:
            connection.close()

    def get(self, path: str, **query: str) -> Any:
        return self.request("GET", path, query=query)

    def create(self, path: str, body: Object, **query: str) -> Object:
        created: Object = self.request("POST", path, body, query=query)
        return created

    def patch(self, path: str, body: object, *, content_type: str = MERGE) -> Object:
        patched: Object = self.request("PATCH", path, body, content_type=content_type)
        return patched

    def apply(self, path: str, body: Object, *, manager: str = "harness") -> Object:
        """Apply `body` to the object at `path` (server-side apply); conflicts with other managers are overridden."""
        query = {"fieldManager": manager, "force": "true"}
        applied: Object = self.request("PATCH", path, body, query=query, content_type=APPLY)
        return applied

    def delete(self, path: str, *, grace: int | None = None, uid: str | None = None, orphan: bool = False) -> Any:
        """Delete an object.

        Args:
            path: Of the object.
            grace: Seconds that a pod has to end.
            uid: Precondition (409 if another object now has the name).
            orphan: Keep its dependents.
        """
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        if orphan:
            options["propagationPolicy"] = "Orphan"
        return self.request("DELETE", path, options)

    def watch(self, path: str, *, timeout: float = 300.0, **query: str) -> Watch:
        """Return a watch from the `resourceVersion` in `query`. It ends by itself after `timeout` seconds."""
        return Watch(self, path, query | {"watch": "true", "timeoutSeconds": str(int(timeout))}, timeout + 10)

    def ready(self) -> bool:
        """Return whether the server reports itself ready."""
        try:
            return bool(self.request("GET", "/readyz", timeout=5.0) == "ok")
        except (OSError, http.client.HTTPException, ApiError):
            return False


class Watch:
    """Iterator over the events of a watch. It ends when the server ends the watch, or `close` is called from any
    thread."""

    def __init__(self, api: Api, path: str, query: Mapping[str, str], timeout: float) -> None:
        self._connection = api._connect(timeout)
        target = f"{path}?{urlencode(query)}"
        self._connection.request("GET", target, headers=api._headers)
        self._socket = self._connection.sock
        self._response = self._connection.getresponse()
        if self._response.status >= 400:
            raise ApiError(f"GET {target}", self._response.status, self._response.read())

    def __iter__(self) -> Iterator[Object]:
        # http.client raises AttributeError if another thread closes the connection that is being read
        with suppress(OSError, http.client.HTTPException, ValueError, AttributeError):
            while line := self._response.readline():
                yield json.loads(line)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._connection.close()
