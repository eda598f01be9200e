"""Client of the API server: typed calls by resource, and writes only while this process leads.

Guarantees, in addition to the guarantees of `kube`:
- While `may_write` returns False, every write, and every retry of a write, raises `NotLeadingError` and is not sent.
- While the API server does not serve a SharePod resource (CRD not installed), a GET fails with `UnavailableError`. So
  an object of that kind never counts as missing.
- A call that the API server refused before processing it (429, or 503 with Retry-After) is retried after the requested
  pause plus a random delay. An eviction is not retried, because for it 429 means that a PodDisruptionBudget forbids it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import quote

from kubernetes.aio.client import Configuration
from prometheus_client import Histogram

from sharepod.api import gpubudget, gpunode, objects, sharepod, statement
from sharepod.controller import metrics
from sharepod.kube import (
    APPLY_PATCH,
    JSON,
    JSON_PATCH,
    MERGE_PATCH,
    ApiError,
    Connection,
    Json,
    NotFoundError,
    PageTokens,
    TakeUnreadable,
    UnavailableError,
)

T = TypeVar("T")

_TRIES = 4
"""Largest number of tries of a call that the API server asks to retry. After the last try the call fails."""
_OTHER_HISTORY = "the API server's versions went back since it was asked"
LONGEST_WAIT_S = 30.0
"""Longest Retry-After, in seconds, that a call waits for. If the server asks for more, the call fails at once."""


class NotLeadingError(Exception):
    """A process that does not lead tried to write."""


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
NAMESPACES = Resource("/api/v1", "namespaces")
NODES = Resource("/api/v1", "nodes")
EVENTS = Resource("/apis/events.k8s.io/v1", "events")
LEASES = Resource("/apis/coordination.k8s.io/v1", "leases")
SHAREPODS = Resource(f"/apis/{objects.API_VERSION}", sharepod.PLURAL)
CONFIG_MAPS = Resource("/api/v1", "configmaps")
SECRETS = Resource("/api/v1", "secrets")
QUOTAS = Resource("/api/v1", "resourcequotas")
CLAIMS = Resource("/apis/resource.k8s.io/v1", "resourceclaims")
CLAIM_TEMPLATES = Resource("/apis/resource.k8s.io/v1", "resourceclaimtemplates")
POLICIES = Resource("/apis/admissionregistration.k8s.io/v1", "validatingadmissionpolicies")
POLICY_BINDINGS = Resource("/apis/admissionregistration.k8s.io/v1", "validatingadmissionpolicybindings")
WEBHOOKS = Resource("/apis/admissionregistration.k8s.io/v1", "mutatingwebhookconfigurations")
GPUNODES = Resource(f"/apis/{objects.API_VERSION}", gpunode.PLURAL)
GPUBUDGETS = Resource(f"/apis/{objects.API_VERSION}", gpubudget.PLURAL)
GPUSTATEMENTS = Resource(f"/apis/{objects.API_VERSION}", statement.STATEMENT_PLURAL)

_MISSED = (f"{SHAREPODS.prefix}/", f"{PODS.prefix}/")
"""Paths of SharePod's objects and of Pods. The operator acts on their absence, so a 404 because the resource is not
served must not count as absence."""


class Client:
    """Client of one API server. Every method that calls the server may raise an `ApiError`; a write may also raise
    `NotLeadingError`.

    Args:
        config: How to reach the API server.
        read_timeout: Seconds for one GET or one page of a list.
        write_timeout: Seconds for one write.
        page_size: Objects in one page of a list.
        may_write: Returns True while this process may write. Called before each write.
        tries: Largest number of tries of a call that the server asks to retry.
    """

    def __init__(
        self,
        config: Configuration,
        *,
        read_timeout: float,
        write_timeout: float,
        page_size: int = 500,
        may_write: Callable[[], bool] = lambda: True,
        tries: int = _TRIES,
    ) -> None:
        self._api = Connection(config, "sharepod-operator")
        self.read_timeout = read_timeout
        self._write_timeout = write_timeout
        self.page_size = page_size
        self._may_write = may_write
        self._tries = tries
        self._forgotten = 0

    async def close(self) -> None:
        """Close all connections."""
        await self._api.close()

    def forget(self) -> None:
        """Fail every call in flight. Called when the API server's versions went back (etcd restored): the answers would
        describe objects from before the restore.
        """
        self._forgotten += 1

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Json:
        """Return one object, read from the API server instead of the cache."""
        return await self._call("GET", resource.path(name, namespace))

    @property
    def answered_s(self) -> float | None:
        """Seconds since the API server's last answer other than a server error (5xx) or 429. None if there was none."""
        return None if self._api.answered_at is None else time.monotonic() - self._api.answered_at

    def hangs_alone(self, error: ApiError) -> bool:
        """Return True if a write got no answer while the API server answered other calls. The API server then most
        likely waits for an admission webhook."""
        answered_s = self.answered_s
        return error.was_not_answered and answered_s is not None and answered_s < self._write_timeout

    @property
    def rejected_for_s(self) -> float:
        """Seconds for which every call has failed because the API server rejects the credentials (401) or presents an
        untrusted certificate. 0 if calls succeed.
        """
        return self._api.rejected_for_s

    @property
    def clock_behind_s(self) -> float:
        """Seconds by which this machine's clock is behind the API server's, to about a second."""
        return self._api.clock_behind_s

    async def read_all(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        labels: str = "",
        limit: int | None = None,
        take: Callable[[Json], None],
    ) -> None:
        """Read a whole list, page by page. Skip unreadable items. Arguments: see `page`."""
        tokens, token = PageTokens(resource.path(namespace=namespace)), ""
        while True:
            listed = await self.page(
                resource, namespace, labels=labels, limit=limit, token=token, take=take, unreadable=lambda *_: None
            )
            token = tokens.after(listed)
            if not token:
                return

    async def page(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        labels: str = "",
        fields: str = "",
        limit: int | None = None,
        token: str = "",
        timeout_s: float | None = None,
        heard: Callable[[], None] = lambda: None,
        take: Callable[[Json], None],
        unreadable: TakeUnreadable,
    ) -> Json:
        """Read one page of a list, item by item as it arrives; return the list's metadata.

        Args:
            resource: The resource.
            namespace: None: all.
            labels: Label selector.
            fields: Field selector.
            limit: Largest number of objects in the page; None: the client's `page_size`.
            token: Start of the page: `continue` of the page before.
            timeout_s: Longest time in seconds without a chunk of the answer; None: the timeout of reads.
            heard: Called for each chunk that arrives.
            take: Called with each object.
            unreadable: Called with the readable part of each unreadable object.
        """
        query = {"limit": str(limit or self.page_size), **_selectors(labels, fields)}
        if token:
            query["continue"] = token
        path, within = resource.path(namespace=namespace), timeout_s or self.read_timeout
        return await self._made(
            "list", lambda: self._api.page(path, query, take=take, unreadable=unreadable, heard=heard, timeout_s=within)
        )

    async def create(
        self,
        resource: Resource,
        body: Json,
        namespace: str | None = None,
        *,
        strict: bool = False,
        timeout_s: float | None = None,
    ) -> Json:
        """Create an object. With `strict`, the API server refuses unknown and duplicate fields instead of dropping
        them.

        `timeout_s`: seconds; None: the timeout of writes.
        """
        query = {"fieldValidation": "Strict"} if strict else {}
        return await self._call("POST", resource.path(namespace=namespace), body, query=query, timeout_s=timeout_s)

    async def patch_json(
        self,
        resource: Resource,
        name: str,
        operations: list[Json],
        namespace: str | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Json:
        """Apply a JSON Patch. Raise `InvalidError` if a `test` operation fails or the patch is malformed.

        `timeout_s`: seconds; None: the timeout of writes.
        """
        path = resource.path(name, namespace)
        return await self._call("PATCH", path, operations, content=JSON_PATCH, timeout_s=timeout_s)

    async def patch_status(self, resource: Resource, name: str, body: Json, namespace: str | None = None) -> Json:
        """Merge a patch into the status. Raise `ConflictError` if the stored object has another uid or resourceVersion
        than `metadata` in `body`."""
        return await self._call("PATCH", resource.path(name, namespace, "status"), body, content=MERGE_PATCH)

    async def patch_merge(self, resource: Resource, name: str, body: Json, namespace: str | None = None) -> Json:
        """Merge a patch into an object. Preconditions as for `patch_status`."""
        return await self._call("PATCH", resource.path(name, namespace), body, content=MERGE_PATCH)

    async def apply_status(self, resource: Resource, name: str, body: Json, namespace: str | None = None) -> Json:
        """Write the status by server-side apply. Fields in `body` are set; fields that other field managers set
        stay."""
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
        """Delete the object with this uid, and with this resourceVersion if one is given. Raises `ConflictError` if the
        stored object has another uid or resourceVersion.
        """
        preconditions = {"uid": uid} | ({"resourceVersion": resource_version} if resource_version else {})
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": preconditions}
        await self._call("DELETE", resource.path(name, namespace), body)

    async def evict(self, name: str, namespace: str, *, uid: str, dry_run: bool = False) -> None:
        """Evict the pod with this uid by the Eviction API. `dry_run`: only check whether the eviction is allowed now.

        Raises `UnavailableError` with status 429 if a PodDisruptionBudget or a webhook forbids the eviction. If two
        budgets select the pod, the API server answers 201 with a Status of failure; this raises the same error.
        """
        options: Json = {"preconditions": {"uid": uid}}
        if dry_run:
            options["dryRun"] = ["All"]
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
            "deleteOptions": options,
        }
        path = PODS.path(name, namespace, "eviction")
        try:
            answer = await self._call("POST", path, body, verb="evict")
        except ApiError as error:
            if error.of_admission:
                raise UnavailableError(
                    f"POST {path}", HTTPStatus.TOO_MANY_REQUESTS, error.reason, error.message
                ) from None
            raise
        if answer.get("status") == "Failure":
            reason, message = str(answer.get("reason") or ""), str(answer.get("message") or "")
            raise UnavailableError(f"POST {path}", HTTPStatus.TOO_MANY_REQUESTS, reason, message)

    async def watch(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        since: str,
        labels: str = "",
        fields: str = "",
        heard: Callable[[], None],
        unreadable: TakeUnreadable,
    ) -> AsyncGenerator[Json, None]:
        """Yield watch events (`{"type", "object"}`, bookmarks included) after version `since`, until the server ends
        the watch.

        Raise `GoneError` if the version is too old, `SilentError` if the server does not end the watch in time.
        `heard` is called when the watch is answered, and for each chunk that arrives; `unreadable` takes the objects
        that cannot be read.
        """
        events = self._api.watch(
            resource.path(namespace=namespace), _selectors(labels, fields), since, heard=heard, unreadable=unreadable
        )
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    yield event
        except ApiError as error:
            _count("watch", error)
            raise

    async def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        verb: str | None = None,
        query: Mapping[str, str] | None = None,
        content: str = JSON,
        timeout_s: float | None = None,
    ) -> Json:
        within = timeout_s or (self.read_timeout if method == "GET" else self._write_timeout)
        forgotten = self._forgotten

        async def call() -> Json:
            if method != "GET" and not self._may_write():
                raise NotLeadingError(f"{method} {path}: not the leader")
            try:
                answer = await self._api.call(method, path, body, query=query, content=content, timeout_s=within)
            except NotFoundError as error:
                if error.of_resource and path.startswith(_MISSED):
                    raise UnavailableError(f"{method} {path}", 404, "NotServed", error.message) from None
                raise
            if forgotten == self._forgotten:
                return answer
            if method == "GET":
                raise UnavailableError(f"{method} {path}", 0, "", _OTHER_HISTORY)
            raise NotLeadingError(f"{method} {path}: {_OTHER_HISTORY}")

        return await self._made(verb or _VERBS[method], call)

    async def _made(self, verb: str, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call and record its duration. Retry a call that the server asks to retry, up to `tries` tries."""
        tries = 1 if verb == "evict" else self._tries
        while True:
            began = time.perf_counter()
            try:
                return await call()
            except ApiError as error:
                _count(verb, error)
                tries -= 1
                wait = error.retry_after_s
                if not tries or not error.was_not_begun or wait is None or wait > LONGEST_WAIT_S:
                    raise
                metrics.API_RETRIES.labels(verb, str(error.status)).inc()
            finally:
                _seconds(verb).observe(time.perf_counter() - began)
            await asyncio.sleep(jittered(wait))


_VERBS = {"GET": "get", "POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}


def jittered(seconds: float) -> float:
    """Return a pause of the server plus up to a fifth at random, so that clients do not all retry at once."""
    return seconds * random.uniform(1.0, 1.2)  # noqa: S311 - spreads load, nothing secret


@cache
def _seconds(verb: str) -> Histogram:
    """Return the duration histogram of a verb. It is cached, because `labels()` takes as long as an observation."""
    return metrics.API_SECONDS.labels(verb)


def _count(verb: str, error: ApiError) -> None:
    metrics.API_ERRORS.labels(verb, str(error.status) if error.status else "none").inc()


def _selectors(labels: str, fields: str) -> dict[str, str]:
    return ({"labelSelector": labels} if labels else {}) | ({"fieldSelector": fields} if fields else {})
