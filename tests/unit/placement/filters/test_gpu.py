"""GPU filters: labels, mode Exclusive, time, memory, and several GPUs at once."""

from __future__ import annotations

from typing import Any

import pytest
from sharepod.api.gpunode import Mode
from sharepod.api.sharepod import PlacementPolicy
from sharepod.api.units import MIB, TenantId, parse_quantity
from sharepod.placement.state.types import Outlook, PodNeeds
from sharepod.placement.wording import of_lines, size_down, size_exact, size_near, size_up
from unit.placement.world import GI, ask, cluster_of, gpu, interactive, node, put, refused

A0, A1 = "GPU-node-a-0", "GPU-node-a-1"


def test_requests_fill_a_gpu_exactly_and_no_further() -> None:
    cluster = cluster_of(node())
    put(cluster, ask("t4", 400))
    put(cluster, ask("t6", 600))
    refused(cluster, ask("t0", 1))


@pytest.mark.promise("memory-default")
def test_memory_is_a_share_of_the_gpu_unless_it_is_asked_for() -> None:
    cluster = cluster_of(node(gpus=[gpu("node-a", 0, memory=40 * GI)]))
    assert put(cluster, ask("half", 500)).memory == 20 * GI
    assert put(cluster, ask("exact", 100, memory=20 * GI)).memory == 20 * GI
    assert "too little memory free" in refused(cluster, ask("more", 100)).message


def test_best_effort_needs_memory_only() -> None:
    cluster = cluster_of(node())
    put(cluster, ask("whole", 1000, memory=70 * GI))
    put(cluster, ask("idle", 0, memory=10 * GI))
    refused(cluster, ask("idle2", 0, memory=1))


def test_an_unavailable_gpu_takes_nobody_and_says_why() -> None:
    cluster = cluster_of(node(gpus=[gpu("node-a", 0, broken="MIG is on")]))
    refusal = refused(cluster, ask())
    assert "node-a GPU 0 cannot be shared because MIG is on" in refusal.message
    assert refusal.outlook is Outlook.WAITING


@pytest.mark.promise("placement-chosen-gpus")
def test_only_the_uuids_asked_for() -> None:
    cluster = cluster_of(node(gpus=3))
    assert put(cluster, ask("t", uuids=[A1])).gpus == (A1,)
    refusal = refused(cluster, ask("u", uuids=["GPU-none"]))
    assert "3 GPUs are not among spec.gpu.uuids" in refusal.message
    assert refusal.outlook is Outlook.NEVER


@pytest.mark.promise("placement-chosen-gpus")
def test_only_the_models_asked_for() -> None:
    cluster = cluster_of(node(gpus=[gpu("node-a", 0, model="A100"), gpu("node-a", 1, model="L4")]))
    assert put(cluster, ask("t", models=["L4", "H100"])).gpus == (A1,)
    assert "2 GPUs are of no model among spec.gpu.models (A100, L4)" in refused(cluster, ask(models=["H100"])).message


@pytest.mark.promise("placement-exclusive")
def test_exclusive_takes_wholly_free_gpus_and_shares_with_nobody() -> None:
    cluster = cluster_of(node(gpus=2))
    put(cluster, ask("small", 0, memory=GI))
    assert put(cluster, ask("whole", mode=Mode.EXCLUSIVE)).gpus == (A1,)
    assert "mode Exclusive takes wholly free GPUs" in refused(cluster, ask("more", mode=Mode.EXCLUSIVE)).message
    put(cluster, ask("fits", 1000, memory=GI))
    assert "taken whole by an Exclusive SharePod" in refused(cluster, ask("tiny", 1)).message


def test_exclusive_reserves_all_memory() -> None:
    assert put(cluster_of(node()), ask(mode=Mode.EXCLUSIVE)).memory == 80 * GI


@pytest.mark.promise("placement-exclusion")
@pytest.mark.parametrize("first", ["x", None])
@pytest.mark.parametrize("second", ["x", "y", None])
def test_exclusion_labels_share_a_gpu_only_with_their_very_like(first: str | None, second: str | None) -> None:
    cluster = cluster_of(node())
    put(cluster, ask("first", 100, exclusion=first))
    if first == second:
        put(cluster, ask("second", 100, exclusion=second))
    else:
        refused(cluster, ask("second", 100, exclusion=second))


@pytest.mark.promise("placement-labels-of-namespace")
def test_the_same_exclusion_label_of_another_namespace_is_another_label_and_is_not_told() -> None:
    cluster = cluster_of(node())
    put(cluster, ask("first", 100, exclusion="secret", namespace="one"))
    assert "secret" not in refused(cluster, ask("second", 100, namespace="two")).message
    refused(cluster, ask("third", 100, exclusion="secret", namespace="two"))


@pytest.mark.promise("placement-anti-affinity")
def test_anti_affinity_keeps_a_label_on_different_gpus() -> None:
    cluster = cluster_of(node(gpus=2))
    first = put(cluster, ask("first", 100, anti_affinity="db"))
    second = put(cluster, ask("second", 100, anti_affinity="db"))
    assert first.gpus != second.gpus
    refusal = refused(cluster, ask("third", 100, anti_affinity="db"))
    assert '2 GPUs have a SharePod of the anti-affinity label "db" already' in refusal.message


@pytest.mark.promise("placement-interactive")
@pytest.mark.parametrize("per_gpu", [1, 2])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("policy", [*PlacementPolicy])
def test_a_gpu_takes_as_many_interactive_tenants_as_the_setting_says(
    per_gpu: int, learned: bool, policy: PlacementPolicy
) -> None:
    cluster = cluster_of(node(gpus=2), interactive_per_gpu=per_gpu)
    if learned:  # with learned demand, the columns rank the GPUs
        for _ in range(32):
            cluster.engine.packing.arrived(ask(request=100))
        cluster.engine.packing.renew()
    taken: list[str] = []
    for number in range(2 * per_gpu):
        request = interactive(ask(f"t{number}", 100, placement=policy))
        taken += put(cluster, request).gpus
    assert sorted(taken) == sorted([A0, A1] * per_gpu)
    refusal = refused(cluster, interactive(ask("more", 100, placement=policy)))
    assert "2 GPUs have as many SharePods of latency Interactive as a GPU takes" in refusal.message
    put(cluster, ask("normal", 100, placement=policy))


@pytest.mark.promise("placement-labels-of-namespace")
def test_anti_affinity_acts_within_the_namespace() -> None:
    cluster = cluster_of(node())
    put(cluster, ask("first", 100, anti_affinity="db", namespace="one"))
    put(cluster, ask("second", 100, anti_affinity="db", namespace="two"))


def test_a_group_goes_to_one_gpu_where_the_first_found_most_free() -> None:
    cluster = cluster_of(node("node-a"), node("node-b"), node("node-c"))
    put(cluster, ask("filler", 300))
    first = put(cluster, ask("first", 200, affinity="g"))
    assert first.node == "node-b"
    put(cluster, ask("packed", 700))
    assert put(cluster, ask("second", 200, affinity="g")).gpus == first.gpus


@pytest.mark.promise("placement-affinity")
def test_a_member_of_a_group_waits_rather_than_go_elsewhere() -> None:
    cluster = cluster_of(node("node-a"), node("node-b"))
    put(cluster, ask("first", 700, affinity="g"))
    refusal = refused(cluster, ask("second", 400, affinity="g"))
    assert refusal.message == (
        "0/2 nodes can take it: 1 GPU has too little time free (most free: 0.3 of node-a GPU 0; asked 0.4), "
        '1 node does not have the affinity group "g", which is on node-a GPU 0. '
        "spec.gpu.request 0.3 would fit now. It will be placed automatically as soon as there is room."
    )


@pytest.mark.promise("placement-labels-of-namespace")
def test_groups_act_within_the_namespace() -> None:
    cluster = cluster_of(node("node-a"), node("node-b"))
    one = put(cluster, ask("first", 500, affinity="g", namespace="one"))
    two = put(cluster, ask("second", 500, affinity="g", namespace="two"))
    assert one.node != two.node


@pytest.mark.promise("placement-affinity")
def test_a_group_of_several_gpus_shares_the_same_ones() -> None:
    cluster = cluster_of(node("node-a", 4))
    first = put(cluster, ask("first", 300, affinity="g", count=2))
    assert put(cluster, ask("second", 300, affinity="g", count=2)).gpus == first.gpus
    refusal = refused(cluster, ask("third", 100, affinity="g"))
    assert 'the affinity group "g" has 2 GPUs and spec.gpu.count is 1' in refusal.message
    assert refusal.outlook is Outlook.CONFLICT


def test_an_exclusive_one_cannot_join_a_group_nor_be_joined() -> None:
    cluster = cluster_of(node("node-a", 4))
    put(cluster, ask("first", 300, affinity="g"))
    alone = refused(cluster, ask("second", affinity="g", mode=Mode.EXCLUSIVE))
    assert alone.outlook is Outlook.CONFLICT
    assert "mode Exclusive shares them with no tenant" in alone.message
    put(cluster, ask("whole", affinity="w", mode=Mode.EXCLUSIVE))
    joining = refused(cluster, ask("third", 100, affinity="w"))
    assert joining.outlook is Outlook.CONFLICT
    assert "in mode Exclusive" in joining.message


@pytest.mark.parametrize(
    ("had", "asked", "expected"),
    [
        ({"exclusion": "x"}, {}, "has members with another spec.gpu.exclusion"),
        ({}, {"exclusion": "x"}, "has members with another spec.gpu.exclusion"),
        ({"anti_affinity": "a"}, {"anti_affinity": "a"}, "has a member with the same spec.gpu.antiAffinity"),
        ({}, {"models": ["H100"]}, "is on node-a GPU 0, which spec.gpu.uuids, spec.gpu.models or spec.gpu.memory"),
        ({}, {"pod": PodNeeds(node_selector={"zone": "b"})}, "is on node-a, which can never take this pod"),
    ],
)
def test_one_that_is_at_odds_with_its_group_is_told_so_instead_of_to_wait(
    had: dict[str, Any], asked: dict[str, Any], expected: str
) -> None:
    other = node("node-b", [gpu("node-b", 0, model="H100")], labels={"zone": "b"})
    cluster = cluster_of(node("node-a"), other)
    put(cluster, ask("first", 300, affinity="g", **had))
    refusal = refused(cluster, ask("second", 300, affinity="g", **asked))
    assert refusal.outlook is Outlook.CONFLICT
    assert expected in refusal.message
    cluster.release("node-a", TenantId("first"))
    put(cluster, ask("second", 300, affinity="g", **asked))


def test_a_group_on_a_node_that_is_away_waits() -> None:
    cluster = cluster_of(node("node-a"), node("node-b"))
    first = put(cluster, ask("first", 300, affinity="g"))
    cluster.remove_node(first.node)
    refusal = refused(cluster, ask("second", 300, affinity="g"))
    assert "on GPUs of node-a that cannot be seen at the moment" in refusal.message
    assert refusal.outlook is Outlook.WAITING


def test_a_group_whose_members_are_all_ending_holds_nobody_once_that_is_written() -> None:
    cluster = cluster_of(node("node-a"), node("node-b"))
    first = put(cluster, ask("first", 700, affinity="g"))
    ending = cluster.set_releasing(first.node, TenantId("first"))
    waited_from = cluster.room_version
    refused(cluster, ask("second", 700, affinity="g"))
    cluster.read_back(first.node, ending, 2)
    assert cluster.regrouped_since(("team", "g"), waited_from)
    assert put(cluster, ask("second", 700, affinity="g")).node == "node-b"


@pytest.mark.promise("placement-one-node")
def test_several_gpus_are_distinct_and_of_one_node() -> None:
    cluster = cluster_of(node("node-a", 1), node("node-b", 3))
    assignment = put(cluster, ask("t", count=2))
    assert assignment.node == "node-b"
    assert len(set(assignment.gpus)) == 2
    refusal = refused(cluster, ask("u", 600, count=2))
    assert "1 node has room on fewer than the 2 GPUs asked" in refusal.message
    assert refusal.outlook is Outlook.WAITING


def test_more_gpus_than_any_node_has_never_fit() -> None:
    refusal = refused(cluster_of(node("node-a", 1), node("node-b", 3)), ask(count=4))
    assert "2 nodes have fewer than the 4 GPUs asked (most: 3 on node-b)" in refusal.message
    assert refusal.outlook is Outlook.NEVER


def test_more_memory_than_any_gpu_has_never_fits() -> None:
    cluster = cluster_of(node(gpus=[gpu("node-a", 0, memory=24 * GI), gpu("node-a", 1, memory=16 * GI)]))
    refusal = refused(cluster, ask(memory=40 * GI))
    assert refusal.message == (
        "0/1 nodes can take it: 2 GPUs have too little memory even when empty "
        "(largest: 24Gi, node-a GPU 0; asked 40Gi). "
        "None of them could take it even when empty: change the request, or add a node that fits it."
    )
    assert refusal.outlook is Outlook.NEVER


def test_on_gpus_of_different_size_a_share_gets_the_smallest_ones_memory_on_each() -> None:
    cluster = cluster_of(node(gpus=[gpu("node-a", 0, memory=80 * GI), gpu("node-a", 1, memory=40 * GI)]))
    assert put(cluster, ask(count=2)).memory == 20 * GI


def test_messages_never_show_more_free_or_less_asked_than_there_is() -> None:
    size = 20 * GI - 1
    assert (size_down(size), size_up(size)) == ("19.9Gi", "20Gi")
    for exact in (0, 1, 1023, GI, GI * 3 // 2, size, 7 * GI + 12345, 3 << 40):
        assert parse_quantity(size_down(exact)) <= exact <= parse_quantity(size_up(exact))


@pytest.mark.promise("memory-default")
@pytest.mark.parametrize("mib", [81559, 143771, 46068, 23028], ids=["H100", "H200", "L40S", "A10"])
@pytest.mark.parametrize("shares", [(400, 600), (333, 333, 334), (100,) * 10])
def test_shares_of_a_full_gpu_leave_nothing_that_is_advised(mib: int, shares: tuple[int, ...]) -> None:
    size = mib * MIB - 12345
    cluster = cluster_of(node(gpus=[gpu("node-a", 0, memory=size)]))
    amounts = [put(cluster, ask(f"t{number}", request)).memory for number, request in enumerate(shares)]
    assert not [amount for amount in amounts if amount % MIB]
    assert 0 <= size - sum(amounts) < len(shares) * MIB + 12345
    refusal = refused(cluster, ask("more", 100, memory=4 * GI))
    assert "would fit now" not in refusal.message


@pytest.mark.parametrize(
    ("free", "advice"), [(767, None), (1023, "768Mi"), (4 * 1024 + 300, "4.25Gi"), (16 * 1024, "16Gi")]
)
def test_advised_memory_is_round_and_enough_for_a_program(free: int, advice: str | None) -> None:
    cluster = cluster_of(node(gpus=[gpu("node-a", 0, memory=64 * GI)]))
    put(cluster, ask("first", 100, memory=64 * GI - free * MIB))
    refusal = refused(cluster, ask("more", 100, memory=32 * GI))
    assert (f"spec.gpu.memory {advice} would fit now" in refusal.message) is (advice is not None)
    if advice is not None:
        put(cluster, ask("more", 100, memory=parse_quantity(advice)))


def test_a_size_is_shown_as_it_was_asked_for() -> None:
    assert [size_exact(parse_quantity(text)) for text in ("3840Mi", "6.5Gi", "16Gi", "1Ti")] == [
        "3840Mi",
        "6.5Gi",
        "16Gi",
        "1Ti",
    ]
    assert size_near(16 * GI * 4 // 10 // MIB * MIB) == "6.4Gi"


@pytest.mark.parametrize(
    ("text", "count", "line"),
    [
        ("spec.gpu.request 0.2 would fit now.", 1, "sharepod.dev/gpu-milli: 200 would fit now."),
        ("spec.gpu.request 1 would fit now.", 2, "sharepod.dev/gpu-milli: 2000 would fit now."),
        ("spec.gpu.memory 4.25Gi would fit now.", 2, "sharepod.dev/gpu-memory-mib: 8704 would fit now."),
        ("as spec.gpu.memory is not set", 1, "as sharepod.dev/gpu-memory-mib is not set"),
        ("spec.gpu.count is 1", 1, "annotation sharepod.dev/gpu-count is 1"),
    ],
)
def test_a_resource_line_is_answered_in_its_own_words(text: str, count: int, line: str) -> None:
    assert of_lines(text, count) == line


# Scores


@pytest.mark.promise("placement-policies")
def test_binpack_fills_a_used_gpu_before_it_opens_another() -> None:
    cluster = cluster_of(node("node-a", 2), node("node-b", 2))
    places = [put(cluster, ask(f"t{number}", 250)) for number in range(4)]
    assert len({place.gpus for place in places}) == 1


def test_binpack_prefers_a_gpu_that_only_best_effort_uses_to_an_idle_one() -> None:
    cluster = cluster_of(node("node-a", 2))
    put(cluster, ask("idle", 0, memory=4 * GI, uuids=[A1]))
    assert put(cluster, ask("t", 300)).gpus == (A1,)


def test_binpack_takes_the_tightest_fit() -> None:
    cluster = cluster_of(node("node-a", 2))
    put(cluster, ask("low", 300, uuids=[A0]))
    put(cluster, ask("high", 600, uuids=[A1]))
    assert put(cluster, ask("t", 400)).gpus == (A1,)


def test_binpack_does_not_strand_time_where_memory_would_be_gone() -> None:
    cluster = cluster_of(node("node-a", 2))
    put(cluster, ask("a", 500, memory=60 * GI, uuids=[A0]))
    put(cluster, ask("b", 450, memory=36 * GI, uuids=[A1]))
    # On GPU 0 the request would leave 0.3 of the time without memory to use it.
    assert put(cluster, ask("t", 200, memory=20 * GI)).gpus == (A1,)


def test_exclusive_leaves_the_larger_set_of_idle_gpus_whole() -> None:
    cluster = cluster_of(node("node-a", 8), node("node-b", 2))
    assert put(cluster, ask(mode=Mode.EXCLUSIVE, count=2)).node == "node-b"


def test_packed_best_effort_goes_where_least_time_is_promised() -> None:
    cluster = cluster_of(node("node-a", 3))
    put(cluster, ask("busy", 900, memory=GI, uuids=[A0]))
    put(cluster, ask("calm", 200, memory=GI, uuids=[A1]))
    assert put(cluster, ask("idle", 0, memory=GI)).gpus == (A1,)


@pytest.mark.promise("placement-policies")
def test_spread_goes_where_most_is_free() -> None:
    cluster = cluster_of(node("node-a", 2))
    put(cluster, ask("low", 300, uuids=[A0]))
    put(cluster, ask("high", 600, uuids=[A1]))
    assert put(cluster, ask("t", 300, placement=PlacementPolicy.SPREAD)).gpus == (A0,)


@pytest.mark.promise("placement-policies")
def test_spread_keeps_replicas_of_one_owner_apart_by_node_then_by_gpu() -> None:
    cluster = cluster_of(node("node-a", 2), node("node-b", 2))
    put(cluster, ask("other", 800, uuids=["GPU-node-b-0"]))
    replicas = [
        put(cluster, ask(f"r{number}", 100, owner="rs", placement=PlacementPolicy.SPREAD)) for number in range(4)
    ]
    assert {replica.node for replica in replicas[:2]} == {"node-a", "node-b"}
    assert len({replica.gpus for replica in replicas}) == 4


def test_ties_go_to_the_first_name_and_index_whatever_the_order_of_arrival() -> None:
    for names in (("node-b", "node-a"), ("node-a", "node-b")):
        assert put(cluster_of(*(node(name, 2) for name in names)), ask()).gpus == (A0,)
