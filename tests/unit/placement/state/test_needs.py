"""Needs of pods, summed as kube-scheduler sums them."""

from __future__ import annotations

from typing import Any

import pytest
from sharepod.placement.state.needs import NeedsError, parse_allocatable, parse_needs, parse_taints, pod_resources
from sharepod.placement.state.types import NodeRequirement, NodeSelectorTerm, Resources, Taint, Toleration

GI = 1 << 30


def container(cpu: str | None = None, memory: str | None = None, **more: Any) -> dict[str, Any]:
    requests = {name: value for name, value in (("cpu", cpu), ("memory", memory)) if value is not None}
    return {"name": "c", "resources": {"requests": requests}, **more}


def test_containers_add_up() -> None:
    spec = {"containers": [container("500m", "1Gi"), container("1", "512Mi"), {"name": "bare"}]}
    assert pod_resources(spec) == Resources(1_500, GI * 3 // 2)


@pytest.mark.parametrize(
    ("cpu", "milli"),
    [("1", 1_000), (2, 2_000), (0.5, 500), ("0.1", 100), ("1500m", 1_500), ("100u", 1), ("1n", 1), ("2e3", 2_000_000)],
)
def test_cpu_is_read_in_all_its_spellings_and_rounded_up(cpu: object, milli: int) -> None:
    assert pod_resources({"containers": [{"resources": {"requests": {"cpu": cpu}}}]}).cpu_milli == milli


def test_a_limit_without_a_request_is_a_request() -> None:
    spec = {"containers": [{"resources": {"limits": {"cpu": "1", "memory": "500Mi"}, "requests": {"cpu": "250m"}}}]}
    assert pod_resources(spec) == Resources(250, 500 << 20)


def test_the_largest_init_container_counts_where_it_is_larger() -> None:
    spec = {
        "containers": [container("1", "1Gi")],
        "initContainers": [container("3", "100Mi"), container("2", "2Gi")],
    }
    assert pod_resources(spec) == Resources(3_000, 2 * GI)


def test_sidecars_run_beside_the_containers_and_beside_later_init_containers() -> None:
    sidecar = container("1", restartPolicy="Always")
    assert pod_resources({"containers": [container("2")], "initContainers": [sidecar]}).cpu_milli == 3_000
    before = {"containers": [container("2")], "initContainers": [sidecar, container("4")]}
    assert pod_resources(before).cpu_milli == 5_000
    after = {"containers": [container("2")], "initContainers": [container("4"), sidecar]}
    assert pod_resources(after).cpu_milli == 4_000


def test_requests_at_pod_level_stand_in_place_of_the_containers() -> None:
    spec = {"containers": [container("1", "1Gi")], "resources": {"requests": {"cpu": "4"}}}
    assert pod_resources(spec) == Resources(4_000, GI)


def test_a_pod_level_limit_counts_only_where_no_container_asks() -> None:
    spec = {"containers": [container("1")], "resources": {"limits": {"cpu": "4", "memory": "2Gi"}}}
    assert pod_resources(spec) == Resources(1_000, 2 * GI)


def test_overhead_comes_on_top() -> None:
    spec = {"containers": [container("1", "1Gi")], "overhead": {"cpu": "250m", "memory": "1Gi"}}
    assert pod_resources(spec) == Resources(1_250, 2 * GI)


def test_other_resources_are_counted_by_name() -> None:
    spec = {"containers": [{"resources": {"limits": {"rdma/hca": 1, "hugepages-2Mi": "4Mi"}}}] * 2}
    assert pod_resources(spec) == Resources(0, 0, {"rdma/hca": 2, "hugepages-2Mi": 8 << 20})


def test_selector_affinity_and_tolerations_are_read() -> None:
    term = {
        "matchExpressions": [{"key": "zone", "operator": "In", "values": ["a", "b"]}],
        "matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["node-x"]}],
    }
    required = {"nodeSelectorTerms": [term]}
    needs = parse_needs(
        {
            "nodeSelector": {"disk": "ssd"},
            "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}},
            "tolerations": [{"operator": "Exists"}, {"key": "k", "value": "v", "effect": "NoSchedule"}],
        }
    )
    assert needs.node_selector == {"disk": "ssd"}
    assert needs.node_affinity_terms == (
        NodeSelectorTerm(
            expressions=(NodeRequirement("zone", "In", ("a", "b")),),
            fields=(NodeRequirement("metadata.name", "NotIn", ("node-x",)),),
        ),
    )
    assert needs.tolerations == (Toleration("", "Exists"), Toleration("k", "Equal", "v", "NoSchedule"))


def test_a_preference_is_not_a_requirement() -> None:
    preferred = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": {}}]}
    assert parse_needs({"affinity": {"nodeAffinity": preferred}}).node_affinity_terms == ()


def _required(**requirement: object) -> dict[str, Any]:
    terms = {"nodeSelectorTerms": [{"matchExpressions": [requirement]}]}
    return {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}}


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"containers": [container("lots")]}, "spec.containers[0].resources.requests.cpu"),
        ({"containers": [container("-1")]}, "spec.containers[0].resources.requests.cpu"),
        ({"containers": [container(memory="1GB")]}, "spec.containers[0].resources.requests.memory"),
        ({"initContainers": [container("x")]}, "spec.initContainers[0].resources.requests.cpu"),
        ({"containers": "none"}, "spec.containers"),
        ({"containers": [{"resources": ["cpu"]}]}, "spec.containers[0].resources"),
        ({"nodeSelector": ["a"]}, "spec.nodeSelector"),
        ({"tolerations": [{"key": "k", "operator": "Like"}]}, "spec.tolerations[0].operator"),
        (_required(key="k", operator="Near"), "matchExpressions[0].operator"),
        (_required(key="k", operator="Gt", values=["a"]), "matchExpressions[0].values"),
        (_required(key="k", operator="In", values=[]), "matchExpressions[0].values"),
        (_required(key="k", operator="In", values="a"), "matchExpressions[0].values"),
    ],
)
def test_what_cannot_be_read_is_named_by_its_field(spec: dict[str, Any], field: str) -> None:
    with pytest.raises(NeedsError) as caught:
        parse_needs(spec)
    assert field in caught.value.field


def test_a_cordoned_node_is_tainted_before_the_controller_says_so() -> None:
    cordon = Taint("node.kubernetes.io/unschedulable", "", "NoSchedule")
    assert parse_taints({"unschedulable": True}) == (cordon,)
    taint = {"key": cordon.key, "effect": "NoSchedule"}
    assert parse_taints({"unschedulable": True, "taints": [taint]}) == (cordon,)
    assert parse_taints({"taints": [{"key": "k", "value": "v", "effect": "NoExecute"}]}) == (
        Taint("k", "v", "NoExecute"),
    )


def test_allocatable_is_read_with_the_number_of_pods() -> None:
    status = {"allocatable": {"cpu": "7910m", "memory": "31Gi", "pods": "250", "rdma/hca": "1"}}
    assert parse_allocatable(status) == (Resources(7_910, 31 * GI, {"rdma/hca": 1}), 250)
    assert parse_allocatable({}) == (Resources(), 110)


HOST = {"key": "kubernetes.io/hostname", "operator": "In", "values": ["n"]}


def affine(*terms: Any) -> dict[str, Any]:
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": list(terms)}}
    return {"containers": [], "affinity": {"nodeAffinity": required}}


@pytest.mark.parametrize(
    ("spec", "field", "message"),
    [
        ({"containers": [{}] * 65}, "spec.containers", "has 65 entries; write at most 64"),
        ({"initContainers": [{}] * 65}, "spec.initContainers", "write at most 64"),
        ({"tolerations": [{}] * 129}, "spec.tolerations", "write at most 128"),
        ({"nodeSelector": {f"k{number}": "v" for number in range(65)}}, "spec.nodeSelector", "write at most 64"),
        ({"nodeSelector": {"k": "v" * 64}}, "spec.nodeSelector[k]", "write at most 63 characters"),
        (affine(*[{"matchExpressions": [HOST]}] * 65), "nodeSelectorTerms", "write at most 64"),
        (affine(*[{"matchExpressions": [HOST] * 13}] * 5), "Execution", "has 65 requirements; write at most 64"),
        (affine({"matchExpressions": [HOST | {"values": ["n"] * 513}] * 2}), "Execution", "has 1026 values"),
        (affine({"matchExpressions": [HOST | {"operator": "Gt", "values": ["1_0"]}]}), "values", "whole number"),
        (affine({"matchExpressions": [HOST | {"operator": "Lt", "values": ["9" * 5_000]}]}), "values", "whole number"),
        ({"containers": [{"resources": {"requests": {f"x/{n}": 1 for n in range(17)}}}]}, "requests", "at most 16"),
        (
            {"containers": [{"resources": {"requests": {f"x/{n}": 1}}} for n in range(20)]},
            "spec.containers",
            "more than 16 resources",
        ),
        ({"containers": [{"resources": {"requests": {"x" * 318: 1}}}]}, "requests", "write at most 317 characters"),
        (
            {"overhead": {"memory": "4Ei"}, "containers": [{"resources": {"requests": {"memory": "1"}}}]},
            "spec",
            "any node",
        ),
    ],
)
def test_what_is_beyond_a_bound_is_refused_by_name(spec: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(NeedsError) as refused:
        parse_needs(spec)
    assert field in refused.value.field
    assert message in refused.value.message


def test_as_many_requirements_as_the_bounds_allow_are_read() -> None:
    terms = parse_needs(affine(*[{"matchExpressions": [HOST | {"values": ["n"] * 16}]}] * 64)).node_affinity_terms
    assert sum(len(term.expressions[0].values) for term in terms) == 1024
