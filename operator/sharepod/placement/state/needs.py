"""Needs of pods and capacities of nodes, parsed from Kubernetes' objects as kube-scheduler reads them.

Objects are plain dicts, before or after the API server has filled in defaults: a limit without a request counts as a
request, as it does there. What cannot be read raises `NeedsError`, which names the field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from sharepod.api.units import UnitError, parse_cpu, parse_quantity

from .types import NodeRequirement, NodeSelectorTerm, PodNeeds, Resources, Taint, Toleration

UNSCHEDULABLE_TAINT = Taint(key="node.kubernetes.io/unschedulable", effect="NoSchedule")
"""Taint of a cordoned node. The node lifecycle controller adds it a moment after `spec.unschedulable` was set."""

_OPERATORS_WITHOUT_VALUES = ("Exists", "DoesNotExist")
_OPERATORS = ("In", "NotIn", *_OPERATORS_WITHOUT_VALUES, "Gt", "Lt")
_TOLERATION_OPERATORS = ("Equal", "Exists", "Gt", "Lt")

Dict = Mapping[str, Any]


class NeedsError(ValueError):
    """A field of a pod or node that cannot be read. `field` is its path; the message says what is wrong there."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


def parse_needs(pod_spec: Dict) -> PodNeeds:
    """Parse what a PodSpec asks of its node.

    Raises `NeedsError` for a quantity, an operator or a shape that the API server would not take either.
    """
    selector = _mapping(pod_spec, "nodeSelector", "spec")
    return PodNeeds(
        resources=pod_resources(pod_spec),
        node_selector={str(key): str(value) for key, value in selector.items()},
        node_affinity_terms=_affinity_terms(pod_spec),
        tolerations=tuple(
            _toleration(item, f"spec.tolerations[{number}]")
            for number, item in enumerate(_items(pod_spec, "tolerations", "spec"))
        ),
    )


def pod_resources(pod_spec: Dict) -> Resources:
    """Add up what a pod takes of its node, as kube-scheduler counts it.

    Containers and sidecars (init containers with `restartPolicy: Always`) run together and add up; an init container
    runs after the sidecars declared before it and alone besides, so the largest such moment counts where it is larger.
    Requests at pod level stand in place of that sum; overhead comes on top. (KEP-753, KEP-2837, KEP-688.)
    """
    running = Resources()
    for number, container in enumerate(_items(pod_spec, "containers", "spec")):
        running += _container(container, f"spec.containers[{number}]")
    sidecars = starting = Resources()
    for number, container in enumerate(_items(pod_spec, "initContainers", "spec")):
        asked = _container(container, f"spec.initContainers[{number}]")
        if container.get("restartPolicy") == "Always":
            sidecars += asked
            starting = starting.at_least(sidecars)
        else:
            starting = starting.at_least(sidecars + asked)
    total = _at_pod_level(pod_spec, (running + sidecars).at_least(starting))
    return total + _resources(_mapping(pod_spec, "overhead", "spec"), "spec.overhead")


def parse_taints(node_spec: Dict) -> tuple[Taint, ...]:
    """Parse a Node's taints. A cordoned node has its taint even before the controller has added it."""
    taints = tuple(
        Taint(key=str(item.get("key", "")), value=str(item.get("value") or ""), effect=str(item.get("effect", "")))
        for item in _items(node_spec, "taints", "spec")
    )
    if node_spec.get("unschedulable") and all(taint.key != UNSCHEDULABLE_TAINT.key for taint in taints):
        taints += (UNSCHEDULABLE_TAINT,)
    return taints


def parse_allocatable(node_status: Dict) -> tuple[Resources, int]:
    """Parse what a Node has for pods, and how many pods it takes (110, the kubelet's default, where it does not
    say)."""
    allocatable = dict(_mapping(node_status, "allocatable", "status"))
    pods = allocatable.pop("pods", 110)
    return _resources(allocatable, "status.allocatable"), _quantity(pods, "status.allocatable.pods")


def _container(container: Dict, path: str) -> Resources:
    return _resources(_requests(container, path), f"{path}.resources.requests")


def _requests(holder: Dict, path: str) -> dict[str, Any]:
    """Return the requests of a container or pod. A limit without a request counts as one."""
    resources = _mapping(holder, "resources", path)
    path = f"{path}.resources"
    return {**_mapping(resources, "limits", path), **_mapping(resources, "requests", path)}


def _at_pod_level(pod_spec: Dict, containers: Resources) -> Resources:
    """Replace the containers' sum by pod-level requests. A pod-level limit alone counts only for a resource that no
    container asks for."""
    resources = _mapping(pod_spec, "resources", "spec")
    requests = _mapping(resources, "requests", "spec.resources")
    limits = _mapping(resources, "limits", "spec.resources")
    if not requests and not limits:
        return containers
    explicit = _resources(requests, "spec.resources.requests")
    fallback = _resources(limits, "spec.resources.limits")

    def pick(name: str, by_request: int, by_limit: int, by_containers: int) -> int:
        return by_request if name in requests else by_containers or by_limit

    names = {**containers.extended, **explicit.extended, **fallback.extended}
    extended = {
        name: pick(name, *(source.extended.get(name, 0) for source in (explicit, fallback, containers)))
        for name in names
    }
    return Resources(
        pick("cpu", explicit.cpu_milli, fallback.cpu_milli, containers.cpu_milli),
        pick("memory", explicit.memory, fallback.memory, containers.memory),
        {name: amount for name, amount in extended.items() if amount},
    )


def _resources(amounts: Dict, path: str) -> Resources:
    extended: dict[str, int] = {}
    cpu = memory = 0
    for name, value in amounts.items():
        where = f"{path}.{name}"
        if name == "cpu":
            cpu = _quantity(value, where, parse_cpu)
        elif name == "memory":
            memory = _quantity(value, where)
        else:
            amount = _quantity(value, where)
            if amount:
                extended[name] = amount
    return Resources(cpu, memory, extended)


def _quantity(value: Any, path: str, parse: Callable[[Any], int] = parse_quantity) -> int:
    try:
        return parse(value)
    except UnitError as error:
        raise NeedsError(path, str(error)) from None


def _affinity_terms(pod_spec: Dict) -> tuple[NodeSelectorTerm, ...]:
    affinity = _mapping(pod_spec, "affinity", "spec")
    node = _mapping(affinity, "nodeAffinity", "spec.affinity")
    field = "requiredDuringSchedulingIgnoredDuringExecution"
    required = _mapping(node, field, "spec.affinity.nodeAffinity")
    path = f"spec.affinity.nodeAffinity.{field}"
    return tuple(
        NodeSelectorTerm(
            expressions=_requirements(term, "matchExpressions", f"{path}.nodeSelectorTerms[{number}]"),
            fields=_requirements(term, "matchFields", f"{path}.nodeSelectorTerms[{number}]"),
        )
        for number, term in enumerate(_items(required, "nodeSelectorTerms", path))
    )


def _requirements(term: Dict, name: str, path: str) -> tuple[NodeRequirement, ...]:
    requirements = []
    for number, item in enumerate(_items(term, name, path)):
        where = f"{path}.{name}[{number}]"
        operator = str(item.get("operator", ""))
        if operator not in _OPERATORS:
            raise NeedsError(f"{where}.operator", f"{operator!r} is not known; write one of {', '.join(_OPERATORS)}")
        values = item.get("values") or ()
        if not isinstance(values, (list, tuple)):
            raise NeedsError(f"{where}.values", "is not a list")
        if operator in ("Gt", "Lt") and (len(values) != 1 or integer(str(values[0])) is None):
            raise NeedsError(f"{where}.values", f"{operator} takes exactly one whole number")
        if operator in ("In", "NotIn") and not values:
            raise NeedsError(f"{where}.values", f"{operator} takes at least one value")
        requirements.append(NodeRequirement(str(item.get("key", "")), operator, tuple(str(value) for value in values)))
    return tuple(requirements)


def _toleration(item: Dict, path: str) -> Toleration:
    operator = str(item.get("operator") or "Equal")
    if operator not in _TOLERATION_OPERATORS:
        known = ", ".join(_TOLERATION_OPERATORS)
        raise NeedsError(f"{path}.operator", f"{operator!r} is not known; write one of {known}")
    return Toleration(
        key=str(item.get("key") or ""),
        operator=operator,
        value=str(item.get("value") or ""),
        effect=str(item.get("effect") or ""),
    )


def integer(text: str) -> int | None:
    """Parse a whole number as node labels and taints write it; None for other text."""
    try:
        return int(text)
    except ValueError:
        return None


def _mapping(holder: Dict, name: str, path: str) -> Dict:
    value = holder.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise NeedsError(f"{path}.{name}", "is not a map")
    return value


def _items(holder: Dict, name: str, path: str) -> Iterable[Dict]:
    value = holder.get(name)
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, Mapping) for item in value):
        raise NeedsError(f"{path}.{name}", "is not a list of maps")
    return cast("Iterable[Dict]", value)
