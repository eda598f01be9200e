"""The status patch: it has all fields if the last status is unknown, else only changed ones, and never a field of
another writer."""

from __future__ import annotations

import asyncio
from typing import Any

import jsonpatch
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.agent.agent import AgentFacts
from sharepod.agent.cluster import status_report
from sharepod.agent.cluster.status_report import Readiness, ReadyReason, StatusReport, patch
from sharepod.api.gpunode import CONDITION_AGENT_READY, TenantStatus
from sharepod.api.objects import Condition

CONDITION = {"type": "AgentReady", "status": "True", "reason": "Serving", "message": ""}
OTHER = {"type": "AgentAlive", "status": "False", "reason": "LeaseExpired", "message": "help"}


def gpunode(status: dict[str, Any] | None) -> dict[str, Any]:
    found: dict[str, Any] = {"metadata": {"uid": "u", "resourceVersion": "7"}, "spec": {}}
    return found if status is None else {**found, "status": status}


def wanted(**changes: Any) -> dict[str, Any]:
    fields = {
        "gpus": [{"uuid": "GPU-0"}],
        "tenants": [],
        "conditions": [CONDITION],
        "observedGeneration": 3,
        "agentVersion": "1",
        "simulated": False,
    }
    return {**fields, **changes}


def paths(operations: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(each["op"], each["path"]) for each in operations]


def test_a_status_that_is_not_there_yet_is_written_whole() -> None:
    operations = patch(gpunode(None), wanted(), None)
    assert paths(operations) == [("test", "/metadata/uid"), ("test", "/metadata/resourceVersion"), ("add", "/status")]
    assert jsonpatch.apply_patch(gpunode(None), operations)["status"] == wanted()


def test_only_what_changed_is_written() -> None:
    operations = patch(gpunode(wanted()), wanted(tenants=[{"id": "a"}]), wanted())
    assert paths(operations) == [("test", "/metadata/uid"), ("add", "/status/tenants")]
    assert patch(gpunode(wanted()), wanted(), wanted()) == []


def test_another_writers_condition_stays() -> None:
    server = wanted(conditions=[OTHER, {**CONDITION, "status": "Unknown"}])
    operations = patch(gpunode(server), wanted(), wanted(conditions=[{**CONDITION, "status": "Unknown"}]))
    assert ("test", "/metadata/resourceVersion") in paths(operations), "conditions are written by two"
    assert jsonpatch.apply_patch(gpunode(server), operations)["status"]["conditions"] == [OTHER, CONDITION]


def test_a_message_that_the_api_server_would_refuse_is_cut() -> None:
    rows = "; ".join(f"tenant {number:036}: mode: Input should be 'Shared' or 'Exclusive'" for number in range(400))
    shown = status_report.condition(CONDITION_AGENT_READY, Readiness(ReadyReason.LEDGER_UNREADABLE, rows), {})
    assert Condition.model_validate(shown).message == rows[:32768]


def test_another_object_of_that_name_is_not_written() -> None:
    operations = patch(gpunode(wanted()), wanted(observedGeneration=4), wanted())
    other = {**gpunode(wanted()), "metadata": {"uid": "another", "resourceVersion": "9"}}
    with pytest.raises(jsonpatch.JsonPatchTestFailed):
        jsonpatch.apply_patch(other, operations)


_statuses = st.builds(
    wanted,
    tenants=st.lists(st.fixed_dictionaries({"id": st.sampled_from("ab"), "drained": st.booleans()}), max_size=2),
    observedGeneration=st.integers(1, 3),
    conditions=st.just([CONDITION]) | st.just([{**CONDITION, "status": "False"}]),
)


@given(before=_statuses | st.none(), after=_statuses, known=st.booleans(), others=st.booleans())
def test_the_patch_always_leads_to_what_is_wanted(
    before: dict[str, Any] | None, after: dict[str, Any], known: bool, others: bool
) -> None:
    server = before if before is None or not others else {**before, "conditions": [OTHER, *before["conditions"]]}
    operations = patch(gpunode(server), after, before if known else None)
    result = jsonpatch.apply_patch(gpunode(server), operations).get("status")
    kept = [OTHER] if others and before is not None else []
    assert result == {**after, "conditions": [*kept, *after["conditions"]]}


class OneGpuNode:
    """GPUNode whose ledger is applied, and the connection that writes its status and counts the writes."""

    def __init__(self) -> None:
        self.object: dict[str, Any] = gpunode(None)
        self.uid, self.generation, self.in_force = "u", 3, ()
        self.written: list[dict[str, Any]] = []
        self.wrote = asyncio.Event()

    def note(self, answer: dict[str, Any]) -> None:
        self.object = answer

    async def patch(self, _path: str, operations: Any, _kind: str) -> dict[str, Any]:
        self.object = jsonpatch.apply_patch(self.object, operations)
        self.written.append(self.object["status"])
        self.wrote.set()
        return self.object

    async def writes(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.written) < count:
                self.wrote.clear()
                await self.wrote.wait()


def facts(processes: int, *, drained: bool = False, held: int | None = 0) -> AgentFacts:
    tenant = TenantStatus(
        id="a", connected=False, enforced=None, processes=processes, memory=0, held_milli=held, drained=drained
    )
    return AgentFacts(gpus=(), gpus_known=True, tenants=(tenant,), simulated=True, agent_version="1")


def report_of(node: OneGpuNode, known: list[AgentFacts], woken: asyncio.Event) -> StatusReport:
    """Return a status report. Its facts are the last entry of `known`."""
    return StatusReport(
        node,  # type: ignore[arg-type]
        node="node-1",
        ledger=node,  # type: ignore[arg-type]
        facts=lambda: known[-1],
        readiness=lambda: {CONDITION_AGENT_READY: Readiness(ReadyReason.SERVING)},
        woken=woken,
    )


@pytest.mark.promise("node-release-soon")
async def test_a_drained_tenant_is_written_before_the_time_of_the_next_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_report, "FACTS_EVERY_S", 3600.0)
    node, known, woken = OneGpuNode(), [facts(1)], asyncio.Event()
    report = report_of(node, known, woken)
    running = asyncio.create_task(report.run())
    try:
        woken.set()
        await node.writes(1)
        for now in (facts(0), facts(0, drained=True)):
            known.append(now)
            woken.set()
            await asyncio.sleep(0)
        await node.writes(2)
        assert [status["tenants"][0].get("drained", False) for status in node.written] == [False, True]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.promise("operator-usage-known")
async def test_usage_is_written_as_soon_as_it_is_known_and_then_only_with_other_news_or_after_a_while() -> None:
    node, known = OneGpuNode(), [facts(1, held=None)]
    report = report_of(node, known, asyncio.Event())
    for held, written in ((None, True), (None, False), (400, True), (500, False)):
        known.append(facts(1, held=held))
        assert await report.write_if_due() is written, held
    assert [status["tenants"][0].get("heldMilli") for status in node.written] == [None, 400]
