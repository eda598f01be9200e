"""Binpack with a learned demand: the requests for which it keeps room."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from sharepod.api.units import TenantId
from sharepod.placement.binpack.demand import HALF_LIFE, Demand
from sharepod.placement.binpack.request_classes import request_key
from sharepod.placement.state.accounts import GpuAccount
from sharepod.placement.state.types import PlacementRequest, PodNeeds, Resources
from unit.placement.world import GI, ClusterWithEngine, ask, cluster_of, gpu, node, put


def learn(cluster: ClusterWithEngine, requests: Sequence[PlacementRequest]) -> None:
    """Let these requests arrive many times, and end again, so that the demand is learned."""
    for _ in range(100):
        for request in requests:
            cluster.engine.packing.arrived(request)
    cluster.engine.packing.renew()


def place_of(cluster: ClusterWithEngine, request: PlacementRequest) -> str:
    answer = cluster.engine.find(request)
    assert answer is not None
    return answer.gpus[0]


def test_a_scarce_model_is_left_to_those_who_ask_for_it() -> None:
    cluster = cluster_of(
        node("node-a", [gpu("node-a", 0, model="H100")]), node("node-b", [gpu("node-b", 0, model="T4")])
    )
    any_model = ask("any", 1000)
    assert place_of(cluster, any_model) == "GPU-node-a-0"
    learn(cluster, [ask("picky", 1000, models=["H100"]), any_model])
    assert place_of(cluster, any_model) == "GPU-node-b-0"


@pytest.mark.parametrize("milli", [250, 400, 500, 1000])
def test_two_gpus_of_a_node_are_left_to_requests_of_two(milli: int) -> None:
    """A request for two GPUs needs two different GPUs: one GPU with room for both parts does not serve it."""
    cluster = cluster_of(node("node-a", 2), node("node-b", 1))
    pair, single = ask("pair", milli, count=2), ask("single", 1000)
    learn(cluster, [pair, single])
    assert place_of(cluster, single) == "GPU-node-b-0"


@pytest.mark.parametrize("leave", [False, True], ids=["no tenant leaves", "tenants leave"])
def test_where_tenants_leave_a_node_with_more_idle_gpus_is_left_to_requests_of_four(leave: bool) -> None:
    """Neither node has room for four now. If one tenant ends, node-a has."""
    cluster = cluster_of(node("node-a", 4), node("node-b", 4))
    for uuid in ("GPU-node-a-0", "GPU-node-b-0", "GPU-node-b-1"):
        put(cluster, ask(uuid, 1000, uuids=[uuid]))
    if leave:
        first = put(cluster, ask("first", 300))
        cluster.engine.packing.settle()
        cluster.release(first.node, TenantId("first"))
    four, single = ask("four", 1000, count=4), ask("single", 1000)
    learn(cluster, [four, single])
    assert place_of(cluster, single) == ("GPU-node-b-2" if leave else "GPU-node-a-1")


@pytest.mark.parametrize("leave", [False, True], ids=["no tenant leaves", "tenants leave"])
def test_the_largest_node_is_left_to_a_job_that_fills_it_though_none_has_come_yet(leave: bool) -> None:
    """For all requests that have arrived so far, the nodes differ only in CPU."""
    cluster = cluster_of(node("node-a", 4, cpu=128_000), node("node-b", 4, cpu=96_000), node("node-c", 4, cpu=96_000))
    small = ask("small", 500, pod=PodNeeds(resources=Resources(4_000)))
    if leave:
        first = put(cluster, ask("first", 300, uuids=["GPU-node-c-0"]))
        cluster.engine.packing.settle()
        cluster.release(first.node, TenantId("first"))
    learn(cluster, [small])
    assert place_of(cluster, small) == ("GPU-node-b-0" if leave else "GPU-node-a-0")


def test_gpus_whose_cpu_is_used_up_go_to_those_who_need_little_cpu() -> None:
    cluster = cluster_of(node("node-a", 1, cpu=32_000), node("node-b", 1, cpu=4_000))
    light = ask("light", 500, pod=PodNeeds(resources=Resources(1_000)))
    assert place_of(cluster, light) == "GPU-node-a-0"
    learn(cluster, [ask("heavy", 500, pod=PodNeeds(resources=Resources(16_000))), light])
    assert place_of(cluster, light) == "GPU-node-b-0"


def test_time_that_nobodys_memory_fits_beside_is_used_up_first() -> None:
    cluster = cluster_of(node("node-a"), node("node-b"))
    put(cluster, ask("a", 400, memory=30 * GI, uuids=["GPU-node-a-0"]))
    put(cluster, ask("b", 400, memory=72 * GI, uuids=["GPU-node-b-0"]))
    small = ask("small", 200, memory=4 * GI)
    learn(cluster, [ask("common", 500, memory=40 * GI), small])
    assert place_of(cluster, small) == "GPU-node-b-0"


def test_memory_that_nobodys_time_fits_beside_is_used_up_first() -> None:
    cluster = cluster_of(node("node-a"), node("node-b"))
    put(cluster, ask("a", 400, memory=10 * GI, uuids=["GPU-node-a-0"]))
    put(cluster, ask("b", 800, memory=10 * GI, uuids=["GPU-node-b-0"]))
    small = ask("small", 100, memory=20 * GI)
    learn(cluster, [ask("common", 600, memory=30 * GI), small])
    assert place_of(cluster, small) == "GPU-node-b-0"


def test_a_changed_workload_outweighs_the_old_one_within_two_half_lives() -> None:
    demand = Demand()
    old, new = ask("old", 300), ask("new", 700)
    for request in (old, new):
        for _ in range(2 * HALF_LIFE):
            demand.count(request)
    shares = {known.milli: share for known, share in demand.shares().items()}
    assert shares[700] > 3 * shares[300]


def test_what_is_learned_takes_a_bounded_amount_of_memory() -> None:
    demand = Demand()
    for number in range(3000):
        request = ask("t", 1 + number % 1000, pod=PodNeeds(resources=Resources(number)))
        demand.count(request)
        if demand.due:
            demand.shares()
    assert len(demand.shares()) <= 1024


def test_a_cluster_without_gpus_has_no_place_and_learns_all_the_same() -> None:
    cluster = cluster_of(node("node-a", 0))
    learn(cluster, [ask("t", 500, models=["T4"]), ask("u", 500, memory=GI)])
    assert cluster.engine.find(ask("t", 500, models=["T4"])) is None


def test_nodes_that_come_and_go_are_seen_by_the_next_decision() -> None:
    cluster = cluster_of(node("node-b"))
    learn(cluster, [ask("t", 500)])
    put(cluster, ask("first", 1000))
    assert cluster.engine.find(ask("second", 500)) is None
    cluster.upsert_node(node("node-a", 2))
    assert place_of(cluster, ask("second", 500)) == "GPU-node-a-0"
    cluster.remove_node("node-a")
    assert cluster.engine.find(ask("second", 500)) is None
    cluster.upsert_node(node("node-a", 2))
    assert place_of(cluster, ask("second", 500)) == "GPU-node-a-0"


@pytest.mark.promise("placement-bounded")
def test_where_more_has_changed_than_one_decision_scores_a_place_is_found_all_the_same() -> None:
    """Most nodes then have only an estimated score. No node that has room may be overlooked."""
    chance = random.Random(3)
    names = [f"node-{number:03}" for number in range(300)]
    cluster = cluster_of(*(node(name, 4) for name in names))
    kinds = [
        ask(f"kind-{number}", milli, memory=memory * GI, count=count)
        for number, (milli, memory, count) in enumerate(
            ((100, 1, 1), (250, 9, 1), (300, 30, 1), (500, 20, 2), (950, 1, 1))
        )
    ]
    pods = [PodNeeds(resources=Resources(cpu)) for cpu in range(0, 9000, 300)]
    learn(cluster, [replace(kind, pod=pod) for kind in kinds for pod in pods])
    for name in names:
        for index in range(4):
            share, memory = chance.randrange(100, 1001), chance.randrange(1, 81)
            put(cluster, ask(f"{name}-{index}", share, memory=memory * GI, uuids=[f"GPU-{name}-{index}"]))
    refused = 0
    for number, kind in enumerate(kinds * 50):
        asked = replace(kind, tenant=TenantId(f"tenant-{number}"))
        answer = cluster.engine.find(asked)
        most = max(sum(fits(gpu, asked) for gpu in account.gpus) for account in cluster.nodes())
        assert (answer is None) == (most < asked.gpu.count)
        refused += answer is None
        if answer is not None:
            cluster.engine.reserve(asked, answer)
    assert 0 < refused < 200


def fits(gpu: GpuAccount, request: PlacementRequest) -> bool:
    return gpu.free_milli >= request.gpu.request_milli and gpu.free_memory >= (request.gpu.memory or 0)


@pytest.mark.promise("placement-slices")
@pytest.mark.parametrize("disturb", ["nothing", "decisions", "nodes", "fewer nodes"])
def test_what_happens_between_the_slices_of_a_renewal_is_in_the_sums_at_its_end(
    disturb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # with this value there is one slice for each node, or two
    monkeypatch.setattr("sharepod.placement.binpack.scores._SCORED_AT_ONCE", 1)
    if disturb == "fewer nodes":
        # with this value there is one slice for each node
        monkeypatch.setattr("sharepod.placement.binpack.scores._SUMMED_AT_ONCE", 1)
    cluster = cluster_of(*(node(f"node-{number}", 4) for number in range(6)))
    packing, rng = cluster.engine.packing, random.Random(5)
    kinds = [ask("t", rng.choice([100, 300, 600, 900]), pod=PodNeeds(resources=Resources(n * 500))) for n in range(40)]
    labelled = ask("x", 300, exclusion="x")
    learn(cluster, kinds[:20])
    put(cluster, replace(labelled, tenant=TenantId("first")))
    for request in [*kinds, labelled]:
        packing.arrived(request)
        cluster.engine.find(request)
    slices, known = 0, packing._scorer._number
    for step, _ in enumerate(packing.renewal()):
        slices = step + 1
        if disturb == "decisions":
            put(cluster, ask(f"new-{step}", 1 + step % 7, exclusion="x" if step % 3 else None))
        elif disturb == "nodes" and step % 3 == 1:
            cluster.remove_node(f"node-{step // 3}")
            cluster.upsert_node(node(f"new-{step}", 8))
        elif disturb == "fewer nodes" and packing._scorer._number > known:
            # once, after the summation has begun: only one node is left, and all arrays are rebuilt for it
            known = packing._scorer._number + 9
            for number in range(1, 6):
                cluster.remove_node(f"node-{number}")
            cluster.upsert_node(node("node-0", 8))
            packing.settle()
    assert slices >= 6
    packing.settle()
    kept = packing._scorer._weighing.sums.copy()
    answers = [cluster.engine.find(request) for request in [*kinds, labelled]]
    assert packing.usable is not None
    packing._scorer.bind(packing.usable)
    assert (kept == packing._scorer._weighing.sums).all()
    packing._scores.clear()
    assert [cluster.engine.find(request) for request in [*kinds, labelled]] == answers


@pytest.mark.promise("placement-slices")
def test_a_class_is_scored_in_slices_as_it_is_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = cluster_of(*(node(f"node-{number:02}", 1 + number % 4) for number in range(24)))
    packing, scored, slices = cluster.engine.packing, [], []
    for number in range(24):
        put(cluster, ask(f"t{number}", 40 + 35 * number))
    asked = ask("u", 300)
    learn(cluster, [asked, ask("v", 700)])
    for at_once in (1_000_000, 1):
        monkeypatch.setattr("sharepod.placement.binpack.scores._SCORED_AT_ONCE", at_once)
        scores = packing.scores(request_key(asked), asked)
        scores.score[:], scores.weights[:] = 0, 0
        slices.append(len(list(packing._scorer.renew(scores, 1_000_000))))
        scored.append([scores.score.tolist(), scores.gpu.tolist(), scores.weights.tolist()])
    assert scored[0] == scored[1]
    assert slices[0] == 0
    assert slices[1] > 6


def test_scores_of_classes_decided_long_ago_are_dropped_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sharepod.placement.binpack.packing._MAX_SCORES", 0)
    cluster = cluster_of(*(node(f"node-{number}") for number in range(4)))
    often = ask("often", 50)
    learn(cluster, [often])
    packing = cluster.engine.packing
    for number in range(200):
        put(cluster, ask(f"t{number}", 1, uuids=[f"GPU-node-{number % 4}-0"]))
        cluster.engine.find(ask("rare", 100 + number))
        before = packing._scores.get(request_key(often))
        cluster.engine.find(often)
        assert number == 0 or packing._scores[request_key(often)] is before
        assert len(packing._scores) <= 64
