"""Writes of a SharePod's status: their content, their time, and the version that they require."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from doubles.apiserver.errors import Refused
from sharepod.controller.decisions import status
from sharepod.controller.state.facts.sharepod_facts import unreadable_sharepod
from sharepod.kube import InvalidError, Json, UnavailableError
from unit.controller.acting_world import World, acting_world

REFUSED = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes fit"}


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with acting_world() as made:
        made.node()
        await made.running()
        yield made


def writes(world: World) -> int:
    return len(world.server.made("patch", "sharepods"))


@pytest.fixture
def compositions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the SharePods whose status was composed, in order."""
    composed: list[str] = []
    compose = status.compose

    def counted(sharepod: Any, *others: Any) -> Any:
        composed.append(sharepod.name)
        return compose(sharepod, *others)

    monkeypatch.setattr(status, "compose", counted)
    return composed


async def waits_for(world: World, message: str) -> None:
    """Report that the Pod's container waits for this reason. Only a condition changes by this."""
    waiting = {"name": "main", "state": {"waiting": {"reason": "Pulling", "message": message}}}
    world.pod_phase("Running", containerStatuses=[waiting])
    await world.look()


async def test_what_only_explains_is_written_once_a_second_and_nothing_is_lost(world: World) -> None:
    world.now += 1
    await waits_for(world, "one")
    before = writes(world)
    await waits_for(world, "two")
    assert writes(world) == before
    assert world.looks_again(1.0)
    world.now += 1
    await world.look()
    assert writes(world) == before + 1
    assert "two" in world.condition("PodReady")["message"]


async def test_a_phase_is_written_at_once(world: World) -> None:
    await waits_for(world, "one")
    world.pod_phase("Succeeded")
    await world.look()
    assert world.status()["phase"] == "Succeeded"


async def test_a_status_that_cannot_be_read_is_left_as_it_is_and_the_owner_is_told(world: World) -> None:
    before, raw = world.status(), world.read("sharepods", "one")
    assert raw is not None
    metadata = raw["metadata"] | {"resourceVersion": str(10 * int(raw["metadata"]["resourceVersion"]))}
    world.state.sharepods.put(unreadable_sharepod(metadata, "is nested too deep"))
    await world.tenants.reconcile(world.tenant)
    assert world.status() == before
    await world.until(lambda: bool(world.notes("Invalid")))
    assert world.notes("Invalid") == ["spec: cannot be read: the object is nested too deep"]


@pytest.mark.promise("operator-usage")
async def test_usage_is_written_once_an_interval_and_the_last_figure_is_not_lost(world: World) -> None:
    world.now += world.settings.usage_interval
    for held in (100, 200, 300):
        world.report({"id": world.tenant, "connected": True, "heldMilli": held, "memory": held})
        await world.look()
    assert world.status()["usage"]["heldMilli"] == 100
    assert world.looks_again(world.settings.usage_interval)
    world.now += world.settings.usage_interval
    await world.look()
    assert world.status()["usage"]["heldMilli"] == 300


async def test_a_status_is_not_written_over_a_sharepod_that_has_changed(world: World) -> None:
    world.pod_phase("Succeeded")
    await world.relist()
    world.change("sharepods", "one", lambda item: item["metadata"].update(labels={"novel": "1"}))
    await world.tenants.reconcile(world.tenant)
    assert world.status()["phase"] == "Running"
    assert world.looks_again(0.0)
    await world.tenants.reconcile(world.tenant)
    assert world.status()["phase"] == "Succeeded"
    assert (world.read("sharepods") or {})["metadata"]["labels"] == {"novel": "1"}


@pytest.mark.promise("operator-deletion-calls")
async def test_a_sharepod_that_went_before_its_status_was_written_is_dropped_without_a_read(world: World) -> None:
    world.pod_phase("Succeeded")
    await world.relist()
    world.delete("sharepods")
    await world.tenants.reconcile(world.tenant)
    assert world.state.sharepods.get(world.tenant) is None
    await world.tenants.reconcile(world.tenant)
    assert world.server.made("get", "sharepods") == []


async def test_a_write_whose_answer_was_lost_is_not_repeated_nor_forgotten(world: World) -> None:
    world.pod_phase("Succeeded")
    world.server.fail("patch", "sharepods", lose_answer=True)
    with pytest.raises(UnavailableError):
        await world.look()
    before = writes(world)
    await world.look()
    assert world.status()["phase"] == "Succeeded"
    assert writes(world) == before


async def test_a_write_that_was_refused_is_tried_again_as_it_was(world: World) -> None:
    world.pod_phase("Succeeded")
    world.server.fail("patch", "sharepods", refusal=Refused(500, "InternalError", "etcd is away"))
    with pytest.raises(UnavailableError):
        await world.look()
    assert world.status()["phase"] == "Running"
    await world.look()
    assert world.status()["phase"] == "Succeeded"


async def test_every_write_names_the_object_and_version_it_is_for(world: World) -> None:
    for call in world.server.made("patch", "sharepods"):
        assert call.subresource == "status"
        assert call.body["metadata"]["uid"] == world.tenant
        assert call.body["metadata"]["resourceVersion"]


async def test_a_finding_is_reported_once_and_again_when_it_returns(world: World) -> None:
    finding: Json = {"reason": "Overtaken", "message": "its work did not end with its turn"}
    for findings in ([finding], [finding], [], [finding]):
        world.now += 601  # after this time the same Event may be written again
        world.renew()
        world.report({"id": world.tenant, "enforced": True, "connected": True, "findings": findings})
        await world.look()
    await world.until(lambda: len(world.notes("Overtaken")) == 2)


async def test_a_status_is_composed_again_only_when_an_input_has_changed(world: World, compositions: list[str]) -> None:
    world.now += world.settings.usage_interval
    world.report({"id": world.tenant, "connected": True, "heldMilli": 400, "memory": 1 << 20})
    await world.look()
    compositions.clear()
    for _ in range(5):
        world.now += world.settings.usage_interval
        await world.look()
    assert compositions == []
    await waits_for(world, "one")
    assert compositions == ["one"]
    await world.look()
    assert compositions == ["one"]


async def test_a_change_that_arrives_while_the_status_is_written_is_shown(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SharePod is edited, and the watch shows that, before the answer to the write is handled."""
    apply = world.client.apply_status

    async def edited_meanwhile(*args: Any) -> Json:
        answer = await apply(*args)
        world.state.put_sharepod(world.change("sharepods", "one", lambda item: item["spec"]["gpu"].update(request=0.5)))
        monkeypatch.undo()
        return answer

    monkeypatch.setattr(world.client, "apply_status", edited_meanwhile)
    world.now += 1
    await waits_for(world, "one")
    world.now += 1
    await world.look()
    assert world.status()["observedGeneration"] == 2


async def test_a_status_that_cannot_be_applied_is_merged(world: World) -> None:
    """Server-side apply sets a list to null if its last entry is removed and another manager also owns it. The API
    server refuses the null, so the operator sends the status as a merge patch."""
    world.server.fail("patch", "sharepods", refusal=Refused(422, "Invalid", "status.gpus: Invalid value: null"))
    world.now += 1
    await waits_for(world, "one")
    assert "one" in world.condition("PodReady")["message"]
    assert not world.notes("StatusRefused")


async def test_a_refused_status_is_reported(world: World) -> None:
    for _ in range(2):
        world.server.fail("patch", "sharepods", refusal=Refused(422, "Invalid", "no such field"))
    world.now += 1
    with pytest.raises(InvalidError):
        await waits_for(world, "one")
    await world.until(lambda: bool(world.notes("StatusRefused")))


async def test_what_another_manager_has_left_in_the_status_is_taken_out_and_order_says_nothing(world: World) -> None:
    def leave(item: Json) -> None:
        strange = {"type": "Strange", "status": "True", "reason": "Odd", "message": "", "lastTransitionTime": "t"}
        item["status"]["conditions"] = [strange, *reversed(item["status"]["conditions"])]

    before = writes(world)
    world.change("sharepods", "one", leave, status=True)
    world.now += 1
    await world.look()
    assert "Strange" not in {item["type"] for item in world.status()["conditions"]}
    written = writes(world)
    assert written == before + 2, "applied, then taken out"
    world.change("sharepods", "one", lambda item: item["status"]["conditions"].reverse(), status=True)
    world.now += 1
    await world.look()
    assert writes(world) == written


@pytest.mark.promise("time-progress-shown")
async def test_progress_is_shown_and_written_again_once_it_has_moved_by_five_points(world: World) -> None:
    async def reports(progress: int) -> str:
        """Let an agent report this progress. Return the progress that was written."""
        world.now += world.settings.usage_interval
        seen = {"connected": True, "heldMilli": 220, "progressMilli": progress, "memory": 1 << 20}
        world.report({"id": world.tenant, **seen})
        await world.look()
        return str(world.status()["usage"]["progress"])

    assert [await reports(progress) for progress in (930, 900, 875)] == ["0.93", "0.93", "0.875"]


@pytest.mark.promise("operator-usage")
async def test_usage_at_rest_is_not_written_and_a_drift_is_once_it_is_five_points(world: World) -> None:
    async def reports(held: int, memory: int = 1 << 20) -> int:
        """Let an agent report this usage. Return the usage that was written."""
        world.now += world.settings.usage_interval
        world.report({"id": world.tenant, "connected": True, "heldMilli": held, "memory": memory})
        await world.look()
        return int(world.status()["usage"]["heldMilli"])

    assert await reports(400) == 400
    before = writes(world)
    for held in (380, 420, 449, 351, 400):
        assert await reports(held, 2 << 20) == 400
    assert writes(world) == before
    assert not world.looks_again(world.settings.usage_interval)
    assert await reports(450) == 450
    assert await reports(460, 8 << 30) == 460  # the used memory has changed
    assert writes(world) == before + 2


async def test_a_new_operator_repeats_no_event(world: World) -> None:
    finding: Json = {"reason": "Overtaken", "message": "its work did not end with its turn"}
    seen = {"id": world.tenant, "connected": True, "enforced": True, "findings": [finding]}
    world.now += 1
    world.report(seen)
    await world.look()
    await world.until(lambda: len(world.notes("Overtaken")) == 1)
    world.memos.clear()
    world.events._recorded.clear()
    before = [call.body["reason"] for call in world.server.made("create", "events")]
    world.now += world.settings.usage_interval
    world.report(seen | {"heldMilli": 300})
    await world.look()
    assert world.status()["usage"]["heldMilli"] == 300
    assert not world.events._waiting
    assert [call.body["reason"] for call in world.server.made("create", "events")] == before


async def test_an_end_is_written_whatever_characters_it_quotes(world: World) -> None:
    message = "loss \U0001f4c9 \x7f\u2028 nan"
    ended = {"name": "main", "state": {"terminated": {"exitCode": 3, "reason": "Error", "message": message}}}
    world.pod_phase("Failed", containerStatuses=[ended])
    await world.look()
    assert world.status()["phase"] == "Failed"
    assert "loss \U0001f4c9 \ufffd\ufffd nan" in world.condition("PodReady")["message"]


@pytest.mark.promise("operator-usage-known")
async def test_usage_is_not_written_before_it_is_known_and_then_at_once(world: World) -> None:
    before = writes(world)
    for memory in (1 << 20, 6 << 30):
        world.now += 5
        world.report({"id": world.tenant, "connected": True, "memory": memory})
        await world.look()
        assert "usage" not in world.status()
    world.now += 1
    world.report({"id": world.tenant, "connected": True, "heldMilli": 400, "memory": 6 << 30})
    await world.look()
    assert world.status()["usage"]["heldMilli"] == 400
    assert writes(world) == before + 1


@pytest.mark.promise("operator-first-status")
@pytest.mark.parametrize(
    ("word", "phase"),
    [
        ({"spec": {"nodeName": "node-a"}, "status": {"phase": "Running"}}, "Running"),
        ({"spec": {}, "status": {"conditions": [REFUSED]}}, "Placed"),
    ],
)
async def test_the_first_status_of_a_run_is_written_once_its_pod_runs_or_is_refused(word: Json, phase: str) -> None:
    async with acting_world() as world:
        world.node()
        await world.placed()
        await world.look()
        world.change("pods", "one", lambda item: item["spec"].update(word["spec"]))
        await world.look()
        assert writes(world) == 0
        world.change("pods", "one", lambda item: item.update(status=word["status"]), status=True)
        await world.look()
        assert (writes(world), world.status()["phase"]) == (1, phase)
        world.now += 1
        await world.look()
        assert writes(world) == 1


@pytest.mark.promise("operator-first-status")
async def test_a_pod_that_takes_longer_than_a_second_to_start_is_shown_before() -> None:
    async with acting_world() as world:
        world.node()
        await world.placed()
        await world.look()
        world.change("pods", "one", lambda item: item["spec"].update(nodeName="node-a"))
        await world.look()
        assert (writes(world), world.looks_again(1.0)) == (0, True)
        world.now += 1
        await world.look()
        assert (writes(world), world.status()["phase"]) == (1, "Placed")
        assert world.condition("PodReady")["reason"] == "ContainersNotReady"
