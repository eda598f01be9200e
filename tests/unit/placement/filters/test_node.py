"""Node filters: kube-scheduler's checks, made before the Pod is created."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from sharepod.api.objects import MAX_TENANTS
from sharepod.api.units import TenantId
from sharepod.placement.filters.node import matches_affinity, tolerates
from sharepod.placement.state.types import (
    Assignment,
    NodeRequirement,
    NodeSelectorTerm,
    Outlook,
    PodNeeds,
    Resources,
    Taint,
    Toleration,
)
from unit.placement.world import GI, ask, cluster_of, node, put, refused, row


def test_a_taint_keeps_a_pod_away_unless_it_is_tolerated() -> None:
    cluster = cluster_of(node(taints=(Taint("nvidia.com/gpu", "present", "NoSchedule"),)))
    refusal = refused(cluster, ask())
    assert "1 node has a taint that the pod does not tolerate (nvidia.com/gpu=present:NoSchedule)" in refusal.message
    put(cluster, ask(pod=PodNeeds(tolerations=(Toleration("nvidia.com/gpu", "Exists"),))))


def test_a_preference_against_a_node_is_no_obstacle() -> None:
    put(cluster_of(node(taints=(Taint("busy", "", "PreferNoSchedule"),))), ask())


def test_a_cordoned_node_takes_nobody_and_may_come_back() -> None:
    cluster = cluster_of(node(taints=(Taint("node.kubernetes.io/unschedulable", "", "NoSchedule"),)))
    refusal = refused(cluster, ask())
    assert "node node-a is cordoned" in refusal.message
    assert refusal.outlook is Outlook.WAITING


@pytest.mark.parametrize(
    ("toleration", "taint", "expected"),
    [
        (Toleration("k", "Equal", "v"), Taint("k", "v"), True),
        (Toleration("k", "Equal", "v"), Taint("k", "w"), False),
        (Toleration("k", "Exists"), Taint("k", "w"), True),
        (Toleration("", "Exists"), Taint("any", "w"), True),
        (Toleration("", "Equal", ""), Taint("any", ""), False),
        (Toleration("k", "Exists", effect="NoExecute"), Taint("k", "w", "NoSchedule"), False),
        (Toleration("k", "Exists", effect="NoSchedule"), Taint("k", "w", "NoSchedule"), True),
        (Toleration("k", "Gt", "900"), Taint("k", "950"), True),
        (Toleration("k", "Gt", "950"), Taint("k", "950"), False),
        (Toleration("k", "Lt", "5"), Taint("k", "4"), True),
        (Toleration("k", "Lt", "5"), Taint("k", "four"), False),
    ],
)
def test_tolerations_match_as_in_kubernetes(toleration: Toleration, taint: Taint, expected: bool) -> None:
    assert tolerates(toleration, taint) is expected


def test_node_selector_wants_every_label() -> None:
    cluster = cluster_of(node("node-a", labels={"disk": "ssd"}), node("node-b", labels={"disk": "ssd", "zone": "z"}))
    needs = PodNeeds(node_selector={"disk": "ssd", "zone": "z"})
    assert put(cluster, ask(pod=needs)).node == "node-b"
    refusal = refused(cluster, ask("u", pod=PodNeeds(node_selector={"zone": "y"})))
    assert "2 nodes do not match spec.nodeSelector (zone=y)" in refusal.message
    assert refusal.outlook is Outlook.NEVER


LABELS = {"zone": "z", "gen": "8"}


@pytest.mark.parametrize(
    ("operator", "key", "values", "expected"),
    [
        ("In", "zone", ("y", "z"), True),
        ("In", "zone", ("y",), False),
        ("In", "absent", ("",), False),
        ("NotIn", "zone", ("y",), True),
        ("NotIn", "zone", ("z",), False),
        ("NotIn", "absent", ("z",), True),
        ("Exists", "zone", (), True),
        ("Exists", "absent", (), False),
        ("DoesNotExist", "absent", (), True),
        ("DoesNotExist", "zone", (), False),
        ("Gt", "gen", ("7",), True),
        ("Gt", "gen", ("8",), False),
        ("Lt", "gen", ("9",), True),
        ("Lt", "zone", ("9",), False),
        ("Gt", "absent", ("0",), False),
    ],
)
def test_node_affinity_operators_match_as_in_kubernetes(
    operator: str, key: str, values: tuple[str, ...], expected: bool
) -> None:
    term = NodeSelectorTerm(expressions=(NodeRequirement(key, operator, values),))
    assert matches_affinity(node(labels=LABELS), (term,)) is expected


def _field(operator: str, *names: str) -> NodeSelectorTerm:
    return NodeSelectorTerm(fields=(NodeRequirement("metadata.name", operator, names),))


def test_terms_are_alternatives_and_an_empty_one_matches_nothing() -> None:
    state = node("node-a", labels=LABELS)
    wrong = NodeSelectorTerm(expressions=(NodeRequirement("zone", "In", ("y",)),))
    assert matches_affinity(state, (wrong, _field("In", "node-a")))
    assert not matches_affinity(state, (wrong, _field("NotIn", "node-a")))
    assert not matches_affinity(state, (NodeSelectorTerm(),))
    assert matches_affinity(state, ())


def test_all_requirements_of_a_term_hold_together() -> None:
    both = NodeSelectorTerm(
        expressions=(NodeRequirement("zone", "Exists"),), fields=(NodeRequirement("metadata.name", "In", ("node-b",)),)
    )
    assert not matches_affinity(node("node-a", labels=LABELS), (both,))
    assert matches_affinity(node("node-b", labels=LABELS), (both,))


@pytest.mark.parametrize(
    ("has", "asked", "explanation"),
    [
        ({"cpu": 4_000}, Resources(4_500), "asked 4500m CPU, most has: 4"),
        ({"memory": 8 * GI}, Resources(0, 9 * GI), "asked 9Gi memory, most has: 8Gi"),
        ({"extended": {"rdma/hca": 1}}, Resources(0, 0, {"rdma/hca": 2}), "asked 2 rdma/hca, most has: 1"),
    ],
)
def test_a_node_too_small_even_when_empty_is_said_never_to_fit(
    has: Mapping[str, object], asked: Resources, explanation: str
) -> None:
    refusal = refused(cluster_of(node(**has)), ask(pod=PodNeeds(resources=asked)))  # type: ignore[arg-type]
    assert explanation in refusal.message
    assert refusal.outlook is Outlook.NEVER


def test_pods_of_others_count() -> None:
    cluster = cluster_of(node(cpu=4_000))
    cluster.set_pod_usage("node-a", "other", Resources(3_500, GI))
    request = ask(pod=PodNeeds(resources=Resources(1_000)))
    refusal = refused(cluster, request)
    assert "1 node has too little left for the pod (asked 1 CPU, most free: 500m)" in refusal.message
    assert refusal.outlook is Outlook.WAITING
    cluster.remove_pod("other")
    put(cluster, request)


def test_a_reservation_counts_with_what_its_pod_will_need_until_the_pod_is_seen() -> None:
    cluster = cluster_of(node(cpu=4_000))
    put(cluster, ask("first", 100, pod=PodNeeds(resources=Resources(3_000))))
    second = ask("second", 100, pod=PodNeeds(resources=Resources(1_500)))
    refused(cluster, second)
    # The pod is larger than its request, for example because an admission webhook changed it. The observed size counts,
    # once.
    cluster.set_pod_usage("node-a", "pod-of-first", Resources(2_500), tenant=TenantId("first"))
    put(cluster, second)


def test_what_a_pod_does_not_ask_for_may_be_used_up() -> None:
    cluster = cluster_of(node(cpu=1_000))
    cluster.set_pod_usage("node-a", "other", Resources(2_000))
    put(cluster, ask(pod=PodNeeds(resources=Resources(0, GI))))


def test_a_node_takes_no_more_pods_than_it_says() -> None:
    cluster = cluster_of(node(pods=2))
    cluster.set_pod_usage("node-a", "other", Resources())
    put(cluster, ask("first", 100))
    assert "1 node has no room for another pod" in refused(cluster, ask("second", 100)).message


def test_a_moved_pod_counts_once() -> None:
    cluster = cluster_of(node("node-a", cpu=1_000), node("node-b", 0, cpu=1_000))
    cluster.set_pod_usage("node-a", "pod", Resources(1_000))
    cluster.set_pod_usage("node-b", "pod", Resources(1_000))
    put(cluster, ask(pod=PodNeeds(resources=Resources(1_000))))


def test_an_unavailable_node_says_why_and_is_waited_for() -> None:
    cluster = cluster_of(node(unavailable="has no agent: its lease ended"))
    refusal = refused(cluster, ask())
    assert refusal.message.startswith("0/1 nodes can take it: node node-a has no agent: its lease ended.")
    assert refusal.outlook is Outlook.WAITING


def test_many_nodes_with_many_reasons_still_make_one_short_message() -> None:
    away = [node(f"node-{number:02}", unavailable="is not ready") for number in range(9)]
    odd = [node(f"odd-{number}", unavailable=f"has no agent: lease {number} ended") for number in range(9)]
    refusal = refused(cluster_of(*away, *odd), ask())
    assert refusal.message.startswith(
        "0/18 nodes can take it: 9 nodes (node-00, node-01, node-02, node-03 and 5 more): each is not ready, "
        "odd-0 has no agent: lease 0 ended, "
    )
    assert "6 nodes for other reasons" in refusal.message


def test_a_node_to_avoid_is_avoided_with_its_reason() -> None:
    cluster = cluster_of(node("node-a"), node("node-b"))
    why = "was refused by kube-scheduler: no port"
    assert put(cluster, ask(avoid={"node-a": why})).node == "node-b"
    assert why in refused(cluster, ask("u", avoid={"node-a": why, "node-b": why})).message


def test_a_full_ledger_is_a_reason() -> None:
    cluster = cluster_of(node())
    cluster.load("node-a", [row(f"t{number}", 0, memory=1) for number in range(MAX_TENANTS)], 1)
    assert f"1 node has {MAX_TENANTS} tenants, as many as a ledger holds" in refused(cluster, ask()).message


def test_a_cluster_without_nodes_says_what_to_do() -> None:
    refusal = refused(cluster_of(), ask())
    assert "sharepod.dev/pool" in refusal.message
    assert refusal.outlook is Outlook.WAITING


@pytest.mark.promise("operator-scheduler-pool-one-allocator")
def test_a_node_where_kube_scheduler_gives_shares_away_takes_nothing_and_the_refusal_names_the_class() -> None:
    theirs = replace(node("node-b"), by_scheduler=True)
    refusal = refused(cluster_of(theirs), ask())
    assert "1 node is of pool scheduler, where kube-scheduler gives shares away" in refusal.message
    assert "ResourceClaim of class scheduler.sharepod.dev" in refusal.message
    assert refusal.outlook is Outlook.NEVER
    assert refused(cluster_of(theirs, node("node-a")), ask(count=2)).outlook is Outlook.NEVER


def test_a_node_whose_agent_has_reported_nothing_is_waited_for() -> None:
    refusal = refused(cluster_of(node("node-a", 0)), ask(count=8))
    assert "1 node shows no GPU yet" in refusal.message
    assert refusal.outlook is Outlook.WAITING


def test_a_removed_node_is_not_used_and_comes_back_with_its_tenants() -> None:
    cluster = cluster_of(node())
    put(cluster, ask("first", 700))
    cluster.remove_node("node-a")
    refused(cluster, ask("second", 300))
    cluster.upsert_node(node())
    refused(cluster, ask("second", 400))
    assert isinstance(cluster.engine.place(ask("second", 300)), Assignment)
