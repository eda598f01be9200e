"""The end of one tenant: the record of its end, the agent's confirmation, and the live read precede the reassignment of
its share.
"""

from __future__ import annotations

from typing import Any

import pytest
from sharepod.kube import UnavailableError
from unit.controller.acting_world import NAMESPACE, World
from unit.controller.tenants.server_history import versions


async def test_an_end_is_on_record_before_the_release_begins(world: World) -> None:
    world.node()
    await world.running()
    world.pod_phase("Succeeded")
    await world.look()
    assert world.status()["phase"] == "Succeeded"
    assert world.rows()[world.tenant]["state"] == "Reserved"
    await world.look()
    await world.until(lambda: world.rows()[world.tenant]["state"] == "Releasing")
    ended = versions(world, "sharepods", lambda item: (item.get("status") or {}).get("phase") == "Succeeded")
    released = versions(
        world, "gpunodes", lambda item: any(row["state"] == "Releasing" for row in item["spec"].get("tenants", ()))
    )
    assert ended[0] < released[0]


@pytest.mark.promise("operator-released-means-gone")
async def test_a_share_is_given_away_once_the_agent_has_confirmed_that_nothing_is_left(world: World) -> None:
    await world.releasing()
    await world.look()
    assert world.tenant in world.rows(), "its agent has reported nothing yet"
    world.report({"id": world.tenant, "drained": True})
    await world.look()
    await world.until(lambda: world.tenant not in world.rows())
    assert world.status()["phase"] == "Succeeded"
    world.delete("sharepods")
    world.delete("pods")
    await world.look()
    assert world.memo.status_written is None, "the memo of a released tenant is empty"


async def test_a_report_of_an_earlier_ledger_confirms_nothing(world: World) -> None:
    world.node()
    await world.running()
    world.report({"id": world.tenant, "drained": True})
    world.pod_phase("Failed", message="boom")
    await world.look()
    await world.look()
    await world.until(lambda: world.rows()[world.tenant]["state"] == "Releasing")
    for _ in range(3):
        await world.look()
    assert world.tenant in world.rows()
    assert world.condition("PodReady")["message"] == "boom"


async def test_a_deleted_sharepod_ends_its_pod_first_then_its_share(world: World) -> None:
    world.node()
    await world.running()
    uid = (world.read("pods") or {})["metadata"]["uid"]
    world.delete("sharepods")
    await world.look()
    (deleted,) = world.server.made("delete", "pods")
    assert deleted.body["preconditions"] == {"uid": uid}
    await world.look()
    assert world.rows()[world.tenant]["state"] == "Reserved", "its pod is still there"
    world.pod_gone()
    await world.look()
    await world.until(lambda: world.rows()[world.tenant]["state"] == "Releasing")


async def test_a_release_does_not_begin_under_a_pod_that_only_the_api_server_knows(world: World) -> None:
    world.node()
    await world.running()
    world.delete("sharepods")
    await world.relist()
    world.loses_sight_of_the_pod()
    await world.tenants.reconcile(world.tenant)
    assert world.looks_again(1.0)
    assert world.rows()[world.tenant]["state"] == "Reserved"
    assert world.state.pod_of(world.tenant) is not None, "the live read has brought it"


async def test_a_sharepod_lost_only_by_a_watch_is_not_deleted(world: World) -> None:
    world.node()
    await world.running()
    world.state.drop_sharepod(world.tenant, int((world.read("sharepods") or {})["metadata"]["resourceVersion"]))
    await world.tenants.reconcile(world.tenant)
    assert world.state.sharepods.get(world.tenant) is not None
    assert world.server.made("delete", "pods") == []


async def test_a_sharepod_survives_a_while_in_which_its_kind_is_not_served(world: World) -> None:
    """An API server that has just started answers 404 until it has read the CRDs."""
    world.node()
    await world.running()
    version = int((world.read("sharepods") or {})["metadata"]["resourceVersion"])
    world.state.drop_sharepod(world.tenant, version)
    world.server.unserved.add("sharepods")
    with pytest.raises(UnavailableError, match="NotServed"):
        await world.tenants.reconcile(world.tenant)
    assert world.server.made("delete", "pods") == []
    assert not world.memo.tenant_deleted
    world.server.unserved.clear()
    await world.look()
    assert world.status()["phase"] == "Running"
    assert world.rows()


async def test_the_end_of_a_sharepod_is_confirmed_once_and_that_of_its_pod_was_seen(world: World) -> None:
    """A deletion takes five reconciliations. Without the cache, each of them would read the SharePod again."""
    world.node()
    await world.running()
    world.delete("sharepods")
    before = len(world.server.calls)
    for _ in range(3):
        await world.look()
    world.pod_gone()
    await world.look()
    await world.until(lambda: world.rows()[world.tenant]["state"] == "Releasing")
    for drained in (False, True):
        world.report({"id": world.tenant, "drained": drained})
        await world.look()
    await world.until(lambda: world.tenant not in world.rows())
    made = [f"{call.verb} {call.kind.plural}" for call in world.server.calls[before:] if call.verb != "list"]
    assert sorted(made) == ["delete pods", "get sharepods", "patch gpunodes", "patch gpunodes"]


async def test_a_pod_that_has_left_the_watch_but_was_not_deleted_is_asked_for(world: World) -> None:
    """A watch also sends DELETED for a Pod that has only lost its label."""
    world.node()
    await world.running()
    world.delete("sharepods")
    world.state.drop_sharepod(world.tenant, world.server.storage.version, deleted=True)
    pod = world.read("pods") or {}
    world.state.drop_pod(pod["metadata"]["uid"], pod, int(pod["metadata"]["resourceVersion"]))
    await world.tenants.reconcile(world.tenant)
    assert len(world.server.made("get", "pods")) == 1
    assert world.rows()[world.tenant]["state"] == "Reserved", "it is there"


@pytest.mark.promise("operator-restored-backup")
async def test_a_pod_of_a_history_that_no_longer_exists_is_not_lost_but_made_again(world: World) -> None:
    world.node()
    world.sharepod()
    backup = world.server.storage.backup()
    await world.look()
    await world.until(lambda: world.tenant in world.rows())
    await world.look()
    world.pod_phase("Running", node="node-a")
    await world.look()
    assert world.status()["phase"] == "Running"
    world.server.storage.restore(backup)
    world.memos.clear()
    await world.relist()
    assert world.tenant not in world.state._pods_of, "nothing of that Pod is left"
    await world.look()
    await world.until(lambda: world.tenant in world.rows())
    await world.look()
    world.now += 1
    await world.look()
    assert world.status()["phase"] == "Placed"
    assert world.read("pods") is not None


async def test_a_deletion_that_the_watch_has_shown_is_not_asked_for(world: World) -> None:
    world.node()
    await world.running()
    world.delete("sharepods")
    world.state.drop_sharepod(world.tenant, world.server.storage.version, deleted=True)
    await world.tenants.reconcile(world.tenant)
    assert world.server.made("get", "sharepods") == []
    assert len(world.server.made("delete", "pods")) == 1


async def test_a_pod_is_ended_whose_sharepod_was_replaced_by_another_of_that_name(world: World) -> None:
    world.node()
    await world.running()
    former = world.tenant
    world.delete("sharepods")
    world.sharepod()
    assert world.tenant != former
    await world.look(former)
    assert len(world.server.made("delete", "pods")) == 1
    world.pod_gone()
    await world.look(former)
    await world.until(lambda: world.rows()[former]["state"] == "Releasing")


async def test_a_row_without_any_sharepod_or_pod_is_released(world: World) -> None:
    world.node()
    row = {
        "id": "stray",
        "namespace": NAMESPACE,
        "podName": "stray",
        "state": "Reserved",
        "gpus": ["GPU-node-a-0"],
        "requestMilli": 100,
        "limitMilli": 100,
        "memory": 1 << 30,
    }
    world.change("gpunodes", "node-a", lambda item: item["spec"].update(tenants=[row]))
    await world.look("stray")
    await world.until(lambda: world.rows()["stray"]["state"] == "Releasing")


async def test_a_pod_without_its_row_ends_only_after_a_live_read_misses_it_too(world: World) -> None:
    world.node()
    await world.running()
    kept = (world.read("gpunodes", "node-a") or {})["spec"]["tenants"]
    world.change("gpunodes", "node-a", lambda item: item["spec"].update(tenants=[]))
    await world.relist()
    world.change("gpunodes", "node-a", lambda item: item["spec"].update(tenants=kept))
    await world.tenants.reconcile(world.tenant)
    assert world.status()["phase"] == "Running"
    assert world.looks_again(1.0)
    world.change("gpunodes", "node-a", lambda item: item["spec"].update(tenants=[]))
    await world.look()
    assert world.status()["phase"] == "Failed"
    assert world.condition("PodReady")["reason"] == "ReservationLost"


async def test_a_pod_that_vanished_ends_its_sharepod_only_if_the_api_server_misses_it_too(world: World) -> None:
    world.node()
    await world.running()
    world.loses_sight_of_the_pod()
    await world.tenants.reconcile(world.tenant)
    assert world.status()["phase"] == "Running"
    world.delete("pods")
    world.pod_gone()
    await world.look()
    assert (world.status()["phase"], world.condition("PodReady")["reason"]) == ("Failed", "PodLost")


@pytest.mark.promise("operator-override-node")
async def test_a_share_on_a_deleted_node_is_reassigned_and_reported_to_administrators(world: World) -> None:
    world.node()
    await world.running()
    world.delete("sharepods")
    world.delete("pods")
    world.pod_gone()
    world.server.storage.delete(world.kind("nodes"), "", "node-a")
    await world.look_at_node()
    await world.look()
    await world.until(lambda: world.rows()[world.tenant]["state"] == "Releasing")
    await world.look()
    await world.until(lambda: world.tenant not in world.rows())
    await world.until(lambda: any("the Node is deleted" in note for note in world.notes("ShareGivenAway")))


async def test_a_share_on_a_node_that_came_back_is_not_given_away(world: World) -> None:
    world.node()
    await world.running()
    world.delete("sharepods")
    world.delete("pods")
    world.pod_gone()
    await world.look()
    await world.until(lambda: world.rows()[world.tenant]["state"] == "Releasing")
    await world.relist()
    node = world.state.nodes.named("node-a")
    assert node is not None
    world.state.drop_node(node.uid, node.version)
    world.state.node_is_gone("node-a")
    await world.tenants.reconcile(world.tenant)
    assert world.looks_again(1.0)
    assert world.tenant in world.rows()
    assert world.state.gone_nodes == set()


async def test_a_row_is_removed_by_one_write_however_often_it_is_looked_at(world: World) -> None:
    world.node()
    await world.running()
    world.delete("sharepods")
    world.delete("pods")
    world.pod_gone()
    world.change("nodes", "node-a", lambda item: item["spec"].update(taints=[OUT_OF_SERVICE]))
    await world.look()
    await world.until(lambda: world.rows()[world.tenant]["state"] == "Releasing")
    before = len(world.server.made("patch", "gpunodes"))
    await world.relist()
    for _ in range(3):
        await world.tenants.reconcile(world.tenant)
    await world.until(lambda: world.tenant not in world.rows())
    assert len(world.server.made("patch", "gpunodes")) == before + 1
    await world.until(lambda: any("out of service" in note for note in world.notes("ShareGivenAway")))


OUT_OF_SERVICE = {"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}


async def test_nothing_is_concluded_while_a_row_cannot_be_read(world: World) -> None:
    world.node()
    await world.running()
    raw = world.read("gpunodes", "node-a") or {}
    raw["spec"]["tenants"][0]["state"] = "Borrowed"
    raw["metadata"]["resourceVersion"] = str(world.server.storage.version + 1)
    world.state.put_gpunode(raw)
    world.delete("pods")
    world.pod_gone()
    world.state.drop_pod((world.state.pod_of(world.tenant) or _absent()).uid)
    before = world.server.storage.version
    await world.tenants.reconcile(world.tenant)
    assert world.server.storage.version == before
    assert world.status()["phase"] == "Running"


def _absent() -> Any:
    raise AssertionError("no such pod")


async def test_force_release_gives_a_share_away_under_a_pod_that_hangs(world: World) -> None:
    world.node()
    await world.running()
    world.delete("sharepods")
    await world.look()
    world.change(
        "gpunodes",
        "node-a",
        lambda item: item["metadata"].update(annotations={"sharepod.dev/force-release": world.tenant}),
    )
    await world.look()
    await world.until(lambda: world.tenant not in world.rows())
    await world.until(lambda: any("force-release" in note for note in world.notes("ShareGivenAway")))
