"""Redaction of API objects for a problem report: lists of the fields that stay.

Guarantees:
- A field that no list names is replaced by `REDACTED`, also a field that a later Kubernetes adds.
- Of objects that users write, only fields that SharePod or a scheduler reads stay, and images and names of variables.
- Of labels, annotations and node selectors, the values of known domains stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kubectl_sharepod.views import text

REDACTED = "<redacted>"
Rule = Callable[[Any], Any]
"""Function that returns a value without its redacted parts."""
_DOMAINS = ("sharepod.dev", "kubeshare", "gemini")
"""Domains of the labels and annotations that SharePod reads."""
_NODE_DOMAINS = (*_DOMAINS, "kubernetes.io", "k8s.io", "nvidia.com")
_REPORTERS = ("sharepod.dev/operator", "default-scheduler", "resource_claim")
"""Components whose Events stay whole. The kubelet's Events quote the paths and the output of probes."""


def entire(value: Any) -> Any:
    """Return the value itself."""
    return value


def only(names: str = "", **rules: Rule) -> Rule:
    """Return a rule for an object, or for each object of a list. `names`: fields that stay, separated by blanks.
    `rules`: fields with a rule of their own."""
    kept = dict.fromkeys(names.split(), entire) | rules

    def rule(value: Any) -> Any:
        if isinstance(value, list):
            return [rule(one) for one in value]
        if not isinstance(value, dict):
            return REDACTED
        return {name: kept[name](one) if name in kept else REDACTED for name, one in value.items()}

    return rule


def listed(metadata: Rule | None = None, **rules: Rule) -> Rule:
    """Return a rule for a list of objects. `rules`: their fields next to the metadata."""
    item = only("apiVersion kind", metadata=metadata or _metadata(_DOMAINS), **rules)
    return only("apiVersion kind", metadata=only("resourceVersion"), items=item)


def _of_domains(domains: tuple[str, ...]) -> Rule:
    """Return a rule for a map with qualified names, which keeps the values of names in these domains."""

    def rule(value: Any) -> Any:
        if not isinstance(value, dict):
            return REDACTED
        return {name: one if _within(name, domains) else REDACTED for name, one in value.items()}

    return rule


def _within(name: object, domains: tuple[str, ...]) -> bool:
    domain = str(name).rpartition("/")[0]
    return any(domain == one or domain.endswith(f".{one}") for one in domains)


def _metadata(labels: tuple[str, ...]) -> Rule:
    return only(
        "name generateName namespace uid generation resourceVersion creationTimestamp deletionTimestamp "
        "deletionGracePeriodSeconds ownerReferences finalizers",
        labels=_of_domains(labels),
        annotations=_of_domains(_DOMAINS),
    )


def _expressions(value: Any) -> Any:
    """Keep the values that a node affinity compares with labels of known domains."""
    keys = [one.get("key") if isinstance(one, Mapping) else None for one in value] if isinstance(value, list) else []
    rules = {True: only("key operator values"), False: only("key operator")}
    return [rules[_within(key, _NODE_DOMAINS)](one) for key, one in zip(keys, value, strict=False)]


def _of_driver(names: str) -> Rule:
    """Return a rule for a list of a claim's devices, which keeps the entries of SharePod's drivers whole. `names`:
    fields of the other entries that stay."""
    others = only(names)

    def rule(value: Any) -> Any:
        if isinstance(value, list):
            return [rule(one) for one in value]
        ours = isinstance(value, dict) and str(value.get("driver")).endswith(".sharepod.dev")
        return value if ours else others(value)

    return rule


def _event(value: Any) -> Any:
    trusted = isinstance(value, dict) and value.get("reportingComponent") in _REPORTERS
    return (_EVENT_WHOLE if trusted else _EVENT)(value)


def _setting(value: Any) -> Any:
    ours = isinstance(value, dict) and text(value, "metadata", "name").startswith("sharepod")
    return (_SETTING if ours else only("apiVersion kind", metadata=only("name")))(value)


_TERMS = only("matchFields", matchExpressions=_expressions)
_NODE_AFFINITY = only(
    requiredDuringSchedulingIgnoredDuringExecution=only(nodeSelectorTerms=_TERMS),
    preferredDuringSchedulingIgnoredDuringExecution=only("weight", preference=_TERMS),
)
_CONTAINER = only(
    "name image imagePullPolicy restartPolicy resources",
    env=only("name"),
    volumeMounts=only("name mountPath readOnly"),
    securityContext=only("privileged runAsUser runAsGroup runAsNonRoot allowPrivilegeEscalation"),
)
_POD_SPEC = only(
    "gpu replicas ttlSecondsAfterFinished activeDeadlineSeconds hostIPC hostNetwork hostPID hostUsers nodeName "
    "overhead preemptionPolicy priority priorityClassName resourceClaims resources restartPolicy runtimeClassName "
    "schedulerName schedulingGates shareProcessNamespace terminationGracePeriodSeconds tolerations",
    affinity=only(nodeAffinity=_NODE_AFFINITY),
    nodeSelector=_of_domains(_NODE_DOMAINS),
    containers=_CONTAINER,
    initContainers=_CONTAINER,
    ephemeralContainers=_CONTAINER,
    volumes=only("name", csi=only("driver readOnly")),
)
_STATE = only(
    waiting=only("reason"),
    running=only("startedAt"),
    terminated=only("exitCode signal reason startedAt finishedAt"),
)
_CONTAINER_STATUS = only("name image imageID ready started restartCount resources", state=_STATE, lastState=_STATE)
_POD_STATUS = only(
    "phase reason message startTime qosClass nominatedNodeName conditions resourceClaimStatuses "
    "extendedResourceClaimStatus",
    containerStatuses=_CONTAINER_STATUS,
    initContainerStatuses=_CONTAINER_STATUS,
    ephemeralContainerStatuses=_CONTAINER_STATUS,
)
_CONFIG = only("requests source", opaque=_of_driver("driver"))
_ALLOCATED = only("results", config=_CONFIG)
_EVENT_FIELDS = (
    "apiVersion kind involvedObject reason type action count firstTimestamp lastTimestamp eventTime source series "
    "related reportingComponent reportingInstance"
)
_EVENT = only(_EVENT_FIELDS, metadata=_metadata(_DOMAINS))
_EVENT_WHOLE = only(f"{_EVENT_FIELDS} message", metadata=_metadata(_DOMAINS))
_SETTING = only("apiVersion kind data", metadata=_metadata(_DOMAINS))

NODES = listed(
    _metadata(_NODE_DOMAINS),
    spec=only("taints unschedulable"),
    status=only("allocatable capacity conditions nodeInfo runtimeHandlers features"),
)
OF_SHAREPOD = listed(spec=entire, status=entire)
"""Rule for kinds of SharePod without a PodSpec."""
SHAREPODS = listed(spec=_POD_SPEC, status=entire)
PODS = listed(spec=_POD_SPEC, status=_POD_STATUS)
CLAIMS = listed(
    spec=only(devices=only("requests constraints", config=_CONFIG)),
    status=only(
        "reservedFor",
        allocation=only("allocationTimestamp nodeSelector", devices=_ALLOCATED),
        devices=_of_driver("driver pool device shareID"),
    ),
)
DEVICE_CLASSES = listed(spec=only("selectors extendedResourceName", config=_CONFIG))
POLICIES = listed(spec=entire)
EVENTS = only("apiVersion kind", metadata=only("resourceVersion"), items=lambda value: list(map(_event, value)))
SYSTEM_EVENTS = only("apiVersion kind", metadata=only("resourceVersion"), items=_EVENT_WHOLE)
SETTINGS = only("apiVersion kind", metadata=only("resourceVersion"), items=lambda value: list(map(_setting, value)))
