"""The ledger writer with several operators, late events and lost answers: no GPU is assigned twice."""

from __future__ import annotations

import asyncio
import copy
import random
from collections import Counter
from typing import Any, cast

import pytest
from sharepod.api.gpunode import GPUNodeSpec, Pool, Tenant, TenantState, manifest
from sharepod.api.pods.pod import PodSettings
from sharepod.api.units import Bytes, GpuUuid, Milli, TenantId
from sharepod.controller.apiserver.client import Client, NotLeadingError
from sharepod.controller.apiserver.events import Events
from sharepod.controller.placing.ledger_writer import LedgerWriter, patch
from sharepod.controller.state.agent_leases import AgentLeases
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.facts.node_facts import gpunode_facts
from sharepod.kube import ApiError, InvalidError, Json
from sharepod.placement.resizing import resize
from sharepod.placement.state.types import PlacementError, Reservation
from unit.controller.fakes import FakeServer, unavailable

NODE = "node-a"
GPUS = ("GPU-0", "GPU-1")
PODS = PodSettings()


def gpunode(*rows: Tenant, generation: int = 1, version: int = 1) -> Json:
    body: Json = copy.deepcopy(cast(Json, manifest(NODE, GPUNodeSpec(tenants=rows))))
    body["metadata"] |= {"uid": "u", "generation": generation, "resourceVersion": str(version)}
    return body


def row(name: str, **fields: Any) -> Tenant:
    values: dict[str, Any] = {
        "id": name,
        "namespace": "n",
        "pod_name": name,
        "gpus": (GPUS[0],),
        "request_milli": 100,
        "limit_milli": 1000,
        "memory": 1,
    }
    return Tenant(**values | fields)


def node() -> Json:
    return {
        "metadata": {
            "name": NODE,
            "uid": "node",
            "resourceVersion": "1",
            "labels": {"sharepod.dev/pool": "dedicated"},
        },
        "spec": {},
        "status": {
            "allocatable": {"cpu": "8", "memory": "64Gi", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


class Operator:
    """A cluster state and a ledger writer on one server. The state gets the events of writes when `deliver` is
    called."""

    def __init__(self, server: FakeServer) -> None:
        self.state = ClusterState(PODS, AgentLeases(20.0, lambda: 0.0))
        self.events = Events(cast(Client, server), "test", lambda: 0.0)
        self.writer = LedgerWriter(self.state, cast(Client, server), self.events, workers=4)
        self.changed: list[str] = []
        self.state.on_tenant_changed = self.changed.append
        self.inbox: list[Json] = []
        self.state.put_node(node())

    def deliver(self) -> None:
        if self.inbox:
            self.state.put_gpunode(self.inbox.pop(0))

    def reserve(self, name: str, gpu: str, milli: int) -> bool:
        reservation = Reservation(
            tenant=TenantId(name),
            namespace="n",
            pod_name=name,
            gpus=(GpuUuid(gpu),),
            request_milli=Milli(milli),
            limit_milli=Milli(1000),
            memory=Bytes(1),
        )
        try:
            self.state.cluster.reserve(NODE, reservation)
        except PlacementError:
            return False
        self.writer.add(NODE)
        return True

    def rows(self) -> set[str]:
        return {str(item.tenant) for item in self.state.cluster.reservations(NODE)}


def served(server: FakeServer) -> Json:
    return server.objects[("gpunodes", "", NODE)]


def start(server: FakeServer) -> None:
    body = gpunode()
    body["status"] = {
        "gpus": [{"uuid": uuid, "index": index, "model": "T", "memory": 1000} for index, uuid in enumerate(GPUS)]
    }
    server._store(("gpunodes", "", NODE), body)


def begin() -> tuple[FakeServer, Operator]:
    """Return a server with an empty ledger, and an operator that has read it."""
    server = FakeServer()
    start(server)
    operator = Operator(server)
    operator.state.put_gpunode(copy.deepcopy(served(server)))
    return server, operator


@pytest.mark.promise("operator-no-over-commit")
@pytest.mark.parametrize("seed", range(60))
async def test_writers_that_race_never_overcommit_and_end_with_what_the_ledger_says(seed: int) -> None:
    chance = random.Random(seed)
    server = FakeServer()
    start(server)
    operators = [Operator(server) for _ in range(2)]
    for operator in operators:
        operator.state.put_gpunode(copy.deepcopy(served(server)))

    def written(kind: str, item: Json) -> None:
        if kind != "gpunodes":
            return
        ids = [entry["id"] for entry in item["spec"]["tenants"]]
        assert len(ids) == len(set(ids))
        taken: Counter[str] = Counter()
        for entry in item["spec"]["tenants"]:
            taken.update(dict.fromkeys(entry["gpus"], entry["requestMilli"]))
        assert all(milli <= 1000 for milli in taken.values()), taken
        for operator in operators:
            operator.inbox.append(copy.deepcopy(item))

    async def dawdle(_call: str) -> None:
        for _ in range(chance.randrange(chance.choice((2, 6, 60)))):
            await asyncio.sleep(0)
        if chance.random() < 0.05:
            raise unavailable()

    server.on_write = written
    server.before = server.after = dawdle
    runs = [asyncio.create_task(operator.writer.run()) for operator in operators]
    try:
        for _step in range(300):
            operator = chance.choice(operators)
            what = chance.random()
            if what < 0.35:
                # Both operators use the same few names, so that they also place the same tenant.
                operator.reserve(f"t{chance.randrange(6)}", chance.choice(GPUS), chance.choice((300, 400, 600)))
            elif what < 0.5 and operator.rows():
                operator.writer.remove(NODE, chance.choice(sorted(operator.rows())))
            elif what < 0.55 and operator.rows():
                tenant = TenantId(chance.choice(sorted(operator.rows())))
                operator.state.cluster.set_releasing(NODE, tenant)
                operator.writer.add(NODE)
            elif what < 0.65 and operator.rows():
                tenant = TenantId(chance.choice(sorted(operator.rows())))
                share = Milli(chance.choice((300, 400, 600)))
                resize(operator.state.cluster, tenant, request_milli=share, limit_milli=Milli(1000), memory=Bytes(1))
                operator.writer.add(NODE)
            else:
                operator.deliver()
            if chance.random() < 0.5:
                await asyncio.sleep(0)
        server.before = server.after = _at_once
        for _ in range(400):
            for operator in operators:
                operator.deliver()
            await asyncio.sleep(0.005)
            settled = all(
                not operator.inbox and not len(operator.writer._queue) and not operator.state.cluster.pending(NODE)
                for operator in operators
            )
            if settled and not any(operator.writer._queue._timers for operator in operators):
                break
        ledger = {entry["id"]: entry for entry in served(server)["spec"]["tenants"]}
        for operator in operators:
            known = {str(item.tenant): item.row().dump() for item in operator.state.cluster.reservations(NODE)}
            assert known == ledger
            account = operator.state.cluster.node(NODE)
            assert account is not None
            for gpu in account.gpus:
                taken = sum(row["requestMilli"] for row in ledger.values() if gpu.state.uuid in row["gpus"])
                assert gpu.free_milli == 1000 - taken, "a withdrawn decision takes nothing"
    finally:
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)


async def _at_once(_: str) -> None:
    return None


async def test_what_is_decided_during_a_write_goes_into_the_next_one() -> None:
    server, operator = begin()
    gate = asyncio.Event()
    calls: list[str] = []

    async def hold(call: str) -> None:
        calls.append(call)
        await gate.wait()

    server.before = hold
    run = asyncio.create_task(operator.writer.run())
    try:
        operator.reserve("first", GPUS[0], 100)
        while not calls:  # noqa: ASYNC110  in steps of the event loop
            await asyncio.sleep(0)
        for number in range(5):
            operator.reserve(f"later{number}", GPUS[0], 100)
            await asyncio.sleep(0)
        assert calls == ["patch"]
        gate.set()
        while len(served(server)["spec"]["tenants"]) < 6:  # noqa: ASYNC110  in steps of the event loop
            await asyncio.sleep(0)
        assert calls == ["patch", "patch"]
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)


def _raise(operator: Operator, milli: int) -> None:
    """Change the request of tenant `one` to `milli` thousandths of a GPU."""
    answer = resize(
        operator.state.cluster,
        TenantId("one"),
        request_milli=Milli(milli),
        limit_milli=Milli(1000),
        memory=Bytes(1),
        in_use=0,
    )
    assert isinstance(answer, Reservation), answer.message


async def test_a_raise_that_is_taken_back_before_it_was_written_takes_nothing_any_more() -> None:
    _, operator = begin()
    operator.reserve("one", GPUS[0], 300)
    await operator.writer._write(NODE)
    _raise(operator, 800)
    _raise(operator, 300)
    assert not operator.reserve("two", GPUS[0], 600), "the raise may be on its way"
    await operator.writer._write(NODE)
    assert operator.reserve("two", GPUS[0], 600)


async def test_a_raise_whose_answer_was_lost_counts_until_it_cannot_come_true_any_more() -> None:
    server, operator = begin()
    operator.reserve("one", GPUS[0], 300)
    await operator.writer._write(NODE)

    async def lose(call: str) -> None:
        if call == "patch":
            raise unavailable()

    server.before = lose
    _raise(operator, 800)
    with pytest.raises(ApiError):
        await operator.writer._write(NODE)
    server.before = _at_once
    _raise(operator, 300)
    await operator.writer._write(NODE)
    assert not operator.reserve("two", GPUS[0], 600), "the lost write still holds for this generation"
    assert operator.reserve("other", GPUS[1], 100)
    await operator.writer._write(NODE)
    assert operator.reserve("two", GPUS[0], 600)


async def _lose(call: str) -> None:
    if call == "patch":
        raise unavailable()


async def test_a_deleted_gpunode_leaves_nothing_in_the_cache() -> None:
    server, operator = begin()
    operator.reserve("one", GPUS[0], 300)
    server.before = _lose
    with pytest.raises(ApiError):
        await operator.writer._write(NODE)
    operator.state.drop_gpunode("u")
    await operator.writer._write(NODE)
    assert not operator.writer._unknown


async def test_a_late_answer_to_a_removal_does_not_free_what_another_wrote_since() -> None:
    server = FakeServer()
    start(server)
    operator, rival = Operator(server), Operator(server)
    for one in (operator, rival):
        one.state.put_gpunode(copy.deepcopy(served(server)))
    operator.reserve("one", GPUS[0], 600)
    await operator.writer._write(NODE)

    async def after_write(_: str) -> None:
        server.after = _at_once
        rival.state.put_gpunode(copy.deepcopy(served(server)))
        rival.reserve("one", GPUS[0], 600)
        await rival.writer._write(NODE)
        operator.state.put_gpunode(copy.deepcopy(served(server)))

    server.after = after_write
    operator.writer.remove(NODE, "one")
    await operator.writer._write(NODE)
    assert [entry["id"] for entry in served(server)["spec"]["tenants"]] == ["one"]
    assert operator.rows() == {"one"}
    assert not operator.reserve("two", GPUS[0], 600)


async def test_a_refusal_though_nothing_moved_is_reported_and_not_repeated() -> None:
    server, operator = begin()
    calls: list[str] = []

    async def refuse(call: str) -> None:
        calls.append(call)
        if call == "patch":
            raise InvalidError("PATCH", 422, "Invalid", "spec.tenants: too odd")

    server.before = refuse
    operator.reserve("one", GPUS[0], 100)
    await operator.writer._write(NODE)
    assert calls == ["patch", "get"]
    assert operator.rows() == set()
    assert operator.changed[-1] == "one"
    assert [event.reason for event in operator.events._waiting.values()] == ["LedgerWriteRefused"]


async def test_a_former_leader_drops_its_decisions() -> None:
    server, operator = begin()

    async def refuse(_: str) -> None:
        raise NotLeadingError("PATCH: not the leader")

    server.before = refuse
    operator.reserve("one", GPUS[0], 100)
    with pytest.raises(NotLeadingError):
        await operator.writer._write(NODE)
    assert operator.rows() == set()
    assert served(server)["spec"]["tenants"] == []


async def test_a_returning_leader_removes_no_row_by_an_old_decision() -> None:
    server, operator = begin()
    operator.reserve("one", GPUS[0], 100)
    await operator.writer._write(NODE)
    operator.writer.remove(NODE, "one")
    operator.writer.abandon()
    assert not operator.writer.leaving(NODE, "one")
    operator.reserve("two", GPUS[0], 100)
    await operator.writer._write(NODE)
    assert [entry["id"] for entry in served(server)["spec"]["tenants"]] == ["one", "two"]
    assert operator.rows() == {"one", "two"}


async def test_a_decision_for_a_gpunode_that_was_made_anew_during_a_write_is_written_and_nothing_reported() -> None:
    server, operator = begin()
    refused: list[str] = []
    operator.writer.on_refused = lambda _node, tenant, _why: refused.append(tenant)

    async def make_anew(call: str) -> None:
        server.before = _at_once
        assert call == "patch"
        recreated = copy.deepcopy(served(server))
        recreated["metadata"]["uid"] = "another"
        operator.state.put_gpunode(server._store(("gpunodes", "", NODE), recreated))
        assert operator.rows() == set(), "decisions for the old GPUNode ended with it"
        operator.reserve("new", GPUS[0], 100)

    server.before = make_anew
    operator.reserve("old", GPUS[0], 100)
    await operator.writer._write(NODE)
    await operator.writer._write(NODE)
    assert [entry["id"] for entry in served(server)["spec"]["tenants"]] == ["new"]
    assert refused == []
    assert not operator.events._waiting


@pytest.mark.promise("operator-no-stale-write")
def test_a_patch_holds_only_for_the_very_generation_it_was_made_from() -> None:
    base = gpunode_facts(gpunode(row("a"), row("b"), row("c"), generation=7))
    operations = patch(
        base,
        changed=[row("b", state=TenantState.RELEASING), row("new")],
        leaving={"a", "c"},
        pool=Pool.DEDICATED,
    )
    assert operations[:2] == [
        {"op": "test", "path": "/metadata/uid", "value": "u"},
        {"op": "test", "path": "/metadata/generation", "value": 7},
    ]
    assert [(item["op"], item["path"]) for item in operations[2:]] == [
        ("replace", "/spec/tenants/1"),
        ("remove", "/spec/tenants/2"),
        ("remove", "/spec/tenants/0"),
        ("add", "/spec/tenants/-"),
    ]


def test_a_patch_of_a_ledger_without_the_field_makes_it() -> None:
    body = gpunode()
    del body["spec"]["tenants"]
    operations = patch(gpunode_facts(body), changed=[row("a")], leaving=(), pool=Pool.DEDICATED)
    assert operations[-1] == {"op": "add", "path": "/spec/tenants", "value": [row("a").dump()]}


def test_nothing_to_change_is_no_patch() -> None:
    base = gpunode_facts(gpunode(row("a")))
    assert patch(base, changed=[row("a")], leaving={"missing"}, pool=Pool.DEDICATED) == []


async def test_a_refused_reservation_stays_away_and_a_refused_release_is_tried_again_later() -> None:
    server, operator = begin()
    operator.reserve("old", GPUS[0], 100)
    await operator.writer._write(NODE)
    refused: list[str] = []
    operator.writer.on_refused = lambda node, tenant, why: refused.append(f"{node} {tenant}: {why}")

    async def refuse(call: str) -> None:
        if call == "patch":
            raise InvalidError("PATCH", 422, "Invalid", "not today")

    server.before = refuse
    operator.state.cluster.set_releasing(NODE, TenantId("old"))
    operator.reserve("new", GPUS[0], 100)
    operator.changed.clear()
    await operator.writer._write(NODE)
    assert [text.split(":")[0] for text in refused] == [f"{NODE} new"]
    assert operator.changed == ["new"]
    assert [str(item.tenant) for item in operator.state.cluster.pending(NODE)] == ["old"]
    server.before = _at_once
    await operator.writer._write(NODE)
    assert served(server)["spec"]["tenants"][0]["state"] == "Releasing"


async def test_nothing_is_written_to_a_ledger_that_cannot_be_read() -> None:
    server, operator = begin()
    operator.reserve("one", GPUS[0], 100)
    spoiled = copy.deepcopy(served(server))
    spoiled["spec"]["tenants"] = [row("two").dump() | {"state": "Borrowed"}]
    spoiled["metadata"] |= {"resourceVersion": "99", "generation": 9}
    operator.state.put_gpunode(spoiled)
    server.objects[("gpunodes", "", NODE)] = copy.deepcopy(spoiled)
    before = copy.deepcopy(served(server))
    await operator.writer._write(NODE)
    assert served(server) == before
    assert "one" not in operator.rows()
