"""`page`: HTTP server on the loopback address. It shows GPUs and tenants to the user who started it.

Guarantees:
- Content is sent only for requests with the token of the URL, and with the server's own address as Host.
- The page loads nothing from elsewhere and runs its own script only, by a content security policy with hashes.
- However many browsers are open, the API server is read once every `EVERY_S`, and only by the user's own kubectl.
- The server ends with the command, by Ctrl-C.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from socketserver import TCPServer
from typing import NoReturn

from kubectl_sharepod.kubectl import ForbiddenError, Json, Kubectl, KubectlError
from kubectl_sharepod.page.content import History, content
from kubectl_sharepod.reading import Scope, sharepods, workloads
from kubectl_sharepod.views import now

EVERY_S = 5.0
"""Seconds between two reads of the API server. Agents report the usage of the last 10 s."""
ADDRESS = "127.0.0.1"
_IDLE_S = 10
"""Seconds after which a connection without a request is closed."""
_CLOSED = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


class Reading:
    """Reader of the page's content. Keeps the newest content."""

    def __init__(self, scope: Scope, note: str = "") -> None:
        self._scope, self._note = scope, note
        self._history = History(EVERY_S)
        self._found: Json = {}
        self.body = b""
        """Newest content, as JSON for the page's script."""

    def read(self) -> None:
        """Read and replace the content. Raise `KubectlError`."""
        seen, moment = workloads(self._scope), now()
        self._history.add(moment.timestamp(), seen.found, seen.fleet)
        self._found = content(seen, self._history, moment, self._scope.namespace)
        self._found["notes"] += [self._note] if self._note else []
        self._show("")

    def run(self) -> NoReturn:
        """Read every `EVERY_S` until Ctrl-C. If a read fails, the page shows the error above the last content. Raise
        `KeyboardInterrupt`."""
        while True:
            time.sleep(EVERY_S)
            try:
                self.read()
            except KubectlError as error:
                self._show(str(error))

    def _show(self, problem: str) -> None:
        self.body = json.dumps({"every": EVERY_S, "problem": problem, **self._found}).encode()


def scope_of(kubectl: Kubectl, namespace: str | None, *, every: bool) -> tuple[Scope, str]:
    """Return the scope of the page, and a note for the user if that is not the whole cluster. Raise `KubectlError`.

    With neither a namespace nor `every`, the scope is all namespaces if the user may list SharePods there, else the
    namespace of the context.
    """
    if every:
        return Scope(kubectl, None), ""
    if namespace is None:
        try:
            sharepods(Scope(kubectl, None))
        except ForbiddenError:
            namespace = kubectl.namespace()
            return Scope(kubectl, namespace), f"Only SharePods of namespace {namespace}: others you may not list."
        return Scope(kubectl, None), ""
    return Scope(kubectl, namespace), f"Only SharePods of namespace {namespace}."


def serve(scope: Scope, note: str, port: int, announce: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C. `announce`: called with its URL. Raise `KubectlError`."""
    reading = Reading(scope, note)
    reading.read()
    with served(lambda: reading.body, port) as url, suppress(KeyboardInterrupt):
        announce(url)
        reading.run()


@contextmanager
def served(body: Callable[[], bytes], port: int = 0) -> Iterator[str]:
    """Serve the page and its content while the block lasts. Yield the URL. `port`: 0: any free port. Raise
    `KubectlError`."""
    token = secrets.token_urlsafe(24)
    html = files(__package__).joinpath("page.html").read_bytes()
    try:
        server = _Server(token, html, body, port)
    except OSError as error:
        raise KubectlError(f"cannot listen on {ADDRESS}:{port}: {error.strerror}; name another --port") from None
    answering = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="page")
    answering.start()
    try:
        yield f"http://{ADDRESS}:{server.server_port}/{token}/"
    finally:
        server.shutdown()
        answering.join()
        server.server_close()


def policy(html: bytes) -> str:
    """Return the content security policy that allows only the page's own style and script, and calls of this server."""
    digests: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _CLOSED.findall(html.decode()):
        digests[kind].append(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'")
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(digests['script'])}",
            f"style-src {' '.join(digests['style'])}",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def server_bind(self) -> None:
        """Bind the socket without the name lookup that `HTTPServer` makes."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.server_address[1]

    def handle_error(self, request: object, client_address: object) -> None:
        """Print errors, except if the browser has closed its connection."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def __init__(self, token: str, html: bytes, body: Callable[[], bytes], port: int) -> None:
        super().__init__((ADDRESS, port), _Handler)
        self.hosts = {f"{name}:{self.server_port}" for name in (ADDRESS, "localhost")}
        self.prefix = f"/{token}/"
        self.pages: dict[str, tuple[str, Callable[[], bytes]]] = {
            "": ("text/html; charset=utf-8", lambda: html),
            "fleet.json": ("application/json", body),
        }
        self.headers = {
            "Cache-Control": "no-store",
            "Content-Security-Policy": policy(html),
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "kubectl-sharepod", ""
    timeout = _IDLE_S
    server: _Server

    def do_GET(self) -> None:
        if self.headers.get("Host", "").lower() not in self.server.hosts:
            return self._answer(403, "text/plain", b"This server answers to its own address only.\n")
        given, prefix = self.path.encode(), self.server.prefix.encode()
        rest = self.path[len(prefix) :]
        if not hmac.compare_digest(given[: len(prefix)], prefix) or rest not in self.server.pages:
            return self._answer(404, "text/plain", b"Open the URL that kubectl sharepod page printed.\n")
        kind, body = self.server.pages[rest]
        return self._answer(200, kind, body())

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing, as the path of a request contains the token."""
