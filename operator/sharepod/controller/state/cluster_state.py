"""Cluster state: the operator's model of the cluster, in memory (a scheduler cache).

Guarantees:
- Watch events and lists may arrive in any order. The newest version of each object is kept.
- Recording an object needs no I/O and never blocks.
- The callbacks `on_tenant_changed` and `on_node_changed` get only the key of the changed object. `on_room_changed` is
  called when capacity for a waiting tenant may have become free.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from sharepod.api.pods.pod import PodSettings
from sharepod.api.sharepod import SharePodStatus
from sharepod.api.units import TenantId
from sharepod.placement.state.cluster import Cluster

from .agent_leases import AgentLeases
from .budgets_seen import BudgetsSeen
from .claims_seen import ClaimsSeen
from .facts.claim_facts import ClaimFacts
from .facts.line_pod_facts import line_pod_facts
from .facts.node_facts import GpuNodeFacts, NodeFacts, gpunode_facts, node_facts
from .facts.pod_facts import PodFacts, pod_facts
from .facts.sharepod_facts import SharePodFacts, sharepod_facts
from .gpunode_changes import reconciler_facts, tenants_concerned
from .holders_seen import HoldersSeen
from .ledgers import Ledgers
from .namespaces import EndingNamespaces, NamespaceLabels
from .other_pods import OtherPods
from .placement_view import node_state, placement_facts
from .reading.unreadable_log import UnreadableLog
from .store import STALE, Latest, Store

Json = Mapping[str, Any]

log = structlog.get_logger(__name__)


def _version(raw: Json) -> tuple[str, int]:
    return str(raw["metadata"]["uid"]), int(raw["metadata"].get("resourceVersion") or 0)


def _nobody(_key: str) -> None:
    return None


class ClusterState:
    """Cluster state: the facts of all objects by kind, and in `cluster` the model of nodes and reservations that
    placement uses.

    Args:
        settings: Settings that apply to every Pod of a SharePod. A Pod's resource requests are read accordingly.
        agents: Liveness of the agents.
        clock: Monotonic seconds.
        interactive_per_gpu: Largest number of SharePods of latency Interactive on one GPU.
        max_excluded_gpus: Largest number of GPUs that a namespace may keep from others by `exclusion` labels. None: no
            limit.
        namespace: The operator's namespace, which contains the plugin holders.
    """

    def __init__(
        self,
        settings: PodSettings,
        agents: AgentLeases,
        clock: Callable[[], float] = time.monotonic,
        *,
        interactive_per_gpu: int = 1,
        max_excluded_gpus: int | None = None,
        namespace: str = "sharepod-system",
    ) -> None:
        self._settings = settings
        self._unreadable_log = UnreadableLog(clock)
        self.agents = agents
        self.ending_namespaces = EndingNamespaces()
        self.ending_namespaces.on_changed = self._tell_namespace
        self.namespace_labels = NamespaceLabels()
        self.budgets = BudgetsSeen()
        self.sharepods: Store[SharePodFacts] = Store()
        self.lines: Store[SharePodFacts] = Store()
        """Plain Pods with a resource line that are tenants themselves, with facts in the form of a SharePod's."""
        self.pods: Store[PodFacts] = Store()
        self.nodes: Store[NodeFacts] = Store()
        self.gpunodes: Store[GpuNodeFacts] = Store()
        self.seen_claims = ClaimsSeen(lambda uid: self.on_tenant_changed(uid))
        self.seen_claims.on_share_claim = self._share_claim_changed
        self.cluster = Cluster(interactive_per_gpu=interactive_per_gpu, max_excluded_gpus=max_excluded_gpus)
        self.holders = HoldersSeen(namespace, self.cluster, self.gpunodes, on_changed=self._holders_changed)
        self.ledgers = Ledgers(
            self.cluster,
            self.gpunodes,
            self.asking,
            self.seen_claims,
            on_tenant_changed=lambda tenant: self.on_tenant_changed(tenant),
            on_room_changed=lambda: self.on_room_changed(),
        )
        self.other_pods = OtherPods(
            self.cluster,
            self.seen_claims,
            self.holders,
            is_tenant=lambda uid: self.pods.get(uid) is not None,
            on_room_changed=lambda: self.on_room_changed(),
            on_whole_gpus_wanted=self._whole_gpus_wanted,
        )
        self.lost_pods: Latest[PodFacts] = Latest()
        """Last facts of a deleted Pod, by its tenant."""
        self.gone_nodes: set[str] = set()
        """Names of nodes with a ledger whose Node a GET has not found."""
        self._pods_of: dict[str, tuple[str, ...]] = {}
        self._deleted: Latest[None] = Latest()
        """uids of SharePods and plain Pods whose deletion a watch has shown, in the order of deletion."""
        self.on_tenant_changed: Callable[[str], None] = _nobody
        self.on_node_changed: Callable[[str], None] = _nobody
        self.on_holders_changed: Callable[[str], None] = _nobody
        self.on_room_changed: Callable[[], None] = lambda: None

    # SharePods

    def put_sharepod(self, raw: Json, *, sure: bool = False, news: bool = True) -> None:
        """Record a SharePod.

        Args:
            raw: The SharePod.
            sure: True if a GET has just returned it, so it exists.
            news: False if the caller has just written its status and needs no notification.
        """
        uid, version = _version(raw)
        if not self.sharepods.knows(uid, version, sure=sure):
            item = sharepod_facts(raw, self._settings, self.sharepods.get(uid))
            self.take_sharepod(item, sure=sure, news=news)

    def take_sharepod(self, item: SharePodFacts, *, sure: bool = False, news: bool = True) -> None:
        """Record the facts of a SharePod. `sure`, `news`: see `put_sharepod`."""
        taken, _, replaced = self.sharepods.put(item, sure=sure)
        if replaced is not None:
            self.on_tenant_changed(replaced.uid)
        if taken and news:
            self.on_tenant_changed(item.uid)

    def drop_sharepod(self, uid: str, version: float = math.inf, *, deleted: bool = False) -> None:
        """Remove a deleted SharePod. `version`: resourceVersion of the deletion, if known.

        `deleted`: True if a watch has shown the deletion. That needs no confirmation by a GET, because the watch has no
        selector that a SharePod could stop matching.
        """
        self.sharepods.drop(uid, version)
        if deleted:
            self._deleted[uid] = None
        self.on_tenant_changed(uid)

    def asking(self, tenant: str) -> SharePodFacts | None:
        """Return the SharePod or plain Pod of a tenant. None if it is unknown or the tenant is a claim."""
        return self.sharepods.get(tenant) or self.lines.get(tenant)

    def _tell_namespace(self, namespace: str) -> None:
        for item in (*self.sharepods, *self.lines):
            if item.namespace == namespace:
                self.on_tenant_changed(item.uid)
        self.seen_claims.tell_namespace(namespace)

    def saw_deleted(self, tenant: str) -> bool:
        """Return True if a watch has shown the deletion of this SharePod."""
        return tenant in self._deleted

    def invalidate_sharepods(self) -> None:
        """Mark all cached SharePods stale, so that the next list overwrites them whatever its versions. Forget which
        were deleted.
        """
        self._deleted.clear()
        self.sharepods.invalidate()

    # Pods with the tenant label

    def pod_of(self, tenant: str) -> PodFacts | None:
        """Return the Pod of a tenant. If there are several, return the newest."""
        uids = self._pods_of.get(tenant)
        if uids is None or len(uids) == 1:
            return self.pods.get(uids[0]) if uids else None
        found = [pod for uid in uids if (pod := self.pods.get(uid)) is not None]
        return max(found, key=self.pods.version, default=None)

    def put_pod(self, raw: Json, *, sure: bool = False, news: bool = True) -> None:
        """Record a Pod.

        Args:
            raw: The Pod.
            sure: True if a GET has just returned it, so it exists. A DELETED event alone does not prove a deletion: the
                watch also sends it for a Pod that has lost the tenant label.
            news: False if the caller has written the Pod itself and handles its tenant next, so that no notification is
                needed.
        """
        if self.pods.knows(*_version(raw), sure=sure):
            return
        item = pod_facts(raw)
        taken, before, replaced = self.pods.put(item, sure=sure)
        if replaced is not None:
            self._pod_gone(replaced)
        if not taken:
            return
        if before is not None and before.tenant not in (None, item.tenant):
            self._no_longer_of(before)
        asks_otherwise = item.plain and self._put_line(line_pod_facts(raw, item, self._settings), sure=sure)
        if item.tenant is not None:
            mine = self._pods_of.get(item.tenant, ())
            if item.uid not in mine:
                self._pods_of[item.tenant] = (*mine, item.uid)
            self.lost_pods.pop(item.tenant, None)
        self._count_pod(item)
        differs = before is None or before.content() != item.content() or asks_otherwise
        if news and item.tenant is not None and differs:
            self.on_tenant_changed(item.tenant)

    def _put_line(self, item: SharePodFacts, *, sure: bool) -> bool:
        """Record the request of a plain Pod. Return True if the request has changed."""
        _, before, _ = self.lines.put(item, sure=sure)
        return before is not None and (before.gpu, str(before.error)) != (item.gpu, str(item.error))

    def drop_pod(self, uid: str, last: Json | None = None, version: float = math.inf) -> None:
        """Remove a Pod. `last`: its last state, from a DELETED event. `version`: resourceVersion of the deletion, if
        known."""
        if last is not None:
            self.pods.put(pod_facts(last))
            if self.lines.get(uid) is not None:
                self._deleted[uid] = None
        pod = self.pods.drop(uid, version)
        if pod is not None:
            self._pod_gone(pod)

    def invalidate_pods(self) -> None:
        """Mark all cached Pods stale, so that the next list overwrites them whatever its versions. Forget which Pods
        were deleted: after a restore of etcd they may exist again."""
        self.lost_pods.clear()
        self.pods.invalidate()
        self.lines.invalidate()

    def _pod_gone(self, pod: PodFacts) -> None:
        self.cluster.remove_pod(pod.uid)
        self.lines.drop(pod.uid)
        if pod.tenant is not None:
            if pod.version != STALE:
                self.lost_pods[pod.tenant] = pod
            self._no_longer_of(pod)
        self.on_room_changed()

    def _no_longer_of(self, pod: PodFacts) -> None:
        tenant = pod.tenant or ""
        mine = tuple(uid for uid in self._pods_of.pop(tenant, ()) if uid != pod.uid)
        if mine:
            self._pods_of[tenant] = mine
        self.on_tenant_changed(tenant)

    def _count_pod(self, pod: PodFacts) -> None:
        node, before = pod.node or (pod.pin if pod.tenant is not None else None), self.cluster.room_version
        if node is None or pod.ended:
            self.cluster.remove_pod(pod.uid)
        else:
            tenant = TenantId(pod.tenant) if pod.tenant is not None else None
            self.cluster.set_pod_usage(node, pod.uid, pod.needs, tenant=tenant)
        self._room_since(before)

    def _room_since(self, before: int) -> None:
        if self.cluster.room_version != before:
            self.on_room_changed()

    # Claims

    def is_claim(self, tenant: str) -> bool:
        """Return True if a tenant is a claim, even if the claim is known from a ledger only. The claim of a SharePod's
        Pod is no tenant."""
        if self.asking(tenant) is not None:
            return False
        known = self.seen_claims.claims.get(tenant)
        if known is not None and (known.ours or known.scheduled):
            return True
        rows = (row for _, row in self.cluster.reservations_of(TenantId(tenant)))
        return any(row.claim is not None and row.claim.uid == tenant for row in rows)

    def claim_of_pod(self, pod: PodFacts) -> ClaimFacts | None:
        """Return the claim by which the GPUs of a SharePod's Pod are attached. None if CSI attaches them, or while the
        claim is not known."""
        return self.seen_claims.share_claim(pod.claim, pod.namespace, pod.uid) if pod.claim is not None else None

    def _share_claim_changed(self, pod_uid: str) -> None:
        pod = self.pods.get(pod_uid)
        if pod is not None and pod.tenant is not None:
            self.on_tenant_changed(pod.tenant)

    def namespace_of(self, tenant: str) -> str:
        """Return the namespace of a tenant; empty if nothing of it is known."""
        known = self.asking(tenant) or self.seen_claims.claims.get(tenant) or self.pod_of(tenant)
        if known is not None:
            return known.namespace
        return next((row.namespace for _, row in self.cluster.reservations_of(TenantId(tenant))), "")

    # Nodes

    def put_node(self, raw: Json) -> None:
        """Record a Node of the pool."""
        if not self.nodes.knows(*_version(raw)):
            self.take_node(node_facts(raw))

    def take_node(self, item: NodeFacts) -> None:
        """Record the facts of a Node of the pool."""
        taken, before, _ = self.nodes.put(item)
        if taken:
            self._say_unreadable("Node", item)
            self.gone_nodes.discard(item.name)
            self.refresh_node(item.name)
            self.on_node_changed(item.name)
            was = (before.out_of_service, before.ready) if before is not None else (False, True)
            if (item.out_of_service, item.ready) != was:
                self.tell_tenants(item.name)

    def node_is_there(self, name: str) -> None:
        """Record that a GET has found a Node of that name, in the pool or not, so processes may run there."""
        if name in self.gone_nodes:
            self.gone_nodes.discard(name)
            self.on_node_changed(name)

    def node_is_gone(self, name: str) -> None:
        """Record that a GET has found no Node of that name, so no process runs there."""
        if name not in self.gone_nodes:
            self.gone_nodes.add(name)
            self.tell_tenants(name)

    def tell_tenants(self, node: str) -> None:
        """Call `on_tenant_changed` for each tenant with a reservation on a node."""
        for row in self.cluster.reservations(node):
            self.on_tenant_changed(row.tenant)

    def drop_node(self, uid: str, version: float = math.inf) -> None:
        """Remove a Node that was deleted or left the pool at `version`. A later version adds the Node again."""
        item = self.nodes.drop(uid, version)
        if item is not None:
            self.refresh_node(item.name)
            self.on_node_changed(item.name)

    # GPUNodes

    def put_gpunode(self, raw: Json) -> None:
        """Record a GPUNode as read or written."""
        uid, version = _version(raw)
        if self.gpunodes.knows(uid, version):
            return
        item = self.ledgers.with_known_rows(gpunode_facts(raw, self.gpunodes.get(uid)))
        taken, before, replaced = self.gpunodes.put(item)
        if not taken:
            return
        self._say_unreadable("GPUNode", item)
        if replaced is not None:
            self.ledgers.remove(replaced)
        if before is None or before.generation != item.generation:
            self.ledgers.load(item)
            self.holders.follow(item.name)
        if before is None or placement_facts(before) != placement_facts(item):
            self.refresh_node(item.name)
        for tenant in tenants_concerned(before, item, self._status_written):
            self.on_tenant_changed(tenant)
        if before is None or reconciler_facts(before) != reconciler_facts(item):
            self.on_node_changed(item.name)

    def _say_unreadable(self, kind: str, item: NodeFacts | GpuNodeFacts) -> None:
        if item.error is not None:
            self._unreadable_log.warn(kind, item.error, follows="it takes no tenants", name=item.name)

    def _status_written(self, tenant: str) -> SharePodStatus | None:
        sharepod = self.sharepods.get(tenant)
        return sharepod.status if sharepod is not None else None

    def drop_gpunode(self, uid: str, version: float = math.inf) -> None:
        """Remove a deleted GPUNode together with its ledger. `version`: resourceVersion of the deletion, if known."""
        item = self.gpunodes.drop(uid, version)
        if item is not None:
            self.ledgers.remove(item)
            self.refresh_node(item.name)
            self.on_node_changed(item.name)

    def invalidate_gpunodes(self) -> None:
        """Mark all cached GPUNodes stale, so that the next list overwrites them whatever its versions and
        generations.
        """
        self.gpunodes.invalidate()
        self.cluster.invalidate_ledgers()

    def _whole_gpus_wanted(self) -> None:
        """Enqueue all nodes with plugin holders, and wake placement. Called when the set of Pods that wait for whole
        GPUs has changed, as unused holders may have to return their GPUs.
        """
        for node in self.cluster.plugin_nodes():
            self.on_holders_changed(node.name)
        self.on_room_changed()

    def _holders_changed(self, node: str) -> None:
        self.refresh_node(node)
        self.on_holders_changed(node)

    # Placement's view of a node

    def refresh_node(self, name: str) -> None:
        """Update placement's view of a node from its Node, its GPUNode and its agent's Lease."""
        node, gpunode = self.nodes.named(name), self.gpunodes.named(name)
        if node is None:
            self.cluster.remove_node(name)
        else:
            held = self.holders.open_gpus(gpunode) if gpunode is not None else frozenset()
            state = node_state(node, gpunode, agent_alive=self.agents.alive(name), held=held)
            account = self.cluster.node(name)
            if account is not None and account.state == state:
                return
            self.cluster.upsert_node(state)
        self.on_room_changed()

    def agent_away(self, name: str) -> bool:
        """Return True if a node of the pool has no living agent."""
        return self.nodes.named(name) is not None and not self.agents.alive(name)

    # All kinds of objects

    def tenants(self) -> set[str]:
        """Return every tenant that has a SharePod, a claim, a Pod or a reservation."""
        rows = {row for gpunode in self.gpunodes for row in gpunode.rows}
        decided = {str(row.tenant) for node in self.cluster.nodes() for row in self.cluster.reservations(node.name)}
        claims = {claim.uid for claim in self.seen_claims.claims if claim.ours or claim.scheduled}
        return self.sharepods.uids() | claims | set(self._pods_of) | rows | decided
