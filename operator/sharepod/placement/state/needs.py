"""Needs of pods and capacities of nodes, parsed from Kubernetes' objects as kube-scheduler reads them.

Objects are plain dicts, before or after the API server has set defaults: as in kube-scheduler, a limit without a
request counts as a request.

Guarantees:
- An unreadable value raises `NeedsError`, which names the field.
- Parsed values are within the bounds of `sharepod.api.bounds`. So parsing them and comparing them with a node take
  bounded time, and amounts fit into 63 bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from sharepod.api.bounds import (
    MAX_CONTAINERS,
    MAX_LABEL,
    MAX_NAME,
    MAX_NODE_RESOURCES,
    MAX_RESOURCES,
    MAX_SELECTION,
    MAX_SELECTION_VALUES,
    clipped,
    quoted,
)
from sharepod.api.units import UnitError, parse_cpu, parse_quantity

from .types import NodeRequirement, NodeSelectorTerm, PodNeeds, Resources, Taint, Toleration

UNSCHEDULABLE_TAINT = Taint(key="node.kubernetes.io/unschedulable", effect="NoSchedule")
"""Taint of a cordoned node. The node lifecycle controller adds it a moment after `spec.unschedulable` is set."""

_OPERATORS_WITHOUT_VALUES = ("Exists", "DoesNotExist")
_OPERATORS = ("In", "NotIn", *_OPERATORS_WITHOUT_VALUES, "Gt", "Lt")
_TOLERATION_OPERATORS = ("Equal", "Exists", "Gt", "Lt")

_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")
"""Pattern of a whole number of at most 64 bits, as Kubernetes writes it."""

_MOST_TOLERATIONS = 2 * MAX_SELECTION
"""Most tolerations of a pod: as many as its owner may write, and as many again that the cluster's admission may add."""
_MOST = 1 << 62
"""Most of a resource that a pod may request. It is a quarter of the range of 64 bits, so that a sum of a few stays
within the range."""

Dict = Mapping[str, Any]


class NeedsError(ValueError):
    """Error for an unreadable field of a pod or node. `field`: its path. `message`: the fault."""

    def __init__(self, field: str, message: str) -> None:
        field = clipped(field, MAX_NAME)
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


def parse_needs(pod_spec: Dict) -> PodNeeds:
    """Parse what a PodSpec requires of its node.

    Raises `NeedsError` for a quantity, an operator or a shape that the API server would refuse, too.
    """
    selector = _mapping(pod_spec, "nodeSelector", "spec")
    if len(selector) > MAX_SELECTION:
        raise NeedsError("spec.nodeSelector", f"has {len(selector)} entries; write at most {MAX_SELECTION}")
    return PodNeeds(
        resources=pod_resources(pod_spec),
        node_selector={
            _name(key, "spec.nodeSelector"): _value(value, f"spec.nodeSelector[{key}]")
            for key, value in selector.items()
        },
        node_affinity_terms=_affinity_terms(pod_spec),
        tolerations=tuple(
            _toleration(item, f"spec.tolerations[{number}]")
            for number, item in enumerate(_items(pod_spec, "tolerations", "spec", most=_MOST_TOLERATIONS))
        ),
    )


def pod_resources(pod_spec: Dict) -> Resources:
    """Sum a pod's resources, as kube-scheduler does.

    - Containers and sidecars (init containers with `restartPolicy: Always`) run together and add up.
    - An init container runs with only the sidecars declared before it. The largest such sum counts if it exceeds the
      first sum.
    - Pod-level requests replace these sums; overhead is added. (KEP-753, KEP-2837, KEP-688.)

    Raises `NeedsError` for unreadable values, for more containers than `MAX_CONTAINERS`, and for more of a resource
    than any node has.
    """
    total = _at_pod_level(pod_spec, _of_containers(pod_spec))
    overhead = _mapping(pod_spec, "overhead", "spec")
    return _plausible(_sum(total, _resources(overhead, "spec.overhead")) if overhead else total)


def _of_containers(pod_spec: Dict) -> Resources:
    running: Resources | None = None
    for number, container in enumerate(_items(pod_spec, "containers", "spec", most=MAX_CONTAINERS)):
        asked = _container(container, f"spec.containers[{number}]")
        running = asked if running is None else _sum(running, asked)
    starts = _items(pod_spec, "initContainers", "spec", most=MAX_CONTAINERS)
    sidecars = starting = Resources()
    if running is not None and not starts:  # a shortcut, because most Pods have no init containers
        return running
    for number, container in enumerate(starts):
        asked = _container(container, f"spec.initContainers[{number}]")
        if container.get("restartPolicy") == "Always":
            sidecars = _sum(sidecars, asked)
            starting = starting.at_least(sidecars)
        else:
            starting = starting.at_least(_sum(sidecars, asked))
    return (sidecars if running is None else running + sidecars).at_least(starting)


def _sum(some: Resources, more: Resources) -> Resources:
    total = some + more
    if len(total.extended) > MAX_RESOURCES:
        raise NeedsError("spec.containers", f"ask for more than {MAX_RESOURCES} resources together; ask for fewer")
    return total


def _plausible(total: Resources) -> Resources:
    for name, amount in (("cpu", total.cpu_milli), ("memory", total.memory), *total.extended.items()):
        if amount > _MOST:
            raise NeedsError("spec.containers", f"ask for more {name} together than any node has; lower their requests")
    return total


def parse_taints(node_spec: Dict) -> tuple[Taint, ...]:
    """Parse a Node's taints. A cordoned node gets its taint here even before the node controller has added it."""
    taints = tuple(
        Taint(
            key=_name(item.get("key"), "spec.taints"),
            value=_value(item.get("value"), "spec.taints"),
            effect=_value(item.get("effect"), "spec.taints"),
        )
        for item in _items(node_spec, "taints", "spec", most=MAX_SELECTION)
    )
    if node_spec.get("unschedulable") and all(taint.key != UNSCHEDULABLE_TAINT.key for taint in taints):
        taints += (UNSCHEDULABLE_TAINT,)
    return taints


def parse_allocatable(node_status: Dict) -> tuple[Resources, int]:
    """Parse a Node's allocatable resources, and the number of pods that it takes (default: 110, the kubelet's
    default)."""
    allocatable = dict(_mapping(node_status, "allocatable", "status"))
    pods = allocatable.pop("pods", 110)
    return _resources(allocatable, "status.allocatable", MAX_NODE_RESOURCES), _quantity(pods, "status.allocatable.pods")


def _container(container: Dict, path: str) -> Resources:
    return _resources(_requests(container, path), f"{path}.resources.requests")


def _requests(holder: Dict, path: str) -> dict[str, Any]:
    """Return the requests of a container or pod. A limit without a request counts as one."""
    resources = _mapping(holder, "resources", path)
    path = f"{path}.resources"
    return {**_mapping(resources, "limits", path), **_mapping(resources, "requests", path)}


def _at_pod_level(pod_spec: Dict, containers: Resources) -> Resources:
    """Replace the containers' sum by pod-level requests. A pod-level limit without a
    request counts only for a resource that no container requests."""
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


def _resources(amounts: Dict, path: str, most: int = MAX_RESOURCES) -> Resources:
    extended: dict[str, int] = {}
    cpu = memory = 0
    if len(amounts) > most:
        raise NeedsError(path, f"has {len(amounts)} resources; write at most {most}")
    for name, value in amounts.items():
        where = f"{path}.{name}"
        if name == "cpu":
            cpu = _quantity(value, where, parse_cpu)
        elif name == "memory":
            memory = _quantity(value, where)
        else:
            amount = _quantity(value, where)
            if amount:
                extended[_name(name, path)] = amount
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
    terms = tuple(
        NodeSelectorTerm(
            expressions=_requirements(term, "matchExpressions", f"{path}.nodeSelectorTerms[{number}]"),
            fields=_requirements(term, "matchFields", f"{path}.nodeSelectorTerms[{number}]"),
        )
        for number, term in enumerate(_items(required, "nodeSelectorTerms", path, most=MAX_SELECTION))
    )
    requirements = [requirement for term in terms for requirement in (*term.expressions, *term.fields)]
    if len(requirements) > MAX_SELECTION:
        raise NeedsError(path, f"has {len(requirements)} requirements; write at most {MAX_SELECTION}")
    values = sum(len(requirement.values) for requirement in requirements)
    if values > MAX_SELECTION_VALUES:
        raise NeedsError(path, f"has {values} values; write at most {MAX_SELECTION_VALUES}, or label the nodes")
    return terms


def _requirements(term: Dict, name: str, path: str) -> tuple[NodeRequirement, ...]:
    requirements = []
    for number, item in enumerate(_items(term, name, path, most=MAX_SELECTION)):
        where = f"{path}.{name}[{number}]"
        operator = _one_of(item.get("operator"), _OPERATORS, f"{where}.operator")
        values = item.get("values") or ()
        if not isinstance(values, (list, tuple)):
            raise NeedsError(f"{where}.values", "is not a list")
        if len(values) > MAX_SELECTION_VALUES:
            raise NeedsError(f"{where}.values", f"has {len(values)} values; write at most {MAX_SELECTION_VALUES}")
        if operator in ("Gt", "Lt") and (len(values) != 1 or integer(str(values[0])) is None):
            raise NeedsError(f"{where}.values", f"{operator} takes exactly one whole number")
        if operator in ("In", "NotIn") and not values:
            raise NeedsError(f"{where}.values", f"{operator} takes at least one value")
        longest = MAX_NAME if name == "matchFields" else MAX_LABEL
        found = tuple(_value(value, f"{where}.values", longest) for value in values)
        requirements.append(NodeRequirement(_name(item.get("key"), f"{where}.key"), operator, found))
    return tuple(requirements)


def _toleration(item: Dict, path: str) -> Toleration:
    return Toleration(
        key=_name(item.get("key"), f"{path}.key"),
        operator=_one_of(item.get("operator") or "Equal", _TOLERATION_OPERATORS, f"{path}.operator"),
        value=_value(item.get("value"), f"{path}.value"),
        effect=_value(item.get("effect"), f"{path}.effect"),
    )


def integer(text: str) -> int | None:
    """Parse a whole number as node labels and taints write it; None for other text."""
    return int(text) if _INTEGER.fullmatch(text) else None


def _name(value: object, path: str) -> str:
    """Return the name of a label, taint or resource."""
    return _value(value, path, MAX_NAME)


def _value(value: object, path: str, most: int = MAX_LABEL) -> str:
    """Return the value of a label, taint or requirement. An absent value is empty."""
    if value is None:
        return ""
    if isinstance(value, str):
        text = value
    elif isinstance(value, (Mapping, list, tuple)):
        raise NeedsError(path, f"{quoted(value)} is not a text")
    else:
        text = str(value)
    if len(text) > most:
        raise NeedsError(path, f"{quoted(text)} is too long; write at most {most} characters")
    return text


def _one_of(value: object, known: tuple[str, ...], path: str) -> str:
    text = _value(value, path)
    if text not in known:
        raise NeedsError(path, f"{quoted(value)} is not known; write one of {', '.join(known)}")
    return text


def _mapping(holder: Dict, name: str, path: str) -> Dict:
    value = holder.get(name)
    if value is None:
        return {}
    # `dict` is tested first, because the test of an abstract class takes longer
    if not isinstance(value, (dict, Mapping)):
        raise NeedsError(f"{path}.{name}", "is not a map")
    return value


def _items(holder: Dict, name: str, path: str, *, most: int) -> Sequence[Dict]:
    value = holder.get(name)
    if value is None:
        return ()
    if isinstance(value, (list, tuple)) and len(value) > most:
        raise NeedsError(f"{path}.{name}", f"has {len(value)} entries; write at most {most}")
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, (dict, Mapping)) for item in value):
        raise NeedsError(f"{path}.{name}", "is not a list of maps")
    return cast("Sequence[Dict]", value)
