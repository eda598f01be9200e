"""Cap on the GPUs from which a namespace excludes other namespaces by exclusion labels while it requests little of
these GPUs.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from sharepod.api.sharepod import PlacementPolicy
from sharepod.api.units import Bytes, Milli, TenantId
from sharepod.placement.head_reservation import find_head_reservation
from sharepod.placement.holders import find_holder
from sharepod.placement.preemption.planner import plan_preemption
from sharepod.placement.preemption.victims import VictimFacts, victims_of
from sharepod.placement.resizing import resize
from sharepod.placement.state.types import NewHolder, Outlook, PlacementRequest, Reservation
from unit.placement.test_holders import plugin_node
from unit.placement.world import GI, ClusterWithEngine, ask, cluster_of, node, put, refused

pytestmark = pytest.mark.promise("placement-exclusion-cap")

A0, A1 = "GPU-node-a-0", "GPU-node-a-1"


def small(tenant: str, label: str, *, request: int = 0, count: int = 1, namespace: str = "team") -> PlacementRequest:
    return ask(tenant, request, memory=GI, count=count, exclusion=label, namespace=namespace)


def capped(most: int | None = 1, *, gpus: int = 4) -> ClusterWithEngine:
    """Return a node on whose GPU 0 the namespace `team` has a tenant with the exclusion label "x"."""
    cluster = cluster_of(node(gpus=gpus), max_excluded_gpus=most)
    assert put(cluster, small("first", "x")).gpus == (A0,)
    return cluster


def shares(cluster: ClusterWithEngine, tenant: str, request: int) -> None:
    answer = resize(cluster, TenantId(tenant), request_milli=Milli(request), limit_milli=Milli(1000), memory=Bytes(GI))
    assert isinstance(answer, Reservation), answer.message


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("policy", [*PlacementPolicy])
def test_beyond_the_cap_small_shares_exclude_others_from_no_further_gpu(learned: bool, policy: PlacementPolicy) -> None:
    cluster = cluster_of(node("node-a", gpus=2), node("node-b", gpus=2), max_excluded_gpus=2)
    if learned:  # with learned demand, the columns rank the GPUs
        for _ in range(32):
            cluster.engine.packing.arrived(ask(request=100))
        cluster.engine.packing.renew()

    def one(tenant: str, label: str, request: int = 100) -> PlacementRequest:
        return ask(tenant, request, exclusion=label, placement=policy)

    put(cluster, one("a", "x"))
    put(cluster, one("b", "y"))
    refused(cluster, one("c", "z"))
    put(cluster, one("d", "x"))
    put(cluster, one("e", "y"))
    assert cluster.excluded.of("team") == 2
    cluster.release(cluster.reservations_of(TenantId("b"))[0][0], TenantId("b"))
    refused(cluster, one("c", "z"))
    cluster.release(cluster.reservations_of(TenantId("e"))[0][0], TenantId("e"))
    put(cluster, one("c", "z"))


def test_the_reason_names_the_cap_and_what_to_do() -> None:
    refusal = refused(capped(), small("second", "y"))
    assert refusal.outlook is Outlook.WAITING
    assert {item.what: item.count for item in refusal.obstacles} == {"Exclusion": 1, "ExclusionCap": 3}
    for part in ('namespace "team"', "max_excluded_gpus allows 1", "spec.gpu.request 0.5 or more", "administrator"):
        assert part in refusal.message
    assert "keeps 1 GPU with less than 0.5 of its time requested and asks for 1 more" in refusal.message


def test_half_a_gpu_no_label_and_the_same_label_are_no_matter_of_the_cap() -> None:
    cluster = capped()
    assert put(cluster, small("same", "x")).gpus == (A0,)
    assert put(cluster, small("half", "y", request=500)).gpus != (A0,)
    refused(cluster, small("less", "z", request=499))
    put(cluster, ask("plain", 0, memory=GI))
    put(cluster, small("other", "x", namespace="others"))


def test_without_a_cap_and_with_a_cap_of_none() -> None:
    cluster = capped(None)
    for label in "abc":
        put(cluster, small(label, label))
    none = cluster_of(node(), max_excluded_gpus=0)
    refused(none, small("t", "x"))
    put(none, small("t", "x", request=500))
    put(none, small("joins", "x"))


def test_several_gpus_need_room_for_all_of_them() -> None:
    cluster = capped(2)
    assert "asks for 2 more" in refused(cluster, small("two", "y", count=2)).message
    put(cluster, small("one", "y"))
    assert len(put(cluster, small("joins", "x")).gpus) == 1


@pytest.mark.parametrize("how", ["ends", "asks for more", "another asks for more", "its node goes"])
def test_those_that_wait_are_woken_when_their_namespace_excludes_others_from_fewer_gpus(how: str) -> None:
    cluster = cluster_of(node("node-a"), node("node-b"), max_excluded_gpus=1)
    put(cluster, small("first", "x", request=300))
    refused(cluster, small("second", "y"))
    moment = cluster.room_version
    match how:
        case "ends":
            cluster.release("node-a", TenantId("first"))
        case "asks for more":
            shares(cluster, "first", 500)
        case "another asks for more":
            put(cluster, small("joins", "x", request=200))
        case _:
            cluster.remove_node("node-a")
    assert cluster.excludes_fewer_since("team", moment)
    assert not cluster.excludes_fewer_since("others", moment)
    assert cluster.engine.find(small("second", "y")) is not None


def test_an_operator_that_starts_again_counts_the_same() -> None:
    before = capped(1)
    rows = before.reservations("node-a")
    after = ClusterWithEngine(max_excluded_gpus=1)
    after.load("node-a", rows, 1)
    after.upsert_node(node(gpus=4))
    assert after.excluded.of("team") == 1
    after.upsert_node(node(gpus=3))
    assert after.excluded.of("team") == 1
    refused(after, small("second", "y"))


def test_of_several_claims_of_one_pod_each_counts() -> None:
    cluster = cluster_of(node(gpus=4), max_excluded_gpus=1)
    both = replace(small("one", "x"), siblings=(small("two", "y"),))
    assert cluster.engine.find(both) is None
    assert cluster.engine.find(replace(both, siblings=(small("two", "x"),))) is not None
    assert cluster.excluded.of("team") == 0, "asking changes nothing"


def test_no_gpus_are_kept_for_one_that_the_cap_stops() -> None:
    cluster = capped()
    assert find_head_reservation(cluster, small("second", "y")) is None
    kept = find_head_reservation(cluster, small("joins", "x"))
    assert kept is not None
    assert kept.gpus == {A0}


def test_no_holder_takes_a_gpu_for_one_that_the_cap_stops() -> None:
    cluster = cluster_of(node(), plugin_node(), max_excluded_gpus=1)
    put(cluster, small("first", "x"))
    assert find_holder(cluster, small("second", "y")) is None
    assert isinstance(find_holder(cluster, small("half", "y", request=500)), NewHolder)


def test_others_make_room_on_the_gpu_that_has_the_label_not_on_another() -> None:
    cluster = cluster_of(node(gpus=2), max_excluded_gpus=1)
    put(cluster, ask("full", 400, memory=80 * GI, exclusion="x"))
    victims = victims_of({TenantId("full"): VictimFacts(unit="full", priority=0)})
    plan = plan_preemption(cluster, replace(small("joins", "x"), priority=5), victims)
    assert plan is not None
    assert plan.gpus == {A0}
    plan = plan_preemption(cluster, replace(small("second", "y"), priority=5), victims)
    assert plan is not None
    assert plan.evict == (TenantId("full"),), "then its namespace excludes others from no GPU"


def test_a_node_that_the_cap_ruled_out_counts_again_although_nothing_about_it_has_changed() -> None:
    cluster = cluster_of(node("node-a"), node("node-b"), max_excluded_gpus=1)
    for _ in range(32):  # with learned demand, the columns rank the GPUs
        cluster.engine.packing.arrived(ask(request=100))
    cluster.engine.packing.renew()
    put(cluster, small("first", "x", request=300))
    second = small("second", "y", request=100)
    refused(cluster, second)
    shares(cluster, "first", 500)
    assert put(cluster, second).node == "node-b"
