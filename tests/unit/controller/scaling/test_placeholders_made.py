"""Placeholders over the API server double: created, marked and removed, also across restarts of the operator."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from sharepod.controller.scaling.placeholders import Placeholders
from sharepod.controller.settings import OperatorSettings
from sharepod.kube import ApiError, InvalidError, Json, UnavailableError
from unit.controller.acting_world import World, acting_world


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with acting_world() as made:
        made.node()
        yield made


def placeholders(world: World, **settings: Any) -> Placeholders:
    given = {"placeholders": 2, "placeholder_after": 0, "namespace": "system", **settings}
    return Placeholders(
        world.state,
        world.client,
        world.events,
        world.memos,
        world.loop,
        OperatorSettings(**given),
        acts=lambda: True,
        lines_in_force=lambda: True,
        clock=world._clock,
    )


def there(world: World) -> list[Json]:
    pods = world.server.storage.select(world.kind("pods"), "system")
    return [pod for pod in pods if "sharepod.dev/placeholder" in pod["metadata"].get("labels", {})]


async def without_room(world: World) -> None:
    """Let the SharePod `one` wait with reason NoRoom, because its node's agent reports no suitable GPU."""
    world.change("gpunodes", "node-a", lambda item: item["status"].update(gpus=[small()]), status=True)
    await world.gated(gpu={"memory": "8Gi"})
    world.place()
    await world.until_answered(world.tenant)


def small() -> Json:
    return World.gpu("node-a", memory=1 << 30)


@pytest.mark.promise("operator-placeholder", "operator-placeholder-ends")
async def test_a_share_without_room_has_one_that_says_unschedulable_until_it_is_placed(world: World) -> None:
    await without_room(world)
    made = placeholders(world)
    await made.look()
    (pod,) = there(world)
    assert pod["metadata"]["name"] == f"sharepod-placeholder-{world.tenant}"
    (condition,) = pod["status"]["conditions"]
    assert (condition["type"], condition["status"], condition["reason"]) == ("PodScheduled", "False", "Unschedulable")
    await made.look()
    assert there(world) == [pod], "nothing is written twice"
    world.loop.leave(world.tenant)
    await made.look()
    assert there(world) == []


async def test_a_share_that_asks_for_something_else_has_another(world: World) -> None:
    await without_room(world)
    made = placeholders(world)
    await made.look()
    (before,) = there(world)
    other = placeholders(world, holder_image="another")
    await other.look()
    await other.look()
    (after,) = there(world)
    assert after["metadata"]["uid"] != before["metadata"]["uid"]
    assert after["spec"]["containers"][0]["image"] == "another"


async def test_those_on_later_pages_of_the_list_are_seen_too(world: World) -> None:
    await without_room(world)
    for name in ("a", "b", "z"):
        labels = {"sharepod.dev/placeholder": f"old-{name}"}
        pod = {"metadata": {"name": name, "labels": labels}, "spec": {"containers": []}}
        world.server.storage.create(world.kind("pods"), "system", pod)
    world.client.page_size = 1
    await placeholders(world).look()
    assert [pod["metadata"]["name"] for pod in there(world)] == [f"sharepod-placeholder-{world.tenant}"]


async def test_a_next_leader_keeps_what_it_finds_until_it_has_decided(world: World) -> None:
    await without_room(world)
    await placeholders(world).look()
    (pod,) = there(world)
    world.memos.clear()
    follower = placeholders(world)
    await follower.look()
    assert there(world) == [pod], "it has decided nothing yet"
    world.now += 31
    await follower.look()
    assert there(world) == []


@pytest.mark.promise("operator-placeholder-limits")
async def test_a_next_leader_makes_no_more_than_the_limit_beside_those_that_it_keeps(world: World) -> None:
    await without_room(world)
    await placeholders(world).look()
    (pod,) = there(world)
    other = world.sharepod("two", gpu={"memory": "8Gi"})
    await world.look(other)
    await world.until_answered(other)
    world.memos.of(world.tenant).refusal = None  # the new operator has not decided about the first tenant yet
    follower = placeholders(world, placeholders=1)
    await follower.look()
    assert there(world) == [pod]
    world.now += 31
    await follower.look()
    assert [one["metadata"]["labels"]["sharepod.dev/placeholder"] for one in there(world)] == [other]


async def test_the_time_of_a_next_leader_begins_with_its_first_look(world: World) -> None:
    follower = placeholders(world)
    await follower.look()
    world.now += 31
    await without_room(world)
    await follower.look()
    assert len(there(world)) == 1
    world.memos.of(world.tenant).refusal = None
    await follower.look()
    assert there(world) == []


@pytest.mark.promise("operator-placeholder-node-comes")
async def test_while_a_node_has_told_no_gpus_nobody_asks_until_it_is_given_up(world: World) -> None:
    await without_room(world)
    made = placeholders(world, placeholder_for=100)
    await made.look()
    assert len(there(world)) == 1
    world.node("node-b", gpunode=False)
    await world.relist()
    await made.look()
    assert there(world) == []
    world.now += 101
    await made.look()
    world.now += 101
    await made.look()
    assert len(there(world)) == 1


async def test_with_the_setting_off_what_is_left_goes_and_then_nothing_is_asked(world: World) -> None:
    await without_room(world)
    await placeholders(world).look()
    off = placeholders(world, placeholders=0)
    off.clear()
    world.now += 31
    await off.look()
    world.now += 31
    await off.look()
    assert there(world) == []
    assert off._idle


@pytest.mark.parametrize(
    "refusal",
    [
        InvalidError("POST pods", 422, "Invalid", "no"),
        UnavailableError("POST pods", 500, "InternalError", 'admission webhook "w" denied the request: no'),
    ],
)
async def test_one_that_the_api_server_refuses_keeps_no_other_from_being_made(world: World, refusal: ApiError) -> None:
    await without_room(world)
    other = world.sharepod("two", gpu={"memory": "8Gi"})
    await world.look(other)
    await world.until_answered(other)
    create = world.client.create

    async def refusing(resource: Any, body: Json, *args: Any, **options: Any) -> Json:
        if world.tenant in body["metadata"]["name"]:
            raise refusal
        return await create(resource, body, *args, **options)

    world.client.create = refusing  # type: ignore[method-assign]
    await placeholders(world).look()
    assert [pod["metadata"]["labels"]["sharepod.dev/placeholder"] for pod in there(world)] == [other]
