"""Values of placement: nodes, GPUs, requests, reservations and answers. All are frozen: a decision can be kept,
compared and repeated.

Units: time in thousandths of one GPU (`Milli`), sizes in bytes, CPU in thousandths of a core. Scheduling labels
(affinity, antiAffinity, exclusion) apply within a namespace, so they are compared as `LabelKey`, never as bare text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from sharepod.api.bounds import clipped
from sharepod.api.gpunode import (
    ClaimReference,
    CoRunningPolicy,
    Latency,
    MemoryIsolation,
    Mode,
    SchedulingLabels,
    Tenant,
    TenantState,
)
from sharepod.api.sharepod import NO_GROUP, GpuRequest
from sharepod.api.units import Bytes, GpuUuid, Milli, TenantId

LabelKey = tuple[str, str]
"""(namespace, label): scheduling labels are compared by it."""

NO_LABELS = SchedulingLabels()

_CHOSEN = ("NodeSelector", "NodeAffinity", "Taint")
"""Obstacles by which the request itself (selector, affinity) or an admin (taint) excludes nodes on purpose."""
_FIGURES = re.compile(r" \(.*\)")
"""Pattern of the numbers in an obstacle's text: the part in parentheses."""
_BRIEF_WORDS = 25
"""Most words of an Event's text. Of a longer obstacle, only the first clause is used."""


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources that pods take of a node, or that a node has for them. `extended`: every other resource by name, such
    as `ephemeral-storage`, `hugepages-2Mi` or `rdma/hca`, in whole units."""

    cpu_milli: int = 0
    memory: int = 0
    extended: Mapping[str, int] = field(default_factory=dict, hash=False)

    def __add__(self, other: Resources) -> Resources:
        return Resources(self.cpu_milli + other.cpu_milli, self.memory + other.memory, self._merged(other, 1))

    def __sub__(self, other: Resources) -> Resources:
        return Resources(self.cpu_milli - other.cpu_milli, self.memory - other.memory, self._merged(other, -1))

    def _merged(self, other: Resources, sign: int) -> Mapping[str, int]:
        if not other.extended:
            return self.extended
        merged = dict(self.extended)
        for name, amount in other.extended.items():
            merged[name] = merged.get(name, 0) + sign * amount
        return {name: amount for name, amount in merged.items() if amount}

    def at_least(self, other: Resources) -> Resources:
        """Return the larger of the two, resource by resource."""
        extended = self.extended
        if other.extended:
            names = {**self.extended, **other.extended}
            extended = {name: max(self.extended.get(name, 0), other.extended.get(name, 0)) for name in names}
        return Resources(max(self.cpu_milli, other.cpu_milli), max(self.memory, other.memory), extended)


def sum_of(parts: Iterable[Resources]) -> Resources:
    """Return the sum of resources, without an object for each part."""
    cpu_milli = memory = 0
    extended: dict[str, int] = {}
    for part in parts:
        cpu_milli += part.cpu_milli
        memory += part.memory
        for name, amount in part.extended.items() if part.extended else ():
            extended[name] = extended.get(name, 0) + amount
    return Resources(cpu_milli, memory, {name: amount for name, amount in extended.items() if amount})


@dataclass(frozen=True, slots=True)
class Taint:
    """One taint of a node."""

    key: str
    value: str = ""
    effect: str = "NoSchedule"


@dataclass(frozen=True, slots=True)
class Toleration:
    """One toleration of a PodSpec. An empty `key` with `Exists` tolerates every taint, an empty `effect` every
    effect."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""


@dataclass(frozen=True, slots=True)
class NodeRequirement:
    """One `matchExpressions` or `matchFields` entry. `operator`: In, NotIn, Exists, DoesNotExist, Gt, Lt."""

    key: str
    operator: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeSelectorTerm:
    """One term of required node affinity: all of its requirements must match. A term without any matches no node."""

    expressions: tuple[NodeRequirement, ...] = ()
    fields: tuple[NodeRequirement, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PodNeeds:
    """Needs of a pod: the parts of its PodSpec that placement checks. `node_affinity_terms`: alternatives, of which one
    must match; empty: every node matches."""

    resources: Resources = Resources()
    node_selector: Mapping[str, str] = field(default_factory=dict, hash=False)
    node_affinity_terms: tuple[NodeSelectorTerm, ...] = ()
    tolerations: tuple[Toleration, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """State of one physical GPU.

    - `memory`: bytes available to tenants.
    - `reason`: why the GPU is not `available`, as text that fits after "because": "MIG is on", "it is unhealthy: Xid
      79".
    - `links`: connections to other GPUs of the node, by UUID, in the terms of NVML's topology.
    - `held`: False if NVIDIA's device plugin owns the GPU and no holder of SharePod has taken it.
    - `taken`: True if no new holder can get the GPU: the device plugin has assigned it to a pod, or does not offer it.
    """

    uuid: GpuUuid
    index: int
    model: str
    memory: Bytes
    available: bool = True
    reason: str = ""
    numa_node: int | None = None
    links: tuple[tuple[GpuUuid, str], ...] = ()
    held: bool = True
    taken: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """State of one node.

    - `unavailable`: why it takes no tenants now, as text that fits after "the node" ("is not ready", "has no agent: its
      lease ended"); None: it takes tenants.
    - `allocatable` and `pods`: its resources for pods, and the number of pods that it takes, in total.
    - `device_plugin`: True if NVIDIA's device plugin owns its GPUs, so tenants get only GPUs that holders took from it.
    - `by_scheduler`: True if only kube-scheduler assigns shares of its GPUs, or if it has assigned some.
    - `no_claims`: why claims cannot attach GPUs there, as text that fits after "the node"; None: they can.
    """

    name: str
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    taints: tuple[Taint, ...] = ()
    unavailable: str | None = None
    allocatable: Resources = Resources()
    pods: int = 110
    gpus: tuple[GpuState, ...] = ()
    device_plugin: bool = False
    by_scheduler: bool = False
    no_claims: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Reservation of one tenant, a row of a node's ledger: the share of each of `gpus`. `memory`: bytes on each.

    `pod_uid`: the share's Pod; None in rows of claims, and of an operator that created Pods after their rows. `claim`:
    the ResourceClaim that attaches the GPUs.

    `owner` is the UID of the SharePod's creator, such as a ReplicaSet. `needs` are the resources that its pod takes of
    the node; they count until the pod itself does. Neither is in the ledger, so comparisons of reservations leave both
    out.
    """

    tenant: TenantId
    namespace: str
    pod_name: str
    gpus: tuple[GpuUuid, ...]
    request_milli: Milli
    limit_milli: Milli
    memory: Bytes
    pod_uid: str | None = None
    claim: ClaimReference | None = None
    mode: Mode = Mode.SHARED
    memory_isolation: MemoryIsolation = MemoryIsolation.ENFORCED
    latency: Latency = Latency.NORMAL
    co_running: CoRunningPolicy = CoRunningPolicy.ALLOW
    group: str | None = None
    labels: SchedulingLabels = NO_LABELS
    releasing: bool = False
    owner: str | None = field(default=None, compare=False)
    needs: Resources = field(default=Resources(), compare=False)
    read_from: Tenant | None = field(default=None, compare=False, repr=False)
    """The ledger row from which this was read; None for a decision of this process."""

    @property
    def title(self) -> str:
        """Namespace and name of its SharePod or claim, for messages."""
        return f"{self.namespace}/{self.pod_name or (self.claim.name if self.claim is not None else self.tenant)}"

    def row(self) -> Tenant:
        """Return the row as it is written into `spec.tenants` of the GPUNode."""
        return Tenant(
            id=self.tenant,
            namespace=self.namespace,
            pod_name=self.pod_name,
            pod_uid=self.pod_uid,
            claim=self.claim,
            state=TenantState.RELEASING if self.releasing else TenantState.RESERVED,
            gpus=self.gpus,
            request_milli=self.request_milli,
            limit_milli=self.limit_milli,
            memory=self.memory,
            memory_isolation=self.memory_isolation,
            mode=self.mode,
            latency=self.latency,
            co_running=self.co_running,
            group=self.group,
            labels=self.labels,
        )

    @classmethod
    def of_row(cls, row: Tenant, *, owner: str | None = None, needs: Resources = Resources()) -> Reservation:
        """Make the reservation from a row read from a GPUNode."""
        return cls(
            tenant=TenantId(row.id),
            namespace=row.namespace,
            pod_name=row.pod_name,
            pod_uid=row.pod_uid,
            claim=row.claim,
            gpus=tuple(GpuUuid(uuid) for uuid in row.gpus),
            request_milli=Milli(row.request_milli),
            limit_milli=Milli(row.limit_milli),
            memory=Bytes(row.memory),
            mode=row.mode,
            memory_isolation=row.memory_isolation,
            latency=row.latency,
            co_running=row.co_running,
            group=row.group,
            labels=row.labels,
            releasing=row.state is TenantState.RELEASING,
            owner=owner,
            needs=needs,
            read_from=row,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """Request of a SharePod for a place.

    - `created`: its creationTimestamp as the API server writes it, RFC 3339 in UTC, so that text order is time order.
    - `priority`: the effective priority.
    - `standing`: how much of its entitlement the namespace has used, in coarse steps. Within one priority, requests
      with less go first.
    - `pod_uid`: UID of its Pod; None for a claim, and while a place is only searched.
    - `claim`: the ResourceClaim that attaches the GPUs.
    - `avoid`: nodes to skip this time, each with the reason as text that fits after "the node" ("was refused by
      kube-scheduler: ...").
    """

    tenant: TenantId
    namespace: str
    name: str
    gpu: GpuRequest
    pod: PodNeeds = PodNeeds()
    pod_uid: str | None = None
    owner: str | None = None
    priority: int = 0
    standing: int = 0
    created: str = ""
    claim: ClaimReference | None = None
    avoid: Mapping[str, str] = field(default_factory=dict, hash=False)
    may_preempt: bool = True
    """False: no tenant may be preempted for this request (`preemptionPolicy: Never`)."""
    siblings: tuple[PlacementRequest, ...] = ()
    """Requests of further claims of the same Pod. All are placed on one node, or none is."""
    default_group: str | None = None
    """Group of tenants that get their turns together, if the request names none. None: no group."""

    @property
    def group(self) -> str | None:
        """Return the group of the tenant in its namespace; None: no group."""
        named = self.gpu.group
        return None if (named or "").lower() == NO_GROUP.lower() else named or self.default_group


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Place for a request: distinct GPUs of one node, ordered by index, and the bytes to reserve on each."""

    node: str
    gpus: tuple[GpuUuid, ...]
    memory: Bytes
    siblings: tuple[Assignment, ...] = ()
    """Places of the `siblings` requests, in their order, on the same node."""

    def reservation(self, request: PlacementRequest) -> Reservation:
        """Return the row that records this assignment."""
        return Reservation(
            tenant=request.tenant,
            namespace=request.namespace,
            pod_name="" if request.claim is not None and request.pod_uid is None else request.name,
            pod_uid=request.pod_uid,
            claim=request.claim,
            gpus=self.gpus,
            request_milli=request.gpu.request_milli,
            limit_milli=request.gpu.limit_milli,
            memory=self.memory,
            mode=request.gpu.mode,
            memory_isolation=request.gpu.memory_isolation,
            latency=request.gpu.latency,
            co_running=request.gpu.co_running,
            group=request.group,
            labels=request.gpu.labels,
            owner=request.owner,
            needs=request.pod.resources,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NewHolder:
    """Place that must be prepared first: `count` more holders on this node have to take GPUs from NVIDIA's device
    plugin.

    The kubelet chooses the GPUs. `memory`: bytes to reserve on each of the tenant's GPUs.
    """

    node: str
    count: int
    memory: Bytes


class Outlook(StrEnum):
    """Prospect of a refused request: whether waiting can help. The values are reasons of the condition Placed."""

    WAITING = "NoRoom"
    """Some node could take the request if other tenants left, or if the node became available."""
    NEVER = "NeverFits"
    """No known node could take the request even when empty: the request or the cluster must change."""
    CONFLICT = "AffinityConflict"
    """The request's affinity group runs, and the request cannot join it, regardless of free room. Causes: its `count`
    or exclusion label differs from the members', it is Exclusive, or it excludes the group's GPUs. The request or the
    group must change."""
    SPENT = "BudgetSpent"
    """The budget of its namespace is used up, and new SharePods wait until it is refilled."""
    UNSEEN = "Waiting"
    """The operator's watches deliver nothing, so its cluster state is too old for an answer."""
    UNCOUNTED = "QuotaCannotCount"
    """The requested change would grant more than the quotas of the namespace have counted."""
    IN_USE = "MemoryInUse"
    """The requested change would take memory that the tenant uses, so the tenant must free it first."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Obstacle that several nodes or GPUs have in common. `count`: how many `unit`s ("GPU", "node", or "SharePod" for
    an obstacle of the request itself). `what`: its name as one CamelCase word. `text`: its wording for users."""

    what: str
    unit: str
    count: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Answer that there is no place. `obstacles`: the reason for each group of nodes or GPUs; `fits_now`: smaller
    values with which the request would have a place now; `advice`: other changes that would help. No text names objects
    or labels of another namespace."""

    outlook: Outlook
    headline: str
    obstacles: tuple[Obstacle, ...] = ()
    fits_now: str = ""
    advice: str = ""

    @property
    def message(self) -> str:
        """Text of the condition Placed, cut to a bounded length."""
        obstacles = f": {', '.join(item.text for item in self.obstacles)}" if self.obstacles else ""
        parts = (f"{self.headline}{obstacles}.", f"{self._fits_now}." if self.fits_now else "", self.advice)
        return clipped(" ".join(part for part in parts if part))

    @property
    def brief(self) -> str:
        """Text of the Event, one short sentence: what would fit now, else the most frequent obstacle. Obstacles of
        nodes that are excluded on purpose count last."""
        most = max(self.obstacles, key=lambda item: (item.what not in _CHOSEN, item.count), default=None)
        rest = self._fits_now or (_FIGURES.sub("", most.text) if most is not None else "")
        if len(f"{self.headline} {rest}".split()) > _BRIEF_WORDS:
            rest = rest.partition(", ")[0]
        return clipped(f"{self.headline}: {rest}" if rest else self.headline)

    @property
    def _fits_now(self) -> str:
        return f"{self.fits_now} would fit now" if self.fits_now else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overcommit:
    """GPU that a loaded ledger over-commits. Its rows are kept, and no row is added."""

    node: str
    gpu: GpuUuid
    text: str


class PlacementError(Exception):
    """Error for a reservation, or change, that does not fit: the caller did not ask the engine."""


def label_key(namespace: str, label: str | None) -> LabelKey | None:
    """Return the key by which a scheduling label is compared; None for no label."""
    return None if label is None else (namespace, label)


def in_order(gpus: Iterable[GpuState]) -> tuple[GpuState, ...]:
    """Sort GPUs by index, then UUID. All answers of placement list GPUs in this order."""
    return tuple(sorted(gpus, key=lambda gpu: (gpu.index, gpu.uuid)))
