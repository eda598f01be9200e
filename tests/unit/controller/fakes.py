"""API server that keeps objects in memory, slow or silent on demand. It does what the operator's own logic needs.

It keeps the guarantees on which the operator relies: one resourceVersion for all objects, `generation` counts changes
of spec, preconditions, and a JSON Patch whose `test` fails has no effect.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable
from typing import Any

from sharepod.controller.apiserver.client import Resource
from sharepod.kube import AlreadyExistsError, ConflictError, InvalidError, Json, NotFoundError, UnavailableError


async def _at_once(_call: str) -> None:
    return None


class FakeServer:
    """Objects by plural, namespace and name. `before` runs before each call takes effect, `after` before its answer is
    received: either may wait, or raise `UnavailableError`. `on_write` is called with each new state.
    """

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Json] = {}
        self.before: Callable[[str], Awaitable[None]] = _at_once
        self.after: Callable[[str], Awaitable[None]] = _at_once
        self.on_write: Callable[[str, Json], None] = lambda kind, item: None
        self._version = 0

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Json:
        await self.before("get")
        item = copy.deepcopy(self._find(resource, name, namespace))
        await self.after("get")
        return item

    async def create(
        self,
        resource: Resource,
        body: Json,
        namespace: str | None = None,
        *,
        strict: bool = False,
        timeout_s: float | None = None,
    ) -> Json:
        await self.before("create")
        key = (resource.plural, namespace or "", body["metadata"]["name"])
        if key in self.objects:
            raise AlreadyExistsError("create", 409, "AlreadyExists", "exists")
        item = copy.deepcopy(body)
        item["metadata"] |= {"uid": f"uid-{self._version}", "generation": 1}
        answer = self._store(key, item)
        await self.after("create")
        return answer

    async def replace(self, resource: Resource, name: str, body: Json, namespace: str | None = None) -> Json:
        await self.before("replace")
        known = self._find(resource, name, namespace)
        if body["metadata"].get("resourceVersion") != known["metadata"]["resourceVersion"]:
            raise ConflictError("replace", 409, "Conflict", "has changed")
        item = copy.deepcopy(body)
        item["metadata"] = copy.deepcopy(known["metadata"])
        answer = self._store((resource.plural, namespace or "", name), item)
        await self.after("replace")
        return answer

    async def patch_json(
        self, resource: Resource, name: str, operations: list[Json], namespace: str | None = None
    ) -> Json:
        await self.before("patch")
        item = copy.deepcopy(self._find(resource, name, namespace))
        spec = copy.deepcopy(item.get("spec"))
        for operation in operations:
            _apply(item, operation)
        if item.get("spec") != spec:
            item["metadata"]["generation"] += 1
        answer = self._store((resource.plural, namespace or "", name), item)
        await self.after("patch")
        return answer

    def _find(self, resource: Resource, name: str, namespace: str | None) -> Json:
        try:
            return self.objects[(resource.plural, namespace or "", name)]
        except KeyError:
            raise NotFoundError("get", 404, "NotFound", name) from None

    def _store(self, key: tuple[str, str, str], item: Json) -> Json:
        self._version += 1
        item["metadata"]["resourceVersion"] = str(self._version)
        self.objects[key] = item
        self.on_write(key[0], copy.deepcopy(item))
        return copy.deepcopy(item)


def unavailable() -> UnavailableError:
    """Return the error of a call that got no answer in time."""
    return UnavailableError("call", 0, "TimeoutError", "no answer in time")


def _apply(item: Any, operation: Json) -> None:
    """Apply one operation of RFC 6902 to objects and lists."""
    *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
    for part in parents:
        item = item[int(part)] if isinstance(item, list) else item[part]
    kind, value = operation["op"], operation.get("value")
    key: Any = last
    if isinstance(item, list) and last != "-":
        key = int(last)
        if key >= len(item):
            raise InvalidError("patch", 422, "Invalid", f"no {operation['path']}")
    if kind == "test":
        if item[key] != value:
            raise InvalidError("patch", 422, "Invalid", f"testing {operation['path']} failed")
    elif kind == "remove":
        del item[key]
    elif isinstance(item, list) and kind == "add":
        item.insert(len(item) if last == "-" else key, value)
    else:
        item[key] = value
