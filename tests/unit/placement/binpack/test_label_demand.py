"""Binpack and labels: the free part of a GPU with an exclusion label is worth the demand of that label."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from sharepod.api.gpunode import Latency
from sharepod.api.units import TenantId
from sharepod.placement.binpack.label_combinations import LabelCombinations
from sharepod.placement.binpack.label_demand import LabelDemand, LabelShares
from sharepod.placement.state.accounts import GpuAccount
from sharepod.placement.state.types import LabelKey, PlacementRequest, PodNeeds, Resources
from unit.placement.world import ClusterWithEngine, ask, cluster_of, node, put


def learned(cluster: ClusterWithEngine, requests: Sequence[PlacementRequest]) -> ClusterWithEngine:
    for _ in range(100):
        for request in requests:
            cluster.engine.packing.arrived(request)
    cluster.engine.packing.renew()
    return cluster


def gpus_of(cluster: ClusterWithEngine, requests: Sequence[PlacementRequest]) -> dict[str, str]:
    """Place these requests in turn. Return the GPU of each, by tenant."""
    found: dict[str, str] = {}
    for request in requests:
        answer = cluster.engine.find(request)
        if answer is not None:
            cluster.engine.reserve(request, answer)
            found[str(request.tenant)] = answer.gpus[0]
    return found


@pytest.mark.promise("placement-labels")
@pytest.mark.parametrize("order", list(itertools.permutations(("x1", "x2", "u1", "u2"))), ids="-".join)
def test_the_second_of_a_label_joins_the_first_in_every_order(order: tuple[str, ...]) -> None:
    cluster = cluster_of(node("node-a", 2), node("node-b", 1))
    plain, labelled = ask("u", 600), ask("x", 400, exclusion="x")
    learned(cluster, [plain, ask("v", 400), plain, ask("w", 300), labelled])
    sizes = {"x1": (400, "x"), "x2": (400, "x"), "u1": (600, None), "u2": (600, None)}
    where = gpus_of(cluster, [ask(name, sizes[name][0], exclusion=sizes[name][1]) for name in order])
    assert len(where) == 4
    assert where["x1"] == where["x2"]


@pytest.mark.promise("placement-labels")
def test_sixteen_labels_of_two_take_sixteen_gpus() -> None:
    cluster = cluster_of(*(node(f"node-{number:02}", 8) for number in range(8)))
    labelled = [ask(f"x{n}-{copy}", 400, exclusion=f"label-{n}") for copy in range(2) for n in range(16)]
    learned(cluster, [ask("half", 500)] * 4 + labelled[:16])
    where = gpus_of(cluster, labelled)
    assert len(where) == 32
    assert len(set(where.values())) == 16
    others = gpus_of(cluster, [ask(f"u{number}", 500) for number in range(120)])
    assert len(others) == 96


def test_of_the_gpus_of_a_label_the_fullest_is_taken_whatever_others_ask_for() -> None:
    """The expected requests are for 0.5, so a place on a GPU without a label would destroy much usable capacity."""
    cluster = cluster_of(node("node-a", 1), node("node-b", 1))
    put(cluster, ask("emptier", 300, exclusion="x", uuids=["GPU-node-a-0"]))
    put(cluster, ask("fuller", 500, exclusion="x", uuids=["GPU-node-b-0"]))
    learned(cluster, [ask("half", 500)] * 6 + [ask("x", 100, exclusion="x"), ask("y", 100, exclusion="y")])
    assert gpus_of(cluster, [ask("third", 100, exclusion="x")]) == {"third": "GPU-node-b-0"}


@pytest.mark.promise("placement-labels")
@pytest.mark.parametrize("cpu", [0, 1_000], ids=["no CPU left", "CPU for a few"])
def test_labels_that_ask_for_no_cpu_share_gpus_where_cpu_is_short(cpu: int) -> None:
    cluster = cluster_of(*(node(f"node-{number:02}", 8, cpu=cpu) for number in range(4)))
    labelled = [ask(f"x{n}-{copy}", 400, exclusion=f"label-{n}") for copy in range(2) for n in range(32)]
    others = PodNeeds(resources=Resources(4 * cpu))
    learned(cluster, [ask("half", 500, pod=others)] * 4 + labelled[:32])
    random.Random(2).shuffle(labelled)
    where = gpus_of(cluster, labelled)
    assert len(where) == 64
    assert len(set(where.values())) == 32


def test_a_label_that_half_of_all_have_is_packed_as_if_it_were_none() -> None:
    cluster = cluster_of(node("node-a", 1), node("node-b", 1), node("node-c", 1))
    put(cluster, ask("first", 600, exclusion="x", uuids=["GPU-node-b-0"]))
    put(cluster, ask("second", 300, exclusion="x", uuids=["GPU-node-c-0"]))
    learned(cluster, [ask("x", 400, exclusion="x"), ask("u", 400)])
    assert gpus_of(cluster, [ask("third", 400, exclusion="x")]) == {"third": "GPU-node-b-0"}


def test_one_without_a_label_joins_its_like_and_leaves_empty_gpus_to_labels() -> None:
    cluster = cluster_of(node("node-a", 1), node("node-b", 1))
    put(cluster, ask("first", 300, uuids=["GPU-node-b-0"]))
    learned(cluster, [ask("u", 300), ask("x", 900, exclusion="x")])
    assert gpus_of(cluster, [ask("u", 300)]) == {"u": "GPU-node-b-0"}


def test_gpus_that_keep_a_label_off_go_to_those_without_it() -> None:
    """Two GPUs have equal room. The request without a label gets the GPU that the next member of the label
    cannot use."""
    cluster = cluster_of(node("node-a", 1), node("node-b", 1))
    put(cluster, ask("plain", 500, uuids=["GPU-node-a-0"]))
    put(cluster, ask("member", 500, anti_affinity="apart", uuids=["GPU-node-b-0"]))
    learned(cluster, [ask("u", 500), ask("v", 500, anti_affinity="apart")])
    where = gpus_of(cluster, [ask("u", 500), ask("v", 500, anti_affinity="apart")])
    assert where == {"u": "GPU-node-b-0", "v": "GPU-node-a-0"}


def test_gpus_full_of_interactive_tenants_go_to_others() -> None:
    def interactive(name: str, *uuids: str) -> PlacementRequest:
        request = ask(name, 500, uuids=uuids)
        return replace(request, gpu=replace(request.gpu, latency=Latency.INTERACTIVE))

    cluster = cluster_of(node("node-a", 1), node("node-b", 1))
    put(cluster, ask("plain", 500, uuids=["GPU-node-a-0"]))
    put(cluster, interactive("first", "GPU-node-b-0"))
    learned(cluster, [ask("u", 500), interactive("v")])
    assert gpus_of(cluster, [ask("u", 500), interactive("v")]) == {"u": "GPU-node-b-0", "v": "GPU-node-a-0"}


def test_an_interactive_tenant_that_leaves_room_for_others_takes_the_hole_that_fits_best() -> None:
    """On GPU B the request would leave a hole that the next request fills, on GPU A only a sliver."""
    cluster = ClusterWithEngine(interactive_per_gpu=2)
    cluster.upsert_node(node("node-a", 1))
    cluster.upsert_node(node("node-b", 1))
    put(cluster, ask("a", 400, uuids=["GPU-node-a-0"]))
    put(cluster, ask("b", 100, uuids=["GPU-node-b-0"]))
    interactive = ask("interactive", 400)
    interactive = replace(interactive, gpu=replace(interactive.gpu, latency=Latency.INTERACTIVE))
    learned(cluster, [interactive, interactive, interactive, ask("u", 500)])
    assert gpus_of(cluster, [interactive]) == {"interactive": "GPU-node-b-0"}
    assert len(gpus_of(cluster, [ask("u", 500)])) == 1


def test_worth_of_a_gpu_by_the_labels_of_its_tenants() -> None:
    x, y = ("team", "x"), ("team", "y")
    shares = LabelShares({x: 0.25, y: 0.25}, {x: 0.5}, 0.125)
    assert shares.worth((), (), full=False) == 1.0
    assert shares.worth((None,), (), full=False) == 0.5
    assert shares.worth((x,), (), full=False) == 0.25
    assert shares.worth((("other", "x"),), (), full=False) == 0.0
    assert shares.worth((x, None), (), full=False) == 0.0, "no tenant may join a GPU that a ledger mixes"
    assert shares.worth((None,), (x, y), full=False) == 0.25
    assert shares.worth((None,), (), full=True) == 0.5 * 0.875


@pytest.mark.promise("placement-slices")
def test_a_storm_of_labels_is_weighed_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sharepod.placement.binpack.label_combinations._WEIGHED_AT_ONCE", 10)
    cluster = cluster_of(*(node(f"node-{number:02}", 8) for number in range(12)))
    for number in range(96):
        put(cluster, ask(f"x{number}", 100, exclusion=f"label-{number}"))
    packing, weighed = cluster.engine.packing, 0
    packing.arrived(ask("u", 100))
    worth = LabelShares.worth

    def counted(*args: Any, **kwargs: Any) -> float:
        nonlocal weighed
        weighed += 1
        return worth(*args, **kwargs)

    monkeypatch.setattr(LabelShares, "worth", counted)
    of_slices = []
    for _ in packing.renewal():
        of_slices.append(weighed)
        weighed = 0
    assert sum(of_slices) >= 96
    assert max(of_slices) <= 10


def test_numbers_of_labels_that_nobody_has_any_more_are_given_again() -> None:
    cluster = cluster_of(node("node-a", 2))
    packing = cluster.engine.packing
    stays = put(cluster, ask("stays", 300, exclusion="stays", uuids=["GPU-node-a-0"]))
    for number in range(2000):
        anti_affinity = f"apart-{number}" if number % 2 else None
        request = ask(f"x{number}", 300, exclusion=f"label-{number}", anti_affinity=anti_affinity)
        packing.arrived(request)
        if packing.due:
            packing.renew()
        put(cluster, request)
        packing.settle()
        cluster.release("node-a", request.tenant)
    packing.settle()
    assert len(packing.columns.combinations) < 300
    learned(cluster, [ask("u", 300), ask("y", 300, exclusion="stays")])
    assert stays.gpus[0] == "GPU-node-a-0"
    assert gpus_of(cluster, [ask("y", 300, exclusion="stays")]) == {"y": "GPU-node-a-0"}


def test_the_demand_without_a_label_is_added_up_once() -> None:
    """Each decision needs the sum over all labels, of which a cluster may have thousands. So the sum is cached."""

    class Shares(dict[LabelKey, float]):
        asked = 0

        def values(self) -> Any:
            self.asked += 1
            return super().values()

    exclusion = Shares({("team", "x"): 0.25})
    shares = LabelShares(exclusion)
    assert [shares.open_to(None) for _ in range(3)] == [0.75] * 3
    assert exclusion.asked == 1


def test_rare_labels_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sharepod.placement.binpack.label_demand._MAX_LABELS", 2)
    demand = LabelDemand()
    for label, weight in (("a", 1.0), ("b", 3.0), ("c", 2.0)):
        demand.count(ask(label, 100, exclusion=label, anti_affinity=label), weight)
    slices = list(demand.keep_commonest())
    assert len(slices) == 2, "one for each sort of labels"
    shares = demand.shares(6.0)
    demand.rescale(2.0)
    for label, part in (("a", 0.0), ("b", 0.5), ("c", 2.0 / 6.0)):
        assert shares.open_to(("team", label)) == demand.shares(3.0).open_to(("team", label)) == part
        assert shares.not_kept_off([("team", label)], interactive=False) == 1.0 - part


def test_a_gpu_beside_whose_tenants_there_is_room_is_found_whatever_labels_came_before() -> None:
    cluster = cluster_of(node("node-a", 1), node("node-b", 1))
    learned(cluster, [ask("u", 300)])
    assert cluster.engine.find(ask("early", 300, anti_affinity="x")) is not None
    put(cluster, ask("x", 300, anti_affinity="x", uuids=["GPU-node-a-0"]))
    put(cluster, ask("y", 300, anti_affinity="y", uuids=["GPU-node-b-0"]))
    assert gpus_of(cluster, [ask("late", 300, anti_affinity="x")]) == {"late": "GPU-node-b-0"}
    cluster.release("node-a", TenantId("x"))
    assert gpus_of(cluster, [ask("later", 300, anti_affinity="x")]) == {"later": "GPU-node-a-0"}


@pytest.mark.parametrize("tenant", ["anti-affinity", "interactive"])
def test_a_decision_does_not_look_at_each_gpu_that_keeps_it_off(tenant: str) -> None:
    """The C code examines every GPU quickly, so the test counts only executed lines of Python."""

    def asked(name: str, **fields: Any) -> PlacementRequest:
        request = ask(name, 300, anti_affinity="x" if tenant == "anti-affinity" else None, **fields)
        return (
            request
            if tenant == "anti-affinity"
            else replace(request, gpu=replace(request.gpu, latency=Latency.INTERACTIVE))
        )

    def lines(nodes: int) -> int:
        names = [f"node-{number:03}" for number in range(nodes)]
        cluster = cluster_of(*(node(name, 8) for name in names))
        learned(cluster, [asked("x"), ask("u", 300)])
        for name in names:
            for gpu in range(4):
                put(cluster, asked(f"{name}-{gpu}", uuids=[f"GPU-{name}-{gpu}"]))
        cluster.engine.find(asked("first"))
        put(cluster, asked("second"))
        count = 0

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal count
            count += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            cluster.engine.find(asked("third"))
        finally:
            sys.settrace(before)
        return count

    assert lines(64) < 1.2 * lines(8)


def test_who_keeps_a_label_off_is_known_without_a_look_at_every_combination() -> None:
    """Labels appear and disappear, numbers are reused, and new labels are requested."""
    rng, combinations = random.Random(7), LabelCombinations()
    labels = [("team", f"label-{number}") for number in range(12)]
    held: dict[int, frozenset[LabelKey]] = {}
    for _ in range(400):
        kept_off = frozenset(rng.sample(labels, rng.randrange(1, 4)))
        gpu = SimpleNamespace(tenants=1, exclusions={None}, anti_affinity=kept_off, has_interactive=False)
        held[combinations.number(cast(GpuAccount, gpu))] = kept_off
        if rng.random() < 0.1:
            used = rng.sample(sorted(held), len(held) // 2)
            held = {number: held[number] for number in used}
            combinations.take([0.0] * len(combinations), LabelShares(), np.array(used))
        for label in rng.sample(labels, 2):
            keeps = combinations.keeping_off(label)
            assert {number for number in held if keeps[number]} == {n for n in held if label in held[n]}
