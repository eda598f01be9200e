"""The whole operator in the test process, over the API server double: when it acts, what ends it, what it reports."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from doubles.apiserver.errors import Refused
from doubles.apiserver.players import Players
from doubles.apiserver.server import ApiServer, api_server
from kubernetes.aio.client import Configuration
from sharepod.controller import health as healths
from sharepod.controller import metrics
from sharepod.controller import operator as operators
from sharepod.controller.health import RejectedError
from sharepod.controller.operator import Operator
from sharepod.controller.settings import OperatorSettings
from sharepod.placement.state.types import Outlook
from sharepod.tasks import TaskEndedError
from sharepod.web.metrics_access import MetricsAccess

PATIENCE_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def an_operator(api: ApiServer, identity: str = "one", port: int = 0, health: int = 0) -> Operator:
    settings = OperatorSettings(
        identity=identity,
        bind_address="127.0.0.1",
        health_port=health,
        metrics_port=port,
        metrics_access=MetricsAccess.OPEN,
        retry_period=0.5,
    )
    return Operator(settings, Configuration(host=api.url))


@asynccontextmanager
async def running(operator: Operator) -> AsyncIterator[asyncio.Task[None]]:
    stop = asyncio.Event()
    task = asyncio.create_task(operator.run(stop))
    try:
        yield task
    finally:
        stop.set()
        await asyncio.gather(task, return_exceptions=True)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110  in steps of the event loop
            await asyncio.sleep(0.01)


async def get(port: int, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as answer:
        return answer.status, await answer.text()


@pytest.mark.promise("operator-restored-backup")
async def test_it_begins_anew_when_the_api_servers_versions_have_gone_back() -> None:
    async with api_server() as api, running(operator := an_operator(api)):
        await until(lambda: operator._active)
        backup = api.storage.backup()
        sharepods = api.kind("sharepods")
        body = {
            "metadata": {"name": "lost"},
            "spec": {"gpu": {"request": 0.4}, "containers": [{"name": "c", "image": "i"}]},
        }
        for number in range(200):  # so many versions that the renewals of the Lease do not reach them again
            api.storage.create(sharepods, "n", body | {"metadata": {"name": f"lost-{number}"}})
        await until(lambda: len(operator.state.sharepods) == 200)
        # each SharePod has its Pod and its status, so no write is still running that could raise the version
        await until(lambda: all((item.get("status") or {}).get("phase") for item in api.storage.select(sharepods, "n")))
        late = asyncio.Event()
        held = api.fail("patch", "sharepods", hold_answer=late)
        api.storage.create(sharepods, "n", body)
        await until(lambda: held.times == 0)
        term = operator._term
        api.storage.restore(backup)
        api.cut_watches()
        await until(lambda: operator._term > term and operator._active and len(operator.state.sharepods) == 0)
        late.set()  # an answer from the lost history contains one more SharePod
        await until(lambda: len(operator.tenant_reconciler.queue) == 0)
        assert len(operator.state.sharepods) == 0
        assert operator.loop.waiting() == ()
        api.storage.create(sharepods, "n", body | {"metadata": {"name": "found"}})
        await until(lambda: [item.name for item in operator.state.sharepods] == ["found"])


async def test_an_operator_that_loses_leadership_forgets_what_is_queued() -> None:
    async with api_server() as api:
        operator = an_operator(api)
        tenants, nodes = operator.tenant_reconciler, operator.node_reconciler
        claims, holders = operator.claim_reconciler, operator.holder_reconciler
        others = operator.preemptor, operator.line_templates, operator.self_test_claims
        queues = [part.queue for part in (tenants, nodes, claims, holders, *others)]
        for queue in queues:
            queue.add("key")
        operator._lost()
        assert [len(queue) for queue in queues] == [0] * 7


async def test_credentials_that_are_rejected_for_long_end_it_and_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healths, "_REJECTED_S", 0.0)

    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"reason": "Unauthorized", "message": "Unauthorized"}, status=401)

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", refuse)
    async with TestServer(application) as server:
        operator = Operator(
            OperatorSettings(identity="one", health_port=0, metrics_port=0),
            Configuration(host=f"http://127.0.0.1:{server.port}"),
        )
        async with running(operator) as task:
            with pytest.raises(TaskEndedError, match="rejected the credentials") as ended:
                await asyncio.wait_for(task, PATIENCE_S)
    assert isinstance(ended.value.__cause__, RejectedError)


@pytest.mark.promise("operator-no-blind-placement")
async def test_it_places_nothing_on_old_beliefs_and_goes_on_once_it_sees_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with api_server() as api, running(operator := an_operator(api)):
        await until(lambda: operator._active)
        assert operator.loop._may_act()
        woken: list[bool] = []
        monkeypatch.setattr(operator.loop, "room_changed", lambda: woken.append(True))
        monkeypatch.setattr(operator.watches, "believed", lambda: False)
        assert not operator.loop._may_act()
        operator.loop.want_place("t")
        operator.health.check_beliefs()
        assert woken == []
        refusal = operator.memos.of("t").refusal
        assert refusal is not None
        assert refusal.outlook is Outlook.UNSEEN
        assert refusal.message.endswith("places nothing until there is one.")
        monkeypatch.setattr(operator.watches, "believed", lambda: True)
        operator.health.check_beliefs()
        operator.health.check_beliefs()
        assert woken == [True]


async def test_time_for_which_the_machine_was_suspended_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def noted(clock: int) -> float:
        asked.append(clock)
        return 100.0

    monkeypatch.setattr(time, "clock_gettime", noted)
    assert operators.boot_seconds() == 100.0
    assert asked == [time.CLOCK_BOOTTIME]
    now = 100.0
    monkeypatch.setattr(operators, "boot_seconds", lambda: now)
    async with api_server() as api:
        operator = an_operator(api)
        await operator.leadership.step()
        for reflector in operator.watches.all:
            await reflector.list_all()
        spec = {"holderIdentity": "agent", "leaseDurationSeconds": 20, "renewTime": "1"}
        for renewed in ("1", "2"):
            lease = {"metadata": {"name": "sharepod-agent-a", "uid": "u"}, "spec": spec | {"renewTime": renewed}}
            operator.state.agents.put(lease)
        assert (operator.leadership.acting(), operator.state.agents.alive("a"), operator.watches.believed()) == (
            True,
        ) * 3
        now += 3600.0
        assert (operator.leadership.acting(), operator.state.agents.alive("a"), operator.watches.believed()) == (
            False,
        ) * 3
        await operator.client.close()
        await operator.lease_client.close()


async def test_health_fails_where_a_watch_is_blind_or_the_event_loop_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with api_server() as api:
        operator = an_operator(api)
        assert operator.health.healthy() == "stands by"
        monkeypatch.setattr(operator.watches, "blind", lambda: "the watch of pods has been silent for 61 s")
        with pytest.raises(RuntimeError, match="pods"):
            operator.health.healthy()
        monkeypatch.setattr(operator.health, "_clock", lambda: operators.boot_seconds() + 31)
        with pytest.raises(RuntimeError, match="event loop"):
            operator.health.healthy()


async def test_a_standby_is_ready_and_shows_nothing_of_what_the_leader_counts() -> None:
    ports, health = (free_port(), free_port()), (free_port(), free_port())
    async with api_server() as api:
        leader, standby = (an_operator(api, name, *at) for name, *at in zip(("one", "two"), ports, health, strict=True))
        async with running(leader):
            await until(lambda: leader._active)
            async with running(standby):
                await until(lambda: standby.health.unready() is None)
                shown = [(await get(port, "/metrics"))[1] for port in ports]
                ready = [await get(port, "/readyz") for port in health]
    assert ready == [(200, "ok\n")] * 2
    for name in ("sharepods", "waiting", "decisions_total", "queue_depth", "apply_to_pod_seconds_count"):
        assert [f"\nsharepod_operator_{name}" in text for text in shown] == [True, False], name
    for name in (
        'sharepod_operator_watch_age_seconds{kind="nodes"}',
        "sharepod_operator_build_info{",
        "process_cpu_sec",
    ):
        assert all(name in text for text in shown), name


async def test_agents_that_are_not_ready_are_counted() -> None:
    async with api_server() as api:
        players = Players(api.storage, {name: api.kind(name) for name in ("pods", "nodes", "gpunodes", "leases")})
        players.add_nodes(2, gpus=1)
        async with running(operator := an_operator(api)):
            await until(lambda: len(operator.state.gpunodes) == 2)
            operator.health.measure()
            assert metrics.AGENTS_UNREADY._value.get() == 0
            unready = {"type": "AgentReady", "status": "False", "reason": "InventoryUnavailable", "message": ""}
            kind, name = api.kind("gpunodes"), next(iter(operator.state.gpunodes)).name
            api.storage.update(kind, "", name, lambda raw: {**raw, "status": {"conditions": [unready]}}, status=True)

            def counted() -> bool:
                operator.health.measure()
                return bool(metrics.AGENTS_UNREADY._value.get() == 1)

            await until(counted)


async def test_while_a_kind_is_not_served_it_is_not_ready_and_says_which() -> None:
    port = free_port()
    async with api_server() as api, running(operator := an_operator(api, health=port)):
        api.unserved.add("sharepods")
        operator.watches.sharepods.listed = False
        api.cut_watches("sharepods", error=Refused(410, "Expired", "too old"))
        await until(lambda: (operator.health.unready() or "").startswith("not listed: sharepods (LIST "))
        status, text = await get(port, "/readyz")
        assert status == 503
        assert text.startswith("not listed: sharepods (LIST ")
        assert operator.health.healthy() in ("leads", "stands by")


@pytest.mark.promise("operator-line-webhook-rollout")
async def test_while_its_webhook_does_not_serve_it_is_not_ready() -> None:
    keeper: Any = SimpleNamespace(unready=lambda: "not yet")
    async with api_server() as api, running(operator := an_operator(api)):
        await until(lambda: operator.health.unready() is None)
        operator.certificates = keeper
        assert operator.health.unready() == "not yet"


async def test_no_node_is_looked_at_before_all_kinds_are_listed() -> None:
    async with api_server() as api:
        players = Players(api.storage, {name: api.kind(name) for name in ("pods", "nodes", "gpunodes", "leases")})
        players.add_nodes(4, gpus=1)
        api.unserved.add("gpunodes")
        async with running(operator := an_operator(api)):
            await until(lambda: operator.health.leads() and len(operator.state.nodes) == 4)
            await until(lambda: not any(operator.state.agent_away(item.name) for item in operator.state.nodes))
            ticked = operator.health.looked_at
            await until(lambda: operator.health.looked_at > ticked)
            await until(lambda: not len(operator.node_reconciler.queue))
            assert api.made("create", "gpunodes") == []
            api.unserved.clear()
            await until(lambda: operator._active)
            await until(lambda: not len(operator.node_reconciler.queue))
            assert api.made("create", "gpunodes") == [], "they are all there"


@pytest.mark.promise("operator-new-before-known")
async def test_a_new_leader_checks_pending_requests_before_running_ones() -> None:
    count = 60
    async with api_server() as api:
        players = Players(
            api.storage, {name: api.kind(name) for name in ("pods", "nodes", "gpunodes", "leases", "sharepods")}
        )
        players.add_nodes(4, gpus=8)
        players.start()
        sharepods = api.kind("sharepods")

        def create(name: str) -> str:
            spec = {"gpu": {"request": 0.4}, "containers": [{"name": "c", "image": "i"}]}
            made = api.storage.create(sharepods, "n", {"metadata": {"name": name}, "spec": spec})
            return str(made["metadata"]["uid"])

        def running_now() -> int:
            items = api.storage.select(sharepods, "n")
            return sum((item.get("status") or {}).get("phase") == "Running" for item in items)

        try:
            async with running(an_operator(api)):
                for number in range(count):
                    create(f"p{number}")
                await until(lambda: running_now() == count)
            novel, looked_at = create("novel"), list[str]()
            operator = an_operator(api)
            work = operator.tenant_reconciler.queue._work

            async def noting(tenant: str) -> None:
                looked_at.append(tenant)
                await work(tenant)

            operator.tenant_reconciler.queue._work = noting
            async with running(operator):
                await until(lambda: running_now() == count + 1)
            assert looked_at[0] == novel
            assert len(set(looked_at)) > 1
        finally:
            await players.stop()


def calls_of_tenants(api: ApiServer, since: int) -> Counter[str]:
    """Return the number of the operator's calls by verb, except lists, watches and Leases."""
    made = [call for call in api.calls[since:] if call.verb not in ("list", "watch") and call.kind.plural != "leases"]
    return Counter(call.verb for call in made)


def reads_of_tenants(api: ApiServer, since: int) -> list[str]:
    """Return the single objects that the operator has read, except Leases."""
    made = [call for call in api.calls[since:] if call.verb == "get" and call.kind.plural != "leases"]
    return [f"{call.kind.plural}/{call.name}" for call in made]


@pytest.mark.promise("operator-deletion-calls")
async def test_a_life_takes_at_most_five_writes_and_its_end_two_calls_whatever_comes_at_once() -> None:
    """One write of a ledger may contain several rows, and an agent's first report may cause a status write of
    its own."""
    count = 60
    async with api_server() as api, running(operator := an_operator(api)):
        players = Players(
            api.storage, {name: api.kind(name) for name in ("pods", "nodes", "gpunodes", "leases", "sharepods")}
        )
        players.add_nodes(4, gpus=8)
        players.start()
        try:
            await until(lambda: operator._active and len(operator.state.nodes) == 4)
            sharepods = api.kind("sharepods")
            await until(lambda: len(api.storage.select(api.kind("gpunodes"), "")) == 4)
            before = len(api.calls)
            for number in range(count):
                spec = {"gpu": {"request": 0.4}, "containers": [{"name": "c", "image": "i"}]}
                api.storage.create(sharepods, "n", {"metadata": {"name": f"p{number}"}, "spec": spec})

            def phases() -> set[str]:
                return {(item.get("status") or {}).get("phase", "") for item in api.storage.select(sharepods, "n")}

            await until(lambda: phases() == {"Running"})
            made = calls_of_tenants(api, before)
            assert reads_of_tenants(api, before) == []
            assert made["create"] + made["patch"] <= 6 * count
            before = len(api.calls)
            for number in range(count):
                api.storage.delete(sharepods, "n", f"p{number}")
            await until(lambda: not api.storage.select(api.kind("pods"), "n"))
            await until(
                lambda: not any(operator.state.cluster.reservations(item.name) for item in operator.state.nodes)
            )
            made = calls_of_tenants(api, before)
            assert reads_of_tenants(api, before) == []
            assert made["delete"] == count
            assert made.total() <= 2 * count
        finally:
            await players.stop()


@pytest.mark.promise("operator-clock-off")
@pytest.mark.parametrize("behind_s", [0.0, 21_600.0, -21_600.0])
async def test_ages_of_objects_go_by_the_api_servers_clock_where_the_machines_is_off(behind_s: float) -> None:
    async with api_server() as api:
        operator = an_operator(api)
        operator.client._api.clock_behind_s = behind_s
        walls = [
            operator.loop.victims_seen._wall,
            operator.loop.preemptions.moving._movers._wall,
            operator.tenant_reconciler._snapshots._wall,
            operator.claim_reconciler._snapshots._wall,
        ]
        assert [wall() for wall in walls] == [pytest.approx(time.time() + behind_s, abs=30)] * 4
        await operator.client.close()
        await operator.lease_client.close()
