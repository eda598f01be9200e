"""Promises of placement under any events: every decision follows the rules, every refusal has a true reason, and no
request waits that could be placed.

`placement_life` simulates the cluster. `placement_rules` contains the rules a second time, by brute force.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from property.placement_life import Life
from property.placement_refusals import check_reasons
from property.placement_requests import node_states, requests, shares, sizes
from property.placement_rules import Place, Rules
from sharepod.api.gpunode import Mode
from sharepod.api.sharepod import PlacementPolicy
from sharepod.api.units import Bytes, GpuUuid, Milli, TenantId
from sharepod.placement.head_reservation import find_head_reservation, is_attainable
from sharepod.placement.resizing import resize
from sharepod.placement.state.types import Assignment, NewHolder, PlacementRequest, Refusal, Reservation, label_key

pytestmark = pytest.mark.promise(
    "operator-no-over-commit", "placement-complete", "placement-rules", "placement-true-refusals"
)


class Placement(Life):
    """One run on a small cluster, in which events of all kinds happen in any order."""

    asked = runs = 0

    @initialize(
        data=st.data(),
        count=st.sampled_from([3, 2, 1]),
        wave=st.lists(requests, min_size=4, max_size=10),
        learned=st.booleans(),
        max_excluded=st.sampled_from([None, 0, 1, 1, 2]),
    )
    def start(
        self,
        data: st.DataObject,
        count: int,
        wave: list[PlacementRequest],
        learned: bool,
        max_excluded: int | None,
    ) -> None:
        Placement.runs += 1
        states = [data.draw(node_states(f"n{number}")) for number in range(count)]
        self.build(states, wave if learned else [], max_excluded=max_excluded)
        self.ask_all(wave)

    # Decisions

    @rule(wave=st.lists(requests, min_size=3, max_size=8))
    def ask(self, wave: list[PlacementRequest]) -> None:
        self.ask_all(wave)

    def ask_all(self, wave: list[PlacementRequest]) -> None:
        for request in wave:
            self.serial += 1
            self.ask_one(replace(request, tenant=TenantId(f"t{self.serial}"), name=f"p{self.serial}"))

    def ask_one(self, request: PlacementRequest) -> None:
        Placement.asked += 1
        before = self.rows_everywhere()
        answer = self.cluster.engine.place(request)
        assert answer == self.cluster.engine.place(request)
        assert self.rows_everywhere() == before, "asking changes nothing"
        rules = self.oracle()
        possible = rules.possible(request)
        if isinstance(answer, Refusal):
            assert not possible, answer.message
            check_reasons(rules, answer, request)
            self.refused = [*self.refused[-5:], (request, self.cluster.room_version)]
            self.ask_for_a_holder(rules, request)
            return
        assert answer == self.cluster.engine.find(request)
        assert len(set(answer.gpus)) == request.gpu.count
        assert set(answer.gpus) <= possible[answer.node]
        self.check_choice(rules, answer, request)
        before_it = rules.excluded().count(request.namespace)
        self.cluster.engine.reserve(request, answer)
        self.decided(answer.reservation(request))
        excluded = self.oracle().excluded().count(request.namespace)
        assert self.max_excluded is None or excluded <= max(self.max_excluded, before_it)
        if self.cluster.head_reservation is not None and self.cluster.head_reservation.tenant == request.tenant:
            self.cluster.reserve_for_head(None)

    def check_choice(self, rules: Rules, answer: Assignment, request: PlacementRequest) -> None:
        """Check that the answer is one of the places that the request's policy ranks first."""
        chosen: Place = answer.node, frozenset(answer.gpus)
        kept = self.cluster.head_reservation
        open_to_it = kept is not None and kept.open_to == request.namespace
        if kept is not None and (kept.tenant == request.tenant or kept.priority < request.priority or open_to_it):
            # The request may use reserved GPUs: its own first, GPUs of a lower priority or of its namespace last. That
            # order precedes the policy's.
            return
        if rules.group(request):
            return
        choices = list(rules.choices(request))
        first = request.gpu.labels.affinity is not None
        same_node = [place for place in choices if place[0] == answer.node]
        if request.gpu.placement is PlacementPolicy.SPREAD and not first:
            assert rules.replicas(request, chosen) == min(rules.replicas(request, place) for place in choices)
            same_node = [
                place for place in same_node if rules.replicas(request, place) == rules.replicas(request, chosen)
            ]
        assert rules.distance(chosen) == min(map(rules.distance, same_node))
        if request.gpu.count == 1 and first:
            assert self.free_time(chosen) == max(map(self.free_time, choices)), "where most is free"
        best_effort = request.gpu.request_milli == 0 and request.gpu.placement is PlacementPolicy.BINPACK
        if request.gpu.count == 1 and best_effort and not first:
            assert self.in_use(chosen) == max(map(self.in_use, choices)), "the idle time is on a shared GPU"

    def free_time(self, place: Place) -> int:
        node = self.states[place[0]]
        return min(self.oracle().free_of_gpu(node, gpu)[0] for gpu in node.gpus if gpu.uuid in place[1])

    def in_use(self, place: Place) -> bool:
        return any(row for row in self.rows(place[0]) if place[1] & set(row.gpus))

    def ask_for_a_holder(self, rules: Rules, request: PlacementRequest) -> None:
        """Check that the engine requests holders only on a node where they make a place, whichever GPUs they get. It
        must choose the node that needs the fewest, then the node with the fewest GPUs left."""
        answer, expected = self.cluster.engine.place_or_hold(request), rules.new_holders(request)
        assert isinstance(answer, NewHolder) == bool(expected), (answer, expected)
        if isinstance(answer, NewHolder):
            wanted, left = expected[answer.node]
            assert answer.count == wanted
            assert (wanted, left) == min(expected.values())
            self.serial += 1
            self.holders[f"holder-{self.serial}"] = answer.node, request.tenant
            self.cluster.start_holder(answer.node, f"holder-{self.serial}", request.tenant)

    # Waiting requests

    @rule()
    def look_who_could_be_served(self) -> None:
        """Check that a refused request has a place only if the operator tries it again: after nodes have gained
        capacity, its affinity group has changed, or its namespace excludes others from fewer GPUs."""
        for request, moment in self.refused:
            key = label_key(request.namespace, request.gpu.labels.affinity)
            woken = self.cluster.engine.serves(request, self.cluster.grown_since(moment))
            possible = self.oracle().possible(request)
            assert (self.cluster.engine.find(request) is not None) == bool(possible)
            if possible:
                regrouped = key is not None and self.cluster.regrouped_since(key, moment)
                labelled = request.gpu.labels.exclusion is not None
                fewer = labelled and self.cluster.excludes_fewer_since(request.namespace, moment)
                assert woken or regrouped or fewer
            else:
                assert not woken

    @rule(again=st.booleans())
    def ask_again(self, again: bool) -> None:
        kept = self.cluster.head_reservation
        for waiting in [item for item in self.refused if kept is not None and item[0].tenant == kept.tenant] or (
            self.refused[-1:]
        ):
            self.refused.remove(waiting)
            if again and not self.cluster.reservations_of(waiting[0].tenant):
                self.ask_one(waiting[0])

    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        """Reserve GPUs for a refused request, or drop the reservation."""
        request = data.draw(st.sampled_from([None, *(request for request, _ in self.refused)]))
        if request is None:
            self.cluster.reserve_for_head(None)
            return
        if self.cluster.reservations_of(request.tenant):
            return
        kept = find_head_reservation(self.cluster, request)
        one_day = self.oracle().possible_one_day(request)
        assert (kept is not None) == bool(one_day)
        if kept is not None:
            assert len(kept.gpus) == request.gpu.count
            assert kept.gpus <= one_day[kept.node]
            assert is_attainable(self.cluster, request, kept)
        if kept is not None and data.draw(st.booleans(), "open to its namespace"):
            kept = replace(kept, open_to=request.namespace)
        self.cluster.reserve_for_head(kept)

    # Other shares on the same GPUs

    @rule(data=st.data(), changes=st.lists(st.tuples(shares, sizes), min_size=2, max_size=6))
    def resize(self, data: st.DataObject, changes: list[tuple[int, int | None]]) -> None:
        for request, memory in changes:
            rows = [row for name in self.states for row in self.rows(name) if row.mode is Mode.SHARED]
            if rows and (request > 0 or memory is not None):
                self.resize_one(data.draw(st.sampled_from(rows)), request, memory)

    def resize_one(self, row: Reservation, request: int, memory: int | None) -> None:
        fits = self.has_room_for(row, request, memory)
        answer = resize(
            self.cluster,
            row.tenant,
            request_milli=Milli(request),
            limit_milli=Milli(1000),
            memory=None if memory is None else Bytes(memory),
        )
        assert self.only_row(row.tenant) == (row if isinstance(answer, Refusal) else answer)
        assert isinstance(answer, Reservation) == (fits and not row.releasing)
        if isinstance(answer, Reservation):
            assert (answer.gpus, answer.request_milli) == (row.gpus, request)
            self.decided(answer)

    def has_room_for(self, row: Reservation, request: int, memory: int | None) -> bool:
        """Return whether the row may grow to this request and memory. Only the additional amount must be free, and
        outside the head-of-queue reservation."""
        rules = self.oracle()
        node = self.states[self.cluster.reservations_of(row.tenant)[0][0]]
        gpus = [gpu for gpu in node.gpus if gpu.uuid in row.gpus]
        amount = memory if memory is not None else min(gpu.memory * request // 1000 for gpu in gpus)
        time, size = self.most[row.tenant]
        more = request - time, amount - size
        if max(more) <= 0:
            return True
        kept = self.cluster.head_reservation
        here = kept is not None and kept.node == node.name and kept.gpus & set(row.gpus)
        if kept is not None and here and row.tenant != kept.tenant and row.namespace != kept.open_to:
            return False
        free = [rules.free_of_gpu(node, gpu) for gpu in gpus]
        return all(needed <= 0 or needed <= has for one in free for needed, has in zip(more, one, strict=True))

    # Invariants

    @invariant()
    def affinity_groups_stay_together(self) -> None:
        places: dict[tuple[str, str], set[tuple[str, frozenset[GpuUuid]]]] = {}
        for name in self.states:
            for row in self.rows(name):
                if row.labels.affinity is not None and row.tenant not in self.left:
                    key = (row.namespace, row.labels.affinity)
                    places.setdefault(key, set()).add((name, frozenset(row.gpus)))
        for key, groups in places.items():
            assert len(groups) == 1
            assert set(self.cluster.groups(key)) == groups

    @invariant()
    def labels_that_keep_apart_do(self) -> None:
        for name, state in self.states.items():
            for gpu in state.gpus:
                here = [row for row in self.rows(name) if gpu.uuid in row.gpus]
                apart = [(row.namespace, row.labels.anti_affinity) for row in here if row.labels.anti_affinity]
                assert len(apart) == len(set(apart))
                exclusions = {row.labels.exclusion and (row.namespace, row.labels.exclusion) for row in here}
                assert len(exclusions) <= 1


TestPlacement = Placement.TestCase
TestPlacement.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
