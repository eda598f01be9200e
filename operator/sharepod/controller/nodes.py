"""Reconciler of the nodes in a pool: keeps each node's GPUNode, advertises the resources of the resource line, and
writes the operator's conditions and Events about nodes.

Guarantees:
- A GPUNode is created for every Node whose pool label names a pool, and for no other Node. If the label has another
  value, an Event on the Node quotes it.
- A GPUNode is deleted only when its Node is deleted, or has left the pool, and its ledger is empty.
- A Node with shared GPUs advertises the resources of the line while the policy on Pods with a line is enforced. If
  another client removes them from the Node's status, they are written again. A Node that has left the pool does not
  advertise them.
- A Pod's gate waits at most `_ADVERTISED_S` for its Node to advertise enough of these resources.
- The annotation force-release releases only tenants that have ended. A listed tenant that runs keeps its row, and an
  Event names it.
"""

from __future__ import annotations

import datetime
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

import structlog

from sharepod.api.gpunode import KIND, GPUNodeSpec, Health, Pool, Tenant, TenantState, manifest, unknown_cordons
from sharepod.api.objects import API_VERSION, CORDONED_ANNOTATION, FORCE_RELEASE_ANNOTATION, POOL_LABEL
from sharepod.api.resource_line import RESOURCES
from sharepod.controller.apiserver.client import GPUNODES, NODES, Client
from sharepod.controller.apiserver.events import Events
from sharepod.controller.apiserver.workqueue import WorkQueue
from sharepod.controller.placing.ledger_writer import LedgerWriter
from sharepod.controller.state.agent_leases import PREFIX
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.facts.node_facts import GpuNodeFacts, NodeFacts
from sharepod.kube import AlreadyExistsError, ConflictError, InvalidError, Json, NotFoundError

from . import metrics
from .decisions.advertised import LineOnNode, advertised
from .decisions.attaching import CONDITION_BY_CLAIMS, Attaching, AttachReason
from .settings import OperatorSettings

CONDITION_AGENT_ALIVE = "AgentAlive"
CONDITION_DEVICE_PLUGIN = "DevicePluginPresent"
"""Condition of a GPUNode of pool `dedicated` or `scheduler`: True while its Node advertises GPUs of NVIDIA's device
plugin."""
_OURS = (CONDITION_AGENT_ALIVE, CONDITION_DEVICE_PLUGIN, CONDITION_BY_CLAIMS)
"""Conditions of a GPUNode that the operator writes. The agent writes the others."""

_LOOK_AGAIN_S = 1.0
"""Seconds until the next check of a deleted node with tenants, or of a node that leaves pool `scheduler`. A check is
needed because no watch shows a Node that was created again without the pool label."""
_ADVERTISED_S = 5.0
"""Longest time in seconds for which a Pod's gate stays closed because its Node advertises too little. Then the gate
opens, and kube-scheduler decides. Normally one write is enough."""

_UNLABELLED = (
    f"the node has lost its label {POOL_LABEL} while it has tenants. No agent runs there to see them end, so the "
    f"shares of tenants that end are not released. Put the label back, or release the share of a tenant that has "
    f"certainly ended: kubectl annotate gpunode {{0}} {FORCE_RELEASE_ANNOTATION}=<its id in spec.tenants>"
)

_DEVICE_PLUGIN = (
    "the Node advertises {0}, so NVIDIA's device plugin gives its GPUs to other pods while SharePod shares them. No "
    "SharePod is placed there. Keep the device plugin off the node (GPU Operator: kubectl label node {1} "
    "nvidia.com/gpu.deploy.device-plugin=false), or take the node from SharePod: kubectl label node {1} "
    f"{POOL_LABEL}-"
)

_UNLABELLED_SHORT = (
    f"the label {POOL_LABEL} was removed while tenants run; condition {CONDITION_AGENT_ALIVE} has the fix"
)
_AWAY_SHORT = (
    "the agent does not renew its Lease, so no SharePod is placed here; "
    f"condition {CONDITION_AGENT_ALIVE} has the commands"
)
_DEVICE_PLUGIN_SHORT = (
    "NVIDIA's device plugin also assigns these GPUs, so no SharePod is placed here; "
    f"condition {CONDITION_DEVICE_PLUGIN} has the commands"
)
"""Texts ending in SHORT are notes of Events: one sentence. The condition's message has the whole text."""

_NAMED = 200
"""Largest number of characters of an annotation's wrong entries that an Event quotes."""
_CORDON_FIX = "write an index or UUID from `kubectl sharepod gpus -o wide`"
_POOL_FIX = f"write {', '.join(Pool)}: kubectl label node {{1}} --overwrite {POOL_LABEL}={{0}}"

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Enough:
    """Record that a Node was seen to advertise enough of the line's resources for one version of its ledger.

    `uids`: uids of the Node and its GPUNode. `amounts`: amount of each resource that the rows of that version need.
    """

    uids: tuple[str, str]
    generation: int
    rows: Mapping[str, Tenant]
    amounts: Mapping[str, int]


class NodeReconciler:
    """Reconciler of nodes by name. `clock`: monotonic seconds."""

    def __init__(
        self,
        state: ClusterState,
        client: Client,
        ledger: LedgerWriter,
        events: Events,
        settings: OperatorSettings,
        clock: Callable[[], float],
    ) -> None:
        self._state = state
        self._client = client
        self._ledger = ledger
        self._events = events
        self._settings = settings
        self._clock = clock
        self._away: dict[str, float] = {}
        """Time since which the agent of a node is away, by node."""
        self._short: dict[str, float] = {}
        """Time since which a node advertises too little for its ledger, by node."""
        self._enough: dict[str, _Enough] = {}
        """For each node, the latest version of its ledger for which the Node was seen to advertise enough."""
        self._unfit: dict[tuple[str, str], str] = {}
        """Text of the last Event about a GPU or an annotation, by (node, the GPU's UUID or the annotation's name)."""
        self.lines_in_force: bool | None = None
        """True if the cluster enforces the policy that refuses a Pod with a resource line and no claim. None while
        unknown."""
        self.attaching: Attaching | None = None
        """Way in which the GPUs of SharePods' new Pods are attached. None while unknown."""
        self.take_in: Callable[[Iterable[GpuNodeFacts]], Awaitable[bool]] = _nothing_to_take_in
        """Stores the consumption counts of GPUNodes in GPUStatements, so that the GPUNodes can be deleted. Returns True
        if all counts are stored."""
        self.queue: WorkQueue[str] = WorkQueue("node", self.reconcile, settings.writers)

    async def run(self) -> None:
        """Reconcile nodes from the queue until cancelled."""
        await self.queue.run()

    def check_agents(self, *, acting: bool) -> None:
        """Find the agents that have become alive or away since the last call, and update their nodes. If `acting`,
        enqueue those nodes. The caller must call this about once a second.
        """
        names = [node.name for node in self._state.nodes]
        for name in self._state.agents.changed(names):
            log.info("agent came or went", node=name, away=self._state.agent_away(name))
            self._state.refresh_node(name)
            self._state.tell_tenants(name)
            if acting:
                self.queue.add(name)
        metrics.AGENTS_AWAY.set(self._state.agents.away(names))

    async def reconcile(self, name: str) -> None:
        """Reconcile one node. Raises `ApiError` and `NotLeadingError`.

        1. Carry out or refuse the annotation force-release.
        2. If the Node does not exist: delete the GPUNode once its ledger is empty.
        3. If the GPUNode does not exist: create it.
        4. If both exist: copy the pool label, write Events about GPUs, advertise the resources of the line, and write
           the conditions on the device plugin, the agent and the attachment of GPUs.
        """
        node, gpunode = self._state.nodes.named(name), self._state.gpunodes.named(name)
        if gpunode is not None:
            await self._force_release(gpunode)
        if node is None:
            await self._without_node(name, gpunode)
        elif gpunode is None:
            if node.pool in tuple(Pool):
                await self._create(node)
            else:
                text = f'label {POOL_LABEL}: "{node.pool}" is not a pool; {_POOL_FIX.format(_near(node.pool), name)}'
                self._events.warning("Node", node, "PoolUnknown", "Watch", text)
        else:
            if node.pool in tuple(Pool) and (gpunode.spec.pool != node.pool or gpunode.spec.leaving):
                self._ledger.add(name)
                # the pool changes once the last claim there has ended, which no watch event shows: check again
                if gpunode.spec.pool is Pool.SCHEDULER:
                    self.queue.add_after(name, _LOOK_AGAIN_S)
            self._announce_gpus(gpunode)
            self._announce_cordons(gpunode)
            await self._advertise(node, gpunode)
            await self._show_device_plugin(node, gpunode)
            await self._show_agent(node, gpunode)
            await self._show_attaching(gpunode)

    def _announce_gpus(self, gpunode: GpuNodeFacts) -> None:
        """Write Events about GPUs that have failed, cannot be shared, or can be shared again."""
        for gpu in gpunode.status.gpus:
            key = (gpunode.name, gpu.uuid)
            failed = gpu.health is not Health.HEALTHY
            text = f"GPU {gpu.index} ({gpu.uuid}): {gpu.reason}" if failed or not gpu.shareable else ""
            if self._unfit.get(key, "") == text:
                continue
            if text:
                self._unfit[key] = text
                self._events.warning(KIND, gpunode, "GpuFailed" if failed else "GpuNotShareable", "Watch", text)
            else:
                del self._unfit[key]
                text = f"GPU {gpu.index} ({gpu.uuid}) can be shared again"
                self._events.normal(KIND, gpunode, "GpuRecovered", "Watch", text)

    def _announce_cordons(self, gpunode: GpuNodeFacts) -> None:
        """Write one Event about the entries of the cordon annotation that name no GPU of the node."""
        wrong = unknown_cordons(gpunode.cordoned, gpunode.status.gpus)
        key, named = (gpunode.name, CORDONED_ANNOTATION), ", ".join(wrong)[:_NAMED]
        text = f'annotation {CORDONED_ANNOTATION}: "{named}" is no GPU of the node; {_CORDON_FIX}' if wrong else ""
        if text and self._unfit.get(key) != text:
            self._events.warning(KIND, gpunode, "CordonUnknown", "Watch", text)
        if text:
            self._unfit[key] = text
        else:
            self._unfit.pop(key, None)

    async def _advertise(self, node: NodeFacts, gpunode: GpuNodeFacts) -> None:
        """Write the amounts of the line's resources into the Node's status, if it has other amounts."""
        if self.lines_in_force is None or gpunode.error is not None or node.error is not None:
            return
        wanted = self._wanted(gpunode)
        if all(node.allocatable.extended.get(name, 0) == amount for name, amount in wanted.items()):
            return
        amounts = {name: str(amount) for name, amount in wanted.items()}
        body = {"metadata": {"uid": node.uid}, "status": {"capacity": amounts, "allocatable": amounts}}
        try:
            self._state.put_node(await self._client.patch_status(NODES, node.name, body))
        except (ConflictError, NotFoundError):  # the Node was deleted or replaced; the watch reports it
            return
        log.info("advertised the resources of the line", node=node.name, amounts=amounts)

    async def _withdraw(self, node: Json) -> None:
        """Remove the resources of the line from the status of a Node that has left the pool. With these resources
        kube-scheduler would bind a Pod there whose line was not turned into a claim."""
        status = node.get("status") or {}
        if not any(name in (status.get(kind) or {}) for kind in ("capacity", "allocatable") for name in RESOURCES):
            return
        nothing: Json = dict.fromkeys(RESOURCES)
        uid, name = node["metadata"]["uid"], node["metadata"]["name"]
        body = {"metadata": {"uid": uid}, "status": {"capacity": nothing, "allocatable": nothing}}
        try:
            await self._client.patch_status(NODES, name, body)
        except (ConflictError, NotFoundError):  # the Node was deleted or replaced
            return
        log.info("the node has left the pool: it no longer advertises the resources of the line", node=name)

    def advertises_enough(self, name: str) -> bool:
        """Return True if a Node advertises enough of the line's resources for all shares in its ledger.

        Otherwise return False and enqueue the node, whose reconciliation writes the amounts. Return True in three more
        cases: the Node has lacked the amounts for `_ADVERTISED_S`, the policy on Pods with a line is not enforced, or
        the Node or GPUNode is missing or unreadable.
        """
        node, gpunode = self._state.nodes.named(name), self._state.gpunodes.named(name)
        if (
            not self.lines_in_force
            or gpunode is None
            or gpunode.error is not None
            or node is None
            or node.error is not None
        ):
            return True
        seen, uids = self._enough.get(name), (node.uid, gpunode.uid)
        if seen is None or seen.uids != uids or self._needs_more(seen, gpunode) or not _has(node, seen.amounts):
            wanted = self._wanted(gpunode)
            if not _has(node, wanted):
                self.queue.add(name)
                return self._clock() >= self._short.setdefault(name, self._clock()) + _ADVERTISED_S
            self._enough[name] = _Enough(uids, gpunode.generation, gpunode.rows, wanted)
        elif seen.generation != gpunode.generation:
            self._enough[name] = replace(seen, generation=gpunode.generation, rows=gpunode.rows)
        self._short.pop(name, None)
        return True

    def _needs_more(self, seen: _Enough, gpunode: GpuNodeFacts) -> bool:
        """Return True if the present ledger may need more of the line's resources than the ledger in `seen`. Only
        changed rows are checked; an unchanged row is the same Python object.
        """
        before, rows = seen.rows, gpunode.rows
        if seen.generation == gpunode.generation:
            return False
        removed = [uid for uid in before if uid not in rows]
        if any(self._state.pod_of(uid) or self._state.seen_claims.claims.get(uid) for uid in removed):
            return True
        lines = (self._line_of(uid, row, gpunode.name) for uid, row in rows.items() if before.get(uid) is not row)
        return any(line is not None and line.beyond for line in lines)

    def _wanted(self, gpunode: GpuNodeFacts) -> Mapping[str, int]:
        """Return the amounts of the line's resources that a Node should advertise now."""
        by_scheduler = gpunode.spec.pool is Pool.SCHEDULER
        ours = [gpu for gpu in gpunode.status.gpus if gpu.held is not False and not by_scheduler]
        return advertised(ours, self._lines_on(gpunode), in_force=bool(self.lines_in_force))

    def _lines_on(self, gpunode: GpuNodeFacts) -> Iterator[LineOnNode]:
        """Yield the resource lines that a node must fit: of each row with a line, and of each Pod that is bound there
        without a row.
        """
        seen = self._state.seen_claims
        for uid, row in gpunode.rows.items():
            if (of_row := self._line_of(uid, row, gpunode.name)) is not None:
                yield of_row
        for plain in seen.bound_lines(gpunode.name):
            claim = seen.claims.named(plain.claim_of_line or "", plain.namespace)
            if claim is None or claim.uid not in gpunode.rows:
                yield LineOnNode(plain.carried, None)
        account = self._state.cluster.node(gpunode.name)
        for uid, usage in account.pods.items() if account is not None else ():
            if usage.tenant is not None and usage.tenant not in gpunode.rows:  # e.g. its row was released by force
                left = self._state.pods.get(uid)
                if left is not None and left.carried and left.node == gpunode.name:
                    yield LineOnNode(left.carried, None)

    def _line_of(self, uid: str, row: Tenant, node: str) -> LineOnNode | None:
        """Return the resource line of a row on a node. None if the row's Pod has no line, has ended or is elsewhere."""
        claim, pod = self._state.seen_claims.claims.get(uid), self._state.pod_of(uid)
        if claim is not None and claim.by_line:
            user = self._state.seen_claims.pods.get(claim.made_for or "")
            return LineOnNode(user.carried, row) if user is not None else None
        if pod is not None and pod.carried and not pod.ended and (pod.node or pod.pin) in (None, node):
            return LineOnNode(pod.carried, row)
        return None

    async def _create(self, node: NodeFacts) -> None:
        try:
            made = await self._client.create(GPUNODES, manifest(node.name, GPUNodeSpec(pool=Pool(node.pool))))
        except AlreadyExistsError:
            made = await self._client.get(GPUNODES, node.name)
        else:
            log.info("created GPUNode", node=node.name)
        self._state.put_gpunode(made)

    async def _without_node(self, name: str, gpunode: GpuNodeFacts | None) -> None:
        """Handle a Node that was deleted or has left the pool. Delete its GPUNode once the ledger is empty. While a
        Node that has left the pool still has tenants, set AgentAlive to False, with advice.
        """
        for known in (self._away, self._short, self._enough):
            known.pop(name, None)
        self._unfit = {key: text for key, text in self._unfit.items() if key[0] != name}
        left: Json | None = None
        try:
            raw = await self._client.get(NODES, name)
        except NotFoundError:
            self._state.node_is_gone(name)
            if gpunode is not None and gpunode.spec.tenants:
                self.queue.add_after(name, _LOOK_AGAIN_S)
        else:
            self._state.node_is_there(name)
            if POOL_LABEL in (raw["metadata"].get("labels") or {}):
                self._state.put_node(raw)
                return
            if gpunode is not None and gpunode.spec.pool is Pool.SCHEDULER and not gpunode.spec.leaving:
                self._ledger.add(name)
            if gpunode is not None and gpunode.spec.tenants:
                await self._show_agent_away(gpunode, "PoolLabelGone", _UNLABELLED.format(name), _UNLABELLED_SHORT)
                return
            left = raw
        if gpunode is None or gpunode.spec.tenants or gpunode.spec.holders or self._state.cluster.reservations(name):
            return
        if left is not None:
            await self._withdraw(left)
        if gpunode.status.consumption and not await self.take_in([gpunode]):
            self.queue.add_after(name, _LOOK_AGAIN_S)  # a deletion now would lose the counts
            return
        try:
            await self._client.delete(GPUNODES, name, uid=gpunode.uid, resource_version=str(gpunode.version))
        except (ConflictError, NotFoundError):
            self.queue.add_after(name, 1.0)
        else:
            log.info("deleted GPUNode: its Node is deleted and its ledger is empty", node=name)

    async def _force_release(self, gpunode: GpuNodeFacts) -> None:
        """Carry out the annotation force-release, which lists tenants.

        Each listed tenant with a row is enqueued; its reconciler removes the row if the tenant has ended. A listed
        tenant that still runs keeps its row, and an Event names its SharePod or Pod. The annotation is removed once no
        listed tenant has a row.
        """
        if not gpunode.forced:
            return
        live: list[str] = []
        for tenant in sorted(gpunode.forced & gpunode.rows.keys()):
            live += self._running(tenant, gpunode.rows[tenant])
            self._state.on_tenant_changed(tenant)
        if live:
            text = f"force-release does not end running work; delete it first: {', '.join(live)}"
            self._events.warning(KIND, gpunode, "ForceReleaseRefused", "Release", text)
            return
        if gpunode.forced & gpunode.rows.keys():
            return
        pointer = FORCE_RELEASE_ANNOTATION.replace("/", "~1")
        operations: list[Json] = [
            {"op": "test", "path": "/metadata/resourceVersion", "value": str(gpunode.version)},
            {"op": "remove", "path": f"/metadata/annotations/{pointer}"},
        ]
        try:
            self._state.put_gpunode(await self._client.patch_json(GPUNODES, gpunode.name, operations))
        except (InvalidError, ConflictError, NotFoundError):
            self.queue.add_after(gpunode.name, 1.0)

    def _running(self, tenant: str, row: Tenant) -> Iterator[str]:
        """Yield the SharePod and the Pods that use a row, or are about to use it, although an administrator wants to
        release the row."""
        sharepod, pod = self._state.asking(tenant), self._state.pod_of(tenant)
        if (
            sharepod is not None
            and not sharepod.ended
            and not sharepod.deleting
            and row.state is not TenantState.RELEASING
            and (pod is None or not pod.deleting)
        ):
            yield f"{sharepod.kind} {sharepod.namespace}/{sharepod.name}"
        claim = self._state.seen_claims.claims.get(tenant)
        if claim is not None and claim.allocation is not None:
            users = self._state.seen_claims.users(claim)
            yield from (f"Pod {user.namespace}/{user.name}" for user in users if user.runs and not user.deleting)

    async def _show_agent(self, node: NodeFacts, gpunode: GpuNodeFacts) -> None:
        """Set AgentAlive to False, with advice, once the agent of a ready Node has been away for `agent_duration`. Set
        it to True when the agent is back.
        """
        known = next((item for item in gpunode.status.conditions if item.type == CONDITION_AGENT_ALIVE), None)
        away = node.ready and self._state.agent_away(node.name)
        if not away:
            self._away.pop(node.name, None)
        else:
            # The agent of a new node needs time to start, and a new operator needs time to read the Leases.
            due = self._away.setdefault(node.name, self._clock()) + self._settings.agent_duration
            if self._clock() < due:
                self.queue.add_after(node.name, due - self._clock() + 0.1)
                return
        if away:
            await self._show_agent_away(gpunode, "LeaseNotRenewed", self._advice(node.name), _AWAY_SHORT)
        elif known is not None:
            await self._write_condition(gpunode, CONDITION_AGENT_ALIVE, true=True, reason="LeaseRenewed", text="")

    async def _show_device_plugin(self, node: NodeFacts, gpunode: GpuNodeFacts) -> None:
        """Set DevicePluginPresent to True, with advice, while NVIDIA's device plugin could assign the node's GPUs to
        other Pods, else to False. Write nothing if the plugin was never seen there.
        """
        present = node.double_booked
        known = any(item.type == CONDITION_DEVICE_PLUGIN for item in gpunode.status.conditions)
        if not present and not known:
            return
        text = _DEVICE_PLUGIN.format(", ".join(node.plugin_resources), node.name) if present else ""
        reason = "ResourceAdvertised" if present else "NoResource"
        if (
            await self._write_condition(gpunode, CONDITION_DEVICE_PLUGIN, true=present, reason=reason, text=text)
            and present
        ):
            self._events.warning(KIND, gpunode, CONDITION_DEVICE_PLUGIN, "Watch", _DEVICE_PLUGIN_SHORT)

    async def _show_attaching(self, gpunode: GpuNodeFacts) -> None:
        """Write the condition SharePodsByClaims: how GPUs of new Pods are attached. Write nothing where the setting has
        always been `csi`.
        """
        how = self.attaching
        known = next((item for item in gpunode.status.conditions if item.type == CONDITION_BY_CLAIMS), None)
        if how is None or (known is None and how.reason is AttachReason.SETTING):
            return
        again = known is not None and known.message != how.message
        await self._write_condition(
            gpunode, CONDITION_BY_CLAIMS, true=how.by_claims, reason=how.reason, text=how.message, again=again
        )

    async def _show_agent_away(self, gpunode: GpuNodeFacts, reason: str, text: str, short: str) -> None:
        """Set AgentAlive to False and write a short Event, unless AgentAlive already has this reason."""
        if await self._write_condition(gpunode, CONDITION_AGENT_ALIVE, true=False, reason=reason, text=text):
            self._events.warning(KIND, gpunode, "AgentAway", "Watch", short)

    def _advice(self, name: str) -> str:
        namespace, lease = self._settings.namespace, f"{PREFIX}{name}"
        return (
            f"the node is ready, but its agent does not renew Lease {namespace}/{lease}. No SharePod is placed there, "
            f"and the shares of tenants that end are not released. See: kubectl -n {namespace} get pods -o wide "
            f"--field-selector spec.nodeName={name}. To release the share of a tenant that has certainly ended: "
            f"kubectl annotate gpunode {name} {FORCE_RELEASE_ANNOTATION}=<its id in spec.tenants>"
        )

    async def _write_condition(
        self, gpunode: GpuNodeFacts, kind: str, *, true: bool, reason: str, text: str, again: bool = False
    ) -> bool:
        """Write one of the operator's conditions. Return True if it was written, and False if the GPUNode already has
        the condition with this reason. `again`: write in that case too.

        Each apply contains all conditions that the operator writes, because server-side apply removes omitted
        conditions.
        """
        present = (self._state.gpunodes.named(gpunode.name) or gpunode).status.conditions
        if not again and any(item.type == kind and item.reason == reason for item in present):
            return False
        others = [item.dump() for item in present if item.type in _OURS and item.type != kind]
        condition: Json = {
            "type": kind,
            "status": "True" if true else "False",
            "reason": reason,
            "message": text,
            "lastTransitionTime": self._now(),
            "observedGeneration": gpunode.generation,
        }
        body: Json = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": gpunode.name, "uid": gpunode.uid},
            "status": {"conditions": [*others, condition]},
        }
        self._state.put_gpunode(await self._client.apply_status(GPUNODES, gpunode.name, body))
        return True

    @staticmethod
    def _now() -> str:
        return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _near(pool: str) -> str:
    """Return the name of the pool that is most similar to a misspelt name."""
    return get_close_matches(pool, tuple(Pool), n=1, cutoff=0.0)[0]


def _has(node: NodeFacts, amounts: Mapping[str, int]) -> bool:
    """Return whether a Node advertises these amounts at least."""
    return all(node.allocatable.extended.get(resource, 0) >= amount for resource, amount in amounts.items())


async def _nothing_to_take_in(_gpunodes: Iterable[GpuNodeFacts]) -> bool:
    return True
