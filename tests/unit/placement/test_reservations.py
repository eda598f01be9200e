"""GPUs reserved for the request that has waited longest: which GPUs are reserved, and which requests may use them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sharepod.api.units import WHOLE_GPU, Bytes, GpuUuid, Milli, TenantId
from sharepod.placement.resizing import resize
from sharepod.placement.state.cluster_view import HeadReservation
from sharepod.placement.state.types import Refusal, Reservation
from unit.placement.world import GI, ClusterWithEngine, ask, cluster_of, node, put, refused

A0, A1 = GpuUuid("GPU-node-a-0"), GpuUuid("GPU-node-a-1")


def keep(cluster: ClusterWithEngine, *gpus: GpuUuid, tenant: str = "oldest") -> None:
    cluster.reserve_for_head(HeadReservation(TenantId(tenant), "node-a", frozenset(gpus)))


def test_of_gpus_that_were_alike_only_those_are_kept_that_are_named() -> None:
    cluster = cluster_of(node(gpus=2))
    assert cluster.engine.serves(ask("before", 500), ["node-a"]), "the node was looked at while its GPUs were alike"
    moment = cluster.room_version
    keep(cluster, A0)
    assert cluster.engine.serves(ask("t", 500), cluster.grown_since(moment)), "GPU 1 is not reserved"
    refused(cluster, ask("pair", 500, count=2))
    assert put(cluster, ask("t", 500)).gpus == (A1,)


def test_what_was_kept_is_for_everybody_once_it_is_let_go() -> None:
    cluster = cluster_of(node(gpus=2))
    keep(cluster, A0, A1)
    refused(cluster, ask("t", 500))
    moment = cluster.room_version
    cluster.reserve_for_head(None)
    assert cluster.engine.serves(ask("t", 500), cluster.grown_since(moment))
    put(cluster, ask("t", 500, count=2))


def test_what_is_kept_is_not_reserved_for_head_from_one_of_higher_priority() -> None:
    cluster = cluster_of(node(gpus=1), node("node-b", 1))
    keep(cluster, A0)
    urgent = [replace(ask(name, 800), priority=1) for name in ("first", "second")]
    assert put(cluster, urgent[0]).node == "node-b", "reserved GPUs come last"
    refused(cluster, ask("t", 800))
    assert put(cluster, urgent[1]).gpus == (A0,)


def test_what_is_open_to_a_namespace_comes_last_for_it_and_is_kept_from_others_and_from_lower_priorities() -> None:
    cluster = cluster_of(node(gpus=2), node("node-b", 2))
    reservation = HeadReservation(TenantId("oldest"), "node-a", frozenset({A0, A1}), 5, open_to="team")
    cluster.reserve_for_head(reservation)
    for name in ("first", "next"):
        assert put(cluster, replace(ask(name, 800), priority=5)).node == "node-b", "reserved GPUs come last"
    assert put(cluster, replace(ask("second", 800), priority=5)).gpus == (A0,)
    refused(cluster, replace(ask("lower", 800), priority=4))
    refused(cluster, replace(ask("foreign", 800, namespace="other"), priority=5))
    assert cluster.head_reservation == reservation, "its owner gets the rest of it"
    raised = resize(cluster, TenantId("second"), request_milli=WHOLE_GPU, limit_milli=WHOLE_GPU, memory=Bytes(GI))
    assert isinstance(raised, Reservation), "a raise is its namespace's own as well"
    put(cluster, replace(ask("oldest", 800), priority=5))


def test_its_owner_may_have_what_is_kept_and_any_other() -> None:
    cluster = cluster_of(node(gpus=2), node("node-b", 2))
    keep(cluster, A0)
    assert put(cluster, ask("oldest", 500, count=2)).gpus == (A0, A1)
    cluster = cluster_of(node(gpus=2), node("node-b", 2))
    keep(cluster, A0)
    assert put(cluster, ask("oldest", 500, uuids=["GPU-node-b-1"])).node == "node-b"


@pytest.mark.promise("placement-head-keeps")
def test_a_raise_does_not_take_what_is_kept_and_a_lowering_gives_to_it() -> None:
    cluster = cluster_of(node())
    put(cluster, ask("t", 500, memory=GI))
    keep(cluster, A0)
    answer = resize(cluster, TenantId("t"), request_milli=Milli(600), limit_milli=WHOLE_GPU, memory=Bytes(GI))
    assert isinstance(answer, Refusal)
    assert "1 GPU is kept for the SharePod that has waited longest" in answer.message
    assert isinstance(
        resize(cluster, TenantId("t"), request_milli=Milli(400), limit_milli=WHOLE_GPU, memory=Bytes(GI)), Reservation
    )
    keep(cluster, A0, tenant="t")
    assert isinstance(
        resize(cluster, TenantId("t"), request_milli=Milli(600), limit_milli=WHOLE_GPU, memory=Bytes(GI)), Reservation
    )


def test_gpus_kept_for_one_tenant_twice_are_told_apart() -> None:
    """One is the head-of-queue reservation, which is open to its namespace. The other belongs to a preemption, and is
    open to none."""
    for closed, opened in (("GPU-node-a-0", "GPU-node-a-1"), ("GPU-node-a-1", "GPU-node-a-0")):
        cluster = cluster_of(node("node-a", 2))
        head = HeadReservation(TenantId("head"), "node-a", frozenset({GpuUuid(closed)}))
        cluster.reserve_for_head(head)
        cluster.keep(replace(head, gpus=frozenset({GpuUuid(opened)}), open_to="team"))
        answer = cluster.engine.find(ask("one", 300))
        assert answer is not None
        assert answer.gpus == (opened,)
        assert cluster.engine.find(ask("two", 300, count=2)) is None
