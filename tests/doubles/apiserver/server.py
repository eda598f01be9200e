"""The double over HTTP: routes, content types, pages, watch streams, and faults on demand."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from . import patches
from .errors import Refused, bad_request, expired
from .kinds import KINDS, Json, Kind
from .storage import Storage


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

    `hold`: the call waits until this is set, before it takes effect. `refusal`: the answer instead of an effect.
    `lose_answer`: the call takes effect and the connection is cut before its answer.
    """

    matches: Callable[[Call], bool]
    times: int = 1
    hold: asyncio.Event | None = None
    refusal: Refused | None = None
    lose_answer: bool = False


@dataclass(slots=True)
class ApiServer:
    """An API server in memory. Tests write through `storage`, clients through HTTP at `url`."""

    storage: Storage = field(default_factory=Storage)
    url: str = ""
    calls: list[Call] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    disrupted: set[tuple[str, str]] = field(default_factory=set)
    """Pods (namespace, name) whose eviction a PodDisruptionBudget forbids."""
    _kinds: dict[str, Kind] = field(default_factory=lambda: {kind.plural: kind for kind in KINDS})
    _watches: set[asyncio.Event] = field(default_factory=set)
    _bookmarks: set[asyncio.Event] = field(default_factory=set)

    def kind(self, plural: str) -> Kind:
        return self._kinds[plural]

    def fail(self, verb: str, plural: str, **fault: Any) -> Fault:
        """Let a fault befall the next calls of this verb to this resource; returns the fault."""
        made = Fault(lambda call: (call.verb, call.kind.plural) == (verb, plural), **fault)
        self.faults.append(made)
        return made

    def cut_watches(self) -> None:
        """End all watches, as a server does that restarts."""
        for watch in self._watches:
            watch.set()

    def made(self, verb: str, plural: str) -> list[Call]:
        """The calls of this verb to this resource so far."""
        return [call for call in self.calls if (call.verb, call.kind.plural) == (verb, plural)]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        try:
            call = self._parse(request, await request.read())
            self.calls.append(call)
            fault = self._fault(call)
            if fault is not None and fault.hold is not None:
                await fault.hold.wait()
            if fault is not None and fault.refusal is not None:
                raise fault.refusal
            if call.verb == "watch":
                return await self._watch(request, call)
            answer, code = self._do(call)
            if fault is not None and fault.lose_answer:
                assert request.transport is not None
                request.transport.close()
            return web.json_response(answer, status=code)
        except Refused as refused:
            return web.json_response(refused.status(), status=refused.code)

    def _parse(self, request: web.Request, body: bytes) -> Call:
        for kind in KINDS:
            rest = request.path.removeprefix(f"{kind.prefix}/")
            if rest == request.path:
                continue
            parts = rest.split("/")
            namespace = parts.pop(1) if parts[0] == "namespaces" and len(parts) > 2 else ""
            if namespace:
                parts.pop(0)
            if parts[0] != kind.plural or len(parts) > 3:
                continue
            name, subresource = [*parts[1:], "", ""][:2]
            try:
                content = json.loads(body) if body else None
            except ValueError as error:
                raise bad_request(f"the object provided is unrecognized: {error}") from None
            query = dict(request.query)
            verb = _verb(request.method, name, subresource, query)
            return Call(verb, kind, namespace, name, subresource, query, request.content_type, content)
        raise Refused(404, "NotFound", "the server could not find the requested resource")

    def _fault(self, call: Call) -> Fault | None:
        for fault in self.faults:
            if fault.times > 0 and fault.matches(call):
                fault.times -= 1
                return fault
        return None

    def _do(self, call: Call) -> tuple[Json, int]:
        kind, where = call.kind, (call.namespace, call.name)
        match call.verb:
            case "get":
                return self.storage.get(kind, *where), 200
            case "list":
                return self._list(call), 200
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

    def _list(self, call: Call) -> Json:
        """One page. A later page is of the same moment as the first; its token ends when the changes are compacted."""
        query, kind = call.query, call.kind
        selected = self.storage.select(kind, call.namespace, *_selectors(query))
        start, version = 0, self.storage.version
        if token := query.get("continue"):
            start, version = json.loads(base64.b64decode(token))
            try:
                self.storage.changes(kind, "", version, "", "")
            except Refused:
                raise expired(
                    "the provided continue parameter is too old to display a consistent list result"
                ) from None
        limit = int(query.get("limit") or 0) or len(selected)
        metadata: Json = {"resourceVersion": str(version)}
        if start + limit < len(selected):
            metadata["continue"] = base64.b64encode(json.dumps([start + limit, version]).encode()).decode()
        items = selected[start : start + limit]
        return {"apiVersion": kind.api_version, "kind": f"{kind.kind}List", "metadata": metadata, "items": items}

    def _patch(self, call: Call) -> Json:
        kind, body, status = call.kind, call.body, call.subresource == "status"
        where = (call.namespace, call.name)
        if call.content == "application/json-patch+json":
            return self.storage.update(kind, *where, lambda item: patches.json_patch(item, body), status=status)
        if call.content == "application/merge-patch+json":
            return self.storage.update(kind, *where, lambda item: patches.merge_patch(item, body), status=status)
        if call.content == "application/apply-patch+yaml":
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
            self.storage.delete(kind, *where, asked["uid"])  # refuses
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

    async def _watch(self, request: web.Request, call: Call) -> web.StreamResponse:
        """Stream events until the client's timeout, a cut, or an error; a bookmark after each batch, if asked for."""
        kind, query = call.kind, call.query
        since = int(query.get("resourceVersion") or self.storage.version)
        self.storage.changes(kind, call.namespace, since, *_selectors(query))  # 410 before the stream begins
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        cut = asyncio.Event()
        self._watches.add(cut)
        try:
            async with asyncio.timeout(float(query.get("timeoutSeconds") or 300)):
                ending = asyncio.create_task(cut.wait())
                while not cut.is_set():
                    events = self.storage.changes(kind, call.namespace, since, *_selectors(query))
                    since = self.storage.version
                    for name, item in events:
                        await _send(response, {"type": name, "object": item})
                    if query.get("allowWatchBookmarks") == "true":
                        mark = {"kind": kind.kind, "metadata": {"resourceVersion": str(since)}}
                        await _send(response, {"type": "BOOKMARK", "object": mark})
                    waiting = asyncio.create_task(self.storage.wait(since))
                    await asyncio.wait([waiting, ending], return_when=asyncio.FIRST_COMPLETED)
                    waiting.cancel()
                ending.cancel()
        except Refused as refused:
            await _send(response, {"type": "ERROR", "object": refused.status()})
        except (TimeoutError, ConnectionError):
            pass
        finally:
            self._watches.discard(cut)
        with contextlib.suppress(ConnectionError):
            await response.write_eof()
        return response


def _verb(method: str, name: str, subresource: str, query: dict[str, str]) -> str:
    if method == "GET":
        return "get" if name else "watch" if query.get("watch") == "true" else "list"
    if method == "POST":
        return "evict" if subresource == "eviction" else "post" if name else "create"
    return {"PUT": "update", "PATCH": "patch", "DELETE": "delete"}.get(method, method.lower())


def _selectors(query: dict[str, str]) -> tuple[str, str]:
    return query.get("labelSelector", ""), query.get("fieldSelector", "")


async def _send(response: web.StreamResponse, event: Json) -> None:
    await response.write(json.dumps(event).encode() + b"\n")


@asynccontextmanager
async def api_server() -> AsyncIterator[ApiServer]:
    """A running double; its watches end with it."""
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
