"""Facts of Pods, read from objects of the API server.

Guarantees:
- These functions do not raise for any object with a uid and a name. Unreadable fields of a Pod count as absent.
- Reading takes bounded time, and no message is longer than `MAX_MESSAGE`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from operator import attrgetter

from sharepod.api.bounds import clipped
from sharepod.api.objects import (
    LINE_TENANT,
    SHARE_CLAIM,
    SHARE_GATE,
    TAKEN_BACK,
    TENANT_LABEL,
)
from sharepod.api.resource_line import MEMORY, MILLI, NOTHING, Carried
from sharepod.controller.state.reading.compact import once_in_all
from sharepod.controller.state.reading.fitting import MAX_LIST, POD
from sharepod.controller.state.reading.pod_summary import ready_containers, summary
from sharepod.controller.state.reading.timestamps import seconds
from sharepod.placement.holders import DEVICE_PLUGIN_RESOURCE
from sharepod.placement.state.needs import NeedsError, parse_needs
from sharepod.placement.state.types import PodNeeds, Resources

from .object_facts import (
    Json,
    ObjectFacts,
    common,
    controller_of,
    grace_s,
    mapping,
    maps,
    resources_of,
    started,
    text_of,
    texts_of,
    whole_number,
    without_line,
)

_TERMINAL = ("Succeeded", "Failed")
_MAX_TIME = 40
"""Characters of a timestamp that are kept."""
NEVER_PREEMPTS = "Never"
"""Value of preemptionPolicy with which a Pod preempts no tenant."""
DEFAULT_SCHEDULER = "default-scheduler"
"""Scheduler of a Pod that names none: kube-scheduler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFacts(ObjectFacts):
    """Facts of a Pod with the tenant label."""

    tenant: str | None
    """Id of the Pod's tenant:
    - For a SharePod's Pod: value of the tenant label, which only the operator may set.
    - For a plain Pod with a resource line: the Pod's own uid.
    - None if the Pod has a controller other than the SharePod of that label. Such a Pod is not the operator's.
    """
    orphaned: bool
    """True if the Pod has the label but no controller, because its SharePod was deleted without the Pod."""
    node: str | None
    """Node to which the Pod is bound. None before."""
    pin: str | None
    """Node that its required node affinity names. None while the Pod waits for its share."""
    phase: str
    reason: str
    message: str
    deleting: bool
    disrupted: str | None
    """Cause of the Pod's eviction or preemption, as text, from its condition DisruptionTarget. None without it."""
    disrupted_by: str
    """Reason of the condition DisruptionTarget; empty without it."""
    ready: bool
    waiting: str
    """Reason why a container does not start. Empty if none waits."""
    unschedulable: str
    """kube-scheduler's reason not to bind the Pod; empty if it was not refused."""
    gates: tuple[str, ...]
    """Names of its scheduling gates that are still closed."""
    restarts: bool
    """True if its restartPolicy is Always."""
    started: str
    """Time at which the kubelet accepted the Pod, RFC 3339. Empty before."""
    restarted: int
    """Number of restarts of its containers, in sum."""
    begun: bool
    """True if one of its containers has been started."""
    finalizers: tuple[str, ...]
    ended_first: bool
    """True if all its containers ended before its deletion was requested, or its deletion was not requested."""
    containers: str
    """Number of ready containers and of all containers, as text: `1/2`."""
    summary: str
    """Text of the column STATUS of `kubectl get pods`."""
    address: str
    """Its IP address; empty before it has one."""
    scheduler: str
    """Name of the scheduler that must bind the Pod."""
    needs: Resources
    """Requested CPU, memory and other resources, without the resource line."""
    carried: Carried = NOTHING
    """Amounts of its resource line. Zero if the Pod was created while resource lines were not in use."""
    priority: int = 0
    """Value of its PriorityClass, as set by the API server's admission."""
    may_preempt: bool = True
    """True unless its preemptionPolicy is Never."""
    grace_s: int = 30
    """Grace period in its spec, in seconds."""
    ends_by: str = ""
    """Time at which its grace period ends, RFC 3339. Empty while the Pod is not being deleted."""
    asks: PodNeeds | None = None
    """Requirements of the Pod on its node. Only read while the Pod waits for its share. None otherwise, or if it cannot
    be read."""
    claim: str | None = None
    """Name of the ResourceClaim through which its GPUs are attached. None if a CSI volume attaches them."""
    other_claims: bool = False
    """True if the Pod also uses other ResourceClaims."""
    of_job: bool = False
    """True for a plain Pod whose controller is a Kubernetes Job."""
    affinity: Json | None = field(default=None, hash=False)
    """`spec.affinity`, while the Pod waits for its share."""

    @property
    def plain(self) -> bool:
        """True for a plain Pod that is a tenant itself."""
        return self.tenant == self.uid

    @property
    def ended(self) -> bool:
        """True if the Pod's phase is terminal."""
        return self.phase in _TERMINAL

    @property
    def waits_for_share(self) -> bool:
        """True while the operator has not opened the Pod's gate. Such a Pod has never run."""
        return SHARE_GATE in self.gates and self.node is None

    @property
    def marked(self) -> bool:
        """True if the Pod has the finalizer that marks its withdrawal, from the start of the withdrawal until
        `LetPodGo`."""
        return TAKEN_BACK in self.finalizers

    @property
    def taken_back(self) -> bool:
        """True if the Pod is withdrawn: it was never bound and never will be."""
        return self.marked and self.deleting and self.node is None

    @property
    def foreign_gates(self) -> tuple[str, ...]:
        """Scheduling gates that are not the operator's."""
        return tuple(gate for gate in self.gates if gate != SHARE_GATE)

    def content(self) -> tuple[object, ...]:
        """Return all facts except the version, as a tuple that is cheap to compare."""
        return _content_of(self)


_content_of: Callable[[PodFacts], tuple[object, ...]] = attrgetter(
    *(item.name for item in fields(PodFacts) if item.name != "version")
)


def pod_facts(raw: Json) -> PodFacts:
    """Return the facts of a Pod with the tenant label. Unreadable fields count as absent."""
    affinity = mapping(mapping(raw.get("spec")).get("affinity")) or None
    try:
        if _usual(raw):
            return _pod_facts(raw, affinity)
    except Exception:  # noqa: S110 - it is read again, field by field
        pass
    return _pod_facts(POD(raw) or {}, affinity)


def _usual(raw: Json) -> bool:
    """Return True if all lists of this Pod are within the reader's limits on their length, so that none must be
    cut."""
    spec, status = raw.get("spec") or {}, raw.get("status") or {}
    lists = [spec.get("containers"), spec.get("initContainers"), spec.get("schedulingGates"), spec.get("tolerations")]
    lists.append(spec.get("resourceClaims"))
    lists += [status.get(name) for name in ("conditions", "containerStatuses", "initContainerStatuses")]
    lists.append(raw["metadata"].get("ownerReferences"))
    return all(one is None or len(one) <= MAX_LIST for one in lists)


def _pod_facts(raw: Json, affinity: Json | None) -> PodFacts:
    metadata, spec, status = raw.get("metadata") or {}, raw.get("spec") or {}, raw.get("status") or {}
    containers = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    conditions = {item.get("type"): item for item in status.get("conditions") or ()}
    scheduled = conditions.get("PodScheduled") or {}
    disruption = conditions.get("DisruptionTarget") or {}
    gates = tuple(text_of(gate.get("name")) for gate in maps(spec.get("schedulingGates")))
    waits = SHARE_GATE in gates
    asks = _asks(spec) if waits else None
    needs = asks.resources if asks is not None else resources_of(spec)
    on_node = without_line(needs)
    controller = controller_of(metadata, None)
    tenant = _tenant(metadata, controller)
    return PodFacts(
        **common(metadata),
        tenant=tenant,
        orphaned=tenant not in (None, metadata.get("uid")) and controller is None,
        node=once_in_all(text_of(spec.get("nodeName"))) or None,
        pin=None if waits else pin_of(spec),
        phase=once_in_all(str(status.get("phase") or "Pending")),
        reason=clipped(str(status.get("reason") or "")),
        message=clipped(_message(status)),
        deleting=bool(metadata.get("deletionTimestamp")),
        disrupted=_disruption(disruption),
        disrupted_by=clipped(str(disruption.get("reason") or "")) if disruption.get("status") == "True" else "",
        ready=(conditions.get("Ready") or {}).get("status") == "True",
        waiting=clipped(_waiting(containers)),
        unschedulable=clipped(_refusal(scheduled)),
        gates=gates,
        restarts=(spec.get("restartPolicy") or "Always") == "Always",
        started=clipped(started(metadata, status)),
        restarted=sum(whole_number(container.get("restartCount")) for container in containers),
        containers=once_in_all(ready_containers(spec, status)),
        summary=once_in_all(summary(metadata, spec, status)),
        address=clipped(str(status.get("podIP") or "")),
        begun=str(status.get("phase") or "Pending") != "Pending" or any(map(_begun, containers)),
        finalizers=texts_of(metadata.get("finalizers")),
        ended_first=_ended_first(metadata, containers),
        scheduler=clipped(str(spec.get("schedulerName") or DEFAULT_SCHEDULER)),
        needs=on_node,
        carried=Carried(needs.extended.get(MILLI, 0), needs.extended.get(MEMORY, 0)) if needs.extended else NOTHING,
        priority=whole_number(spec.get("priority")),
        may_preempt=spec.get("preemptionPolicy") != NEVER_PREEMPTS,
        grace_s=grace_s(spec),
        ends_by=str(metadata.get("deletionTimestamp") or "")[:_MAX_TIME],
        asks=replace(asks, resources=on_node) if asks is not None and on_node is not needs else asks,
        claim=_share_claim(spec),
        other_claims=not all(map(_is_share, maps(spec.get("resourceClaims")))),
        of_job=controller not in (None, tenant) and _of_job(metadata),
        affinity=affinity if waits else None,
    )


def other_pod(raw: Json) -> tuple[str, Resources]:
    """Return (name of the node, resource requests) of a Pod without the tenant label. Unreadable requests count as
    zero."""
    spec = mapping(raw.get("spec"))
    node = spec.get("nodeName")
    return node if isinstance(node, str) else "", resources_of(spec)


def waits_for_whole_gpus(raw: Json) -> PodNeeds | None:
    """Return what a Pod that waits for whole GPUs of NVIDIA's device plugin requires of its node. None for any other
    Pod, and for an unreadable one."""
    spec, metadata = mapping(raw.get("spec")), mapping(raw.get("metadata"))
    if spec.get("nodeName") or spec.get("schedulingGates") or "deletionTimestamp" in metadata:
        return None
    if not resources_of(spec).extended.get(DEVICE_PLUGIN_RESOURCE):
        return None
    try:
        return parse_needs(spec)
    except NeedsError:  # kube-scheduler makes its own checks
        return None


def _tenant(metadata: Json, controller: str | None) -> str | None:
    label = once_in_all(str(mapping(metadata.get("labels")).get(TENANT_LABEL) or "")) or None
    if label == LINE_TENANT:
        return str(metadata["uid"])
    return label if controller is None or controller == label else None


def _of_job(metadata: Json) -> bool:
    """Return True if the controller of a Pod is a Job of the API group `batch/v1`."""
    owners = [owner for owner in maps(metadata.get("ownerReferences")) if owner.get("controller")]
    return any((owner.get("apiVersion"), owner.get("kind")) == ("batch/v1", "Job") for owner in owners)


def pin_of(spec: Json) -> str | None:
    """Return the node that every term of a Pod's required node affinity names. None if there is no such node."""
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    return pinned_node(affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {})


def pinned_node(selector: Json) -> str | None:
    """Return the node that all terms of a node selector name. None if there is no such node.

    A term may name further nodes, for example those from which the user lets SharePod choose. An empty term matches no
    node, so it is ignored.
    """
    terms = maps(selector.get("nodeSelectorTerms"))
    named = [_named(term) for term in terms if term.get("matchExpressions") or term.get("matchFields")]
    pins = set.intersection(*named) if named else set()
    return once_in_all(pins.pop()) if len(pins) == 1 else None


def _named(term: Json) -> set[str]:
    """Return the nodes that a term of a node selector names."""
    return {
        str(value)
        for wanted in maps(term.get("matchFields"))
        if wanted.get("key") == "metadata.name" and wanted.get("operator") == "In"
        for value in islice(wanted.get("values") or (), MAX_LIST)
    }


def _share_claim(spec: Json) -> str | None:
    """Return the name of the claim through which a Pod's GPUs are attached (`build_pod` adds it). None if there is
    none."""
    named = (item.get("resourceClaimName") for item in maps(spec.get("resourceClaims")) if _is_share(item))
    return next((text_of(name) for name in named if isinstance(name, str)), None)


def _is_share(entry: Json) -> bool:
    return entry.get("name") == SHARE_CLAIM


def _begun(container: Json) -> bool:
    """Return True if the status of a container shows that it has been started."""
    state = container.get("state") or {}
    return bool(state.get("running") or state.get("terminated") or whole_number(container.get("restartCount")))


def _ended_first(metadata: Json, containers: Sequence[Json]) -> bool:
    """Return True if all containers ended before the Pod's deletion was requested, and False if one ended in the same
    second. Return True if no deletion was requested.

    The time of the request is the deletionTimestamp minus the grace period, because a deletionTimestamp is the end of
    that period.
    """
    if not metadata.get("deletionTimestamp"):
        return True
    deadline = seconds(str(metadata["deletionTimestamp"]))
    ended = [seconds(str((_ended_state(container)).get("finishedAt") or "")) for container in containers]
    if deadline is None or not ended:
        return False
    asked = deadline - whole_number(metadata.get("deletionGracePeriodSeconds"))
    return all(time is not None and time < asked for time in ended)


def _ended_state(container: Json) -> Json:
    return (container.get("state") or {}).get("terminated") or {}


def _waiting(containers: Sequence[Json]) -> str:
    for container in containers:
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") and waiting["reason"] != "PodInitializing":
            return ": ".join(str(waiting[key]) for key in ("reason", "message") if waiting.get(key))
    return ""


def _exit_code(container: Json) -> int:
    return whole_number(_ended_state(container).get("exitCode"))


def _ended_at(container: Json) -> float:
    time = seconds(str(_ended_state(container).get("finishedAt") or ""))
    return time if time is not None else float("inf")


def _message(status: Json) -> str:
    """Return why a Pod failed: its own message, or the message of the container that failed first.

    Containers that failed later, such as sidecars, usually ended as a consequence.
    """
    if status.get("message"):
        return str(status["message"])
    containers = [*(status.get("containerStatuses") or ()), *(status.get("initContainerStatuses") or ())]
    for container in sorted(filter(_exit_code, containers), key=_ended_at)[:1]:
        ended = _ended_state(container)
        detail = f": {ended['message']}" if ended.get("message") else ""
        how = f"exit code {ended['exitCode']} ({ended.get('reason')})"
        return f"container {container.get('name')} ended with {how}{detail}"
    return ""


def _refusal(scheduled: Json) -> str:
    """Return kube-scheduler's message for a Pod that it cannot bind, from the condition PodScheduled. Empty if
    kube-scheduler has not handled the Pod.

    The API server writes the same condition for a closed scheduling gate. That message is ignored: it stays after the
    gate opens, until a scheduler handles the Pod.
    """
    if scheduled.get("status") != "False" or scheduled.get("reason") == "SchedulingGated":
        return ""
    return str(scheduled.get("message") or "")


def _disruption(condition: Json) -> str | None:
    if condition.get("status") != "True":
        return None
    return f"{condition.get('reason') or 'disrupted'}: {condition.get('message') or 'the pod was evicted'}"


def _asks(spec: Json) -> PodNeeds | None:
    try:
        return parse_needs(spec)
    except Exception:  # the requirements of its SharePod are used instead; kube-scheduler makes its own checks
        return None
