"""The double over HTTP: routes, content types, pages, watch streams, and the faults that a test requests."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from . import discovery, patches
from .delays import Delays
from .errors import Refused, bad_request, expired
from .kinds import KINDS, Json, Kind
from .storage import Change, Storage

_APPLY = "application/apply-patch+yaml"
_LISTS = 16
"""Largest number of lists that clients can read page by page at the same time: more than a test has clients."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request as it arrived. `verb`: get, list, watch, create, update, patch, delete, evict."""

    verb: str
    kind: Kind
    namespace: str
    name: str
    subresource: str
    query: dict[str, str]
    content: str
    body: Any


@dataclass(slots=True)
class Fault:
    """Fault of the next `times` calls that match.

    - `hold`: the call waits until this event is set, before it takes effect.
    - `refusal`: the call has no effect, and this is its answer.
    - `lose_answer`: the call takes effect, and the connection is closed before its answer.
    - `hold_answer`: the call takes effect, and its answer is sent after this event is set.
    """

    matches: Callable[[Call], bool]
    times: int = 1
    hold: asyncio.Event | None = None
    refusal: Refused | None = None
    lose_answer: bool = False
    hold_answer: asyncio.Event | None = None


@dataclass(slots=True, eq=False)
class Watching:
    """One open watch.

    - `since`: all events up to this version were sent.
    - `news`: set when there are more events to send.
    - `behind`: True if there may be events to send without waiting for `news`.
    - `cut`: True if the watch must end.
    - `words`: raw lines to send before the next events or the end.
    """

    kind: Kind
    since: int
    news: asyncio.Event = field(default_factory=asyncio.Event)
    behind: bool = True
    cut: bool = False
    error: Refused | None = None
    words: bytes = b""


@dataclass(slots=True)
class ApiServer:
    """API server in memory. Tests write directly to `storage`; clients use HTTP at `url`."""

    storage: Storage = field(default_factory=Storage)
    kinds: tuple[Kind, ...] = KINDS
    bookmark_s: float = 0.0
    """Seconds between two bookmarks of a watch that requests bookmarks; 0: a bookmark after each batch of events."""
    url: str = ""
    calls: list[Call] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    disrupted: set[tuple[str, str]] = field(default_factory=set)
    """Pods (namespace, name) whose eviction a PodDisruptionBudget forbids."""
    unserved: set[str] = field(default_factory=set)
    """Plurals of resources that are not served, because their CRD is not applied."""
    delays: Delays | None = None
    """Delays of calls before they take effect, of their answers, and of events; None: no delays."""
    silent: set[str] = field(default_factory=set)
    """Plurals of resources whose open watches send nothing more and do not end, like half-open connections."""
    _watches: set[Watching] = field(default_factory=set)
    _pages: dict[str, list[Json]] = field(default_factory=dict)
    """Remaining pages of lists, by token."""
    _tokens: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.storage.listeners.append(self._wake)

    def kind(self, plural: str) -> Kind:
        return next(kind for kind in self.kinds if kind.plural == plural)

    def _wake(self, change: Change) -> None:
        for watch in self._watches:
            if watch.kind is change.kind:
                watch.news.set()
            elif not watch.behind and not watch.news.is_set():
                watch.since = change.version

    def fail(self, verb: str, plural: str, **fault: Any) -> Fault:
        """Add a fault for the next calls of this verb to this resource; return it."""
        made = Fault(lambda call: (call.verb, call.kind.plural) == (verb, plural), **fault)
        self.faults.append(made)
        return made

    def cut_watches(self, plural: str | None = None, *, error: Refused | None = None) -> None:
        """End all watches, or only the watches of one resource, as a restarting server does. `error`: end them with
        this ERROR event."""
        for watch in self._watches:
            if plural in (None, watch.kind.plural):
                watch.cut, watch.error = True, error
                watch.news.set()

    def send_words(self, plural: str, words: bytes, *, ends: bool = False) -> None:
        """Send this text in all watches of one resource. `ends`: end these watches afterwards."""
        for watch in self._watches:
            if plural == watch.kind.plural:
                watch.words, watch.cut = words, ends
                watch.news.set()

    def made(self, verb: str, plural: str) -> list[Call]:
        """Return the calls of this verb to this resource so far."""
        return [call for call in self.calls if (call.verb, call.kind.plural) == (verb, plural)]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        try:
            body, query = await request.read(), dict(request.query)
            call = self.parse(request.method, request.path, query, request.content_type, body)
            if call is None:
                return web.json_response(self.discovered(request.path))
            self.calls.append(call)
            if call.kind.plural in self.unserved:
                raise Refused(404, "NotFound", "the server could not find the requested resource")
            fault = self._fault(call)
            await self._delayed()
            if fault is not None and fault.hold is not None:
                await fault.hold.wait()
            if fault is not None and fault.refusal is not None:
                raise fault.refusal
            if call.verb == "watch":
                return await self._stream(request, call)
            answer, code = self.do(call)
            await self._delayed()
            if fault is not None and fault.hold_answer is not None:
                await fault.hold_answer.wait()
            if fault is not None and fault.lose_answer:
                assert request.transport is not None
                request.transport.close()
            return web.Response(body=answer, status=code, content_type="application/json")
        except Refused as refused:
            headers = {"Retry-After": str(refused.retry_after)} if refused.retry_after is not None else None
            return web.json_response(refused.status(), status=refused.code, headers=headers)

    async def _delayed(self) -> None:
        if self.delays is not None:
            await self.delays.pass_by()

    def discovered(self, path: str) -> Json | None:
        """Return the answer to a discovery request. None for any other request."""
        return discovery.answer(path, self.kinds)

    def parse(self, method: str, path: str, query: dict[str, str], content: str, body: bytes) -> Call | None:
        """Return the call that a request makes; None for a discovery request. Raises `Refused`."""
        for kind in self.kinds:
            rest = path.removeprefix(f"{kind.prefix}/")
            if rest == path:
                continue
            parts = rest.split("/")
            namespace = parts.pop(1) if parts[0] == "namespaces" and len(parts) > 2 else ""
            if namespace:
                parts.pop(0)
            if parts[0] != kind.plural or len(parts) > 3:
                continue
            name, subresource = [*parts[1:], "", ""][:2]
            try:
                asked = _read(content, body)
            except ValueError as error:
                raise bad_request(f"the object provided is unrecognized: {error}") from None
            except yaml.YAMLError as error:
                raise bad_request(f"error decoding YAML: {error}") from None
            verb = _verb(method, name, subresource, query)
            return Call(verb, kind, namespace, name, subresource, query, content, asked)
        if self.discovered(path) is not None:
            return None
        raise Refused(404, "NotFound", "the server could not find the requested resource")

    def _fault(self, call: Call) -> Fault | None:
        for fault in self.faults:
            if fault.times > 0 and fault.matches(call):
                fault.times -= 1
                return fault
        return None

    def do(self, call: Call) -> tuple[bytes, int]:
        """Execute a call. Return its answer and HTTP status. Raises `Refused`."""
        if call.verb == "list":
            return self._list(call), 200
        answer, code = self._one(call)
        return self.storage.text(answer) if "metadata" in answer else json.dumps(answer).encode(), code

    def _one(self, call: Call) -> tuple[Json, int]:
        kind, where = call.kind, (call.namespace, call.name)
        match call.verb:
            case "get":
                return self.storage.get(kind, *where), 200
            case "create":
                return self.storage.create(kind, call.namespace, call.body), 201
            case "update":
                status = call.subresource == "status"
                return self.storage.update(kind, *where, lambda _: call.body, status=status), 200
            case "patch":
                return self._patch(call), 200
            case "delete":
                asked = (call.body or {}).get("preconditions") or {}
                return self.storage.delete(kind, *where, asked.get("uid"), asked.get("resourceVersion")), 200
            case "evict":
                return self._evict(call), 201
        raise Refused(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")

    def _list(self, call: Call) -> bytes:
        """Return one page of a list. Later pages show the objects as they were at the first page. A compaction makes
        the token of the next page invalid."""
        query, kind = call.query, call.kind
        if token := query.get("continue"):
            version = int(base64.b64decode(token).split(b".")[0])
            rest = self._pages.get(token)
            try:
                self.storage.changes(kind, "", version, "", "")
            except Refused:
                rest = None
            if rest is None:
                raise expired("the provided continue parameter is too old to display a consistent list result")
        else:
            version, rest = self.storage.version, self.storage.select(kind, call.namespace, *_selectors(query))
        limit = int(query.get("limit") or 0) or len(rest)
        items, rest = rest[:limit], rest[limit:]
        metadata: Json = {"resourceVersion": str(version)}
        if rest:
            metadata["continue"] = token = base64.b64encode(f"{version}.{next(self._tokens)}".encode()).decode()
            self._pages[token] = rest
            if len(self._pages) > _LISTS:
                del self._pages[next(iter(self._pages))]
        head = json.dumps({"apiVersion": kind.api_version, "kind": f"{kind.kind}List", "metadata": metadata})
        return b'%s,"items":[%s]}' % (head[:-1].encode(), b",".join(map(self.storage.text, items)))

    def _patch(self, call: Call) -> Json:
        kind, body, status = call.kind, call.body, call.subresource == "status"
        where = (call.namespace, call.name)
        if call.content == "application/json-patch+json":
            return self.storage.update(kind, *where, lambda item: patches.json_patch(item, body), status=status)
        if call.content == "application/merge-patch+json":
            return self.storage.update(kind, *where, lambda item: patches.merge_patch(item, body), status=status)
        if call.content == _APPLY:
            if not (manager := call.query.get("fieldManager")):
                raise bad_request("PatchOptions.meta.k8s.io is invalid: fieldManager: Required value")
            force = call.query.get("force") == "true"
            return self.storage.apply(kind, *where, body, manager, force=force, status=status)
        raise Refused(415, "UnsupportedMediaType", f"the body of the request was in an unknown format: {call.content}")

    def _evict(self, call: Call) -> Json:
        kind, where = call.kind, (call.namespace, call.name)
        asked = ((call.body or {}).get("deleteOptions") or {}).get("preconditions") or {}
        found = self.storage.get(kind, *where)
        if where in self.disrupted:
            raise Refused(429, "TooManyRequests", "Cannot evict pod as it would violate the pod's disruption budget.")
        if asked.get("uid") not in (None, found["metadata"]["uid"]):
            self.storage.delete(kind, *where, asked["uid"])  # raises Refused
        condition = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "EvictionByEvictionAPI",
            "message": "Eviction API: evicting",
        }

        def disrupt(item: Json) -> Json:
            item.setdefault("status", {}).setdefault("conditions", []).append(condition)
            return item

        self.storage.update(kind, *where, disrupt, status=True)
        self.storage.delete(kind, *where)
        return {"kind": "Status", "apiVersion": "v1", "status": "Success", "code": 201}

    async def _stream(self, request: web.Request, call: Call) -> web.StreamResponse:
        events = self.watch(call)
        first = await anext(events)  # a watch that starts too late gets 410 before the stream begins
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            await response.write(first)
            async for line in events:
                await self._delayed()
                await response.write(line)
            await response.write_eof()
        return response

    async def watch(self, call: Call) -> AsyncIterator[bytes]:
        """Yield the lines of a watch (with bookmarks, if the client requested them) until the client's timeout, a cut,
        or an error. The first value is empty, after the watch was accepted; else raises `Refused` (410).
        """
        kind, query, loop = call.kind, call.query, asyncio.get_running_loop()
        since = int(query.get("resourceVersion") or self.storage.version)
        self.storage.changes(kind, call.namespace, since, *_selectors(query))
        ends, marked = loop.time() + float(query.get("timeoutSeconds") or 300), -math.inf
        watching = Watching(kind, since)
        self._watches.add(watching)
        try:
            yield b""
            while not watching.cut:
                watching.news.clear()
                if watching.words:
                    yield watching.words
                    watching.words = b""
                if kind.plural in self.silent:
                    watching.behind = True
                    await watching.news.wait()
                    continue
                try:
                    events = self.storage.changes(kind, call.namespace, watching.since, *_selectors(query))
                except Refused as refused:
                    yield _line("ERROR", json.dumps(refused.status()).encode())
                    return
                watching.since, watching.behind = self.storage.version, False
                lines = [_line(name, self.storage.text(item)) for name, item in events]
                marks = query.get("allowWatchBookmarks") == "true" and watching.since >= since
                if marks and loop.time() >= marked + self.bookmark_s:
                    marked = loop.time()
                    mark = {"kind": kind.kind, "metadata": {"resourceVersion": str(watching.since)}}
                    lines.append(_line("BOOKMARK", json.dumps(mark).encode()))
                if lines:
                    yield b"".join(lines)
                until = min(ends, marked + self.bookmark_s) if self.bookmark_s else ends
                if not await _within(watching.news, until - loop.time()) and loop.time() >= ends:
                    if kind.plural in self.silent:
                        continue
                    return
            if watching.words:
                yield watching.words
            if watching.error is not None:
                yield _line("ERROR", json.dumps(watching.error.status()).encode())
        finally:
            self._watches.discard(watching)


async def _within(news: asyncio.Event, seconds: float) -> bool:
    """Wait until `news` is set, for this many seconds at most. Return True if it was set."""
    try:
        async with asyncio.timeout(seconds):
            await news.wait()
    except TimeoutError:
        return False
    return True


def _line(name: str, text: bytes) -> bytes:
    return b'{"type":"%s","object":%s}\n' % (name.encode(), text)


def _read(content: str, body: bytes) -> Any:
    """Return the object in a body. The body of a server-side apply is YAML. It is parsed as YAML only where JSON could
    give another result, because that is slow. Raises `ValueError` and `YAMLError`."""
    if content == _APPLY and (b"\\u" in body or not body.isascii()):
        return yaml.load(body, Loader=yaml.CSafeLoader)
    return json.loads(body) if body else None


def _verb(method: str, name: str, subresource: str, query: dict[str, str]) -> str:
    if method == "GET":
        return "get" if name else "watch" if query.get("watch") == "true" else "list"
    if method == "POST":
        return "evict" if subresource == "eviction" else "post" if name else "create"
    return {"PUT": "update", "PATCH": "patch", "DELETE": "delete"}.get(method, method.lower())


def _selectors(query: dict[str, str]) -> tuple[str, str]:
    return query.get("labelSelector", ""), query.get("fieldSelector", "")


@asynccontextmanager
async def api_server() -> AsyncIterator[ApiServer]:
    """Yield a running double. Its watches end with the block."""
    double = ApiServer()
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", double.handle)
    async with TestServer(application) as server:
        double.url = f"http://127.0.0.1:{server.port}"
        try:
            yield double
        finally:
            double.cut_watches()
            for fault in double.faults:
                if fault.hold is not None:
                    fault.hold.set()
