"""One tenant from its first reconciliation until it runs, with an API server that answers late and loses answers."""

from __future__ import annotations

import pytest
from doubles.apiserver.errors import Refused
from sharepod.kube import UnavailableError
from unit.controller.acting_world import World, acting_world
from unit.controller.tenants.server_history import gates


async def test_a_sharepod_gets_a_gated_pod_then_a_row_then_an_open_gate_then_a_status(world: World) -> None:
    world.node()
    await world.gated()
    made = world.read("pods")
    assert made is not None
    assert gates(world) == ["sharepod.dev/share"]
    (created,) = world.server.made("create", "pods")
    assert created.query == {"fieldValidation": "Strict"}
    assert world.rows() == {}, "the pod comes first"
    world.place()
    await world.until(lambda: world.tenant in world.rows())
    row = world.rows()[world.tenant]
    assert row["podUID"] == made["metadata"]["uid"]
    assert gates(world) == ["sharepod.dev/share"], "the gate opens only once the row is written"
    assert world.status() == {}, "nothing is shown before the ledger has it"
    await world.look()
    opened = world.read("pods")
    assert opened is not None
    assert gates(world) == []
    assert opened["metadata"]["annotations"]["sharepod.dev/gpus"] == ",".join(row["gpus"])
    assert world.status() == {}, "the Pod's start is waited for, a second at most"
    assert world.looks_again(1.0)
    world.now += 1
    await world.look()
    assert (world.status()["phase"], world.status()["podUID"]) == ("Placed", made["metadata"]["uid"])
    assert world.condition("Placed")["reason"] == "Reserved"
    world.pod_phase("Running", conditions=[{"type": "Ready", "status": "True"}])
    await world.look()
    assert world.status()["phase"] == "Running"
    assert world.condition("PodReady")["status"] == "True"


@pytest.mark.promise("operator-five-writes")
async def test_a_life_to_running_takes_four_writes_an_event_and_no_read(world: World) -> None:
    world.node()
    await world.running(started="2026-01-01T00:00:00Z")
    await world.until(lambda: len(world.notes("Started")) == 1)
    writes = [(call.verb, call.kind.plural) for call in world.server.calls if call.verb not in ("list", "watch", "get")]
    writes.remove(("create", "events"))
    assert writes == [
        ("create", "pods"),
        ("patch", "gpunodes"),
        ("patch", "pods"),
        ("patch", "sharepods"),
    ]
    assert world.server.made("get", "pods") == []


@pytest.mark.promise("operator-large-sharepods")
async def test_the_pod_of_a_large_sharepod_is_made_of_it_as_it_is_now_and_never_of_an_older_one(world: World) -> None:
    world.node()
    await world.relist()
    world.sharepod(containers=[{"name": "main", "image": "i", "args": ["x" * 20_000]}])
    await world.relist()
    world.change("sharepods", "one", lambda item: item["spec"]["containers"][0].update(args=["y" * 20_000]))
    await world.tenants.reconcile(world.tenant)
    assert world.read("pods") is None, "the spec has changed since the read"
    await world.look()
    made = world.read("pods")
    assert made is not None
    assert made["spec"]["containers"][0]["args"] == ["y" * 20_000]
    assert len(world.server.made("get", "sharepods")) == 2
    world.delete("pods")
    world.delete("sharepods")
    await world.tenants.reconcile(world.tenant)
    assert world.read("pods") is None


async def test_a_pod_that_waits_for_room_says_so_and_is_made_again_if_somebody_deletes_it(world: World) -> None:
    await world.gated()
    world.place()
    while world.memo.refusal is None:
        await world.look()
    await world.look()
    assert (world.status()["phase"], world.status()["podName"]) == ("Pending", "one")
    assert "podUID" not in world.status(), "it has not run"
    assert world.condition("PodReady")["reason"] == "SchedulingGated"
    former = (world.read("pods") or {})["metadata"]["uid"]
    world.delete("pods")
    await world.look()
    await world.look()
    assert (world.read("pods") or {})["metadata"]["uid"] != former
    assert world.status()["phase"] == "Pending"


@pytest.mark.promise("operator-deletion-calls")
async def test_a_pod_is_deleted_once_while_its_watch_has_not_shown_it(world: World) -> None:
    world.node()
    await world.running()
    world.delete("sharepods")
    await world.look()
    await world.tenants.reconcile(world.tenant)
    assert len(world.server.made("delete", "pods")) == 1
    assert world.looks_again(within=10)
    world.now += 10
    await world.tenants.reconcile(world.tenant)
    assert len(world.server.made("delete", "pods")) == 2, "the watch has shown nothing for long: asked for again"


@pytest.mark.promise("operator-pod-first")
async def test_placement_goes_by_the_pod_as_admission_made_it(world: World) -> None:
    world.node("node-a")
    world.node("node-b")
    await world.gated()
    world.change("pods", "one", lambda item: item["spec"].update(nodeSelector={"kubernetes.io/hostname": "node-b"}))
    await world.look()
    world.place()
    await world.until(lambda: world.tenant in world.rows("node-b"))


async def test_a_gate_opened_by_another_is_not_opened_again(world: World) -> None:
    world.node()
    await world.placed()
    await world.relist()
    world.change("pods", "one", lambda item: item["spec"].pop("schedulingGates"))
    await world.tenants.reconcile(world.tenant)
    assert world.looks_again(1.0)
    pod = world.state.pod_of(world.tenant)
    assert pod is not None
    assert not pod.waits_for_share, "the refused patch is followed by a live read"
    assert (world.read("pods") or {})["metadata"]["annotations"]["sharepod.dev/gpus"] == "void"


async def test_what_the_answer_to_an_opened_gate_shows_besides_is_looked_at(world: World) -> None:
    world.node()
    await world.placed()
    await world.relist()
    world.change("pods", "one", lambda item: item.update(status={"phase": "Failed", "reason": "Shutdown"}), status=True)
    await world.tenants.reconcile(world.tenant)
    assert gates(world) == []
    assert world.looks_again(0)
    await world.look()
    assert world.status()["phase"] == "Failed"


@pytest.mark.parametrize("write", ["create", "open_gate"])
async def test_a_write_that_its_watch_shows_before_it_is_answered_costs_no_further_turn(
    world: World, monkeypatch: pytest.MonkeyPatch, write: str
) -> None:
    world.node()
    if write == "create":
        world.sharepod()
    else:
        await world.placed()
    await world.relist()
    queue, control = world.tenants.queue, world.tenants._pod_control
    do = getattr(control, write)

    async def seen_first(*arguments: object) -> object:
        answer = await do(*arguments)
        queue.add(world.tenant)
        return answer

    monkeypatch.setattr(control, write, seen_first)
    queue._running.begin(world.tenant, "n", 0.0)
    await world.tenants.reconcile(world.tenant)
    assert (write == "create") == bool(gates(world))
    assert world.tenant not in queue._again


async def test_a_pod_whose_row_is_on_record_is_not_made_again(world: World) -> None:
    world.node()
    await world.placed()
    world.delete("pods")
    await world.look()
    assert (world.status()["phase"], world.condition("PodReady")["reason"]) == ("Failed", "PodLost")


async def test_looking_again_changes_nothing(world: World) -> None:
    world.node()
    await world.running()
    before = world.server.storage.version
    for _ in range(3):
        await world.look()
    assert world.server.storage.version == before


async def test_a_pod_that_was_created_with_its_answer_lost_is_adopted(world: World) -> None:
    world.node()
    world.sharepod()
    world.server.fail("create", "pods", lose_answer=True)
    with pytest.raises(UnavailableError):
        await world.look()
    assert "podUID" not in world.status()
    await world.look()
    await world.until(lambda: world.tenant in world.rows())
    await world.look()
    world.now += 1
    await world.look()
    assert world.status()["podUID"] == (world.read("pods") or {})["metadata"]["uid"]
    assert len(world.server.storage.select(world.kind("pods"), "")) == 1


@pytest.mark.promise("operator-crash")
async def test_a_pod_of_another_operator_is_adopted_not_created_twice(world: World) -> None:
    await world.gated()
    memo = world.memo
    world.state.drop_pod((world.read("pods") or {})["metadata"]["uid"])
    world.state.pods._ended.clear()  # the state is now as if the watch had never shown the end
    world.state.lost_pods.clear()
    await world.tenants.reconcile(world.tenant)
    assert len(world.server.made("create", "pods")) == 2
    assert len(world.server.storage.select(world.kind("pods"), "")) == 1
    assert world.state.pod_of(world.tenant) is not None
    assert memo.blocked is None


async def test_another_share_is_granted_in_place(world: World) -> None:
    world.node()
    await world.running()
    world.change("sharepods", "one", lambda item: item["spec"]["gpu"].update(request=0.6))
    await world.look()
    await world.until(lambda: world.rows()[world.tenant]["requestMilli"] == 600)
    await world.look()
    assert world.condition("Resized")["reason"] == "Granted"
    assert world.status()["granted"]["requestMilli"] == 600
    assert len(world.server.made("create", "pods")) == 1


@pytest.mark.parametrize("policy", ["Never", "Always"])
async def test_a_share_that_does_not_fit_is_refused_until_the_wish_is_withdrawn(world: World, policy: str) -> None:
    world.node()
    await world.running(restartPolicy=policy)
    neighbour = world.sharepod("two", request=0.5)
    await world.look(neighbour)
    await world.look(neighbour)
    await world.until(lambda: neighbour in world.rows())
    world.change("sharepods", "one", lambda item: item["spec"]["gpu"].update(request=0.9))
    await world.look()
    while world.memo.resize_refusal is None:
        await world.look()
    world.now += 1
    await world.look()
    assert world.condition("Resized")["status"] == "False"
    assert world.rows()[world.tenant]["requestMilli"] == 400
    warning = "With request 0.9 in the spec, the next run is not placed until that fits."
    assert world.condition("Resized")["message"].endswith(warning) is (policy == "Always")
    world.change("sharepods", "one", lambda item: item["spec"]["gpu"].update(request=0.4))
    world.now += 1
    await world.look()
    assert world.memo.resize_refusal is None
    assert world.condition("Resized")["status"] == "True"


async def test_a_decision_for_a_deleted_sharepod_is_dropped(world: World) -> None:
    world.node()
    held = world.server.fail("patch", "gpunodes", refusal=Refused(503, "ServiceUnavailable", "try again"), times=99)
    await world.gated()
    world.place()
    while not world.state.cluster.reservations("node-a"):
        await world.look()
    world.delete("sharepods")
    await world.look()
    assert not world.state.cluster.reservations("node-a")
    assert world.looks_again(0)
    held.times = 0


@pytest.mark.promise("security-annotations", "operator-annotations-told")
async def test_annotations_that_the_pod_does_not_get_are_told(world: World) -> None:
    world.node()
    world.sharepod()
    given = {"example.com/b": "1", "example.com/a": "2", "prometheus.io/scrape": "true"}
    world.change("sharepods", "one", lambda item: item["metadata"].update(annotations=given))
    await world.look()
    pod = world.read("pods")
    assert pod is not None
    assert pod["metadata"]["annotations"].keys() == {"prometheus.io/scrape", "sharepod.dev/gpus"}
    await world.until(lambda: len(world.notes("AnnotationsNotCopied")) == 1)
    assert world.notes("AnnotationsNotCopied")[0].endswith(": example.com/a, example.com/b")


async def test_an_invalid_sharepod_says_what_is_wrong_and_takes_nothing(world: World) -> None:
    world.node()
    world.sharepod(gpu={"limit": 0.2})
    await world.look()
    placed = world.condition("Placed")
    assert (placed["status"], placed["reason"]) == ("False", "Invalid")
    assert "limit" in placed["message"]
    assert world.rows() == {}


async def test_a_pod_whose_share_is_not_enforced_is_evicted_and_its_sharepod_says_so() -> None:
    async with acting_world(unenforced_policy="Evict", unenforced_grace=30) as world:
        world.node()
        await world.running()
        finding = {"reason": "ProcessWithoutHook", "message": "process 7 uses the GPU without the hook"}
        world.now += 1
        world.report({"id": world.tenant, "enforced": False, "findings": [finding]})
        await world.look()
        assert world.looks_again(30)
        assert world.condition("Enforced")["reason"] == "ProcessWithoutHook"
        world.now += 30
        await world.look()
        assert len(world.server.made("evict", "pods")) == 1
        assert world.looks_again(0), "to show it"
        await world.look()
        assert world.condition("PodReady")["reason"] == "Evicted"
        world.pod_gone()
        await world.look()
        assert (world.status()["phase"], world.condition("PodReady")["reason"]) == ("Failed", "Evicted")
