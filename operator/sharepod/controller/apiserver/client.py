"""Client of the API server: typed calls by resource, and writes only while this process leads.

Guarantees, besides those of `kube`:
- A write raises `NotLeadingError` before it leaves this process once `may_write` says no.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from kubernetes.aio.client import Configuration

from sharepod.api import gpunode, objects, sharepod
from sharepod.kube import APPLY_PATCH, JSON, JSON_PATCH, MERGE_PATCH, Connection, GoneError, Json


class NotLeadingError(Exception):
    """A write was tried by a process that is not, or no longer, the leader."""


@dataclass(frozen=True, slots=True)
class Resource:
    """Resource of the API server; `prefix` is the path of its group and version."""

    prefix: str
    plural: str

    def path(self, name: str | None = None, namespace: str | None = None, subresource: str | None = None) -> str:
        """Return the path of the collection, of one object, or of its subresource."""
        parts = [self.prefix]
        if namespace is not None:
            parts += ["namespaces", quote(namespace, safe="")]
        parts.append(self.plural)
        if name is not None:
            parts.append(quote(name, safe=""))
        if subresource is not None:
            parts.append(subresource)
        return "/".join(parts)


PODS = Resource("/api/v1", "pods")
NODES = Resource("/api/v1", "nodes")
EVENTS = Resource("/apis/events.k8s.io/v1", "events")
LEASES = Resource("/apis/coordination.k8s.io/v1", "leases")
PRIORITY_CLASSES = Resource("/apis/scheduling.k8s.io/v1", "priorityclasses")
SHAREPODS = Resource(f"/apis/{objects.API_VERSION}", sharepod.PLURAL)
GPUNODES = Resource(f"/apis/{objects.API_VERSION}", gpunode.PLURAL)


class Client:
    """Client of one API server. Every method raises an `ApiError`; the writing ones also `NotLeadingError`.

    Args:
        config: How to reach the API server.
        read_timeout: Seconds for one GET or one page of a list.
        write_timeout: Seconds for one write.
        page_size: Objects in one page of a list.
        may_write: Asked before each write.
    """

    def __init__(
        self,
        config: Configuration,
        *,
        read_timeout: float,
        write_timeout: float,
        page_size: int = 500,
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        self._api = Connection(config, "sharepod-operator")
        self._read_timeout = read_timeout
        self._write_timeout = write_timeout
        self._page_size = page_size
        self._may_write = may_write

    async def close(self) -> None:
        """Close all connections."""
        await self._api.close()

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Json:
        """Return one object, read live."""
        return await self._call("GET", resource.path(name, namespace))

    async def list_all(
        self, resource: Resource, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> tuple[list[Json], str]:
        """Return all objects, read page by page, and the version to watch from. A list that expires starts again."""
        for last in (False, False, True):
            items: list[Json] = []
            query = {"limit": str(self._page_size), **_selectors(labels, fields)}
            try:
                while True:
                    page = await self._call("GET", resource.path(namespace=namespace), query=query)
                    items += page.get("items") or ()
                    if not page["metadata"].get("continue"):
                        return items, page["metadata"].get("resourceVersion", "")
                    query["continue"] = page["metadata"]["continue"]
            except GoneError:
                if last:
                    raise
        raise AssertionError("unreachable")

    async def create(
        self, resource: Resource, body: Json, namespace: str | None = None, *, strict: bool = False
    ) -> Json:
        """Create an object; with `strict`, unknown and duplicate fields are refused instead of dropped."""
        query = {"fieldValidation": "Strict"} if strict else {}
        return await self._call("POST", resource.path(namespace=namespace), body, query=query)

    async def patch_json(
        self, resource: Resource, name: str, operations: list[Json], namespace: str | None = None
    ) -> Json:
        """Apply a JSON Patch. A `test` that does not hold raises `InvalidError`, as a malformed patch does."""
        return await self._call("PATCH", resource.path(name, namespace), operations, content=JSON_PATCH)

    async def patch_status(self, resource: Resource, name: str, body: Json, namespace: str | None = None) -> Json:
        """Merge a patch into the status. uid and resourceVersion in `metadata` are preconditions (`ConflictError`)."""
        return await self._call("PATCH", resource.path(name, namespace, "status"), body, content=MERGE_PATCH)

    async def apply_status(self, resource: Resource, name: str, body: Json, namespace: str | None = None) -> Json:
        """Apply `body` to the status, server-side: its fields are set, the fields of other managers stay."""
        query = {"fieldManager": "sharepod-operator", "force": "true"}
        return await self._call(
            "PATCH", resource.path(name, namespace, "status"), body, query=query, content=APPLY_PATCH
        )

    async def replace(self, resource: Resource, name: str, body: Json, namespace: str | None = None) -> Json:
        """Replace an object; the resourceVersion in `body` is a precondition (`ConflictError`)."""
        return await self._call("PUT", resource.path(name, namespace), body)

    async def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str | None = None,
        *,
        uid: str,
        resource_version: str | None = None,
    ) -> None:
        """Delete the object with this uid, in this version if one is given. Raises `ConflictError` if it is another."""
        preconditions = {"uid": uid} | ({"resourceVersion": resource_version} if resource_version else {})
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": preconditions}
        await self._call("DELETE", resource.path(name, namespace), body)

    async def evict(self, name: str, namespace: str, *, uid: str) -> None:
        """Evict the pod with this uid by the Eviction API.

        Raises `UnavailableError` with status 429 if a PodDisruptionBudget forbids it.
        """
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
            "deleteOptions": {"preconditions": {"uid": uid}},
        }
        await self._call("POST", PODS.path(name, namespace, "eviction"), body)

    async def watch(
        self, resource: Resource, namespace: str | None = None, *, since: str, labels: str = "", fields: str = ""
    ) -> AsyncIterator[Json]:
        """Yield events (`{"type", "object"}`, bookmarks included) from a version on until the server ends the watch.

        Raises `GoneError` if the version is too old, `UnavailableError` after a silence longer than the server's
        bookmarks take.
        """
        async for event in self._api.watch(resource.path(namespace=namespace), _selectors(labels, fields), since):
            yield event

    async def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        content: str = JSON,
    ) -> Json:
        if method != "GET" and not self._may_write():
            raise NotLeadingError(f"{method} {path}: not the leader")
        within = self._read_timeout if method == "GET" else self._write_timeout
        return await self._api.call(method, path, body, query=query, content=content, timeout_s=within)


def _selectors(labels: str, fields: str) -> dict[str, str]:
    return ({"labelSelector": labels} if labels else {}) | ({"fieldSelector": fields} if fields else {})
