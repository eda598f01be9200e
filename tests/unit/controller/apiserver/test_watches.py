"""The watches of all kinds together: what they put into the state, when they count as fresh, and when they have
caught up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from doubles.apiserver.errors import Refused
from doubles.apiserver.server import ApiServer, Fault, api_server
from kubernetes.aio.client import Configuration
from sharepod.api.objects import POOL_LABEL, TENANT_LABEL
from sharepod.controller import metrics
from sharepod.controller.apiserver.client import Client
from sharepod.controller.apiserver.watch_freshness import BELIEF_S
from sharepod.controller.apiserver.watches import Watches
from sharepod.controller.state.agent_leases import AgentLeases
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.kube import Json
from unit.controller.objects import PODS

PATIENCE_S = 30.0
DEEP = b'{"a":' * 50_000 + b"1" + b"}" * 50_000


class World:
    """All watches of an API server, on a clock that a test advances."""

    def __init__(self, server: ApiServer) -> None:
        self.now = 1000.0
        self.server = server
        self.client = Client(Configuration(host=server.url), read_timeout=60, write_timeout=60)
        self.state = ClusterState(PODS, AgentLeases(20.0, lambda: self.now))
        self.leases: list[str] = []
        self.replaced = 0
        self.watches = Watches(
            self.state,
            self.client,
            namespace="system",
            on_lease=lambda raw: self.leases.append(raw["metadata"]["name"]),
            on_replaced=self._replaced,
            clock=lambda: self.now,
        )

    def _replaced(self) -> None:
        self.replaced += 1

    def create(self, plural: str, name: str, namespace: str = "", **fields: Any) -> Json:
        metadata = {"name": name, "labels": fields.pop("labels", {})}
        return self.server.storage.create(self.server.kind(plural), namespace, {"metadata": metadata, **fields})

    def sharepod(self, name: str) -> Json:
        return self.create(
            "sharepods", name, "n", spec={"gpu": {"request": 0.4}, "containers": [{"name": "c", "image": "i"}]}
        )

    def pod_of(self, sharepod: Json) -> Json:
        uid = sharepod["metadata"]["uid"]
        return self.create(
            "pods", sharepod["metadata"]["name"], "n", labels={TENANT_LABEL: uid}, spec={"containers": []}
        )

    async def list_all(self) -> None:
        for reflector in self.watches.all:
            await reflector.list_all()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(reflector.run()) for reflector in self.watches.all]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with api_server() as server:
        made = World(server)
        yield made
        server.silent.clear()
        await made.client.close()


async def test_all_kinds_are_made_known(world: World) -> None:
    world.create("nodes", "node-a", labels={POOL_LABEL: "dedicated"}, spec={})
    world.create("nodes", "elsewhere", spec={})
    world.create("gpunodes", "node-a", spec={"pool": "dedicated"})
    sharepod = world.sharepod("one")
    world.pod_of(sharepod)
    world.create("pods", "other", "n", spec={"nodeName": "node-a", "containers": []})
    world.create("leases", "sharepod-operator", "system", spec={})
    world.create("namespaces", "n", status={"phase": "Active"})
    world.create("namespaces", "ending", status={"phase": "Terminating"})
    await world.list_all()
    assert ["n" in world.state.ending_namespaces, "ending" in world.state.ending_namespaces] == [False, True]
    assert [item.name for item in world.state.nodes] == ["node-a"]
    assert [item.name for item in world.state.gpunodes] == ["node-a"]
    assert world.state.sharepods.uids() == {sharepod["metadata"]["uid"]}
    assert world.state.pod_of(sharepod["metadata"]["uid"]) is not None
    assert list(world.state.other_pods.versions().values()) == [world.server.storage.version - 3]
    assert world.leases == ["sharepod-operator"]
    world.server.storage.finish_deletion(world.server.kind("pods"), "n", "other")
    await world.watches.other_pods.list_all()
    assert world.state.other_pods.versions() == {}


@pytest.mark.promise("operator-unreadable-object")
@pytest.mark.parametrize("served", [True, False])  # a CRD is not served in the first seconds of an API server
async def test_a_kind_whose_versions_hide_that_they_went_back_is_replaced_with_the_others(
    world: World, served: bool
) -> None:
    storage, where = world.server.storage, (world.server.kind("gpunodes"), "", "node-a")
    world.create("gpunodes", "node-a", spec={"pool": "dedicated"})
    async with world.running(), asyncio.timeout(PATIENCE_S):
        while not all(reflector.listed for reflector in world.watches.all):  # noqa: ASYNC110 - the test polls
            await asyncio.sleep(0.01)
        backup = storage.backup()
        row = {"id": "t", "namespace": "n", "podName": "t", "gpus": ["GPU-1"], "requestMilli": 400, "limitMilli": 400}
        storage.update(*where, lambda item: item | {"spec": {"pool": "dedicated", "tenants": [row | {"memory": 1}]}})
        for number in range(20):  # these writes make the versions of the Leases later than the versions of the GPUNodes
            world.create("leases", f"before-{number}", "system", spec={})
        while not next(iter(world.state.gpunodes)).rows or len(world.leases) < 20:  # noqa: ASYNC110 - the test polls
            await asyncio.sleep(0.01)
        if not served:
            world.server.unserved.add("gpunodes")
            world.server.cut_watches("gpunodes")
        while world.watches.gpunodes.listed is not served:  # noqa: ASYNC110 - the test polls
            await asyncio.sleep(0.01)
        storage.restore(backup)
        # the GPUNodes' version rises above its former value, which hides the restore; the Leases' version stays below
        for number in range(10):
            world.create("nodes", f"after-{number}", labels={POOL_LABEL: "dedicated"}, spec={})
        world.server.cut_watches()
        while not world.replaced:  # noqa: ASYNC110 - the test polls
            await asyncio.sleep(0.01)
        for number in range(20):
            world.create("leases", f"later-{number}", "system", spec={})
        world.server.unserved.clear()
        while next(iter(world.state.gpunodes)).rows or len(world.state.nodes) < 10:  # noqa: ASYNC110 - the test polls
            await asyncio.sleep(0.01)
    assert world.replaced == 1


async def test_who_owns_what_cannot_be_read_is_told_and_what_was_known_is_kept(world: World) -> None:
    node = world.create("nodes", "node-a", labels={POOL_LABEL: "dedicated"}, spec={})
    row = {"id": "t", "namespace": "n", "podName": "t", "gpus": ["GPU-1"], "requestMilli": 400}
    row |= {"limitMilli": 400, "memory": 1 << 30, "state": "Reserved"}
    gpunode = world.create("gpunodes", "node-a", spec={"pool": "dedicated", "tenants": [row]})
    sharepod = world.sharepod("one")
    await world.list_all()
    before = world.state.gpunodes.named("node-a")
    assert before is not None
    for raw in (node, gpunode, sharepod):
        kind = world.server.kind({"Node": "nodes", "GPUNode": "gpunodes", "SharePod": "sharepods"}[raw["kind"]])
        where = (kind, raw["metadata"].get("namespace", ""), raw["metadata"]["name"])
        world.server.storage.spoil(raw, DEEP)
        world.server.storage.update(*where, lambda item: item | {"spec": item["spec"] | {"unschedulable": True}})
        world.server.storage.update(
            *where, lambda item: item | {"metadata": item["metadata"] | {"labels": {POOL_LABEL: "dedicated", "x": "y"}}}
        )
    await world.list_all()
    facts = world.state.sharepods.get(sharepod["metadata"]["uid"])
    assert facts is not None
    assert facts.gpu is None
    assert "the object is nested too deep" in str(facts.error)
    kept, found = world.state.gpunodes.named("node-a"), world.state.nodes.named("node-a")
    assert kept is not None
    assert kept.rows == before.rows
    assert "too deep" in (kept.ledger_error or "")
    assert found is not None
    assert "too deep" in (found.error or "")


@pytest.mark.promise("operator-no-blind-placement")
async def test_the_watches_are_believed_until_one_was_silent_for_too_long(world: World) -> None:
    assert not world.watches.believed()
    await world.list_all()
    assert world.watches.believed()
    world.now += BELIEF_S - 1
    assert world.watches.believed()
    for reflector in world.watches.all[1:]:
        await reflector.list_all()
    world.now += 1.5
    assert not world.watches.believed()
    assert world.watches.stale() == ["nodes"]
    await world.watches.nodes.list_all()
    assert world.watches.believed()


async def test_an_object_whose_version_went_back_is_ignored_until_its_replacement(world: World) -> None:
    backup = world.server.storage.backup()
    world.sharepod("one")
    await world.list_all()
    assert world.watches.believed()
    world.server.storage.restore(backup)
    world.server.unserved.add("sharepods")
    world.watches.sharepods._invalidate()
    assert (world.replaced, world.watches.believed()) == (1, False)
    world.server.unserved.clear()
    await world.list_all()
    assert world.watches.believed()
    assert len(world.state.sharepods) == 0


async def test_to_catch_up_is_to_have_opened_each_watch_and_taken_in_what_it_says(world: World) -> None:
    async with world.running(), asyncio.timeout(PATIENCE_S):
        await world.watches.catch_up()
        opened = len([call for call in world.server.calls if call.verb == "watch"])
        world.server.silent.add("sharepods")
        world.sharepod("one")
        world.now += 1.0
        await asyncio.sleep(0.05)
        world.server.silent.clear()
        assert len(world.state.sharepods) == 0
        await world.watches.catch_up()
        assert len(world.state.sharepods) == 1
        assert len([call for call in world.server.calls if call.verb == "watch"]) >= opened + len(world.watches.all)


async def test_a_relist_has_caught_up_only_at_the_end_of_its_list(world: World) -> None:
    world.client.page_size = 1
    for number in range(3):
        world.sharepod(f"old-{number}")
    second, third = asyncio.Event(), asyncio.Event()
    pages = [
        Fault(lambda call: call.kind.plural == "sharepods" and "continue" in call.query, hold=held)
        for held in (second, third)
    ]
    async with world.running(), asyncio.timeout(PATIENCE_S):
        await world.watches.catch_up()
        world.server.faults += pages
        world.server.cut_watches("sharepods", error=Refused(410, "Expired", "too old resource version"))
        while pages[0].times:  # noqa: ASYNC110 - until it was asked for
            await asyncio.sleep(0.01)
        world.now += 1.0
        catching_up = asyncio.create_task(world.watches.catch_up())
        await asyncio.sleep(0)
        second.set()
        while pages[1].times:  # noqa: ASYNC110 - as above; the second has arrived
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert not catching_up.done()
        third.set()
        await catching_up


async def test_a_sharepod_and_its_pod_are_timed_if_the_watch_brings_them(world: World) -> None:
    def observed() -> tuple[float, float]:
        samples = {
            sample.name.rpartition("_")[2]: sample.value
            for sample in next(iter(metrics.APPLY_TO_POD_SECONDS.collect())).samples
            if not sample.labels
        }
        return samples["count"], samples["sum"]

    world.pod_of(world.sharepod("old"))
    count, total = observed()
    await world.list_all()
    late = world.sharepod("late")
    await world.watches.sharepods.list_all()
    world.now += 3.0
    world.pod_of(late)
    for _ in range(2):
        await world.watches.pods.list_all()
    assert observed() == (count + 1, total + 3.0)


async def test_only_a_deletion_that_the_watch_shows_needs_no_other_proof(world: World) -> None:
    kind = world.server.kind("sharepods")
    seen, unseen = (world.sharepod(name)["metadata"]["uid"] for name in ("seen", "unseen"))
    await world.list_all()
    world.server.storage.delete(kind, "n", "unseen")
    await world.watches.sharepods.list_all()
    async with asyncio.timeout(PATIENCE_S), world.running():
        world.server.storage.delete(kind, "n", "seen")
        while world.state.sharepods.uids():  # noqa: ASYNC110 - the event comes by HTTP
            await asyncio.sleep(0)
    assert world.state.saw_deleted(seen)
    assert not world.state.saw_deleted(unseen), "a list has not shown it"
    world.watches.sharepods._invalidate()
    assert not world.state.saw_deleted(seen), "in another history it is there"
