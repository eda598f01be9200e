"""Several ResourceClaims of one Pod."""

from __future__ import annotations

import pytest
from sharepod.controller.state.facts.claim_facts import MAX_CLAIMS
from sharepod.controller.tenants import claim_reconciler
from unit.controller.acting_world import World
from unit.controller.tenants.claim_steps import lets_go, placed, running


@pytest.mark.promise("operator-claim-together")
async def test_claims_of_one_pod_go_to_one_node_or_none_is_placed(world: World) -> None:
    world.node("node-a")
    world.claim("first", 600)
    world.claim("second", 600)
    world.pod_with("first", "second")
    await world.look_at_claim("first")
    await world.look_at_claim("second")
    await world.until_answered(world.claim_uid("first"))
    assert world.rows() == {}, "one of them alone would fit"
    world.node("node-b", gpus=2)
    await placed(world, "first", "second")
    await world.look_at_claim("first")
    await world.look_at_claim("second")
    found = [world.allocation(name) for name in ("first", "second")]
    assert [item["devices"]["results"][0]["pool"] for item in found if item is not None] == ["node-b", "node-b"]
    gpus = [row["gpus"] for row in world.rows("node-b").values()]
    assert sorted(gpus) == [["GPU-node-b-0"], ["GPU-node-b-1"]]


async def test_a_pod_with_a_claim_that_is_not_there_gets_no_share_for_the_other(world: World) -> None:
    world.node()
    world.claim()
    world.pod_with("share", "later")
    await world.look_at_claim()
    assert world.loop.waiting() == ()
    world.claim("later")
    await placed(world, "share", "later")


@pytest.mark.promise("operator-claim-pod-needs")
async def test_a_pod_with_a_claim_that_is_not_there_keeps_no_other_from_the_one_that_they_share(world: World) -> None:
    world.node()
    world.claim()
    world.pod_with("share", "none", name="broken", priority=10)
    world.pod_with("share", name="whole")
    await placed(world)
    await world.look_at_claim()
    (consumer,) = (world.read("resourceclaims", "share") or {})["status"]["reservedFor"]
    assert consumer["name"] == "whole"


@pytest.mark.promise("operator-claim-pod-needs")
@pytest.mark.parametrize("what", ["invalid", "being deleted"])
async def test_a_pod_with_a_claim_that_gets_no_place_keeps_no_other_from_the_one_that_they_share(
    world: World, what: str
) -> None:
    world.node()
    world.claim()
    if what == "invalid":
        world.claim("other", annotations={"sharepod.dev/gpu-mode": "Half"})
    else:
        world.claim("other")
        world.change("resourceclaims", "other", lambda item: item["metadata"].update(finalizers=["example.com/keep"]))
        world.delete("resourceclaims", "other")
    world.pod_with("share", "other", name="broken", priority=10)
    world.pod_with("share", name="whole")
    await placed(world)
    await world.look_at_claim()
    (consumer,) = (world.read("resourceclaims", "share") or {})["status"]["reservedFor"]
    assert consumer["name"] == "whole"


@pytest.mark.promise("operator-claim-pod-needs")
async def test_a_claim_is_looked_at_when_another_of_its_pod_begins_to_be_deleted(world: World) -> None:
    world.node()
    uid = world.claim()
    world.claim("other")
    world.pod_with("share", "other")
    await world.see_claims()
    changed: list[str] = []
    world.state.seen_claims._on_changed = changed.append
    world.change("resourceclaims", "other", lambda item: item["metadata"].update(finalizers=["example.com/keep"]))
    await world.see_claims()
    changed.clear()
    world.delete("resourceclaims", "other")
    await world.see_claims()
    assert uid in changed


@pytest.mark.promise("operator-claim-pod-needs")
async def test_of_many_pods_that_cannot_be_placed_each_has_its_turn(world: World) -> None:
    world.node()
    world.claim()
    for number in range(40):
        world.pod_with("share", "none", name=f"broken{number}", priority=10)
    world.pod_with("share", name="whole")
    await world.look_at_claim(times=3)
    await placed(world)
    await world.look_at_claim()
    (consumer,) = (world.read("resourceclaims", "share") or {})["status"]["reservedFor"]
    assert consumer["name"] == "whole"


@pytest.mark.promise("operator-claim-pod-needs")
async def test_turns_begin_again_with_the_first_pods_and_end_where_there_are_no_others(world: World) -> None:
    world.node()
    world.claim()
    for number in range(17):
        world.pod_with("share", f"later{number}", name=f"p{number:02}")
    pauses = []
    for _ in range(2):
        await world.look_at_claim()
        pauses.append(world.due_in(world.claim_uid(), world.claims.queue) or 0.0)
        world.claims.queue.clear()
    assert 0.0 < pauses[0] <= 1.0 < pauses[1] <= 10.0
    world.claim("later3")
    await placed(world, "share", "later3")
    await world.look_at_claim()
    (consumer,) = (world.read("resourceclaims", "share") or {})["status"]["reservedFor"]
    assert consumer["name"] == "p03"


async def test_when_one_claim_of_a_pod_loses_its_place_the_other_goes_too(world: World) -> None:
    world.node("node-a", gpus=2)
    world.claim("first")
    world.claim("second")
    world.pod_with("first", "second")
    await placed(world, "first", "second")
    for name in ("first", "second"):
        await world.look_at_claim(name)
    world.deallocates("first")
    await world.look_at_claim("first")
    await lets_go(world, "second")
    await world.look_at_claim("first")
    assert world.allocation("second") is None
    await world.until(lambda: world.rows() == {})
    world.node("node-b", gpus=2)
    await placed(world, "first", "second")
    assert len(world.rows("node-b")) == 2


async def test_a_pod_is_placed_on_the_node_of_its_shared_claim(world: World) -> None:
    world.node("node-a")
    await running(world)
    world.node("node-b")
    world.claim("own", 100)
    world.pod_with("share", "own", name="second")
    await placed(world, "own")
    assert world.claim_uid("own") in world.rows("node-a")


@pytest.mark.parametrize("within", ["one container", "two containers"])
async def test_a_claim_that_a_pod_names_twice_is_one_claim(world: World, within: str) -> None:
    world.node("node-a")
    world.claim()
    used = [[{"name": "c0"}, {"name": "c1"}]] if within == "one container" else [[{"name": "c0"}], [{"name": "c1"}]]
    containers = [{"name": f"m{n}", "image": "i", "resources": {"claims": names}} for n, names in enumerate(used)]
    world.pod_with("share", "share", containers=containers)
    await placed(world, "share")
    await world.look_at_claim("share")
    assert world.allocation("share") is not None
    assert list(world.rows("node-a")) == [world.claim_uid("share")]


@pytest.mark.promise("operator-claim-listed")
async def test_a_pod_without_a_container_that_lists_its_claim_gets_an_event(world: World) -> None:
    world.node("node-a")
    world.claim()
    lists = {"name": "main", "image": "i", "resources": {"claims": [{"name": "c0"}]}}
    world.pod_with("share", name="idle", initContainers=[{"name": "first", "image": "i"}])
    world.pod_with("share", name="works", containers=[{"name": "side", "image": "i"}, lists])
    world.pod_with("share", name="starts", initContainers=[lists])
    await placed(world)
    await world.look_at_claim()
    await world.until(lambda: bool(world.notes("ClaimNotListed")))
    assert all("no container of pod idle lists it" in note for note in world.notes("ClaimNotListed"))
    assert world.allocation() is not None, "as with any claim of Kubernetes"


@pytest.mark.promise("operator-claim-one-each")
async def test_a_container_with_two_claims_gets_an_event_that_one_is_the_most(world: World) -> None:
    world.node("node-a", gpus=2)
    world.claim("first")
    world.claim("second")
    container = {"name": "main", "image": "i", "resources": {"claims": [{"name": "c0"}, {"name": "c1"}]}}
    world.pod_with("first", "second", containers=[container])
    await world.look_at_claim("first")
    await world.look_at_claim("second")
    await world.until(lambda: len(world.notes("Waiting")) == 4)
    assert all("container main uses two claims" in note for note in world.notes("Waiting"))
    assert world.rows() == {}


@pytest.mark.promise("operator-claim-most")
async def test_a_pod_with_more_claims_than_are_placed_together_gets_none_and_each_says_so(world: World) -> None:
    """The refusal is reported at the first reconciliation, even if some of the claims do not exist yet."""
    world.node("node-a", gpus=8)
    names = [f"c{number}" for number in range(MAX_CLAIMS + 1)]
    for name in names[1:]:
        world.claim(name, 10)
    world.pod_with(*names)
    await world.look_at_claim(names[1])
    assert world.loop.waiting() == ()
    await world.until(lambda: any("has 17 claims; write at most 16" in note for note in world.notes("Waiting")))
    world.pod_with(*names[1:], name="whole")
    await placed(world, *names[1:])


async def test_of_more_pods_than_a_claim_can_be_given_to_the_first_are_told(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the bound, each reconciliation wrote an Event for each of these Pods: with 2,000 Pods on a claim that has
    no place, each change of one Pod took 50 ms."""
    monkeypatch.setattr(claim_reconciler, "MOST_TOLD", 3)
    world.node("node-a")
    world.claim(memory="900Gi")
    for number in range(5):
        world.pod_with("share", name=f"p{number}", priority=-number)
    await world.look_at_claim()
    await world.until_answered(world.claim_uid())
    await world.look_at_claim()
    await world.until(lambda: len(world.notes("NeverFits")) == 4)
    events = world.server.storage.select(world.kind("events"), "")
    named = sorted(item["regarding"]["name"] for item in events if item["reason"] == "NeverFits")
    assert named == ["p0", "p1", "p2", "share"]
