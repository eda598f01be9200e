"""Client that creates Pods or requests shares, by any door, and follows their Pods. A door is a way to request a share.

Guarantees:
- Objects of all kinds are created over the same library and connections (`sharepod.kube`), and their Pods are seen by
  one watch.
- All times start when an object is sent.
- A Pod counts as opened once it has no scheduling gate; a SharePod's Pod also has its node pin.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from cluster.claims_world import claim_spec
from cluster.plain_world import MILLI
from sharepod.kube import ApiError, Connection, GoneError, Json

SHAREPODS = "/apis/sharepod.dev/v1alpha1/namespaces/{}/sharepods"
PODS = "/api/v1/namespaces/{}/pods"
TEMPLATES = "/apis/resource.k8s.io/v1/namespaces/{}/resourceclaimtemplates"
_CONTAINER: Json = {"name": "main", "image": "test", "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}}}
_CREATORS = 32
"""Creates in flight at the same time if no rate is given: as many as the operator's concurrent writes."""
_REQUESTS = range(100, 501, 50)
"""Requests of the shares, in thousandths of a GPU. One is drawn for each share."""
MEAN_REQUEST = statistics.mean(_REQUESTS) / 1000
"""Mean request of a share, in GPUs."""
_SETTLE_S = 300.0
"""Longest wait until the created objects are bound."""


class Door(Enum):
    """Kind of created object: a bare Pod, or one of the ways in which a user can request a share."""

    BARE = "bare"
    SHAREPODS = "SharePods"
    CLAIMS = "claims"
    """Plain Pods, each with a claim of a template."""
    LINES = "lines"
    """Plain Pods with a resource line."""


@dataclass(slots=True)
class Seen:
    """Times at which events of objects of one kind happened, by the object's name, in monotonic seconds."""

    sent: dict[str, float] = field(default_factory=dict)
    opened: dict[str, float] = field(default_factory=dict)
    bound: dict[str, float] = field(default_factory=dict)

    def delays(self, moment: str) -> list[float]:
        """Return the seconds from sending each object until the event `moment`, for objects that had it."""
        reached: dict[str, float] = getattr(self, moment)
        return [reached[name] - at for name, at in self.sent.items() if name in reached]


class LoadClient:
    """Client that creates objects of one kind in one namespace."""

    def __init__(self, api: Connection, namespace: str, door: Door, *, seed: int = 1) -> None:
        self._api = api
        self._namespace = namespace
        self._door = door
        self._chance = random.Random(seed)
        self._number = 0
        self._bound = asyncio.Condition()
        self.seen = Seen()

    async def create(self) -> None:
        """Create one object. Raises `ApiError`."""
        name = f"p{self._number}"
        self._number += 1
        path = (SHAREPODS if self._door is Door.SHAREPODS else PODS).format(self._namespace)
        body = self._body(name)
        self.seen.sent[name] = time.monotonic()
        await self._api.create(path, body)

    async def make_templates(self) -> None:
        """Create the claim templates that Pods with claims refer to. Raises `ApiError`."""
        for milli in _REQUESTS:
            body = {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceClaimTemplate",
                "metadata": {"name": f"t{milli}"},
                "spec": {"spec": claim_spec(milli, memory=None)},
            }
            await self._api.create(TEMPLATES.format(self._namespace), body)

    def _body(self, name: str) -> Json:
        container: Json = dict(_CONTAINER)
        spec: Json = {"containers": [container]}
        body: Json = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
        milli = self._chance.choice(_REQUESTS)
        resources: Json = dict(_CONTAINER["resources"])
        if self._door is Door.SHAREPODS:
            body |= {"apiVersion": "sharepod.dev/v1alpha1", "kind": "SharePod"}
            spec["gpu"] = {"request": milli / 1000}
        elif self._door is Door.CLAIMS:
            spec["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": f"t{milli}"}]
            container["resources"] = resources | {"claims": [{"name": "gpu"}]}
        elif self._door is Door.LINES:
            container["resources"] = resources | {"limits": {MILLI: str(milli)}}
        return body

    async def at_rate(self, rate: float, count: int) -> None:
        """Create `count` objects, `rate` a second, even if earlier ones are not bound yet. Return when all their Pods
        are bound."""
        begun = time.monotonic()
        creating = []
        for number in range(count):
            await asyncio.sleep(max(0.0, begun + number / rate - time.monotonic()))
            creating.append(asyncio.create_task(self.create()))
        await asyncio.gather(*creating)
        await self.all_bound()

    async def in_flight(self, most: int, *, seconds: float = 0.0, count: int = 0) -> float:
        """Create objects for `seconds`, or `count` objects, and keep at most `most` of them unbound at any time.

        Return the number of Pods that were bound per second in that time.
        """
        begun, bound_before, sent_before = time.monotonic(), len(self.seen.bound), self._number
        ends = begun + (seconds or _SETTLE_S)

        async def creator() -> None:
            while time.monotonic() < ends and not (count and self._number - sent_before >= count):
                if self._number - len(self.seen.bound) >= most:
                    async with self._bound:
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(1.0):
                                await self._bound.wait()
                    continue
                await self.create()

        await asyncio.gather(*(creator() for _ in range(_CREATORS)))
        return (len(self.seen.bound) - bound_before) / (time.monotonic() - begun)

    async def all_bound(self) -> None:
        """Wait until the Pods of all objects created so far are bound. Raises `TimeoutError`."""
        async with asyncio.timeout(_SETTLE_S), self._bound:
            await self._bound.wait_for(lambda: len(self.seen.bound) >= len(self.seen.sent))

    async def delete(self, names: Iterable[str]) -> None:
        """Delete these SharePods, all at the same time."""
        path = SHAREPODS.format(self._namespace)
        await asyncio.gather(*(self._api.call("DELETE", f"{path}/{name}", {}) for name in names))

    async def follow(self) -> None:
        """Record events of the namespace's Pods until the task is cancelled."""
        path = PODS.format(self._namespace)
        since = str((await self._api.get(path, {"limit": "1"}))["metadata"]["resourceVersion"])
        while True:
            try:
                async for event in self._api.watch(path, {}, since):
                    since = str(event["object"]["metadata"]["resourceVersion"])
                    if event["type"] in ("ADDED", "MODIFIED"):
                        await self._note(event["object"])
            except GoneError:  # so many other objects have changed that the API server cannot continue the watch
                listed = await self._api.get(path)
                since = str(listed["metadata"]["resourceVersion"])
                for pod in listed["items"]:
                    await self._note(pod)
            except ApiError:
                await asyncio.sleep(0.1)

    async def _note(self, pod: Json) -> None:
        now, name = time.monotonic(), pod["metadata"]["name"]
        if name not in self.seen.opened and self._is_open(pod["spec"]):
            self.seen.opened[name] = now
        if pod["spec"].get("nodeName") and name not in self.seen.bound:
            self.seen.bound[name] = now
            async with self._bound:
                self._bound.notify_all()

    def _is_open(self, spec: Json) -> bool:
        pinned = self._door is not Door.SHAREPODS or "matchFields" in str(spec.get("affinity"))
        return not spec.get("schedulingGates") and pinned


@asynccontextmanager
async def client(kubeconfig: Path, namespace: str, door: Door, *, seed: int = 1) -> AsyncIterator[LoadClient]:
    """Yield a client that records the events of Pods in its namespace."""
    api = await Connection.open(kubeconfig, "benchmark")
    made = LoadClient(api, namespace, door, seed=seed)
    if door is Door.CLAIMS:
        await made.make_templates()
    following = asyncio.create_task(made.follow())
    try:
        await asyncio.sleep(0.5)  # the watch must begin before the first object is created
        yield made
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await api.close()


def percentile(values: list[float], percent: int) -> float:
    """Return a percentile, in milliseconds, of values in seconds."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1] * 1000


def run(work: Any) -> Any:
    """Run a coroutine."""
    return asyncio.run(work)
