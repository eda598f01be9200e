"""The API server, as the operator speaks to it.

Guarantees: bodies and answers are plain dicts; every call names its timeout and its content type; every failure is one
of the errors below, so that a caller can tell "refused" from "outcome unknown" (`Unavailable`); a write is refused
with `NotLeadingError` before it leaves this process once `may_write` says no.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote, urlencode

import aiohttp
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from sharepod.api import gpunode, objects, sharepod

Json = dict[str, Any]

_JSON_PATCH = "application/json-patch+json"
_MERGE_PATCH = "application/merge-patch+json"
_APPLY = "application/apply-patch+yaml"
_WATCH_SECONDS = 300
_WATCH_SILENCE = 90.0  # the API server sends a bookmark each minute
_LINE_LIMIT = 1 << 22


class ApiError(Exception):
    """The API server refused. `status` is the HTTP status, `message` the server's own words."""

    def __init__(self, call: str, status: int, reason: str, message: str) -> None:
        super().__init__(f"{call}: {status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message


class ForbiddenError(ApiError):
    """403: RBAC, a quota or an admission policy."""


class NotFoundError(ApiError):
    """404."""


class ConflictError(ApiError):
    """409: a precondition does not hold, the object has changed."""


class AlreadyExistsError(ApiError):
    """409 on create."""


class GoneError(ApiError):
    """410: the resource version is too old to go on from."""


class InvalidError(ApiError):
    """400 or 422: the object or the patch is not accepted, and would not be if sent again."""


class UnavailableError(ApiError):
    """No answer, or one that says try again later. What became of a write is unknown."""


class NotLeadingError(Exception):
    """This process is not, or no longer, the leader: it must not write."""


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object; `prefix` is the path of its group and version."""

    prefix: str
    plural: str

    def path(self, name: str | None = None, namespace: str | None = None, subresource: str | None = None) -> str:
        """Path of the collection, of one object, or of its subresource."""
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


async def configuration(kubeconfig: Path | None) -> Configuration:
    """How to reach the API server: by a kubeconfig, else by the ServiceAccount of the pod this runs in.

    Raises `ConnectionError` with what to do when there is neither.
    """
    config = Configuration()
    try:
        if kubeconfig is not None:
            await load_kube_config(config_file=str(kubeconfig), client_configuration=config, persist_config=False)
        else:
            load_incluster_config(client_configuration=config)
    except (ConfigException, OSError) as error:
        where = (
            f"kubeconfig {kubeconfig}"
            if kubeconfig
            else "no ServiceAccount of a pod, and no kubeconfig in the settings"
        )
        raise ConnectionError(f"{where}: {error}") from None
    return config


class Client:
    """One user's connection to one API server.

    Every method raises an `ApiError`; the writing ones also `NotLeadingError`.
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
        self._api = ApiClient(config)
        self._host = str(config.host).rstrip("/")
        self._read_timeout = read_timeout
        self._write_timeout = write_timeout
        self._page_size = page_size
        self._may_write = may_write

    async def close(self) -> None:
        """Closes all connections."""
        await self._api.close()

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Json:
        """One object."""
        return await self._call("GET", resource.path(name, namespace))

    async def list_all(
        self, resource: Resource, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> tuple[list[Json], str]:
        """All objects, page by page, and the version to watch from. A list that expires half way begins anew."""
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
        """Creates an object; `strict` refuses unknown and doubled fields instead of dropping them."""
        query = {"fieldValidation": "Strict"} if strict else {}
        return await self._call("POST", resource.path(namespace=namespace), body, query=query)

    async def patch_json(
        self, resource: Resource, name: str, operations: list[Json], namespace: str | None = None
    ) -> Json:
        """A JSON Patch. A `test` that does not hold raises `Invalid`, as a malformed patch does."""
        return await self._call("PATCH", resource.path(name, namespace), operations, content=_JSON_PATCH)

    async def patch_status(self, resource: Resource, name: str, body: Json, namespace: str | None = None) -> Json:
        """A merge patch of the status subresource. uid and resourceVersion in `metadata` are preconditions
        (`Conflict`).
        """
        return await self._call("PATCH", resource.path(name, namespace, "status"), body, content=_MERGE_PATCH)

    async def apply_status(self, resource: Resource, name: str, body: Json, namespace: str | None = None) -> Json:
        """Server-side apply to the status subresource: sets the fields in `body` and leaves those of others alone."""
        query = {"fieldManager": "sharepod-operator", "force": "true"}
        return await self._call("PATCH", resource.path(name, namespace, "status"), body, query=query, content=_APPLY)

    async def replace(self, resource: Resource, name: str, body: Json, namespace: str | None = None) -> Json:
        """Replaces an object; the resourceVersion in `body` is a precondition (`Conflict`)."""
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
        """Deletes just this object, in just this version if one is given (else `Conflict`)."""
        preconditions = {"uid": uid} | ({"resourceVersion": resource_version} if resource_version else {})
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": preconditions}
        await self._call("DELETE", resource.path(name, namespace), body)

    async def evict(self, name: str, namespace: str, *, uid: str) -> None:
        """Asks just this pod to go, by the Eviction API. Where a PodDisruptionBudget forbids it: `Unavailable` with
        status 429.
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
        """Events (`{"type", "object"}`, bookmarks included) from a resource version until the server ends the watch.

        Raises `Gone` when the version is too old, `Unavailable` when nothing came for longer than the server's
        bookmarks take.
        """
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": since,
            "timeoutSeconds": str(_WATCH_SECONDS),
            **_selectors(labels, fields),
        }
        call = f"WATCH {resource.path(namespace=namespace)}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._read_timeout, sock_read=_WATCH_SILENCE)
        try:
            response = await self._send(
                "GET", resource.path(namespace=namespace), None, query, "application/json", timeout
            )
            async with response:
                if response.status >= 400:
                    raise _refusal(call, response.status, await response.read())
                async for line in _lines(response):
                    event = cast(Json, json.loads(line))
                    if event["type"] == "ERROR":
                        raise _refusal(
                            call, int(event["object"].get("code", 500)), json.dumps(event["object"]).encode()
                        )
                    yield event
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise UnavailableError(call, 0, type(error).__name__, str(error)) from error

    async def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        content: str = "application/json",
    ) -> Json:
        if method != "GET" and not self._may_write():
            raise NotLeadingError(f"{method} {path}: not the leader")
        timeout = aiohttp.ClientTimeout(total=self._read_timeout if method == "GET" else self._write_timeout)
        call = f"{method} {path}"
        try:
            response = await self._send(method, path, body, query or {}, content, timeout)
            async with response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnavailableError(call, 0, type(error).__name__, str(error) or "no answer in time") from error
        if response.status >= 400:
            raise _refusal(call, response.status, answer)
        try:
            return cast(Json, json.loads(answer))
        except ValueError as error:
            raise UnavailableError(call, response.status, "NotJson", str(error)) from None

    async def _send(
        self, method: str, path: str, body: Any, query: Mapping[str, str], content: str, within: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        headers = {"Accept": "application/json", "Content-Type": content, "User-Agent": "sharepod-operator"}
        await self._api.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        url = f"{self._host}{path}?{urlencode(query)}" if query else f"{self._host}{path}"
        answer = await self._api.call_api(method, url, header_params=headers, body=body, _request_timeout=within)
        return cast(aiohttp.ClientResponse, answer.response)


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Lines of any length: a watch event may be larger than the reader's buffer."""
    rest = b""
    async for chunk in response.content.iter_any():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            if line:
                yield line
        if len(rest) > _LINE_LIMIT:
            raise ValueError(f"a watch event of more than {_LINE_LIMIT} bytes")


def _selectors(labels: str, fields: str) -> dict[str, str]:
    return ({"labelSelector": labels} if labels else {}) | ({"fieldSelector": fields} if fields else {})


def _refusal(call: str, status: int, answer: bytes) -> ApiError:
    try:
        said = json.loads(answer)
        reason, message = str(said.get("reason", "")), str(said.get("message", ""))
    except (ValueError, AttributeError):
        reason, message = "", answer[:500].decode(errors="replace")
    kinds: dict[int, type[ApiError]] = {
        400: InvalidError,
        403: ForbiddenError,
        404: NotFoundError,
        409: AlreadyExistsError if reason == "AlreadyExists" else ConflictError,
        410: GoneError,
        413: InvalidError,
        415: InvalidError,
        422: InvalidError,
    }
    return kinds.get(status, UnavailableError)(call, status, reason, message)
