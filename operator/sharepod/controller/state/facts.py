"""Facts: what the operator keeps of each object. Typed, frozen, small.

Guarantees:
- No object that has a uid and a name makes these functions raise, whatever else is in it: an invalid SharePod becomes
  facts with `error`, a Pod counts as far as it can be read, a Node or GPUNode with `error` takes no tenants.
- Reading takes bounded time, whatever the size of the object: a few milliseconds.
- Little is kept of a SharePod that is larger than a pod can sensibly be, and no message is longer than `MAX_MESSAGE`.
- Everything readable of a GPUNode is read; fields of a newer version are passed over.
- Unreadable rows of a GPUNode are named, so that nothing is concluded from their absence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from operator import attrgetter
from typing import Any

from pydantic import ValidationError

from sharepod.api.bounds import MAX_CONDITIONS, MAX_LABEL, MAX_NAME, MAX_VALUES, beyond, clipped, quoted
from sharepod.api.dialects import effective
from sharepod.api.gpunode import Gpu, GPUNodeSpec, GPUNodeStatus, PluginHolder, Tenant, TenantStatus
from sharepod.api.objects import (
    FORCE_RELEASE_ANNOTATION,
    MAX_GPUS,
    MAX_TENANTS,
    POOL_LABEL,
    SHARE_GATE,
    TAKEN_BACK,
    TENANT_LABEL,
    Condition,
)
from sharepod.api.pod import PodSettings, check_pod_fields, requested_pod_spec
from sharepod.api.sharepod import (
    MAX_TTL_S,
    TTL,
    GpuRequest,
    Phase,
    RestartPolicy,
    SharePodStatus,
    SpecError,
)
from sharepod.placement.state.needs import NeedsError, parse_allocatable, parse_needs, parse_taints, pod_resources
from sharepod.placement.state.types import PodNeeds, Resources, Taint

from .compact import shared, without_notes
from .entries import Entries, entries, with_lists
from .fitting import CONDITIONS, MAX_LIST, METADATA, POD, texts
from .pod_summary import ready_containers, summary
from .timestamps import seconds

Json = Mapping[str, Any]

_ORPHAN = "orphan"
"""Finalizer of an object that is deleted without its dependents."""
OUT_OF_SERVICE_TAINT = "node.kubernetes.io/out-of-service"
_UNKNOWN = Resources(1 << 62, 1 << 62)
"""Resources of a Node that cannot be read: it is no reason to say that a SharePod will never fit."""
_TERMINAL = ("Succeeded", "Failed")
_DECIDE = ("podUID", "podName", "node", "endTime")
"""Texts of a SharePod's status that are read whatever else is in it, beside `lastEnd` and, where there is no endTime,
the phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectFacts:
    """Facts that every object has. `version`: its resourceVersion, which counts upwards."""

    uid: str
    name: str
    namespace: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SharePodFacts(ObjectFacts):
    """Facts of a SharePod. Exactly one of `gpu` and `error` is set. `raw`: the object itself, without managedFields."""

    generation: int
    created: str
    deleting: bool
    owner: str | None
    gpu: GpuRequest | None
    needs: PodNeeds
    error: SpecError | None
    status: SharePodStatus
    raw: Json
    raw_status: Json
    leaves_pod: bool = False
    """It is deleted with its Pod left alone (`kubectl delete --cascade=orphan`)."""
    ttl_s: int | None = None
    """Seconds after its end at which it is deleted; None: never."""
    restart_policy: RestartPolicy = RestartPolicy.NEVER
    """What may follow a run that ended; Never where that cannot be read."""
    readable: bool = True
    """False if only the metadata is known: neither what it asks nor its status."""

    @property
    def ended(self) -> bool:
        """True if it has ended for good."""
        return self.status.ended


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFacts(ObjectFacts):
    """Facts of a Pod with the tenant label."""

    tenant: str | None
    """Value of the label, which admission lets only the operator set. None if the Pod has another controller than that
    SharePod: then it is not the operator's. An orphaned Pod still is.
    """
    orphaned: bool
    """It has the label and no controller: its SharePod was deleted without it."""
    node: str | None
    """Node that it is bound to."""
    pin: str | None
    """Node that its affinity names; None while it waits for its share."""
    phase: str
    reason: str
    message: str
    deleting: bool
    disrupted: str | None
    """Cause of the Pod's eviction; None if it was not evicted."""
    disrupted_by: str
    """Reason of its condition DisruptionTarget; empty if it was not evicted."""
    ready: bool
    waiting: str
    """Reason that a container does not start; empty if none waits."""
    unschedulable: str
    """kube-scheduler's reason not to bind the Pod; empty if it was not refused."""
    gates: tuple[str, ...]
    """Names of its scheduling gates."""
    restarts: bool
    """Its restartPolicy is Always."""
    started: str
    """When its kubelet took it, RFC 3339; empty before."""
    restarted: int
    """Times that its containers were restarted."""
    begun: bool
    """One of its containers has been started."""
    finalizers: tuple[str, ...]
    ended_first: bool
    """All of its containers had ended before anybody asked for its deletion, or nobody has."""
    containers: str
    """Ready containers and all: `1/2`."""
    summary: str
    """STATUS as `kubectl get pods` has it."""
    address: str
    """Its IP address; empty before it has one."""
    scheduler: str
    """Name of the scheduler that is to bind it."""
    needs: Resources
    priority: int = 0
    """Value of its PriorityClass, as the API server's admission has set it."""
    asks: PodNeeds | None = None
    """What it asks of its node, while it waits for its share; None once it has one, and where that cannot be read."""
    affinity: Json | None = field(default=None, hash=False)
    """`spec.affinity`, while it waits for its share."""

    @property
    def ended(self) -> bool:
        """True if its phase is terminal."""
        return self.phase in _TERMINAL

    @property
    def waits_for_share(self) -> bool:
        """True while the operator has not opened its gate: it never ran."""
        return SHARE_GATE in self.gates and self.node is None

    @property
    def marked(self) -> bool:
        """True from when the operator began to take it back, until it is let go."""
        return TAKEN_BACK in self.finalizers

    @property
    def taken_back(self) -> bool:
        """True if the operator has taken it back: it was never bound, and never will be."""
        return self.marked and self.deleting and self.node is None

    @property
    def foreign_gates(self) -> tuple[str, ...]:
        """Scheduling gates that are not the operator's."""
        return tuple(gate for gate in self.gates if gate != SHARE_GATE)

    def says(self) -> tuple[object, ...]:
        """Return everything that it says but for its version, cheap to compare."""
        return _said_by_pod(self)


_said_by_pod: Callable[[PodFacts], tuple[object, ...]] = attrgetter(
    *(item.name for item in fields(PodFacts) if item.name != "version")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts(ObjectFacts):
    """Facts of a Node of the pool."""

    labels: Mapping[str, str]
    taints: tuple[Taint, ...]
    pool: str
    ready: bool
    allocatable: Resources
    pods: int
    error: str | None

    @property
    def out_of_service(self) -> bool:
        """True if an admin has said, by the taint, that nothing runs there any more."""
        return any(taint.key == OUT_OF_SERVICE_TAINT for taint in self.taints)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNodeLists:
    """Lists of one version of a GPUNode."""

    rows: Entries[Tenant] = field(default_factory=Entries)
    holders: Entries[PluginHolder] = field(default_factory=Entries)
    gpus: Entries[Gpu] = field(default_factory=Entries)
    tenants: Entries[TenantStatus] = field(default_factory=Entries)
    conditions: Entries[Condition] = field(default_factory=Entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNodeFacts(ObjectFacts):
    """Facts of a GPUNode."""

    generation: int
    spec: GPUNodeSpec
    status: GPUNodeStatus
    has_tenants: bool
    """The field `spec.tenants` exists."""
    forced: frozenset[str]
    """Tenants named by the annotation force-release."""
    error: str | None
    """Error in reading the GPUNode; with one, the node takes no tenants."""
    ledger_error: str | None = None
    """Error in reading its spec; with one, nothing is written to the GPUNode."""
    unreadable: frozenset[str] = frozenset()
    """Tenants whose rows cannot be read."""
    lists: GpuNodeLists = field(default_factory=GpuNodeLists, repr=False, compare=False)
    """Its lists as they were read, for the reading of its next version."""

    rows: Mapping[str, Tenant] = field(init=False, repr=False, compare=False)
    """Rows of the ledger by tenant, in their order."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", {row.id: row for row in self.spec.tenants})

    def seen(self, tenant: str) -> TenantStatus | None:
        """Return what the agent reports of a tenant."""
        known = self.lists.tenants.read.get(tenant)
        return known[1] if known is not None else None


def sharepod_facts(raw: Json, settings: PodSettings, before: SharePodFacts | None = None) -> SharePodFacts:
    """Read a SharePod. `before`: an earlier version of it; if it asks for the same, that is not read again."""
    metadata, status_raw = mapping(raw.get("metadata")), mapping(raw.get("status"))
    slim = _slim(raw)
    if before is not None and _asks_the_same(slim, before):
        gpu, needs, error = before.gpu, before.needs, before.error
        kept: Json = {**before.raw, "metadata": shared(slim["metadata"])}
    else:
        too_much = beyond(slim)
        gpu, needs, error = _asked(slim, too_much, settings)
        kept = shared(slim) if too_much is None else {"metadata": METADATA(metadata)}
    status_fits = beyond(status_raw) is None
    return SharePodFacts(
        **_common(metadata),
        generation=whole_number(metadata.get("generation")),
        created=str(metadata.get("creationTimestamp") or ""),
        deleting=bool(metadata.get("deletionTimestamp")),
        owner=controller_of(metadata, None),
        gpu=gpu,
        needs=needs,
        error=error,
        status=without_notes(_sharepod_status(status_raw, fits=status_fits)),
        raw=kept,
        raw_status=shared(status_raw) if status_fits else {},
        leaves_pod=_ORPHAN in _names(metadata.get("finalizers")),
        ttl_s=_ttl_s(slim),
        restart_policy=_restart_policy(slim),
    )


def _restart_policy(slim: Json) -> RestartPolicy:
    """Return the restartPolicy of a SharePod: Always by default, as for a Pod."""
    policy = mapping(slim.get("spec")).get("restartPolicy")
    try:
        return RestartPolicy(policy) if policy else RestartPolicy.ALWAYS
    except ValueError:
        return RestartPolicy.NEVER


def _names(value: object) -> tuple[str, ...]:
    """Return the texts among the first entries of a list."""
    return tuple(item for item in islice(value, MAX_LIST) if isinstance(item, str)) if isinstance(value, list) else ()


def _ttl_s(slim: Json) -> int | None:
    """Return the seconds for which a SharePod that has ended is kept; None: for ever, as where that cannot be read."""
    ttl = mapping(slim.get("spec")).get(TTL)
    return ttl if isinstance(ttl, int) and 0 <= ttl <= MAX_TTL_S else None


def _asks_the_same(slim: Json, before: SharePodFacts) -> bool:
    """Return whether a SharePod differs from a version that could be read in nothing but its status and version."""
    known = before.raw
    if not before.readable or slim.keys() != known.keys() or slim.get("spec") != known.get("spec"):
        return False
    metadata, former = slim["metadata"], mapping(known.get("metadata"))
    return metadata.keys() == former.keys() and all(
        value == former[name] for name, value in metadata.items() if name != "resourceVersion"
    )


def _asked(
    raw: Json, too_much: str | None, settings: PodSettings
) -> tuple[GpuRequest | None, PodNeeds, SpecError | None]:
    """Return what a SharePod asks of GPUs and of its node, or what is wrong with it. `too_much`: see `beyond`."""
    if too_much is not None:
        return (
            None,
            PodNeeds(),
            SpecError("spec", f"{too_much}; keep what is large in a ConfigMap, a volume or the image"),
        )
    try:
        gpu = effective(raw)
        check_pod_fields(raw, settings)
        return gpu, parse_needs(requested_pod_spec(raw, settings)), None
    except SpecError as found:
        error = found
    except NeedsError as found:
        error = SpecError(found.field, found.message)
    except Exception as found:  # whatever a user has written costs that user alone
        error = SpecError("spec", f"cannot be read: {type(found).__name__}: {found}")
    return None, PodNeeds(), error


def unreadable_sharepod(metadata: Json, why: str) -> SharePodFacts:
    """Return the facts of a SharePod of which only the metadata is known. `why`: for its owner, after "the object"."""
    known = METADATA(metadata) or {}
    return SharePodFacts(
        **_common(known),
        generation=whole_number(known.get("generation")),
        created=str(known.get("creationTimestamp") or ""),
        deleting=bool(known.get("deletionTimestamp")),
        owner=controller_of(known, None),
        gpu=None,
        needs=PodNeeds(),
        error=SpecError("spec", f"cannot be read: the object {why}"),
        status=SharePodStatus(),
        raw={"metadata": known},
        raw_status={},
        readable=False,
    )


def pod_facts(raw: Json) -> PodFacts:
    """Read a Pod with the tenant label. What cannot be read of it counts as absent."""
    affinity = mapping(mapping(raw.get("spec")).get("affinity")) or None
    try:
        if _usual(raw):
            return _pod_facts(raw, affinity)
    except Exception:  # noqa: S110 - it is read again, field by field
        pass
    return _pod_facts(POD(raw) or {}, affinity)


def _usual(raw: Json) -> bool:
    """Return whether no list of a Pod is longer than is looked at."""
    spec, status = raw.get("spec") or {}, raw.get("status") or {}
    lists = [spec.get("containers"), spec.get("initContainers"), spec.get("schedulingGates"), spec.get("tolerations")]
    lists += [status.get(name) for name in ("conditions", "containerStatuses", "initContainerStatuses")]
    lists.append(raw["metadata"].get("ownerReferences"))
    return all(one is None or len(one) <= MAX_LIST for one in lists)


def _pod_facts(raw: Json, affinity: Json | None) -> PodFacts:
    metadata, spec, status = raw.get("metadata") or {}, raw.get("spec") or {}, raw.get("status") or {}
    containers = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    conditions = {item.get("type"): item for item in status.get("conditions") or ()}
    scheduled = conditions.get("PodScheduled") or {}
    disruption = conditions.get("DisruptionTarget") or {}
    gates = tuple(_text(gate.get("name")) for gate in maps(spec.get("schedulingGates")))
    waits = SHARE_GATE in gates
    return PodFacts(
        **_common(metadata),
        tenant=_tenant(metadata),
        orphaned=_tenant(metadata) is not None and controller_of(metadata, None) is None,
        node=_text(spec.get("nodeName")) or None,
        pin=None if waits else _pin(spec),
        phase=str(status.get("phase") or "Pending"),
        reason=clipped(str(status.get("reason") or "")),
        message=clipped(_message(status, containers)),
        deleting=bool(metadata.get("deletionTimestamp")),
        disrupted=_disruption(disruption),
        disrupted_by=clipped(str(disruption.get("reason") or "")) if disruption.get("status") == "True" else "",
        ready=(conditions.get("Ready") or {}).get("status") == "True",
        waiting=clipped(_waiting(containers)),
        unschedulable=clipped(str(scheduled.get("message") or "")) if scheduled.get("status") == "False" else "",
        gates=gates,
        restarts=(spec.get("restartPolicy") or "Always") == "Always",
        started=clipped(str(status.get("startTime") or "")),
        restarted=sum(whole_number(container.get("restartCount")) for container in containers),
        containers=ready_containers(spec, status),
        summary=summary(metadata, spec, status),
        address=clipped(str(status.get("podIP") or "")),
        begun=str(status.get("phase") or "Pending") != "Pending" or any(map(_begun, containers)),
        finalizers=_names(metadata.get("finalizers")),
        ended_first=_ended_first(metadata, containers),
        scheduler=clipped(str(spec.get("schedulerName") or "default-scheduler")),
        needs=_resources(spec),
        priority=whole_number(spec.get("priority")),
        asks=_asks(spec) if waits else None,
        affinity=affinity if waits else None,
    )


def node_facts(raw: Json) -> NodeFacts:
    """Read a Node."""
    metadata, status = mapping(raw.get("metadata")), mapping(raw.get("status"))
    error: str | None = None
    labels = mapping(metadata.get("labels"))
    taints: tuple[Taint, ...] = ()
    allocatable, pods, ready = Resources(), 0, False
    if len(labels) > MAX_VALUES or not all(isinstance(value, str) for value in labels.values()):
        error, labels = f"has {len(labels)} labels, which cannot be read", texts(labels)
    try:
        taints = parse_taints(mapping(raw.get("spec")))
        allocatable, pods = parse_allocatable(status)
        conditions = {item.get("type"): item for item in CONDITIONS(status.get("conditions")) or ()}
        ready = (conditions.get("Ready") or {}).get("status") == "True"
    except Exception as found:  # it takes no tenants until it can be read
        error, allocatable = clipped(f"cannot be read: {found}"), _UNKNOWN
    return NodeFacts(
        **_common(metadata),
        labels=labels,
        taints=taints,
        pool=str(labels.get(POOL_LABEL) or ""),
        ready=ready,
        allocatable=allocatable,
        pods=pods,
        error=error,
    )


def gpunode_facts(raw: Json, before: GpuNodeFacts | None = None) -> GpuNodeFacts:
    """Read a GPUNode. `before`: an earlier version of it, of which what has not changed is taken over."""
    metadata = mapping(raw.get("metadata"))
    spec_raw, status_raw = mapping(raw.get("spec")), mapping(raw.get("status"))
    was = before.lists if before is not None else GpuNodeLists()
    faults: list[str] = []
    rows = entries(Tenant, spec_raw, "tenants", MAX_TENANTS, faults, was.rows)
    holders = entries(PluginHolder, spec_raw, "holders", MAX_GPUS, faults, was.holders)
    spec = with_lists(GPUNodeSpec, spec_raw, faults, tenants=rows.models, holders=holders.models)
    ledger_faults = len(faults)
    gpus = entries(Gpu, status_raw, "gpus", MAX_GPUS, faults, was.gpus)
    tenants = entries(TenantStatus, status_raw, "tenants", MAX_TENANTS, faults, was.tenants)
    conditions = entries(Condition, status_raw, "conditions", MAX_CONDITIONS, faults, was.conditions)
    status = with_lists(
        GPUNodeStatus,
        status_raw,
        faults,
        gpus=gpus.models,
        tenants=tenants.models,
        conditions=conditions.models,
    )
    error = clipped(f"has a GPUNode that cannot be read (upgrade the operator?): {faults[0]}") if faults else None
    forced = texts(metadata.get("annotations")).get(FORCE_RELEASE_ANNOTATION, "")
    return GpuNodeFacts(
        **_common(metadata),
        generation=whole_number(metadata.get("generation")),
        spec=spec,
        status=status,
        has_tenants="tenants" in spec_raw,
        forced=frozenset(part.strip() for part in forced.split(",", MAX_TENANTS)[:MAX_TENANTS] if part.strip()),
        error=error,
        ledger_error=error if ledger_faults else None,
        unreadable=rows.unreadable,
        lists=GpuNodeLists(rows=rows, holders=holders, gpus=gpus, tenants=tenants, conditions=conditions),
    )


def other_pod(raw: Json) -> tuple[str, Resources]:
    """Read node and requests of a pod without the tenant label. What cannot be read of it counts as nothing: it is
    kube-scheduler that decides whether a node has room."""
    spec = mapping(raw.get("spec"))
    node = spec.get("nodeName")
    return node if isinstance(node, str) else "", _resources(spec)


def _common(metadata: Json) -> dict[str, Any]:
    return {
        "uid": str(metadata["uid"]),
        "name": str(metadata["name"]),
        "namespace": str(metadata.get("namespace") or ""),
        "version": whole_number(metadata.get("resourceVersion")),
    }


def _text(value: object) -> str:
    """Return a text; an absent one is empty. Raises `TypeError` for anything else."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{quoted(value)} is not a text")
    return value or ""


def whole_number(value: object) -> int:
    """Return a whole number of the API server's own, which may be written as a text; 0 for what is none."""
    try:
        return int(str(value)[:20])
    except ValueError:
        return 0


def _slim(raw: Json) -> Json:
    metadata = {key: value for key, value in mapping(raw.get("metadata")).items() if key != "managedFields"}
    return {key: value for key, value in raw.items() if key != "status"} | {"metadata": metadata}


def controller_of(metadata: Json, kind: str | None) -> str | None:
    """Return the uid of an object's controller, of that kind alone unless None; None if it has none."""
    for owner in maps(metadata.get("ownerReferences")):
        if owner.get("controller") and kind in (None, owner.get("kind")):
            return str(owner.get("uid") or "")[:MAX_NAME]
    return None


def _tenant(metadata: Json) -> str | None:
    label = str(mapping(metadata.get("labels")).get(TENANT_LABEL) or "") or None
    controller = controller_of(metadata, None)
    return label if controller is None or controller == label else None


def mapping(value: object) -> Json:
    """Return a map; an empty one for anything else."""
    return value if isinstance(value, Mapping) else {}


def maps(value: object, most: int = MAX_LIST) -> Iterator[Json]:
    """Yield the maps among the first entries of a list."""
    if isinstance(value, list | tuple):
        yield from (item for item in islice(value, most) if isinstance(item, Mapping))


def _sharepod_status(raw: Json, *, fits: bool) -> SharePodStatus:
    """Read a status, field by field where it was written by a newer operator, or by somebody else.

    What cannot be read of it is passed over, but for what decides whether work runs again: the Pods of this run and of
    the last one, and that the SharePod has ended. `fits`: it is not `beyond` what is read.
    """
    decides: dict[str, Any] = {key: raw[key] for key in _DECIDE if isinstance(raw.get(key), str)}
    if raw.get("endTime") is not None:
        decides.setdefault("endTime", "")
    elif raw.get("phase") in tuple(Phase):
        decides["phase"] = raw["phase"]
    former = mapping(raw.get("lastEnd")).get("podUID")
    if isinstance(former, str) and len(former) <= MAX_LABEL:
        decides["lastEnd"] = {"podUID": former}
    readable = raw
    for _ in range(2 if fits else 0):
        try:
            return SharePodStatus.model_validate(readable, extra="ignore")
        except ValidationError as error:
            unread = {item["loc"][0] for item in error.errors(include_url=False, include_input=False) if item["loc"]}
            readable = {key: value for key, value in raw.items() if key not in unread} | decides
        except Exception:
            break
    return SharePodStatus.model_validate(decides)


def _pin(spec: Json) -> str | None:
    """Return the node that every term of the required affinity names (as `build_pod` has it), or None."""
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    return pinned_node(affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {})


def pinned_node(selector: Json) -> str | None:
    """Return the one node that the terms of a node selector name, or None."""
    pins: set[str] = set()
    for term in maps(selector.get("nodeSelectorTerms")):
        for wanted in maps(term.get("matchFields")):
            if wanted.get("key") == "metadata.name" and wanted.get("operator") == "In":
                pins.update(str(value) for value in islice(wanted.get("values") or (), MAX_LIST))
    return pins.pop() if len(pins) == 1 else None


def _begun(container: Json) -> bool:
    """Return whether a container has been started, by its status."""
    state = container.get("state") or {}
    return bool(state.get("running") or state.get("terminated") or whole_number(container.get("restartCount")))


def _ended_first(metadata: Json, containers: Sequence[Json]) -> bool:
    """Return whether a Pod's containers had all ended before its deletion was asked for; of the same second: not.

    A deletionTimestamp is the time at which the grace period ends.
    """
    if not metadata.get("deletionTimestamp"):
        return True
    gone = seconds(str(metadata["deletionTimestamp"]))
    ended = [seconds(str((_ended_state(container)).get("finishedAt") or "")) for container in containers]
    if gone is None or not ended:
        return False
    asked = gone - whole_number(metadata.get("deletionGracePeriodSeconds"))
    return all(time is not None and time < asked for time in ended)


def _ended_state(container: Json) -> Json:
    return (container.get("state") or {}).get("terminated") or {}


def _waiting(containers: Sequence[Json]) -> str:
    for container in containers:
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") and waiting["reason"] != "PodInitializing":
            return ": ".join(str(waiting[key]) for key in ("reason", "message") if waiting.get(key))
    return ""


def _message(status: Json, containers: Sequence[Json]) -> str:
    if status.get("message"):
        return str(status["message"])
    for container in containers:
        ended = _ended_state(container)
        if ended.get("exitCode"):
            said = f": {ended['message']}" if ended.get("message") else ""
            how = f"exit code {ended['exitCode']} ({ended.get('reason')})"
            return f"container {container.get('name')} ended with {how}{said}"
    return ""


def _disruption(condition: Json) -> str | None:
    if condition.get("status") != "True":
        return None
    return f"{condition.get('reason') or 'disrupted'}: {condition.get('message') or 'the pod was evicted'}"


def _asks(spec: Json) -> PodNeeds | None:
    try:
        return parse_needs(spec)
    except Exception:  # its SharePod's needs are taken instead; kube-scheduler makes its own checks
        return None


def _resources(spec: Json) -> Resources:
    """Add up what a pod takes, as far as that can be read: the API server takes amounts and numbers of containers with
    which no node ever runs a pod."""
    try:
        return pod_resources(spec)
    except Exception:  # noqa: S110 - it is read again, container by container
        pass
    try:
        return pod_resources((POD({"spec": spec}) or {}).get("spec") or {})
    except NeedsError:
        return Resources()
