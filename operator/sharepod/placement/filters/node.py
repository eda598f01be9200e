"""Node filters: kube-scheduler's checks, made before a share is reserved.

Each filter decides whether a node passes, and words the reason for a group of nodes that do not pass. `STATIC` filters
do not depend on the tenants of the node: a request that fails one also fails on an empty cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sharepod.api.gpunode import Pool
from sharepod.api.objects import MAX_TENANTS, SCHEDULER_CLASS
from sharepod.placement.state.accounts import NodeAccount
from sharepod.placement.state.needs import UNSCHEDULABLE_TAINT, integer
from sharepod.placement.state.types import (
    NodeRequirement,
    NodeSelectorTerm,
    NodeState,
    PlacementRequest,
    PodNeeds,
    Resources,
    Taint,
    Toleration,
)
from sharepod.placement.wording import counted, grouped, size_down, size_up, some_of

_BLOCKING_EFFECTS = ("NoSchedule", "NoExecute")
_CONDITION_TAINT_PREFIX = "node.kubernetes.io/"
"""Prefix of the taints by which Kubernetes marks a node's condition, such as not ready. They are temporary."""


@dataclass(frozen=True, slots=True)
class NodeFilter:
    """One check of a node. `name`: the obstacle as one CamelCase word. `explain` words why these nodes (at least one)
    do not pass."""

    name: str
    passes: Callable[[NodeAccount, PlacementRequest], bool]
    explain: Callable[[Sequence[NodeAccount], PlacementRequest], str]


def _state(node: NodeAccount) -> NodeState:
    assert node.state is not None, "only known nodes are filtered"
    return node.state


def matches_selector(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Return whether these labels match a nodeSelector."""
    return not selector or all(labels.get(key) == value for key, value in selector.items())


def matches_affinity(state: NodeState, terms: Sequence[NodeSelectorTerm]) -> bool:
    """Return whether a node matches required node affinity: all requirements of at least one term.

    A term without requirements matches no node.
    """
    if not terms:
        return True
    fields = {"metadata.name": state.name}
    return any(
        bool(term.expressions or term.fields)
        and all(_holds(state.labels, requirement) for requirement in term.expressions)
        and all(_holds(fields, requirement) for requirement in term.fields)
        for term in terms
    )


def _holds(labels: Mapping[str, str], requirement: NodeRequirement) -> bool:
    value = labels.get(requirement.key)
    match requirement.operator:
        case "In":
            return value is not None and value in requirement.values
        case "NotIn":
            return value is None or value not in requirement.values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt":
            return value is not None and _compares(value, requirement.operator, requirement.values[0])
    return False


def _compares(value: str, operator: str, bound: str) -> bool:
    number, limit = integer(value), integer(bound)
    if number is None or limit is None:
        return False
    return number > limit if operator == "Gt" else number < limit


def tolerates(toleration: Toleration, taint: Taint) -> bool:
    """Return whether a toleration tolerates a taint."""
    if toleration.effect and toleration.effect != taint.effect:
        return False
    if toleration.key and toleration.key != taint.key:
        return False
    match toleration.operator:
        case "Exists":
            return True
        case "Gt" | "Lt":
            return bool(toleration.key) and _compares(taint.value, toleration.operator, toleration.value)
    return bool(toleration.key) and toleration.value == taint.value


def untolerated(taints: Sequence[Taint], tolerations: Sequence[Toleration]) -> tuple[Taint, ...]:
    """Return the taints of a node that keep a pod with these tolerations off it."""
    if not taints:
        return ()
    return tuple(
        taint
        for taint in taints
        if taint.effect in _BLOCKING_EFFECTS and not any(tolerates(toleration, taint) for toleration in tolerations)
    )


def covers(has: Resources, asked: Resources) -> bool:
    """Return whether the resources `has` cover the requested ones. A resource that is not requested may be negative
    (over-used)."""
    if asked.cpu_milli and asked.cpu_milli > has.cpu_milli:
        return False
    if asked.memory and asked.memory > has.memory:
        return False
    return not asked.extended or all(amount <= has.extended.get(name, 0) for name, amount in asked.extended.items())


def free_resources(node: NodeAccount) -> Resources:
    """Return the resources of the node that pods and reservations leave free."""
    return node.taken().free


def _selector_matches(node: NodeAccount, request: PlacementRequest) -> bool:
    return _state_selector_matches(_state(node), request.pod)


def _state_selector_matches(state: NodeState, pod: PodNeeds) -> bool:
    return matches_selector(state.labels, pod.node_selector)


def _selector_differs(nodes: Sequence[NodeAccount], request: PlacementRequest) -> str:
    wanted = some_of(f"{key}={value}" for key, value in request.pod.node_selector.items())
    return f"{_nodes(nodes, 'does', 'do')} not match spec.nodeSelector ({wanted})"


def _affinity_matches(node: NodeAccount, request: PlacementRequest) -> bool:
    return _state_affinity_matches(_state(node), request.pod)


def _state_affinity_matches(state: NodeState, pod: PodNeeds) -> bool:
    return matches_affinity(state, pod.node_affinity_terms)


def _affinity_differs(nodes: Sequence[NodeAccount], request: PlacementRequest) -> str:
    return f"{_nodes(nodes, 'does', 'do')} not match the required node affinity"


def _lasting_taints(node: NodeAccount, pod: PodNeeds) -> tuple[Taint, ...]:
    taints = untolerated(_state(node).taints, pod.tolerations)
    return taints and tuple(taint for taint in taints if not taint.key.startswith(_CONDITION_TAINT_PREFIX))


def _untainted(node: NodeAccount, request: PlacementRequest) -> bool:
    return not _lasting_taints(node, request.pod)


def _tainted(nodes: Sequence[NodeAccount], request: PlacementRequest) -> str:
    taints = some_of(_taint(taint) for node in nodes for taint in _lasting_taints(node, request.pod))
    return f"{_nodes(nodes, 'has', 'have')} a taint that the pod does not tolerate ({taints})"


def _taint(taint: Taint) -> str:
    return f"{taint.key}={taint.value}:{taint.effect}" if taint.value else f"{taint.key}:{taint.effect}"


def _large_enough(node: NodeAccount, request: PlacementRequest) -> bool:
    return covers(_state(node).allocatable, request.pod.resources)


def _too_small(nodes: Sequence[NodeAccount], request: PlacementRequest) -> str:
    short = _shortage([_state(node).allocatable for node in nodes], request.pod.resources)
    return f"{_nodes(nodes, 'is', 'are')} too small even when empty ({short})"


def _placed_here(node: NodeAccount, request: PlacementRequest) -> bool:
    return _state_placed_here(_state(node), request.pod)


def _state_placed_here(state: NodeState, pod: PodNeeds) -> bool:
    return not state.by_scheduler


def _placed_by_scheduler(nodes: Sequence[NodeAccount], request: PlacementRequest) -> str:
    return (
        f"{_nodes(nodes, 'is', 'are')} of pool {Pool.SCHEDULER}, where kube-scheduler gives shares away (use a "
        f"ResourceClaim of class {SCHEDULER_CLASS} there)"
    )


def _enough_gpus(node: NodeAccount, request: PlacementRequest) -> bool:
    return len(node.gpus) >= request.gpu.count


def _too_few_gpus(nodes: Sequence[NodeAccount], request: PlacementRequest) -> str:
    most = max(nodes, key=lambda node: (len(node.gpus), node.name))
    if not most.gpus:
        return f"{_nodes(nodes, 'shows', 'show')} no GPU yet"
    has = f"most: {len(most.gpus)} on {most.name}"
    return f"{_nodes(nodes, 'has', 'have')} fewer than the {counted(request.gpu.count, 'GPU')} asked ({has})"


def _available(node: NodeAccount, request: PlacementRequest) -> bool:
    return _state_available(_state(node), request.pod)


def _state_available(state: NodeState, pod: PodNeeds) -> bool:
    return state.unavailable is None


def _unavailable(nodes: Sequence[NodeAccount], request: PlacementRequest) -> str:
    return _by_reason(nodes, lambda node: _state(node).unavailable or "")


def _attaches_claims(node: NodeAccount, request: PlacementRequest) -> bool:
    return request.claim is None or _state(node).no_claims is None


def _attaches_none(nodes: Sequence[NodeAccount], request: PlacementRequest) -> str:
    return _by_reason(nodes, lambda node: _state(node).no_claims or "")


def _no_condition_taint(node: NodeAccount, request: PlacementRequest) -> bool:
    return _state_untainted(_state(node), request.pod)


def _state_untainted(state: NodeState, pod: PodNeeds) -> bool:
    return not untolerated(state.taints, pod.tolerations)


def _condition_tainted(nodes: Sequence[NodeAccount], request: PlacementRequest) -> str:
    def reason(node: NodeAccount) -> str:
        keys = [taint.key for taint in untolerated(_state(node).taints, request.pod.tolerations)]
        if UNSCHEDULABLE_TAINT.key in keys:
            return "is cordoned"
        return f"is tainted {some_of(keys)}"

    return _by_reason(nodes, reason)


def _allowed(node: NodeAccount, request: PlacementRequest) -> bool:
    return node.name not in request.avoid


def _avoided(nodes: Sequence[NodeAccount], request: PlacementRequest) -> str:
    return _by_reason(nodes, lambda node: request.avoid[node.name])


def _has_row(node: NodeAccount, request: PlacementRequest) -> bool:
    return len(node.rows) < MAX_TENANTS


def _no_row(nodes: Sequence[NodeAccount], request: PlacementRequest) -> str:
    return f"{_nodes(nodes, 'has', 'have')} {MAX_TENANTS} tenants, as many as a ledger holds"


def _has_pod_slot(node: NodeAccount, request: PlacementRequest) -> bool:
    return node.taken().pods < _state(node).pods


def _no_pod_slot(nodes: Sequence[NodeAccount], request: PlacementRequest) -> str:
    return f"{_nodes(nodes, 'has', 'have')} no room for another pod"


def _has_resources(node: NodeAccount, request: PlacementRequest) -> bool:
    return covers(free_resources(node), request.pod.resources)


def _no_resources(nodes: Sequence[NodeAccount], request: PlacementRequest) -> str:
    short = _shortage([free_resources(node) for node in nodes], request.pod.resources, "free: ")
    return f"{_nodes(nodes, 'has', 'have')} too little left for the pod ({short})"


STATIC = (
    NodeFilter("FewGpus", _enough_gpus, _too_few_gpus),
    NodeFilter("NodeSelector", _selector_matches, _selector_differs),
    NodeFilter("NodeAffinity", _affinity_matches, _affinity_differs),
    NodeFilter("Taint", _untainted, _tainted),
    NodeFilter("TooSmall", _large_enough, _too_small),
    NodeFilter("SchedulerPool", _placed_here, _placed_by_scheduler),
)
DYNAMIC = (
    NodeFilter("Unavailable", _available, _unavailable),
    NodeFilter("Claims", _attaches_claims, _attaches_none),
    NodeFilter("PassingTaint", _no_condition_taint, _condition_tainted),
    NodeFilter("Avoided", _allowed, _avoided),
    NodeFilter("LedgerFull", _has_row, _no_row),
    NodeFilter("Pods", _has_pod_slot, _no_pod_slot),
    NodeFilter("Resources", _has_resources, _no_resources),
)
UNAFFECTED_BY_TENANTS = DYNAMIC[:4]
"""Dynamic filters whose result does not depend on the node's tenants."""
BY_STATE = (
    _state_available,
    _state_placed_here,
    _state_selector_matches,
    _state_affinity_matches,
    _state_untainted,
)
"""The filters that need only the node's state and the pod's needs, as functions of these two."""


def _nodes(nodes: Sequence[NodeAccount], one: str, many: str) -> str:
    return f"{counted(len(nodes), 'node')} {one if len(nodes) == 1 else many}"


def _by_reason(nodes: Sequence[NodeAccount], reason: Callable[[NodeAccount], str]) -> str:
    return grouped(((f"node {node.name}" if len(nodes) == 1 else node.name, reason(node)) for node in nodes), "node")


def _shortage(has: Sequence[Resources], asked: Resources, word: str = "has: ") -> str:
    """Return text with each resource that one of the nodes lacks: the requested amount, and the most that any of the
    nodes has."""
    parts = []
    if any(asked.cpu_milli > one.cpu_milli for one in has):
        most = max(max(one.cpu_milli for one in has), 0)
        parts.append(f"asked {_cores(asked.cpu_milli)} CPU, most {word}{_cores(most)}")
    if any(asked.memory > one.memory for one in has):
        most = max(max(one.memory for one in has), 0)
        parts.append(f"asked {size_up(asked.memory)} memory, most {word}{size_down(most)}")
    for name, amount in sorted(asked.extended.items()):
        most = max(one.extended.get(name, 0) for one in has)
        if any(amount > one.extended.get(name, 0) for one in has):
            parts.append(f"asked {amount} {name}, most {word}{max(most, 0)}")
    return "; ".join(parts)


def _cores(milli: int) -> str:
    return f"{milli // 1000}" if milli % 1000 == 0 else f"{milli}m"
