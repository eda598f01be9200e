"""The full lists: what a list does not show is gone only once a GET has said so, of that very object."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from doubles.apiserver.server import ApiServer, api_server
from kubernetes.aio.client import Configuration
from sharepod.controller.apiserver.client import SHAREPODS, Client, Resource
from sharepod.controller.apiserver.resync import Resync
from sharepod.controller.state.agent_leases import AgentLeases
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.kube import Json
from unit.controller.objects import PODS, pod_object, sharepod_object


class SlowReader(Client):
    """A client between whose lists and what is made of them something can happen."""

    after_list: Callable[[Resource], None]

    async def list_all(self, resource: Resource, *arguments: Any, **options: Any) -> tuple[list[Json], str]:
        answer = await super().list_all(resource, *arguments, **options)
        self.after_list(resource)
        return answer


@dataclass
class World:
    """A cluster state that is filled by lists alone, and the API server that they come from."""

    server: ApiServer
    client: SlowReader
    state: ClusterState
    resync: Resync

    def create(self, plural: str, item: Json) -> Json:
        item["metadata"].pop("resourceVersion", None)
        return self.server.storage.create(self.server.kind(plural), "n", item)

    def delete(self, plural: str) -> None:
        """Delete the object `one`."""
        self.server.storage.delete(self.server.kind(plural), "n", "one")


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with api_server() as server:
        client = SlowReader(Configuration(host=server.url), read_timeout=5, write_timeout=5)
        client.after_list = lambda _resource: None
        state = ClusterState(PODS, AgentLeases(20.0, lambda: 0.0))
        yield World(server, client, state, Resync(state, client))
        await client.close()


async def test_an_object_that_is_made_while_its_list_is_read_is_kept(world: World) -> None:
    made: list[Json] = []

    def make(resource: Resource) -> None:
        if resource is SHAREPODS:
            made.append(world.create("sharepods", sharepod_object()))
            world.state.put_sharepod(made[0])  # as the watch does

    world.client.after_list = make
    await world.resync.relist()
    assert world.state.sharepods.uids() == {made[0]["metadata"]["uid"]}


async def test_an_object_that_is_gone_is_dropped_though_no_watch_said_so(world: World) -> None:
    world.create("sharepods", sharepod_object())
    await world.resync.relist()
    assert len(world.state.sharepods) == 1
    world.delete("sharepods")
    await world.resync.relist()
    assert world.state.sharepods.uids() == set()


async def test_a_pod_that_has_the_name_of_one_that_is_gone_is_not_taken_for_it(world: World) -> None:
    first = world.create("pods", pod_object())
    await world.resync.relist()
    assert world.state.pods.uids() == {first["metadata"]["uid"]}
    stranger = pod_object()
    del stranger["metadata"]["labels"], stranger["metadata"]["ownerReferences"]
    world.delete("pods")
    world.create("pods", stranger)
    await world.resync.relist()
    assert world.state.pods.uids() == set()
