"""Eviction of pods whose share is not enforced: by policy, after a delay, at a bounded rate, and despite any
PodDisruptionBudget.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from sharepod.api.gpunode import Finding, FindingReason, TenantStatus
from sharepod.controller.apiserver.client import Client, Resource
from sharepod.controller.apiserver.events import Events
from sharepod.controller.settings import OperatorSettings
from sharepod.controller.state.memos import TenantMemo
from sharepod.controller.tenants.evictor import Evictor
from sharepod.kube import ApiError, ConflictError, ForbiddenError, NotFoundError, UnavailableError
from unit.controller.objects import TENANT, pod, sharepod

UNHOOKED = TenantStatus(
    id=TENANT,
    enforced=False,
    findings=(Finding(reason=FindingReason.PROCESS_WITHOUT_HOOK, message="process 7 uses the GPU without the hook"),),
)
RUNNING = pod(node="node-a", phase="Running")


def seen_with(*reasons: str) -> TenantStatus:
    """Return an agent's report of a tenant with these findings."""
    return TenantStatus(
        id=TENANT, enforced=True, findings=tuple(Finding(reason=each, message=each) for each in reasons)
    )


@dataclass
class World:
    """An evictor with a clock that the test advances, and an API server that counts evictions."""

    policy: str = "Evict"
    budget: bool = False
    refusal: ApiError | None = None
    refused: set[str] = field(default_factory=set)
    now: float = 1000.0
    evicted: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        settings = OperatorSettings.model_validate(
            {
                "unenforced_policy": self.policy,
                "unenforced_grace": 30,
                "evictions_per_minute": 6,
                "eviction_patience": 120,
            }
        )
        self.evictor = Evictor(cast(Client, self), cast(Events, self), settings, lambda: self.now)

    async def evict(self, name: str, namespace: str, *, uid: str) -> None:
        if self.budget:
            raise UnavailableError("evict", 429, "TooManyRequests", "violates the disruption budget")
        if self.refusal is not None and uid in self.refused:
            raise self.refusal
        self.evicted.append(uid)

    async def delete(self, resource: Resource, name: str, namespace: str, *, uid: str) -> None:
        self.deleted.append(uid)

    def warning(self, kind: str, about: Any, reason: str, action: str, memo: str) -> None:
        self.notes.append((reason, memo))

    async def look(
        self, memo: TenantMemo, seen: TenantStatus | None = UNHOOKED, its_pod: Any = RUNNING
    ) -> float | None:
        return await self.evictor.check(sharepod(), its_pod, seen, memo)


@pytest.mark.promise("operator-eviction-rate")
async def test_a_pod_is_evicted_once_it_has_been_seen_without_the_hook_for_long_enough() -> None:
    world, memo = World(), TenantMemo()
    assert await world.look(memo) == 30
    world.now += 29
    assert await world.look(memo) == 1
    assert not world.evicted
    world.now += 1
    assert await world.look(memo) is None
    assert world.evicted == ["pod-1"]
    assert memo.eviction is not None
    assert "process 7 uses the GPU without the hook" in (memo.eviction.done or "")
    assert [reason for reason, _ in world.notes] == ["Evicting"]
    world.now += 600
    assert await world.look(memo) is None
    assert world.evicted == ["pod-1"], "once"


@pytest.mark.promise("operator-evict-offences")
@pytest.mark.parametrize("reason", ["ProcessWithoutHook", "HookReplaced", "BusyBeyondHeld", "MemoryBeyondLimit"])
async def test_a_pod_is_evicted_for_every_offence(reason: str) -> None:
    world, memo = World(), TenantMemo()
    assert await world.look(memo, seen_with("Overtaken", reason)) == 30
    world.now += 30
    await world.look(memo, seen_with("Overtaken", reason))
    assert world.evicted == ["pod-1"]
    assert world.notes == [("Evicting", f"evicted by SharePod's operator (unenforced_policy: Evict): {reason}")]


async def test_a_connection_in_time_restarts_the_timeout() -> None:
    world, memo = World(), TenantMemo()
    await world.look(memo)
    world.now += 29
    await world.look(memo, TenantStatus(id=TENANT, enforced=True))
    world.now += 29
    assert await world.look(memo) == 30


@pytest.mark.parametrize(
    ("seen", "its_pod"),
    [
        (None, RUNNING),
        (TenantStatus(id=TENANT, enforced=None), RUNNING),
        (seen_with(FindingReason.OVERTAKEN), RUNNING),
        (seen_with(FindingReason.MEMORY_BEYOND_TRACKED), RUNNING),
        (seen_with(FindingReason.PROCESSES_NOT_TOLD), RUNNING),
        (UNHOOKED, None),
        (UNHOOKED, pod()),
        (UNHOOKED, pod(node="node-a", phase="Running", deleting=True)),
        (UNHOOKED, pod(node="node-a", phase="Succeeded")),
    ],
)
async def test_no_other_tenant_is_evicted(seen: TenantStatus | None, its_pod: Any) -> None:
    world, memo = World(), TenantMemo()
    for _ in range(20):
        await world.look(memo, seen, its_pod)
        world.now += 60
    assert not world.evicted
    assert not world.deleted


@pytest.mark.promise("operator-report-only")
async def test_the_default_policy_only_reports() -> None:
    world, memo = World(policy="Report"), TenantMemo()
    assert OperatorSettings().unenforced_policy == "Report"
    for _ in range(20):
        assert await world.look(memo) is None
        world.now += 60
    assert not world.evicted


@pytest.mark.promise("operator-eviction-rate")
async def test_a_whole_cluster_without_hooks_is_evicted_no_faster_than_the_rate() -> None:
    world = World()
    memos = {f"pod-{number}": TenantMemo() for number in range(30)}
    begun = None
    while len(world.evicted) < len(memos):
        for uid, memo in memos.items():
            if memo.eviction is None or memo.eviction.done is None:
                await world.look(memo, its_pod=pod(uid=uid, node="node-a", phase="Running"))
        if begun is None and world.evicted:
            begun = world.now
        if begun is not None:
            assert len(world.evicted) <= (world.now - begun) / 10 + 1
        world.now += 1
    assert begun is not None
    assert world.now - begun <= 30 * 12, "and hardly slower"


@pytest.mark.promise("operator-eviction-rate")
@pytest.mark.parametrize(
    "refusal",
    [
        UnavailableError("evict", 429, "TooManyRequests", "violates the disruption budget"),
        NotFoundError("evict", 404, "NotFound", "no such pod"),
        ConflictError("evict", 409, "Conflict", "another uid"),
        ForbiddenError("evict", 403, "Forbidden", "may not"),
    ],
)
async def test_an_eviction_that_is_refused_takes_no_others_place(refusal: ApiError) -> None:
    world = World(refusal=refusal, refused={"refused"})
    memos = {uid: TenantMemo() for uid in ("refused", "granted", "next")}
    pods = {uid: pod(uid=uid, node="node-a", phase="Running") for uid in memos}
    for uid, memo in memos.items():
        await world.look(memo, its_pod=pods[uid])
    world.now += 30
    with contextlib.suppress(ForbiddenError):
        await world.look(memos["refused"], its_pod=pods["refused"])
    world.now += 0.2
    await world.look(memos["granted"], its_pod=pods["granted"])
    assert world.evicted == ["granted"]
    world.now += 9
    assert await world.look(memos["next"], its_pod=pods["next"]) == pytest.approx(1)
    world.now += 1
    await world.look(memos["next"], its_pod=pods["next"])
    assert world.evicted == ["granted", "next"]


@pytest.mark.promise("operator-eviction-rate")
async def test_an_eviction_that_may_have_been_granted_counts() -> None:
    world = World(refusal=UnavailableError("evict", 0, "TimeoutError", "no answer"), refused={"unknown"})
    memos = {uid: TenantMemo() for uid in ("unknown", "next")}
    for uid, memo in memos.items():
        await world.look(memo, its_pod=pod(uid=uid, node="node-a", phase="Running"))
    world.now += 30
    with pytest.raises(UnavailableError):
        await world.look(memos["unknown"], its_pod=pod(uid="unknown", node="node-a", phase="Running"))
    assert await world.look(memos["next"], its_pod=pod(uid="next", node="node-a", phase="Running")) == 10


async def test_a_cluster_of_budgets_is_asked_no_faster_than_the_api_server_should_be() -> None:
    world = World(refusal=UnavailableError("evict", 429, "TooManyRequests", "violates the disruption budget"))
    memos = {str(number): TenantMemo() for number in range(100)}
    world.refused = set(memos)
    for _ in range(2):
        for uid, memo in memos.items():
            await world.look(memo, its_pod=pod(uid=uid, node="node-a", phase="Running"))
        world.now += 30
    assert len(world.notes) == 1


@pytest.mark.promise("operator-eviction-budget")
async def test_a_budget_delays_the_eviction_and_cannot_prevent_it() -> None:
    world, memo = World(budget=True), TenantMemo()
    wait: float | None = await world.look(memo)
    begun = world.now
    while wait is not None:
        world.now += wait
        wait = await world.look(memo)
        assert world.now - begun < 300
    assert world.now - begun >= 120
    assert not world.evicted
    assert world.deleted == ["pod-1"]
    assert "EvictionRefused" in {reason for reason, _ in world.notes}


class Recorder:
    """API server that accepts Events."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    async def create(self, resource: Resource, body: Any, namespace: str | None = None) -> None:
        self.notes.append(body["note"])


@pytest.mark.promise("operator-events")
async def test_an_object_that_changes_its_mind_each_second_makes_few_events() -> None:
    now = 0.0
    recorder = Recorder()
    events = Events(cast(Client, recorder), "test", lambda: now)
    writing = asyncio.create_task(events.run())
    for second in range(600):
        now = float(second)
        events.warning("SharePod", sharepod(), "Flutters", "Watch", f"figure {second}")
        events.warning("SharePod", sharepod(), "Other", "Watch", "the same")
        await asyncio.sleep(0)
    while events._waiting:  # noqa: ASYNC110 - no event to await
        await asyncio.sleep(0)
    writing.cancel()
    assert 10 <= sum(note.startswith("figure") for note in recorder.notes) <= 20
    assert recorder.notes.count("the same") == 1
