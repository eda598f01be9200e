"""Simulated scheduler, kubelets and agents. They run in the process of the double, so their writes need no HTTP.

Guarantees:
- The scheduler binds each Pod without a scheduling gate to the node that the Pod's affinity names, else to the next
  node in turn.
- Kubelets report a bound Pod as running and ready, and remove a deleted Pod.
- Agents apply each change of a ledger within a second, with at most one write per node and second.
- Agents report a released row as drained.
- Agents renew their Leases every `RENEW_S`.
- Agents write usage per node every `USAGE_S`, after `swing` was called.
"""

from __future__ import annotations

import asyncio
import datetime
import itertools
import random
from collections.abc import Iterator
from typing import Any

from .errors import Refused
from .kinds import Json, Kind
from .storage import Change, Storage

NAMESPACE = "sharepod-system"
RENEW_S = 5.0
"""Seconds between two renewals of an agent's Lease, as in the real agent."""
USAGE_S = 30.0
"""Seconds between two writes of a node's usage, as in the real agent."""
_PACE_S = 1.0
"""Least seconds between two writes of one agent, as in the real agent."""
_MEMORY = 80 << 30
"""Bytes of memory of one GPU, as a large GPU has."""
_TICK_S = 0.1
"""Seconds between two checks for due writes of Leases and usage. A short interval spreads the writes of all nodes
evenly.
"""


class Players:
    """Scheduler, kubelets and agents that act on one storage. Call `start` and `stop` inside an event loop.

    Args:
        storage: Storage that they read and write.
        kinds: Kinds of the storage, by plural.
    """

    def __init__(self, storage: Storage, kinds: dict[str, Kind]) -> None:
        self._storage = storage
        self._kinds = kinds
        self._nodes: list[str] = []
        self._turns: Iterator[int] = itertools.count()
        self._due: dict[str, float] = {}
        self._behind: set[str] = set()
        self._swing = 0
        self._chance = random.Random(1)
        self._beating: asyncio.Task[None] | None = None
        storage.listeners.append(self._see)

    def start(self) -> None:
        """Begin to renew Leases and to write usage."""
        self._beating = asyncio.create_task(self._beat())

    async def stop(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)

    def add_nodes(self, count: int, gpus: int) -> None:
        """Add nodes of the pool, each with this number of GPUs: Node, GPUNode with its inventory, and Lease."""
        room = {"cpu": "640", "memory": "2560Gi", "pods": "500"}
        for number in range(len(self._nodes), len(self._nodes) + count):
            name = f"node-{number}"
            self._nodes.append(name)
            labels = {"sharepod.dev/pool": "dedicated", "kubernetes.io/hostname": name}
            self._storage.create(self._kinds["nodes"], "", {"metadata": {"name": name, "labels": labels}, "spec": {}})
            status = {"allocatable": room, "conditions": [{"type": "Ready", "status": "True"}]}
            self._write("nodes", "", name, status)
            self._storage.create(
                self._kinds["gpunodes"], "", {"metadata": {"name": name}, "spec": {"pool": "dedicated"}}
            )
            reported = [
                {"uuid": f"GPU-{name}-{index}", "index": index, "model": "Test GPU", "memory": _MEMORY,
                 "health": "Healthy", "shareable": True, "reason": "", "links": []}
                for index in range(gpus)
            ]  # fmt: skip
            self._write("gpunodes", "", name, {"gpus": reported, "tenants": [], "observedGeneration": 1})
            self._renew(name)

    def add_foreign_pods(self, count: int) -> None:
        """Add bound and running Pods that are no tenants, of the size that a Deployment's Pods have."""
        kind = self._kinds["pods"]
        first = next(self._turns)
        for number in range(count):
            container = {
                "name": "main",
                "image": "registry.example/team/service:1.0.0",
                "env": [{"name": f"VARIABLE_{index}", "value": "value" * 4} for index in range(10)],
                "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}},
                "volumeMounts": [{"name": "token", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"}],
            }
            spec = {"containers": [container], "nodeName": f"other-{number % 1000}", "serviceAccountName": "default"}
            body = {"metadata": {"name": f"foreign-{first}-{number}", "labels": {"app": "service"}}, "spec": spec}
            made = self._storage.create(kind, "foreign", body)
            self._write("pods", "foreign", made["metadata"]["name"], _running())

    def swing(self, milli: int) -> None:
        """Let the usage of each tenant change by up to this many thousandths at each write. 0: the usage does not
        change."""
        self._swing = milli

    # Reactions to changes of objects

    def _see(self, change: Change) -> None:
        item = change.after
        if item is None:
            return
        if change.kind.plural == "pods":
            self._soon(self._pod, item)
        elif change.kind.plural == "gpunodes" and (change.before or {}).get("spec") != item.get("spec"):
            self._soon(self._report, item["metadata"]["name"])

    @staticmethod
    def _soon(what: Any, *args: Any) -> None:
        """Schedule a reaction to a write of the storage. It runs after the write has returned."""
        asyncio.get_running_loop().call_soon(what, *args)

    def _pod(self, seen: Json) -> None:
        """Do the next step of a Pod: bind it, start it, or remove it."""
        metadata, spec = seen["metadata"], seen["spec"]
        where, kind = (metadata.get("namespace", ""), metadata["name"]), self._kinds["pods"]
        if metadata.get("deletionTimestamp"):
            try:
                self._storage.finish_deletion(kind, *where)
            except Refused:
                return  # the Pod was deleted before this reaction ran
        elif not spec.get("nodeName"):
            if not spec.get("schedulingGates"):
                node = _pin(spec) or self._nodes[next(self._turns) % len(self._nodes)]
                self._change(kind, where, lambda item: {**item, "spec": {**item["spec"], "nodeName": node}})
        elif (seen.get("status") or {}).get("phase") is None:
            self._write("pods", *where, _running())

    def _report(self, node: str) -> None:
        """Write the agent's view of a node's ledger, now or as soon as the interval between writes allows."""
        now = asyncio.get_running_loop().time()
        if now < self._due.get(node, 0.0):
            self._behind.add(node)
            return
        self._behind.discard(node)
        self._due[node] = now + _PACE_S
        found = self._storage.get(self._kinds["gpunodes"], "", node)
        before = found.get("status") or {}
        known = {item["id"]: item for item in before.get("tenants") or ()}
        tenants = [self._tenant(row, known.get(row["id"])) for row in found["spec"].get("tenants") or ()]
        seen = {"tenants": tenants, "observedGeneration": found["metadata"]["generation"]}
        self._write("gpunodes", "", node, {**before, **seen})

    def _tenant(self, row: Json, before: Json | None) -> Json:
        held = before["heldMilli"] if before else row["requestMilli"]
        if self._swing:
            held = min(1000, max(0, held + self._chance.randint(-self._swing, self._swing)))
        return {
            "id": row["id"],
            "processes": 1,
            "memory": row["memory"] // 2,
            "heldMilli": held,
            "connected": True,
            "enforced": True,
            "drained": row["state"] == "Releasing",
        }

    async def _beat(self) -> None:
        """Renew Leases, write usage, and write the ledger reports that `_report` has put off."""
        loop = asyncio.get_running_loop()
        renewals, usages = self._spread(RENEW_S), self._spread(USAGE_S)
        while True:
            await asyncio.sleep(_TICK_S)
            for node in next(renewals):
                self._renew(node)
            for node in next(usages) if self._swing else ():
                self._report(node)
            for node in [node for node in self._behind if self._due[node] <= loop.time()]:
                self._report(node)

    def _spread(self, period: float) -> Iterator[list[str]]:
        """Yield for each tick of `_TICK_S` the nodes whose write is due. Each node is due once per `period` seconds."""
        ticks = round(period / _TICK_S)
        for tick in itertools.count():
            yield self._nodes[tick % ticks :: ticks]

    def _renew(self, node: str) -> None:
        name = f"sharepod-agent-{node}"
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {"holderIdentity": node, "renewTime": now, "leaseDurationSeconds": 20}
        kind = self._kinds["leases"]
        try:
            self._storage.update(kind, NAMESPACE, name, lambda item: {**item, "spec": spec})
        except Refused:
            self._storage.create(kind, NAMESPACE, {"metadata": {"name": name}, "spec": spec})

    def _write(self, plural: str, namespace: str, name: str, status: Json) -> None:
        kind = self._kinds[plural]
        self._change(kind, (namespace, name), lambda item: {**item, "status": status}, status=True)

    def _change(self, kind: Kind, where: tuple[str, str], change: Any, *, status: bool = False) -> None:
        try:
            self._storage.update(kind, *where, change, status=status)
        except Refused as refused:
            if refused.code != 404:
                raise


def _running() -> Json:
    conditions = [{"type": kind, "status": "True"} for kind in ("PodScheduled", "Initialized", "Ready")]
    return {"phase": "Running", "conditions": conditions, "podIP": "10.0.0.1"}


def _pin(spec: Json) -> str | None:
    """Return the name of the node that a Pod's required node affinity selects. None if it has none."""
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    for term in required.get("nodeSelectorTerms") or ():
        for wanted in term.get("matchFields") or ():
            if wanted["key"] == "metadata.name":
                return str(wanted["values"][0])
    return None
