"""World of the operator over the API server double, on a clock that a test advances.

No queue runs: a test calls each reconciliation (`look`, `look_at_node`), so that it sees each step. Three of the
operator's tasks run: the ledger's writer, the placement loop, the writer of Events.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from doubles.apiserver.kinds import Kind
from doubles.apiserver.server import ApiServer, api_server
from doubles.apiserver.storage import Change
from kubernetes.aio.client import Configuration
from sharepod.api.objects import POOL_LABEL, TENANT_LABEL
from sharepod.controller.apiserver.workqueue import WorkQueue
from sharepod.controller.operator import Operator
from sharepod.controller.settings import OperatorSettings
from sharepod.controller.state.memos import TenantMemo
from sharepod.kube import Json

NAMESPACE = "n"
PATIENCE_S = 10.0
"""Longest wait in seconds for an event that a busy machine may delay. No test waits for it to pass."""


class Led(Operator):
    """Operator whose placement loop decides only while `World._placing` is set, and which writes until `writes_left` is
    used up."""

    def __init__(self, world: World, server: ApiServer) -> None:
        self._world = world
        super().__init__(world.settings, Configuration(host=server.url), world._clock, world._wall_ns)
        self.client._may_write = world._writes

    def may_place(self) -> bool:
        return self._world._placing


class World:
    """One operator, its API server, and the actions of agents, kubelets, kube-scheduler and admins."""

    def __init__(self, server: ApiServer, **settings: Any) -> None:
        self.now = 1000.0
        self.clock_set = 0.0
        """Seconds by which the test has set the time of day forward."""
        self.server = server
        self.settings = OperatorSettings(namespace="system", identity="operator", **settings)
        self.writes_left: int | None = None
        """Writes until the operator dies. None: it does not die."""
        self.operator = Led(self, server)
        self.client, self.state, self.memos = self.operator.client, self.operator.state, self.operator.memos
        self.events, self.watches, self.ledger = self.operator.events, self.operator.watches, self.operator.ledger
        self.tenants, self.claims = self.operator.tenant_reconciler, self.operator.claim_reconciler
        self.nodes, self.holders = self.operator.node_reconciler, self.operator.holder_reconciler
        self.loop = self.operator.loop
        self._claims_seen = 0
        self._placing = True
        self.tenant = ""
        """Uid of the SharePod `one`."""

    def _clock(self) -> float:
        return self.now

    def _writes(self) -> bool:
        """Count a write. Return whether the operator may make it: False after `writes_left` writes, as after a
        crash."""
        if self.writes_left is not None:
            self.writes_left -= 1
        return self.writes_left is None or self.writes_left >= 0

    @property
    def died(self) -> bool:
        """True if the operator has tried to make one more write than `writes_left`."""
        return self.writes_left is not None and self.writes_left < 0

    def wall(self) -> float:
        """Return the time of day. It advances with the clock: `now` seconds after the start of the year, plus
        `clock_set`."""
        return 1767225600.0 + self.now + self.clock_set

    def _wall_ns(self) -> int:
        return round(self.wall() * 1e9)

    # The operator's turns

    async def relist(self) -> None:
        """Read all objects except Leases into the state, as the watches do at their start."""
        watches = self.watches
        for reflector in (watches.nodes, watches.sharepods, watches.pods, watches.gpunodes):
            await reflector.list_all()
        for change in self.server.storage.history:
            if change.kind.plural == "resourceclaims":
                self._see_claim(change)

    async def see_claims(self) -> None:
        """Read all changes of claims and of the Pods that use them into the state, as their watches do."""
        changes = self.server.storage.history
        for change in changes[self._claims_seen :]:
            if change.kind.plural == "resourceclaims":
                self._see_claim(change)
            elif change.kind.plural == "pods" and TENANT_LABEL not in change.last["metadata"].get("labels", {}):
                self._see_pod(change)
        self._claims_seen = len(changes)
        for reflector in (self.watches.nodes, self.watches.gpunodes):
            await reflector.list_all()

    def _see_claim(self, change: Change) -> None:
        if change.after is None:
            self.state.seen_claims.drop_claim(change.last["metadata"]["uid"], change.version, deleted=True)
        else:
            self.state.seen_claims.put_claim(change.after)

    def _see_pod(self, change: Change) -> None:
        if change.after is None or (change.after.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            self.state.other_pods.drop(change.last["metadata"]["uid"])
        else:
            self.state.other_pods.put(change.after)

    async def look_at_claim(self, name: str = "share", *, times: int = 1) -> None:
        """Read all objects, then reconcile one claim `times` times."""
        uid = self.claim_uid(name)
        for _ in range(times):
            await self.see_claims()
            await self.claims.reconcile(uid)

    def claim_uid(self, name: str = "share") -> str:
        """Return the uid of a claim, also of a deleted one."""
        claims = [change.last for change in self.server.storage.history if change.kind.plural == "resourceclaims"]
        return next(str(item["metadata"]["uid"]) for item in reversed(claims) if item["metadata"]["name"] == name)

    async def look(self, tenant: str = "") -> None:
        """Read all objects, then reconcile one tenant once. Like the queue, this removes the tenant's timer."""
        await self.relist()
        if (timer := self.tenants.queue._timers.pop(tenant or self.tenant, None)) is not None:
            timer.cancel()
        await self.tenants.reconcile(tenant or self.tenant)

    async def look_at_node(self, name: str = "node-a") -> None:
        """Read all objects, then reconcile one node once."""
        await self.relist()
        await self.nodes.reconcile(name)

    async def look_at_holders(self, name: str = "node-a") -> None:
        """Read all objects, then reconcile the holders of one node once."""
        await self.relist()
        for change in self.server.storage.history:
            if change.kind.plural == "pods" and TENANT_LABEL not in change.last["metadata"].get("labels", {}):
                self._see_pod(change)
        await self.holders.reconcile(name)

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until `true()` returns True. It is called again after each change of an object on the server."""
        async with asyncio.timeout(PATIENCE_S):
            while not true():
                await self.server.storage.wait(self.server.storage.version)

    async def until_answered(self, tenant: str) -> None:
        """Wait until placement has refused a tenant: its first placement, or another share that it requests."""
        async with asyncio.timeout(PATIENCE_S):
            while not ((memo := self.memos.of(tenant)).refusal or memo.resize_refusal):  # noqa: ASYNC110 - nothing is written that could be waited for
                await asyncio.sleep(0)

    def due_in(self, key: str, queue: WorkQueue[str] | None = None) -> float | None:
        """Return the seconds until a key is due again. None if it is not scheduled."""
        queue = self.tenants.queue if queue is None else queue
        if key in queue._waiting:
            return 0.0
        timer = queue._timers.get(key)
        return max(0.0, timer.when() - asyncio.get_running_loop().time()) if timer is not None else None

    def looks_again(self, within: float, key: str = "", queue: WorkQueue[str] | None = None) -> bool:
        """Return whether a key (default: the SharePod `one`) is due again after `within` seconds. Up to `PATIENCE_S`
        fewer also count, because a busy machine may have used that time."""
        due = self.due_in(key or self.tenant, queue)
        return due is not None and max(0.0, within - PATIENCE_S) <= due <= within

    @property
    def memo(self) -> TenantMemo:
        """Return the memo of the SharePod `one`."""
        return self.memos.of(self.tenant)

    def loses_sight_of_the_pod(self) -> None:
        """Drop the Pod from the cache, as after a DELETED event. On the server the Pod may only have lost its label."""
        metadata = (self.read("pods") or {})["metadata"]
        self.state.drop_pod(metadata["uid"], version=int(metadata["resourceVersion"]))

    # Objects

    def kind(self, plural: str) -> Kind:
        return self.server.kind(plural)

    def read(self, plural: str, name: str = "one") -> Json | None:
        """Return an object as it is on the server. None if it does not exist."""
        kind = self.kind(plural)
        named = [item for item in self.server.storage.select(kind, "") if item["metadata"]["name"] == name]
        return named[0] if named else None

    def change(self, plural: str, name: str, change: Callable[[Json], None], *, status: bool = False) -> Json:
        """Change an object on the server, as another client does."""

        def changed(item: Json) -> Json:
            change(item)
            return item

        kind = self.kind(plural)
        return self.server.storage.update(kind, NAMESPACE, name, changed, status=status)

    def node(self, name: str = "node-a", gpus: int = 1, *, gpunode: bool = True, alive: bool = True) -> None:
        """Create a ready Node of the pool, by default with its GPUNode and its agent."""
        storage = self.server.storage
        metadata = {"name": name, "labels": {POOL_LABEL: "dedicated", "kubernetes.io/hostname": name}}
        storage.create(self.kind("nodes"), "", {"metadata": metadata, "spec": {}})
        allocatable = {"cpu": "8", "memory": "64Gi", "pods": "110"}
        status = {"allocatable": allocatable, "conditions": [{"type": "Ready", "status": "True"}]}
        self.change("nodes", name, lambda item: item.update(status=status), status=True)
        if gpunode:
            storage.create(self.kind("gpunodes"), "", {"metadata": {"name": name}, "spec": {"pool": "dedicated"}})
            attachable = {"type": "CDIDevices", "status": "True", "reason": "Attachable"}
            attaches = {"type": "ClaimsAttach", "status": "True", "reason": "Attached"}
            status = {"gpus": [self.gpu(name, index) for index in range(gpus)], "conditions": [attachable, attaches]}
            self.change("gpunodes", name, lambda item: item.update(status=status), status=True)
        if alive:
            self.renew(name)

    @staticmethod
    def gpu(node: str, index: int = 0, **fields: Any) -> Json:
        known = {"uuid": f"GPU-{node}-{index}", "index": index, "model": "T", "memory": 1 << 34, "health": "Healthy"}
        return known | {"shareable": True, **fields}

    def renew(self, node: str = "node-a") -> None:
        """Renew the Lease of a node's agent now."""
        spec = {"holderIdentity": node, "renewTime": f"renewed at {self.now}", "leaseDurationSeconds": 20}
        metadata = {"name": f"sharepod-agent-{node}", "uid": f"lease-{node}"}
        for renewed in ("before", f"at {self.now}"):
            self.state.agents.put({"metadata": metadata, "spec": spec | {"renewTime": renewed}})

    def sharepod(self, name: str = "one", request: float = 0.4, *, namespace: str = NAMESPACE, **spec: Any) -> str:
        """Create a SharePod, by default with restartPolicy Never. Return its uid."""
        gpu = {"request": request, **spec.pop("gpu", {})}
        containers = [{"name": "main", "image": "i"}]
        body = {
            "metadata": {"name": name},
            "spec": {"gpu": gpu, "restartPolicy": "Never", "containers": containers, **spec},
        }
        made = self.server.storage.create(self.kind("sharepods"), namespace, body)
        uid = str(made["metadata"]["uid"])
        if name == "one":
            self.tenant = uid
        return uid

    def claim(
        self,
        name: str = "share",
        time_milli: int = 400,
        *,
        annotations: Json | None = None,
        memory: str = "1Gi",
        **spec: Any,
    ) -> str:
        """Create a ResourceClaim of SharePod's class; return its uid."""
        capacity = {"requests": {"timeMilli": str(time_milli), "memory": memory}}
        exactly = {"deviceClassName": "sharepod.dev", "capacity": capacity, **spec}
        body = {
            "metadata": {"name": name, "annotations": annotations or {}},
            "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
        }
        return str(self.server.storage.create(self.kind("resourceclaims"), NAMESPACE, body)["metadata"]["uid"])

    def pod_with(self, *claims: str, name: str = "user", **spec: Any) -> str:
        """Create a Pod that uses these claims and waits for a node; return its uid."""
        listed = [{"name": f"c{number}", "resourceClaimName": claim} for number, claim in enumerate(claims)]
        body = {
            "metadata": {"name": name},
            "spec": {"resourceClaims": listed, "containers": [{"name": "main", "image": "i"}], **spec},
        }
        return str(self.server.storage.create(self.kind("pods"), NAMESPACE, body)["metadata"]["uid"])

    def allocation(self, name: str = "share") -> Json | None:
        """Return the allocation of a claim. None if it has none."""
        found: Json | None = ((self.read("resourceclaims", name) or {}).get("status") or {}).get("allocation")
        return found

    def binds(self, pod: str = "user", *claims: str, node: str = "node-a") -> None:
        """Reserve the claims for the Pod and bind it, as kube-scheduler does, and let the kubelet run it."""
        uid = (self.read("pods", pod) or {})["metadata"]["uid"]
        for claim in claims or ("share",):
            self.reserve(claim, uid, pod)
        self.change("pods", pod, lambda item: item["spec"].update(nodeName=node))
        self.change("pods", pod, lambda item: item.update(status={"phase": "Running"}), status=True)

    def reserve(self, claim: str, uid: str, pod: str) -> None:
        """Reserve a claim for a Pod, as kube-scheduler does."""
        consumer = {"resource": "pods", "name": pod, "uid": uid}
        self.change("resourceclaims", claim, lambda item: item["status"].update(reservedFor=[consumer]), status=True)

    def deallocates(self, claim: str = "share") -> None:
        """Remove the allocation, as kube-scheduler or kube-controller-manager does."""
        self.change("resourceclaims", claim, lambda item: item.update(status={}), status=True)

    def status(self, name: str = "one") -> Json:
        found = self.read("sharepods", name)
        assert found is not None
        status: Json = found.get("status") or {}
        return status

    def condition(self, kind: str, name: str = "one") -> Json:
        found: Json = {item["type"]: item for item in self.status(name).get("conditions", ())}.get(kind, {})
        return found

    def rows(self, node: str = "node-a") -> dict[str, Json]:
        """Return the ledger of a node on the server, by tenant."""
        found = self.read("gpunodes", node)
        return {row["id"]: row for row in (found or {"spec": {}})["spec"].get("tenants", ())}

    def notes(self, reason: str) -> list[str]:
        """Return the notes of the Events with this reason."""
        events = self.server.storage.select(self.kind("events"), "")
        return [item["note"] for item in events if item["reason"] == reason]

    # What others do

    def pod_phase(self, phase: str, *, node: str = "node-a", **status: Any) -> None:
        """Bind the Pod, as kube-scheduler does, and set its phase, as the kubelet does."""
        self.change("pods", "one", lambda item: item["spec"].update(nodeName=node))
        self.change("pods", "one", lambda item: item.update(status={"phase": phase, **status}), status=True)

    def pod_gone(self) -> None:
        """Remove the Pod, as the kubelet does after it has ended."""
        self.server.storage.finish_deletion(self.kind("pods"), NAMESPACE, "one")

    def delete(self, plural: str, name: str = "one") -> None:
        """Delete an object, as a user or the garbage collector does."""
        self.server.storage.delete(self.kind(plural), NAMESPACE, name)

    def report(self, *tenants: Json, node: str = "node-a", **fields: Any) -> None:
        """Report these tenants, and the ledger's present generation as applied, as a node's agent does."""

        def report(item: Json) -> None:
            status = copy.deepcopy(item.get("status") or {})
            seen = {"tenants": list(tenants), "observedGeneration": item["metadata"]["generation"]}
            item["status"] = status | seen | fields

        self.change("gpunodes", node, report, status=True)

    # Ways to a state

    async def gated(self, **spec: Any) -> None:
        """Create a SharePod whose Pod waits for its share. The placement loop has its request, and decides once the
        test calls `place`."""
        self._placing = False
        self.sharepod(**spec)
        await self.look()

    def place(self) -> None:
        """Let the placement loop decide again."""
        self._placing = True
        self.loop.room_changed()

    async def placed(self, **spec: Any) -> None:
        """Create a SharePod whose row is in the ledger, and whose Pod's gate is still closed."""
        await self.gated(**spec)
        self.place()
        await self.until(lambda: any(self.tenant in self.rows(node) for node in self._nodes()))

    async def running(self, *, started: str = "", **spec: Any) -> None:
        """Create a SharePod whose Pod runs and is in the cache. `started`: time at which its kubelet accepted it, RFC
        3339."""
        await self.placed(**spec)
        await self.look()
        await self.look()
        found = self.read("pods")
        assert found is not None
        node = next(node for node in self._nodes() if self.tenant in self.rows(node))
        self.pod_phase("Pending", node=node)
        await self.look()
        self.pod_phase("Running", node=node, **({"startTime": started} if started else {}))
        await self.look()
        assert self.status()["phase"] == "Running"

    async def releasing(self) -> None:
        """Create a SharePod whose Pod has ended, and whose row can be removed once its agent has confirmed the
        release."""
        self.node()
        await self.running()
        self.pod_phase("Succeeded")
        await self.look()
        await self.look()
        await self.until(lambda: self.rows()[self.tenant]["state"] == "Releasing")

    def _nodes(self) -> list[str]:
        return [item["metadata"]["name"] for item in self.server.storage.select(self.kind("gpunodes"), "")]


@asynccontextmanager
async def acting(server: ApiServer, after: World | None = None, **settings: Any) -> AsyncIterator[World]:
    """Yield an operator that acts on an API server. Its tasks end with the block. `after`: its predecessor."""
    world = World(server, **settings)
    if after is not None:
        world.now, world.clock_set, world.tenant = after.now, after.clock_set, after.tenant
    loops = [asyncio.create_task(work.run()) for work in (world.ledger, world.loop, world.events)]
    try:
        yield world
    finally:
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        world.operator._lost()
        await world.client.close()


@asynccontextmanager
async def acting_world(**settings: Any) -> AsyncIterator[World]:
    """Yield an operator that acts on a new API server."""
    async with api_server() as server, acting(server, **settings) as world:
        yield world
