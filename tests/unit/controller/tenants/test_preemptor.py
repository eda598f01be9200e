"""Evictions for preemptions: confirmed first, one at a time, only while the preemptor waits. Messages name no tenant of
others.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
from sharepod.api.sharepod import GpuRequest, KeptPlace
from sharepod.api.units import Bytes, GpuUuid, Milli, TenantId
from sharepod.controller.apiserver.client import Client
from sharepod.controller.apiserver.events import Events
from sharepod.controller.placing.making_room.moving import OngoingMove
from sharepod.controller.placing.making_room.preemptions import OngoingPreemption, Preemptions
from sharepod.controller.placing.making_room.victims_seen import VictimsSeen
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.memos import TenantMemos
from sharepod.controller.tenants.preemptor import Preemptor
from sharepod.kube import NotFoundError, UnavailableError
from sharepod.placement.preemption.victims import PreemptionPlan
from sharepod.placement.state.types import Assignment, PlacementRequest, Reservation
from unit.controller.objects import PODS, pod_object, row, sharepod_object

_WAITS = PlacementRequest(
    tenant=TenantId("high"),
    namespace="n",
    name="high",
    gpu=GpuRequest(request_milli=Milli(500), limit_milli=Milli(1000), memory=None),
    priority=9,
)


@dataclass
class World:
    """A preemptor over a cluster state. The object is also the double of the API server, of the writer of Events and of
    the loop that requests preemptions."""

    protected: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    evicted: list[str] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)
    notes: list[tuple[str, str, str]] = field(default_factory=list)
    preemptions: dict[str, OngoingPreemption] = field(default_factory=dict)
    """For each waiting tenant: its preemption."""
    hangs: set[str] = field(default_factory=set)
    """Namespaces whose evictions the API server never answers."""

    def __post_init__(self) -> None:
        self.state = ClusterState(PODS, cast(Any, None))
        self.memos = TenantMemos()
        self.seen = VictimsSeen(self.state, lambda: 1000.0, lambda: 1000.0, lambda _namespace: cast(Any, None))
        self.preemptor = Preemptor(
            self.state,
            cast(Client, self),
            cast(Events, self),
            self.memos,
            cast(Preemptions, self),
            self.seen,
            lambda: 1000.0,
        )

    def tenant(self, name: str, namespace: str = "n", **fields: Any) -> None:
        metadata = {"namespace": namespace}
        self.state.put_sharepod(sharepod_object(uid=name, name=name, metadata=metadata))
        raw = pod_object(uid=f"pod-{name}", name=name, owner=name, node="a", phase="Running", **fields)
        raw["metadata"]["namespace"] = namespace
        self.state.put_pod(raw)

    def begins(
        self,
        *,
        evict: tuple[str, ...] = (),
        lower: tuple[str, ...] = (),
        leaving: tuple[str, ...] = (),
        move_to: Assignment | None = None,
        tenant: str = "high",
    ) -> None:
        plan = PreemptionPlan(
            node="a",
            gpus=frozenset({GpuUuid("g")}),
            evict=tuple(map(TenantId, evict)),
            lower=tuple(map(TenantId, lower)),
            leaving=tuple(map(TenantId, leaving)),
            move_to=move_to,
        )
        self.preemptions[tenant] = OngoingPreemption(replace(_WAITS, tenant=TenantId(tenant)), plan, 0.0)
        self.preemptor.begin(self.preemptions[tenant])

    # Played parts

    @property
    def moving(self) -> World:
        return self

    def kept_place(self, tenant: str) -> KeptPlace:
        return KeptPlace(node="b", gpus=("h",))

    def of(self, tenant: str) -> OngoingPreemption | None:
        return self.preemptions.get(tenant)

    def refused(self, tenant: str, pod: str) -> None:
        self.given_up.append(pod)
        del self.preemptions[tenant]

    async def evict(self, name: str, namespace: str, *, uid: str, dry_run: bool) -> None:
        (self.asked if dry_run else self.evicted).append(uid)
        if namespace in self.hangs:
            await asyncio.Event().wait()
        if uid in self.missing:
            raise NotFoundError("evict", 404, "NotFound", "no such pod")
        if uid in self.protected:
            raise UnavailableError("evict", 429, "TooManyRequests", "violates the disruption budget")

    def normal(self, kind: str, about: Any, reason: str, action: str, note: str) -> None:
        self.notes.append((about.name, reason, note))

    def note(self, name: str) -> str:
        return next(note for about, _, note in self.notes if about == name)


async def test_all_are_asked_before_the_first_is_evicted() -> None:
    world = World()
    for name in ("one", "two", "high"):
        world.tenant(name)
    world.begins(evict=("one", "two"))
    await world.preemptor._carry_out("high")
    assert world.asked == world.evicted == ["pod-one", "pod-two"]
    eviction = world.memos.of("one").eviction
    assert eviction is not None
    assert eviction.preempted


@pytest.mark.promise("operator-turns")
async def test_evictions_that_wait_for_one_namespaces_webhook_delay_no_others() -> None:
    world = World(hangs={"slow"})
    for number in range(20):
        world.tenant(f"slow{number}", "slow")
        world.tenant(f"high{number}")
        world.begins(evict=(f"slow{number}",), tenant=f"high{number}")
    world.tenant("quick")
    world.tenant("high")
    running = asyncio.create_task(world.preemptor.queue.run())
    try:
        async with asyncio.timeout(5):
            while len(world.asked) < 6:  # noqa: ASYNC110 - three quarters of the evictions
                await asyncio.sleep(0)
            world.begins(evict=("quick",))
            while world.evicted != ["pod-quick"]:  # noqa: ASYNC110 - no event to await
                await asyncio.sleep(0)
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


@pytest.mark.promise("placement-preempt-budgets")
async def test_a_disruption_budget_prevents_the_whole_eviction() -> None:
    world = World(protected={"pod-two"})
    for name in ("one", "two", "high"):
        world.tenant(name)
    world.begins(evict=("one", "two"))
    await world.preemptor._carry_out("high")
    assert world.evicted == []
    assert world.given_up == ["pod-two"]


async def test_one_that_is_gone_or_going_is_passed_over() -> None:
    world = World(missing={"pod-one"})
    world.tenant("one")
    world.tenant("two", deleting=True)
    world.tenant("three")
    world.tenant("high")
    world.begins(evict=("one", "two", "three"))
    await world.preemptor._carry_out("high")
    assert world.asked == ["pod-one", "pod-three"]
    assert "Preempted" not in [reason for name, reason, _ in world.notes if name == "one"]


async def test_no_tenant_is_evicted_for_a_request_that_stopped_waiting() -> None:
    world = World()
    world.tenant("one")
    world.tenant("high")
    world.begins(evict=("one",))
    world.preemptions.clear()
    await world.preemptor._carry_out("high")
    assert world.asked == []


async def test_an_api_server_that_fails_is_asked_again() -> None:
    world = World()
    world.tenant("one")
    world.tenant("high")
    world.begins(evict=("one",))

    async def fails(*_: object, **__: object) -> None:
        raise UnavailableError("evict", 503, "ServiceUnavailable", "away")

    world.evict = fails  # type: ignore[method-assign]
    with pytest.raises(UnavailableError):
        await world.preemptor._carry_out("high")
    assert world.given_up == []


async def test_names_stay_within_their_namespace() -> None:
    world = World()
    world.tenant("mine")
    world.tenant("secret", namespace="other")
    world.tenant("high")
    world.begins(evict=("secret",), lower=("mine",))
    assert "mine of lower priority" in world.note("high")
    assert "1 tenant of other namespaces" in world.note("high")
    assert "secret" not in world.note("high")
    assert "high of higher priority" in world.note("mine")
    await world.preemptor._carry_out("high")
    assert world.note("secret") == "preempted on a by a tenant of higher priority of another namespace"


@pytest.mark.parametrize(("namespace", "who"), [("n", "high"), ("other", "a tenant of another namespace")])
async def test_one_that_moves_is_told_where_it_goes_and_both_that_it_is_there(namespace: str, who: str) -> None:
    world = World()
    world.tenant("mover", namespace=namespace)
    world.tenant("high")
    to = Assignment(node="b", gpus=(GpuUuid("h"),), memory=Bytes(1))
    world.begins(evict=("mover",), move_to=to)
    moved = "mover" if namespace == "n" else "1 tenant of other namespaces"
    assert world.notes == [("high", "Moving", f"keeps 1 GPU of a for it, and moves {moved}")]
    await world.preemptor._carry_out("high")
    assert world.asked == world.evicted == ["pod-mover"]
    assert world.notes[1:] == [("mover", "Moving", f"restarted on b: it makes room on a for {who}")]
    eviction = world.memos.of("mover").eviction
    assert eviction is not None
    assert (eviction.move_to, eviction.preempted) == (KeptPlace(node="b", gpus=("h",)), False)

    mover = replace(_WAITS, tenant=TenantId("mover"), name="mover", namespace=namespace, priority=0)
    world.preemptor.moved(OngoingMove(mover, _WAITS, "a", to, 0.0), "b")
    world.preemptor.moved(OngoingMove(mover, None, "a", to, 0.0), "b")
    assert world.notes.pop() == ("mover", "Moved", "has a place on b now"), "a former leader knew who waits"
    subject = "mover" if namespace == "n" else "a tenant of another namespace"
    assert world.notes[2:] == [
        ("mover", "Moved", f"has a place on b now; it made room on a for {who}"),
        ("high", "Moved", f"{subject} made room on a and has another place now"),
    ]


async def test_one_whose_pod_is_gone_is_named_by_its_row() -> None:
    world = World()
    world.tenant("high")
    left = Reservation.of_row(row(id="0b7c2f4e", namespace="n", pod_name="low"))
    world.state.cluster.load("a", [left], 1)
    world.begins(leaving=("0b7c2f4e",))
    assert "waits for low of lower priority" in world.note("high")


async def test_of_many_of_its_own_namespace_some_are_named() -> None:
    world = World()
    names = tuple(f"t{number}" for number in range(6))
    for name in (*names, "high"):
        world.tenant(name)
    world.begins(lower=names)
    assert "t0, t1, t2, t3, 2 more of this namespace of lower priority" in world.note("high")
