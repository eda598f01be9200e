"""Facts: what the operator keeps of each object. Typed, frozen, small.

Guarantees:
- Nothing here trusts the shape of what a user can write: an invalid SharePod becomes facts with `error`, no exception.
- Everything readable of a GPUNode is read; fields of a newer version are passed over.
- Unreadable rows of a GPUNode are named, so that nothing is concluded from their absence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from sharepod.api.dialects import effective
from sharepod.api.gpunode import Gpu, GPUNodeSpec, GPUNodeStatus, PluginHolder, Tenant, TenantStatus
from sharepod.api.objects import FORCE_RELEASE_ANNOTATION, POOL_LABEL, TENANT_LABEL, Condition
from sharepod.api.objects import Model as ApiModel
from sharepod.api.pod import PodSettings, check_pod_fields, requested_pod_spec
from sharepod.api.sharepod import GpuRequest, Phase, SharePodStatus, SpecError
from sharepod.placement.state.needs import NeedsError, parse_allocatable, parse_needs, parse_taints, pod_resources
from sharepod.placement.state.types import PodNeeds, Resources, Taint

Json = Mapping[str, Any]

OUT_OF_SERVICE_TAINT = "node.kubernetes.io/out-of-service"
_TERMINAL = ("Succeeded", "Failed")


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
    priority_class: str | None
    gpu: GpuRequest | None
    needs: PodNeeds
    error: SpecError | None
    status: SharePodStatus
    raw: Json
    raw_status: Json

    @property
    def ended(self) -> bool:
        """True if its phase is terminal."""
        return self.status.phase in (Phase.SUCCEEDED, Phase.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFacts(ObjectFacts):
    """Facts of a Pod with the tenant label."""

    tenant: str | None
    """Value of the label, which admission lets only the operator set. None if the Pod has another controller than that
    SharePod: then it is not the operator's. An orphaned Pod still is.
    """
    node: str | None
    """Node that it is bound to."""
    pin: str | None
    """Node that its affinity names."""
    phase: str
    reason: str
    message: str
    deleting: bool
    disrupted: str | None
    """Cause of the Pod's eviction; None if it was not evicted."""
    ready: bool
    waiting: str
    """Reason that a container does not start; empty if none waits."""
    unschedulable: str
    """kube-scheduler's reason not to bind the Pod; empty if it was not refused."""
    gated: bool
    """True if the Pod has a scheduling gate."""
    restarts: bool
    """Its restartPolicy is Always."""
    needs: Resources

    @property
    def ended(self) -> bool:
        """True if its phase is terminal."""
        return self.phase in _TERMINAL


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

    @property
    def rows(self) -> dict[str, Tenant]:
        """Rows of the ledger by tenant, in their order."""
        return {row.id: row for row in self.spec.tenants}


def sharepod_facts(raw: Json, settings: PodSettings) -> SharePodFacts:
    """Read a SharePod."""
    metadata = raw["metadata"]
    gpu: GpuRequest | None = None
    needs = PodNeeds()
    error: SpecError | None = None
    try:
        gpu = effective(raw)
        check_pod_fields(raw, settings)
        needs = parse_needs(requested_pod_spec(raw, settings))
    except SpecError as found:
        error = found
    except NeedsError as found:
        error = SpecError(found.field, found.message)
    except (ValueError, TypeError, KeyError, AttributeError) as found:
        error = SpecError("spec", f"cannot be read: {found!r}")
    return SharePodFacts(
        **_common(raw),
        generation=int(metadata.get("generation") or 0),
        created=str(metadata.get("creationTimestamp") or ""),
        deleting=bool(metadata.get("deletionTimestamp")),
        owner=_controller(metadata, None),
        priority_class=str((raw.get("spec") or {}).get("priorityClassName") or "") or None,
        gpu=None if error else gpu,
        needs=needs,
        error=error,
        status=_sharepod_status(raw.get("status") or {}),
        raw=_slim(raw),
        raw_status=raw.get("status") or {},
    )


def pod_facts(raw: Json) -> PodFacts:
    """Read a Pod with the tenant label."""
    metadata, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    containers = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    conditions = {item.get("type"): item for item in status.get("conditions") or ()}
    scheduled = conditions.get("PodScheduled") or {}
    disruption = conditions.get("DisruptionTarget") or {}
    return PodFacts(
        **_common(raw),
        tenant=_tenant(metadata),
        node=spec.get("nodeName") or None,
        pin=_pin(spec),
        phase=str(status.get("phase") or "Pending"),
        reason=str(status.get("reason") or ""),
        message=_message(status, containers),
        deleting=bool(metadata.get("deletionTimestamp")),
        disrupted=_disruption(disruption),
        ready=(conditions.get("Ready") or {}).get("status") == "True",
        waiting=_waiting(containers),
        unschedulable=str(scheduled.get("message") or "") if scheduled.get("status") == "False" else "",
        gated=scheduled.get("reason") == "SchedulingGated",
        restarts=(spec.get("restartPolicy") or "Always") == "Always",
        needs=_resources(spec),
    )


def node_facts(raw: Json) -> NodeFacts:
    """Read a Node."""
    metadata, status = raw["metadata"], raw.get("status") or {}
    error: str | None = None
    taints: tuple[Taint, ...] = ()
    allocatable, pods = Resources(), 0
    try:
        taints = parse_taints(raw.get("spec") or {})
        allocatable, pods = parse_allocatable(status)
    except NeedsError as found:
        error = f"cannot be read: {found}"
    labels = metadata.get("labels") or {}
    conditions = {item.get("type"): item for item in status.get("conditions") or ()}
    return NodeFacts(
        **_common(raw),
        labels=labels,
        taints=taints,
        pool=str(labels.get(POOL_LABEL) or ""),
        ready=(conditions.get("Ready") or {}).get("status") == "True",
        allocatable=allocatable,
        pods=pods,
        error=error,
    )


def gpunode_facts(raw: Json) -> GpuNodeFacts:
    """Read a GPUNode."""
    metadata = raw["metadata"]
    spec_raw, status_raw = _object(raw.get("spec")), _object(raw.get("status"))
    faults: list[str] = []
    unreadable: set[str] = set()
    rows = _each(Tenant, spec_raw, "tenants", faults, unreadable)
    spec = _one(GPUNodeSpec, spec_raw, faults, tenants=rows, holders=_each(PluginHolder, spec_raw, "holders", faults))
    ledger_faults = len(faults)
    status = _one(
        GPUNodeStatus,
        status_raw,
        faults,
        gpus=_each(Gpu, status_raw, "gpus", faults),
        tenants=_each(TenantStatus, status_raw, "tenants", faults),
        conditions=_each(Condition, status_raw, "conditions", faults),
    )
    error = f"has a GPUNode that cannot be read (upgrade the operator?): {faults[0]}" if faults else None
    forced = (metadata.get("annotations") or {}).get(FORCE_RELEASE_ANNOTATION) or ""
    return GpuNodeFacts(
        **_common(raw),
        generation=int(metadata.get("generation") or 0),
        spec=spec,
        status=status,
        has_tenants="tenants" in spec_raw,
        forced=frozenset(part.strip() for part in str(forced).split(",") if part.strip()),
        error=error,
        ledger_error=error if ledger_faults else None,
        unreadable=frozenset(unreadable),
    )


def other_pod(raw: Json) -> tuple[str, Resources]:
    """Read node and requests of a pod without the tenant label."""
    spec = raw.get("spec") or {}
    return str(spec.get("nodeName") or ""), _resources(spec)


def _common(raw: Json) -> dict[str, Any]:
    metadata = raw["metadata"]
    return {
        "uid": str(metadata["uid"]),
        "name": str(metadata["name"]),
        "namespace": str(metadata.get("namespace") or ""),
        "version": int(metadata.get("resourceVersion") or 0),
    }


def _slim(raw: Json) -> Json:
    metadata = {key: value for key, value in raw["metadata"].items() if key != "managedFields"}
    return {key: value for key, value in raw.items() if key != "status"} | {"metadata": metadata}


def _controller(metadata: Json, kind: str | None) -> str | None:
    for owner in metadata.get("ownerReferences") or ():
        if owner.get("controller") and kind in (None, owner.get("kind")):
            return str(owner["uid"])
    return None


def _tenant(metadata: Json) -> str | None:
    label = str((metadata.get("labels") or {}).get(TENANT_LABEL) or "") or None
    controller = _controller(metadata, None)
    return label if controller is None or controller == label else None


A = TypeVar("A", bound=ApiModel)


def _object(value: object) -> Json:
    return value if isinstance(value, Mapping) else {}


def _each(kind: type[A], raw: Json, field: str, faults: list[str], unreadable: set[str] | None = None) -> tuple[A, ...]:
    """Return the readable entries of a list; the ids of the others go into `unreadable`."""
    found: list[A] = []
    for number, entry in enumerate(raw.get(field) or ()):
        try:
            found.append(kind.model_validate(entry, extra="ignore"))
        except ValidationError as error:
            faults.append(f"{field}[{number}].{_first(error)}")
            if unreadable is not None:
                unreadable.add(str(_object(entry).get("id") or ""))
    return tuple(found)


def _one(kind: type[A], raw: Json, faults: list[str], **lists: Sequence[ApiModel]) -> A:
    """Read an object whose lists were read already."""
    rest = {key: value for key, value in raw.items() if key not in lists}
    try:
        found = kind.model_validate(rest, extra="ignore")
    except ValidationError as error:
        faults.append(_first(error))
        found = kind()
    return found.model_copy(update=lists)


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"


def _sharepod_status(raw: Json) -> SharePodStatus:
    try:
        return SharePodStatus.model_validate(raw)
    except ValidationError:
        # Written by a newer version of this operator: what decides whether work runs again is kept.
        known = {key: raw[key] for key in ("phase", "podUID", "podName", "node") if key in raw}
        try:
            return SharePodStatus.model_validate(known)
        except ValidationError:
            return SharePodStatus(pod_uid=str(raw.get("podUID") or "") or None)


def _pin(spec: Json) -> str | None:
    """Return the node that every term of the required affinity names (as `build_pod` has it), or None."""
    affinity = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    ) or {}
    pins: set[str] = set()
    for term in affinity.get("nodeSelectorTerms") or ():
        for field in term.get("matchFields") or ():
            if field.get("key") == "metadata.name" and field.get("operator") == "In":
                pins.update(str(value) for value in field.get("values") or ())
    return pins.pop() if len(pins) == 1 else None


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
        ended = (container.get("state") or {}).get("terminated") or {}
        if ended.get("exitCode"):
            said = f": {ended['message']}" if ended.get("message") else ""
            how = f"exit code {ended['exitCode']} ({ended.get('reason')})"
            return f"container {container.get('name')} ended with {how}{said}"
    return ""


def _disruption(condition: Json) -> str | None:
    if condition.get("status") != "True":
        return None
    return f"{condition.get('reason') or 'disrupted'}: {condition.get('message') or 'the pod was evicted'}"


def _resources(spec: Json) -> Resources:
    try:
        return pod_resources(spec)
    except NeedsError:
        return Resources()  # the API server took it, so this does not happen; and it is kube-scheduler that decides
