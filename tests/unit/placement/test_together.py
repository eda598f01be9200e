"""Several requests of one Pod: all on one node, or none."""

from __future__ import annotations

from dataclasses import replace

from sharepod.placement.state.types import Assignment, PlacementRequest, Refusal
from unit.placement.world import ClusterWithEngine, ask, cluster_of, node, put


def together(*requests: PlacementRequest) -> PlacementRequest:
    return replace(requests[0], siblings=tuple(requests[1:]))


def place(cluster: ClusterWithEngine, request: PlacementRequest) -> Assignment | None:
    found = cluster.engine.find(request)
    if found is not None:
        cluster.engine.reserve(request, found)
    return found


def test_requests_that_fit_together_get_one_node_and_a_row_each() -> None:
    cluster = cluster_of(node("node-a"), node("node-b", gpus=2))
    found = place(cluster, together(ask("one", 600), ask("two", 600)))
    assert found is not None
    assert found.node == found.siblings[0].node == "node-b"
    assert found.gpus != found.siblings[0].gpus
    assert {row.tenant for row in cluster.reservations("node-b")} == {"one", "two"}


def test_requests_that_fit_only_apart_get_nothing_and_change_nothing() -> None:
    cluster = cluster_of(node("node-a"), node("node-b"))
    version = cluster.room_version
    request = together(ask("one", 600), ask("two", 600))
    assert place(cluster, request) is None
    assert cluster.room_version == version
    refusal = cluster.engine.place(request)
    assert isinstance(refusal, Refusal)
    assert "2 claims" in refusal.message


def test_every_node_is_tried_not_only_the_best_for_the_first() -> None:
    cluster = cluster_of(node("node-a"), node("node-b"), node("node-c", gpus=2))
    put(cluster, ask("old", 500))
    alone = cluster.engine.find(ask("one", 400))
    assert alone is not None
    assert alone.node == "node-a", "the tightest fit"
    found = place(cluster, together(ask("one", 400), ask("two", 900)))
    assert found is not None
    assert found.node == "node-c"


def test_room_for_all_of_them_serves_them_room_for_one_does_not() -> None:
    cluster = cluster_of(node("node-a"), node("node-b", gpus=2))
    request = together(ask("one", 600), ask("two", 600))
    assert not cluster.engine.serves(request, ["node-a"])
    assert cluster.engine.serves(request, ["node-a", "node-b"])


def test_labels_hold_between_them() -> None:
    cluster = cluster_of(node("node-a", gpus=2))
    apart = together(ask("one", 100, anti_affinity="x"), ask("two", 100, anti_affinity="x"))
    found = place(cluster, apart)
    assert found is not None
    assert found.gpus != found.siblings[0].gpus
    joined = together(ask("three", 100, affinity="y"), ask("four", 100, affinity="y"))
    found = place(cluster, joined)
    assert found is not None
    assert found.gpus == found.siblings[0].gpus
