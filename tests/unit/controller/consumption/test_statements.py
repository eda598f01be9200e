"""Statements: consumption is written exactly once, whenever the operator dies and whichever process leads."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from doubles.apiserver.errors import Refused
from doubles.apiserver.kinds import KINDS
from doubles.apiserver.server import ApiServer, Fault, api_server
from kubernetes.aio.client import Configuration
from sharepod.api.consumption import TAKEN_IN_ANNOTATION
from sharepod.budgets.charges import Prices
from sharepod.controller import metrics
from sharepod.controller.apiserver.client import GPUNODES, GPUSTATEMENTS, Client
from sharepod.controller.consumption.statements import Statements
from sharepod.controller.state.facts.node_facts import GpuNodeFacts, gpunode_facts
from sharepod.kube import AlreadyExistsError, Json

NOW_S = 1_772_366_400.0
"""Time of day, 1 March 2026 at noon."""
STATEMENTS = replace(next(kind for kind in KINDS if kind.plural == "gpustatements"), schema=None)


class Died(Exception):  # noqa: N818 - what happens to a process
    """The process has died."""


class Dying:
    """Client of a process that dies at the write with this number: before the write takes effect, or before its answer
    arrives."""

    def __init__(self, client: Client, at: int, *, made: bool) -> None:
        self._client = client
        self._at = at
        self._made = made
        self.writes = 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)
        if name not in ("create", "patch_status", "patch_merge"):
            return call

        async def write(*arguments: Any, **named: Any) -> Any:
            self.writes += 1
            if self.writes < self._at:
                return await call(*arguments, **named)
            if self._made:
                await call(*arguments, **named)
            raise Died

        return write


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with api_server() as double:
        yield double


@pytest.fixture
async def client(server: ApiServer) -> AsyncIterator[Client]:
    made = Client(Configuration(host=server.url), read_timeout=10, write_timeout=10, page_size=1)
    yield made
    await made.close()


def series(name: str, namespace: str, held: int, **changes: object) -> Json:
    counters = {"heldMilliseconds": held, "reservedMilliseconds": 2 * held, "memoryMebibyteSeconds": 3 * held}
    begun = {"since": "2026-01-31T23:00:00.000Z", "closed": False, "borrowedMilliseconds": 0}
    return {"series": name, "namespace": namespace, "model": "T", **begun, **counters, **changes}


async def report(client: Client, node: str, *entries: Json, at: str = "2026-02-01T01:00:00.000Z") -> GpuNodeFacts:
    """Let an agent report. Return the GPUNode as the operator then knows it."""
    body = {"status": {"consumption": list(entries), "consumptionAt": at}}
    with contextlib.suppress(AlreadyExistsError):
        await client.create(GPUNODES, {"metadata": {"name": node}, "spec": {"pool": "dedicated"}})
    return gpunode_facts(await client.patch_status(GPUNODES, node, body))


def statements(client: Any, prices: Prices | None = None) -> Statements:
    return Statements(client, list, lambda: True, lambda: NOW_S, prices or Prices())


def held(kept: Statements, namespace: str) -> int:
    return kept.totals(namespace)["T"].held_ms


@pytest.mark.promise("operator-statement")
async def test_statements_have_what_nodes_report_by_month_and_outlive_the_operator(client: Client) -> None:
    nodes = [
        await report(client, "n1", series("a", "team", 1_000), series("b", "other", 70)),
        await report(client, "n2", series("c", "team", 400)),
    ]
    first = statements(client)
    assert first.totals("team") == {}
    assert await first.take_in(nodes)
    assert (held(first, "team"), held(first, "other")) == (1_400, 70)
    written = (await client.get(GPUSTATEMENTS, "team"))["status"]
    assert [(month["month"], month["models"][0]["heldMilliseconds"]) for month in written["months"]] == [
        ("2026-01", 700),
        ("2026-02", 700),
    ]
    version = (await client.get(GPUSTATEMENTS, "team"))["metadata"]["resourceVersion"]
    assert await first.take_in(nodes)
    assert (await client.get(GPUSTATEMENTS, "team"))["metadata"]["resourceVersion"] == version, "nothing new: no write"

    second = statements(client)
    nodes[0] = await report(client, "n1", series("a", "team", 1_500), series("b", "other", 70))
    assert await second.take_in(nodes)
    assert (held(second, "team"), held(second, "other")) == (1_900, 70)
    assert second.totals("team")["T"].reserved_ms == 3_800


async def test_a_statement_shows_the_cost_of_its_month_only_where_there_are_prices(client: Client) -> None:
    hours = [await report(client, "n1", series("a", "team", 7_200_000))]
    assert await statements(client).take_in(hours)
    assert "cost" not in (await client.get(GPUSTATEMENTS, "team"))["status"]["shown"]
    hours = [await report(client, "n1", series("a", "team", 14_400_000))]
    prices = Prices.model_validate({"currency": "EUR", "charged": "Held", "default": {"gpuHour": 2.5}})
    assert await statements(client, prices).take_in(hours)
    shown = (await client.get(GPUSTATEMENTS, "team"))["status"]["shown"]
    assert shown["cost"] == f"{float(shown['heldHours']) * 2.5:.2f} EUR"


async def test_a_node_whose_clock_is_years_ahead_keeps_its_namespaces_months_from_nobody(client: Client) -> None:
    kept = statements(client)
    assert await kept.take_in([await report(client, "n1", series("a", "team", 1_000))])
    ahead = series("b", "team", 400, since="2097-01-01T00:00:00.000Z")
    assert await kept.take_in([await report(client, "n2", ahead, at="2099-06-01T00:00:00.000Z")])
    written = (await client.get(GPUSTATEMENTS, "team"))["status"]
    assert [(month["month"], month["models"][0]["heldMilliseconds"]) for month in written["months"]] == [
        ("2026-01", 500),
        ("2026-02", 500),
        ("2026-03", 400),
    ]


async def test_a_statement_that_is_full_of_months_to_come_has_the_present_one_in_their_place(client: Client) -> None:
    """An earlier version of the operator wrote this statement for a node whose clock was ahead."""
    nothing = dict.fromkeys(("heldMilliseconds", "borrowedMilliseconds", "reservedMilliseconds"), 0)
    model = nothing | {"model": "T", "memoryMebibyteSeconds": 0}
    months = [{"month": month, "models": [model]} for month in ["2026-01", *(f"2099-{n:02}" for n in range(1, 13))]]
    body = {"metadata": {"name": "team"}, "spec": {}}
    await client.create(GPUSTATEMENTS, body)
    await client.patch_status(GPUSTATEMENTS, "team", {"status": {"months": months}})
    kept = statements(client)
    assert await kept.take_in([await report(client, "n1", series("a", "team", 1_000))])
    written = (await client.get(GPUSTATEMENTS, "team"))["status"]["months"]
    assert [month["month"] for month in written][:3] == ["2026-01", "2026-02", "2099-01"]
    assert [month["models"][0]["heldMilliseconds"] for month in written][:2] == [500, 500]
    assert len(written) == len(months)


@pytest.mark.promise("operator-statement")
@pytest.mark.parametrize("made", [False, True], ids=["before the write", "before its answer"])
async def test_an_operator_that_dies_at_any_write_loses_nothing_and_counts_nothing_twice(
    client: Client, made: bool
) -> None:
    for at in range(1, 20):
        names = [f"team{at}", f"other{at}"]
        node = await report(client, f"n{at}", *(series(f"{name}-{at}", name, 500, closed=True) for name in names))
        dying: Any = Dying(client, at, made=made)
        first = statements(dying)
        try:
            await first.take_in([node])
        except Died:
            died = True
        else:
            died = False
        again = statements(client)
        node = gpunode_facts(await client.get(GPUNODES, f"n{at}"))
        stored = node.taken_in & {f"{name}-{at}" for name in names}
        for name in names:
            if f"{name}-{at}" in stored:
                written = await client.get(GPUSTATEMENTS, name)
                assert written["status"]["totals"][0]["heldMilliseconds"] == 500, "acknowledged only after the write"
        assert await again.take_in([node])
        assert [held(again, name) for name in names] == [500, 500]
        node = gpunode_facts(await client.get(GPUNODES, f"n{at}"))
        assert node.taken_in == {f"{name}-{at}" for name in names}
        if not died:
            assert at == 6, "two statements of two writes, and one annotation"
            return
    raise AssertionError("it never got through")


@pytest.mark.promise("operator-statement")
async def test_a_former_leader_that_still_writes_neither_loses_nor_doubles(client: Client) -> None:
    early = await report(client, "n1", series("a", "team", 100))
    former, leader = statements(client), statements(client)
    assert await former.take_in([early])
    assert await leader.take_in([early])
    late = await report(client, "n1", series("a", "team", 300))
    assert await leader.take_in([late])
    assert not await former.take_in([late]), "its version is an old one"
    assert await former.take_in([early, late])
    assert held(former, "team") == 300
    written = await client.get(GPUSTATEMENTS, "team")
    assert written["status"]["totals"][0]["heldMilliseconds"] == 300


async def test_an_agent_is_notified_only_of_closed_series(client: Client) -> None:
    node = await report(client, "n1", series("a", "team", 100), series("b", "team", 50, closed=True))
    kept = statements(client)
    assert await kept.take_in([node])
    found = await client.get(GPUNODES, "n1")
    assert found["metadata"]["annotations"] == {TAKEN_IN_ANNOTATION: "b"}
    assert await kept.take_in([gpunode_facts(found)])
    assert (await client.get(GPUNODES, "n1"))["metadata"]["resourceVersion"] == found["metadata"]["resourceVersion"]


async def test_a_statement_that_cannot_be_read_is_left_as_it_is_and_costs_its_namespace_alone(
    client: Client, server: ApiServer
) -> None:
    node = await report(client, "n1", series("a", "team", 100), series("b", "other", 50))
    assert await statements(client).take_in([node])
    strange = {"months": [{"month": "next"}]}
    server.storage.update(STATEMENTS, "", "team", lambda _: {"status": strange}, status=True)
    kept = statements(client)
    node = await report(client, "n1", series("a", "team", 200), series("b", "other", 60))
    assert await kept.take_in([node])
    assert (await client.get(GPUSTATEMENTS, "team"))["status"] == strange
    assert held(kept, "other") == 60


@pytest.mark.promise("operator-statement-metrics")
async def test_the_metrics_agree_with_the_written_account(client: Client) -> None:
    def metric(kind: str) -> float | None:
        labels = {"namespace": "measured", "model": "T", "kind": kind}
        return metrics.LEADERS.get_sample_value("sharepod_namespace_gpu_seconds_total", labels)

    node = await report(client, "n1", series("a", "measured", 1_500))
    kept = statements(client)
    assert await kept.take_in([node])
    assert (metric("held"), metric("borrowed"), metric("reserved")) == (1.5, 0, 3)
    kept.forget()
    node = await report(client, "n1", series("a", "measured", 2_500))
    assert await kept.take_in([node])
    assert metric("held") == 2.5
    memory = {"namespace": "measured", "model": "T"}
    name = "sharepod_namespace_memory_byte_seconds_total"
    assert metrics.LEADERS.get_sample_value(name, memory) == 7_500 << 20


@pytest.mark.promise("operator-statement")
async def test_a_statement_that_cannot_be_written_costs_its_namespace_alone(client: Client, server: ApiServer) -> None:
    kept = statements(client)
    node = await report(client, "n1", series("a", "team", 100), series("b", "other", 50))
    assert await kept.take_in([node])
    refusal = Refused(422, "Invalid", "a webhook does not like it")
    server.faults.append(Fault(lambda call: (call.verb, call.name) == ("patch", "team"), times=2, refusal=refusal))
    node = await report(client, "n1", series("a", "team", 300), series("b", "other", 60))
    for _ in range(2):
        assert not await kept.take_in([node])
        assert (kept.complete, held(kept, "team"), held(kept, "other")) == (True, 100, 60)
    assert await kept.take_in([node])
    assert held(kept, "team") == 300
