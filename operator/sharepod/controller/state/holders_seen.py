"""Plugin holders as the operator knows them: Pods that exist, Pods to create, and Pods to delete.

Guarantees:
- Only a Pod of the operator's namespace with the holders' label is a holder.
- A restart of the operator loses only wanted holders that were not created yet; placement wants them again. All other
  facts follow from Pods, ledgers and time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sharepod.api.gpunode import HolderState
from sharepod.api.objects import HOLDER_FOR_ANNOTATION, HOLDER_LABEL
from sharepod.api.units import TenantId
from sharepod.placement.state.cluster import Cluster

from .facts.node_facts import GpuNodeFacts
from .facts.object_facts import Json, ObjectFacts, common, mapping
from .facts.pod_facts import pin_of
from .store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderPod(ObjectFacts):
    """Pod of a plugin holder."""

    node: str
    """Node to which the Pod is pinned or bound."""
    tenant: str
    """Tenant for which the holder was created. Empty if unknown."""
    deleting: bool
    bound: bool
    """True if the Pod is or was bound to a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedHolder:
    """Plugin holder to create. `name`: name of its Pod. `tenant`: the tenant for which it is created."""

    name: str
    node: str
    tenant: str


class HoldersSeen:
    """Store of the plugin holders, by node.

    Args:
        namespace: The operator's namespace, in which holders' Pods are.
        cluster: Placement's model, in which holders that have no GPU yet are recorded.
        gpunodes: GPUNodes as last read.
        on_changed: Called with a node whose holders have changed.
    """

    def __init__(
        self, namespace: str, cluster: Cluster, gpunodes: Store[GpuNodeFacts], *, on_changed: Callable[[str], None]
    ) -> None:
        self.namespace = namespace
        self._cluster = cluster
        self._gpunodes = gpunodes
        self._on_changed = on_changed
        self._pods: dict[str, HolderPod] = {}
        self._wanted: dict[str, WantedHolder] = {}
        self.lost: dict[str, HolderPod] = {}
        """By uid: holders whose Pods have ended or were deleted according to the watch, until a GET has confirmed
        it."""
        self.giving_back: set[str] = set()
        """Ids of the holders whose GPUs go back to the device plugin. Their GPUs get no new tenants."""

    def put(self, raw: Json) -> HolderPod | None:
        """Record a Pod, if it belongs to a plugin holder. Return its facts then, else None."""
        metadata = mapping(raw.get("metadata"))
        if metadata.get("namespace") != self.namespace or HOLDER_LABEL not in mapping(metadata.get("labels")):
            return None
        spec, notes = mapping(raw.get("spec")), mapping(metadata.get("annotations"))
        bound = str(spec.get("nodeName") or "")
        node = bound or pin_of(spec)
        if not node:
            return None
        item = HolderPod(
            **common(metadata),
            node=node,
            tenant=str(notes.get(HOLDER_FOR_ANNOTATION) or ""),
            deleting="deletionTimestamp" in metadata,
            bound=bool(bound),
        )
        before = self._pods.get(item.uid)
        self._pods[item.uid] = item
        self.lost.pop(item.uid, None)
        self._wanted.pop(item.name, None)
        if before is None or (before.deleting, before.bound) != (item.deleting, item.bound):
            self._changed(item.node)
        return item

    def drop(self, uid: str) -> HolderPod | None:
        """Remove the Pod of a holder from the existing ones, and keep it in `lost`. Return its facts; None if it is
        unknown."""
        item = self._pods.pop(uid, None)
        if item is not None:
            self.lost[uid] = item
            self._changed(item.node)
        return item

    def on(self, node: str) -> list[HolderPod]:
        """Return the holders of a node whose Pods exist, in the order of their names."""
        return sorted((pod for pod in self._pods.values() if pod.node == node), key=lambda pod: pod.name)

    def lost_on(self, node: str) -> list[HolderPod]:
        """Return the holders of a node whose Pods the watch has shown as ended or deleted."""
        return [pod for pod in self.lost.values() if pod.node == node]

    def there(self, uid: str) -> HolderPod | None:
        """Return the Pod of a holder by uid. None if no such Pod is known."""
        return self._pods.get(uid)

    def want(self, wanted: Iterable[WantedHolder]) -> None:
        """Record holders to create, and report their nodes as changed."""
        for each in wanted:
            self._wanted[each.name] = each
            self._changed(each.node)

    def wanted_on(self, node: str) -> list[WantedHolder]:
        """Return the holders to create on a node."""
        return [each for each in self._wanted.values() if each.node == node]

    def unwant(self, wanted: WantedHolder) -> None:
        """Drop a holder to create: it was created or given up."""
        self._wanted.pop(wanted.name, None)
        self.follow(wanted.node)

    def clear(self) -> None:
        """Drop decisions that only this process knows: it no longer leads."""
        nodes = {each.node for each in self._wanted.values()}
        self._wanted.clear()
        self.giving_back.clear()
        for node in nodes:
            self.follow(node)

    # Placement's view

    def follow(self, node: str) -> None:
        """Record in placement's model the holders of a node that have no GPU yet and are not being returned."""
        gpunode = self._gpunodes.named(node)
        settled = {row.id for row in (gpunode.spec.holders if gpunode else ()) if row.state is not HolderState.PENDING}
        coming = {
            pod.uid: pod.tenant
            for pod in self.on(node)
            if not (pod.deleting or pod.uid in settled or pod.uid in self.giving_back)
        }
        coming |= {wanted.name: wanted.tenant for wanted in self.wanted_on(node)}
        for holder in self._cluster.holders(node).keys() - coming.keys():
            self._cluster.end_holder(node, holder)
        for holder, tenant in coming.items():
            self._cluster.start_holder(node, holder, TenantId(tenant))

    def open_gpus(self, gpunode: GpuNodeFacts) -> frozenset[str]:
        """Return the UUIDs of the GPUs of Held holders on which tenants may be placed."""
        there = {pod.uid for pod in self.on(gpunode.name) if not pod.deleting}
        rows = (row for row in gpunode.spec.holders if row.id in there and row.id not in self.giving_back)
        return frozenset(row.uuid for row in rows if row.state is HolderState.HELD and row.uuid is not None)

    def _changed(self, node: str) -> None:
        self.follow(node)
        self._on_changed(node)
