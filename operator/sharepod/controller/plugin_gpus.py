"""Reconciler of plugin holders: Pods of the operator that take GPUs from NVIDIA's device plugin, so that SharePod can
share these GPUs. Below, a holder is a plugin holder.

One key of the queue is one node: all its holders are reconciled together.

Guarantees:
- The operator creates a holder's Pod first and its ledger row second. If it dies in between, the next operator finds
  the Pod and writes the row.
- A holder whose Pod gets no GPU within `holder_pending` is withdrawn. A holder whose creation fails for
  `holder_pending` is given up; a refusal by the API server counts at once. In each case, the tenant that it was meant
  for avoids the node for some time and is placed again.
- A holder whose GPU has had no tenant for `holder_idle` is returned: its row becomes Releasing, then its Pod is
  deleted.
- While a Pod waits for whole GPUs and could use such a GPU, `_WANTED_S` replaces `holder_idle`.
- The GPU of a reservation for a moving or preempting tenant is not returned. The GPU of the head-of-queue reservation
  is returned only while a Pod that waits for whole GPUs could use it.
- A Held holder has lost its GPU in two cases: for `holder_pending`, the agent has reported that the GPU is assigned to
  no Pod, or has not reported the GPU at all. The holder's row then becomes Releasing.
- A tenant with a GPU that no Held holder has is ended by the deletion of its Pod. Its restartPolicy places it again.
- A holder's Pod counts as deleted only after a GET has confirmed it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import structlog

from sharepod.api.gpunode import CONDITION_AGENT_READY, KIND, HolderState, PluginHolder, Pool, Tenant, TenantState
from sharepod.api.objects import HOLDER_PREFIX
from sharepod.api.pods.holder_pod import holder_pod
from sharepod.controller.apiserver.client import PODS, Client
from sharepod.controller.apiserver.events import Events
from sharepod.controller.apiserver.workqueue import WorkQueue
from sharepod.controller.decisions.holder_rows import holder_rows
from sharepod.controller.placing.ledger_writer import LedgerWriter
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.facts.claim_facts import ClaimPodFacts
from sharepod.controller.state.facts.node_facts import GpuNodeFacts
from sharepod.controller.state.facts.pod_facts import PodFacts
from sharepod.controller.state.holders_seen import HolderPod, WantedHolder
from sharepod.controller.state.memos import TenantMemos
from sharepod.kube import AlreadyExistsError, ApiError, ConflictError, ForbiddenError, InvalidError, NotFoundError
from sharepod.placement.holders import left_to_give, wanted_whole
from sharepod.placement.state.types import NewHolder, PlacementRequest

from .settings import OperatorSettings

_ENDED = ("Succeeded", "Failed")
_LOST = "the holder of its GPU no longer exists, so NVIDIA's device plugin may give the GPU to another pod"
_NOT_REPORTED = "the agent of {} no longer reports {}: the driver does not show it"

_WANTED_S = 2.0
"""Seconds for which a holder keeps an unused GPU while a Pod waits for whole GPUs. The tenant for which the holder was
created is placed within this time."""

log = structlog.get_logger(__name__)


class HolderReconciler:
    """Reconciler of the holders of nodes, by the node's name.

    Args:
        state: The cluster state, in which created Pods are recorded at once.
        client: The API server.
        ledger: Writes the holders' rows, as `rows` returns them.
        events: Recorder of Events about GPUNodes, for administrators.
        memos: The tenants' memos, in which the nodes that a tenant must avoid are recorded.
        settings: Settings of the operator.
        clock: Monotonic seconds.
        retry: Called with the tenant of a holder that was withdrawn or given up, to place that tenant elsewhere.
    """

    def __init__(
        self,
        state: ClusterState,
        client: Client,
        ledger: LedgerWriter,
        events: Events,
        memos: TenantMemos,
        settings: OperatorSettings,
        clock: Callable[[], float],
        retry: Callable[[str], None],
    ) -> None:
        self._state = state
        self._seen = state.holders
        self._client = client
        self._ledger = ledger
        self._events = events
        self._memos = memos
        self._settings = settings
        self._clock = clock
        self._retry = retry
        self._ended: set[str] = set()
        """Ids of the holders whose Pods have certainly ended. Kept until their rows are removed."""
        self._without: set[str] = set()
        """Ids of the holders that have lost their GPU (see the guarantees above)."""
        self._since: dict[tuple[str, HolderState], float] = {}
        """By (holder's id, state): time since which a Pending holder has no GPU, or the GPU of a Held holder has no
        tenant."""
        self._unshown_since: dict[str, float] = {}
        """By a holder's id: time since which the agent's report does not show the holder with its GPU."""
        self._failing_since: dict[str, float] = {}
        """By the name of a holder's Pod: time of the first failed attempt to create it."""
        self.queue: WorkQueue[str] = WorkQueue("holder", self.reconcile, settings.writers)

    async def run(self) -> None:
        """Reconcile nodes from the queue until cancelled."""
        await self.queue.run()

    def clear(self) -> None:
        """Drop pending work: leadership was lost."""
        self.queue.clear()
        self._seen.clear()
        self._since.clear()
        self._failing_since.clear()
        self._unshown_since.clear()
        self._ended.clear()
        self._without.clear()

    def want(self, request: PlacementRequest, place: NewHolder) -> None:
        """Enqueue the creation of `place.count` holders on a node, so that a request can be placed on their GPUs."""
        names = (f"{HOLDER_PREFIX}{uuid.uuid4().hex[:12]}" for _ in range(place.count))
        wanted = [WantedHolder(name=name, node=place.node, tenant=str(request.tenant)) for name in names]
        log.info("a holder is wanted", node=place.node, tenant=request.tenant, names=[each.name for each in wanted])
        self._seen.want(wanted)

    def rows(self, base: GpuNodeFacts) -> tuple[PluginHolder, ...]:
        """Return the rows of plugin holders that the ledger of a node should contain."""
        pods = self._seen.on(base.name)
        if not base.spec.holders and not pods:  # the node has no GPUs of the device plugin, like most nodes
            return ()
        return holder_rows(
            base.spec.holders,
            pods,
            base.status.gpus,
            in_use=self._in_use(base),
            giving_back=self._seen.giving_back,
            ended=self._ended,
            without=self._without,
        )

    async def reconcile(self, node: str) -> None:
        """Reconcile the holders of one node. Raises `ApiError` and `NotLeadingError`.

        1. Confirm which Pods of holders have ended, and delete these.
        2. Decide which holders to withdraw or to return, and write the rows.
        3. End the tenants whose GPUs have no Held holder.
        4. Delete the Pods of Releasing holders.
        5. Create the wanted holders. This step is last, because it raises if the API server refuses new Pods, and the
           deletions must not wait for that.
        """
        gpunode = self._state.gpunodes.named(node)
        await self._confirm_ends(node, gpunode)
        if gpunode is not None and gpunode.ledger_error is None:
            self._look_for_lost(gpunode)
            self._give_back(gpunode)
            if self.rows(gpunode) != gpunode.spec.holders:
                self._ledger.add(node)
            await self._end_homeless(gpunode)
            await self._delete_released(gpunode)
        for wanted in self._seen.wanted_on(node):
            await self._create(wanted)

    def _in_use(self, gpunode: GpuNodeFacts) -> set[str]:
        """Return the UUIDs of the node's GPUs that have a tenant: by a row of the ledger, or by a decision not written
        yet.
        """
        rows = (row.gpus for row in gpunode.spec.tenants)
        decided = (row.gpus for row in self._state.cluster.reservations(gpunode.name))
        return {str(gpu) for gpus in (*rows, *decided) for gpu in gpus}

    def _kept(self, node: str, *, wanted: bool) -> set[str]:
        """Return the UUIDs of the node's GPUs that are reserved for a tenant which is not placed yet.

        Args:
            node: Name of the node.
            wanted: True while a Pod waits for whole GPUs. The head-of-queue reservation is then left out, because such
                a Pod precedes it. Reservations for preempting and moving tenants are always included.
        """
        cluster = self._state.cluster
        head = cluster.head_reservation if wanted else None
        return {str(gpu) for item in cluster.kept() if item is not head and item.node == node for gpu in item.gpus}

    # Creating

    async def _create(self, wanted: WantedHolder) -> None:
        settings, namespace = self._settings, self._seen.namespace
        body = holder_pod(
            wanted.name,
            namespace,
            node=wanted.node,
            tenant=wanted.tenant,
            image=settings.holder_image,
            priority_class=settings.holder_priority_class,
            tolerations=[toleration.manifest() for toleration in settings.tolerations],
        )
        try:
            made = await self._client.create(PODS, body, namespace, strict=True)
        except AlreadyExistsError:  # the Pod already exists, because the answer to an earlier request was lost
            made = await self._client.get(PODS, wanted.name, namespace)
        except (ForbiddenError, InvalidError) as error:
            self._refused(wanted, error)
            return
        except ApiError as error:
            now = self._clock()
            if now - self._failing_since.setdefault(wanted.name, now) < self._settings.holder_pending:
                raise
            self._refused(wanted, error)
            return
        self._failing_since.pop(wanted.name, None)
        self._state.other_pods.put(made)
        self._seen.unwant(wanted)
        log.info("created a holder", node=wanted.node, pod=wanted.name, tenant=wanted.tenant)

    def _refused(self, wanted: WantedHolder, error: ApiError) -> None:
        self._failing_since.pop(wanted.name, None)
        self._seen.unwant(wanted)
        self._give_up(wanted.node, wanted.tenant, f"lets no holder be created: {error.message}")
        self._warn(wanted.node, "HolderRefused", f"the API server refuses a holder: {error.message}")

    def _give_up(self, node: str, tenant: str, why: str) -> None:
        """Make a tenant avoid a node on which it got no GPU, and retry it elsewhere."""
        if not tenant:
            return
        memo = self._memos.of(tenant)
        memo.avoid[node] = (why, self._clock() + memo.next_pause_s(self._settings.holder_pending))
        self._retry(tenant)

    # Ends

    async def _confirm_ends(self, node: str, gpunode: GpuNodeFacts | None) -> None:
        """Find the holders whose Pod is missing in the cluster state, and read these Pods live to confirm which have
        ended.
        """
        for pod in self._seen.lost_on(node):
            if await self._has_ended(pod.name, pod.uid):
                self._ended.add(pod.uid)
                row = next((each for each in (gpunode.spec.holders if gpunode else ()) if each.id == pod.uid), None)
                if row is None or row.state is HolderState.PENDING:
                    self._give_up(node, pod.tenant, "did not give a holder a GPU: its Pod has ended")
            self._seen.lost.pop(pod.uid, None)
        rows = gpunode.spec.holders if gpunode is not None else ()
        for row in rows:
            unseen = row.id not in self._ended and self._seen.there(row.id) is None
            if unseen and row.pod_name and await self._has_ended(row.pod_name, row.id):
                self._ended.add(row.id)
        if gpunode is not None:
            self._forget_all_but(gpunode)

    async def _has_ended(self, name: str, uid: str) -> bool:
        """Read a holder's Pod live. Return True if it is deleted or has ended; an ended Pod is deleted. If the Pod is
        alive, record it in the cluster state and return False.
        """
        try:
            raw = await self._client.get(PODS, name, self._seen.namespace)
        except NotFoundError:
            return True
        if str(raw["metadata"]["uid"]) != uid:
            return True
        if (raw.get("status") or {}).get("phase") not in _ENDED:
            self._state.other_pods.put(raw)
            return False
        await self._delete(name, uid)
        return True

    async def _delete(self, name: str, uid: str) -> None:
        try:
            await self._client.delete(PODS, name, self._seen.namespace, uid=uid)
        except (NotFoundError, ConflictError):
            return

    def _forget_all_but(self, gpunode: GpuNodeFacts) -> None:
        """Drop the notes about holders of which neither a row nor a Pod is left."""
        rows = {row.id for item in self._state.gpunodes for row in item.spec.holders}
        self._ended &= rows
        self._without &= rows
        kept = {uid for uid in self._seen.giving_back if uid in rows or self._seen.there(uid) is not None}
        self._seen.giving_back.intersection_update(kept)
        self._unshown_since = {uid: at for uid, at in self._unshown_since.items() if uid in rows}
        self._since = {key: at for key, at in self._since.items() if key[0] in rows}

    def _look_for_lost(self, gpunode: GpuNodeFacts) -> None:
        """Find the Held holders that have lost their GPU to no other Pod, and add them to `_without`.

        - A kubelet that has lost its record of devices reports the GPU as unassigned. The agent then serves no tenant
          on it.
        - A GPU that has fallen off the bus is missing from the agent's report. So is a GPU that was taken out of a
          node.
        - An agent that is away, or not ready, shows neither. The time until a holder counts as lost then starts again.
        """
        now, gpus = self._clock(), {gpu.uuid: gpu for gpu in gpunode.status.gpus}
        knows = not self._state.agent_away(gpunode.name) and not any(
            each.type == CONDITION_AGENT_READY and each.status == "False" for each in gpunode.status.conditions
        )
        for row in gpunode.spec.holders:
            gpu = gpus.get(row.uuid) if row.uuid is not None else None
            if row.state is not HolderState.HELD or (gpu is not None and gpu.held is not False):
                self._unshown_since.pop(row.id, None)
                continue
            if not knows:
                self._unshown_since.pop(row.id, None)
                self.queue.add_after(gpunode.name, self._settings.holder_pending)
                continue
            due = self._unshown_since.setdefault(row.id, now) + self._settings.holder_pending
            if now >= due:
                self._without.add(row.id)
            else:
                self.queue.add_after(gpunode.name, due - now)

    # Giving back

    def _give_back(self, gpunode: GpuNodeFacts) -> None:
        """Mark the holders to return: a holder that got no GPU in time, or whose GPU has had no tenant for too long."""
        node, now, in_use = self._state.nodes.named(gpunode.name), self._clock(), self._in_use(gpunode)
        ours = node is not None and node.pool == Pool.DEVICE_PLUGIN
        wanted = self._is_wanted_whole(gpunode)
        idle_patience = min(_WANTED_S, self._settings.holder_idle) if wanted else self._settings.holder_idle
        kept = self._kept(gpunode.name, wanted=wanted)
        for row in gpunode.spec.holders:
            key = (row.id, row.state)
            pod = self._seen.there(row.id)
            if row.id in self._seen.giving_back or pod is None or row.state is HolderState.RELEASING:
                continue
            if row.uuid is not None and row.uuid in in_use:
                self._since.pop(key, None)
                continue
            pending = row.state is HolderState.PENDING
            patience = self._settings.holder_pending if pending else idle_patience
            due = self._since.setdefault(key, now) + (patience if ours else 0.0)
            if now < due:
                self.queue.add_after(gpunode.name, due - now)
                continue
            if row.uuid is not None and row.uuid in kept:
                self.queue.add_after(gpunode.name, _WANTED_S)  # no event shows the end of the reservation
                continue
            self._seen.giving_back.add(row.id)
            self._seen.follow(gpunode.name)
            self._state.refresh_node(gpunode.name)
            self._tell_given_back(gpunode, pod, pending=pending)

    def _is_wanted_whole(self, gpunode: GpuNodeFacts) -> bool:
        """Return True if a waiting Pod for whole GPUs would fit on the node with the GPUs of holders, but not without
        them.
        """
        cluster, account = self._state.cluster, self._state.cluster.node(gpunode.name)
        if account is None:
            return False
        held = sum(row.state is HolderState.HELD for row in gpunode.spec.holders)
        free = left_to_give(account)
        return wanted_whole(cluster, account, free + held) > max(free, 0)

    def _tell_given_back(self, gpunode: GpuNodeFacts, pod: HolderPod, *, pending: bool) -> None:
        if not pending:
            log.info("returning a holder", node=gpunode.name, pod=pod.name)
            self._events.normal(
                KIND, gpunode, "HolderGivenBack", "Release", f"{pod.name} had no tenants: its GPU is returned"
            )
            return
        why = f"got no GPU within {self._settings.holder_pending:g} s"
        log.info("a holder is withdrawn", node=gpunode.name, pod=pod.name, why=why)
        self._events.warning(KIND, gpunode, "HolderWithdrawn", "Release", f"{pod.name} {why} and is withdrawn")
        self._give_up(gpunode.name, pod.tenant, f"has NVIDIA's device plugin, of which a holder {why}")

    async def _delete_released(self, gpunode: GpuNodeFacts) -> None:
        for row in gpunode.spec.holders:
            pod = self._seen.there(row.id)
            if row.state is HolderState.RELEASING and pod is not None and not pod.deleting:
                await self._delete(pod.name, pod.uid)

    # Lost GPUs

    async def _end_homeless(self, gpunode: GpuNodeFacts) -> None:
        """Delete the Pods of tenants on a GPU that no holder Pod has, because the device plugin may have given that GPU
        to another Pod.
        """
        if gpunode.spec.pool is not Pool.DEVICE_PLUGIN:
            return
        held = {row.uuid for row in gpunode.spec.holders if row.state is HolderState.HELD}
        for row in gpunode.spec.tenants:
            if row.state is TenantState.RESERVED and not held.issuperset(row.gpus):
                for pod in self._pods_of(row):
                    if not pod.deleting and not pod.ended:
                        await self._end(gpunode, row, pod)

    def _pods_of(self, row: Tenant) -> Iterator[PodFacts | ClaimPodFacts]:
        pod, claim = self._state.pod_of(row.id), self._state.seen_claims.claims.get(row.id)
        if pod is not None:
            yield pod
        if claim is not None:
            yield from self._state.seen_claims.users(claim)

    async def _end(self, gpunode: GpuNodeFacts, row: Tenant, pod: PodFacts | ClaimPodFacts) -> None:
        unreported = sorted(set(row.gpus) - {gpu.uuid for gpu in gpunode.status.gpus})
        why = _NOT_REPORTED.format(gpunode.name, ", ".join(unreported)) if unreported else _LOST
        text = f"ended {pod.namespace}/{pod.name}: {why}"
        self._events.warning(KIND, gpunode, "HolderLost", "Evict", text)
        sharepod = self._state.asking(row.id)
        if sharepod is not None:
            self._events.warning(sharepod.kind, sharepod, "HolderLost", "Evict", why)
        else:
            self._events.warning("Pod", pod, "HolderLost", "Evict", why)
        log.warning("ending a tenant whose GPU has no holder", node=gpunode.name, pod=f"{pod.namespace}/{pod.name}")
        try:
            await self._client.delete(PODS, pod.name, pod.namespace, uid=pod.uid)
        except (NotFoundError, ConflictError):
            return

    def _warn(self, node: str, reason: str, text: str) -> None:
        gpunode = self._state.gpunodes.named(node)
        if gpunode is not None:
            self._events.warning(KIND, gpunode, reason, "Hold", text)
