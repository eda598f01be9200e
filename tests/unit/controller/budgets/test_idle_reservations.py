"""Unused reservations."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from sharepod.controller import metrics
from sharepod.controller.apiserver.events import Events
from sharepod.controller.budgets import idle_reservations
from sharepod.controller.budgets.idle_reservations import REASON, IdleReservations
from sharepod.controller.state.agent_leases import AgentLeases
from sharepod.controller.state.cluster_state import ClusterState
from unit.controller.objects import PODS, sharepod_object


class RecordedEvents:
    """Recorder of Events."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, str]] = []

    def warning(self, _kind: str, about: Any, reason: str, _action: str, note: str) -> None:
        assert reason == REASON
        self.notes.append((about.name, note))


@pytest.mark.promise("budgets-idle")
async def test_a_share_that_is_reserved_and_not_held_for_an_hour_is_told_once_and_counted() -> None:
    state, events, now = ClusterState(PODS, AgentLeases(20.0, lambda: 0.0)), RecordedEvents(), 0.0
    watcher = IdleReservations(state, cast("Events", events), acts=lambda: True, clock=lambda: now)
    for name in ("idle", "busy", "besteffort", "unseen"):
        state.put_sharepod(sharepod_object(uid=name, name=name))
    held = {"idle": 0, "busy": 0, "besteffort": 0}
    version = 0

    async def look(at: float) -> None:
        nonlocal version, now
        version, now = version + 1, at
        rows = [
            {
                "id": name,
                "namespace": "n",
                "gpus": ["GPU-1", "GPU-2"],
                "requestMilli": 0 if name == "besteffort" else 250,
                "limitMilli": 1000,
                "memory": 1,
            }
            for name in ("idle", "busy", "besteffort", "unseen")
        ]
        seen = [{"id": name, "heldMilli": milli} for name, milli in held.items()]
        metadata = {"name": "n0", "uid": "n0", "resourceVersion": str(version), "generation": 1}
        state.put_gpunode({"metadata": metadata, "spec": {"tenants": rows}, "status": {"tenants": seen}})
        await watcher.look()

    def gpus() -> float | None:
        return metrics.LEADERS.get_sample_value("sharepod_namespace_idle_reserved_gpus", {"namespace": "n"})

    await look(0)
    held["busy"] = 10
    await look(1800)
    held["busy"] = 0
    await look(3599)
    assert (events.notes, gpus()) == ([], None)
    for at in (3600, 3630, 5000):
        await look(at)
    assert [name for name, _ in events.notes] == ["idle"]
    assert "0.5 of a GPU has been reserved and not used for 1 h" in events.notes[0][1]
    assert gpus() == 0.5
    held["idle"] = 1
    await look(5100)
    assert gpus() is None
    held["idle"] = 0
    for at in (5130, 8000, 9000):
        await look(at)
    assert [name for name, _ in events.notes] == ["idle", "busy", "idle"], "reported again after another hour"


async def test_others_have_turns_while_many_nodes_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_reservations, "_TURN_S", 0.0)
    state, turns = ClusterState(PODS, AgentLeases(20.0, lambda: 0.0)), 0
    for number in range(20):
        metadata = {"name": f"n{number}", "uid": f"n{number}", "resourceVersion": "1", "generation": 1}
        row = {"id": f"t{number}", "namespace": "n", "gpus": ["GPU-1"], "requestMilli": 1, "limitMilli": 1, "memory": 1}
        seen = {"id": f"t{number}", "heldMilli": 0}
        state.put_gpunode({"metadata": metadata, "spec": {"tenants": [row]}, "status": {"tenants": [seen]}})
    now = 0.0
    watcher = IdleReservations(state, cast("Events", RecordedEvents()), acts=lambda: True, clock=lambda: now)

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    task = asyncio.create_task(others())
    try:
        await watcher.look()
        now = 3600.0
        await watcher.look()
    finally:
        task.cancel()
    assert turns >= 30
    idle = metrics.LEADERS.get_sample_value("sharepod_namespace_idle_reserved_gpus", {"namespace": "n"})
    assert idle == pytest.approx(0.02), "of all nodes"


async def test_time_under_another_leader_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_reservations, "PERIOD_S", 0.0)
    state, events, now, leads = ClusterState(PODS, AgentLeases(20.0, lambda: 0.0)), RecordedEvents(), 0.0, True
    watcher = IdleReservations(state, cast("Events", events), acts=lambda: leads, clock=lambda: now)
    state.put_sharepod(sharepod_object(uid="a", name="a"))
    row = {"id": "a", "namespace": "n", "gpus": ["GPU-1"], "requestMilli": 250, "limitMilli": 1000, "memory": 1}
    metadata = {"name": "n0", "uid": "n0", "resourceVersion": "1", "generation": 1}
    status = {"tenants": [{"id": "a", "heldMilli": 0}]}
    state.put_gpunode({"metadata": metadata, "spec": {"tenants": [row]}, "status": status})

    async def at(time: float, *, leading: bool) -> list[str]:
        nonlocal now, leads
        now, leads = time, leading
        for _ in range(5):
            await asyncio.sleep(0)
        return [name for name, _ in events.notes]

    running = asyncio.create_task(watcher.run())
    try:
        await at(0, leading=True)
        await at(10, leading=False)
        assert await at(7200, leading=True) == [], "it may have been used while another led"
        assert await at(7230, leading=True) == []
        assert await at(10_800, leading=True) == ["a"]
    finally:
        running.cancel()
