"""Control of budgets over an API server that fails and restarts: charges, announcements and standings."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.budgets.budget import ConsumedTotal
from sharepod.budgets.standing import WITHOUT_BUDGET
from sharepod.controller.apiserver.client import Client
from sharepod.controller.apiserver.events import Events
from sharepod.controller.budgets.budget_control import BudgetControl
from sharepod.controller.state.agent_leases import AgentLeases
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.kube import ConflictError, UnavailableError
from unit.controller.objects import PODS
from unit.virtual_time import VirtualTimeLoop

Json = dict[str, Any]
START_MS = 1_767_225_600_000
"""2026-01-01T00:00:00Z."""
HOUR_MS = 3_600_000
CENTRAL = "sharepod-system"
UUID = "GPU-00000000-0000-0000-0000-000000000001"


class Server:
    """API server with GPUBudgets. Writes have preconditions. A test can make them fail before or after they
    take effect."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Json] = {}
        self.version = 100
        self.fails = ""
        self.writes = 0
        self.on_written: Callable[[Json], None] = lambda _raw: None

    def put(self, name: str, namespace: str, spec: Json) -> Json:
        self.version += 1
        known = self.objects.get((namespace, name), {})
        metadata = {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-{namespace}-{name}",
            "creationTimestamp": f"2026-01-01T00:00:{len(self.objects):02}Z",
            "generation": 1,
            **known.get("metadata", {}),
            "resourceVersion": str(self.version),
        }
        self.objects[namespace, name] = {"metadata": metadata, "spec": spec, "status": known.get("status", {})}
        return self.objects[namespace, name]

    async def patch_status(self, _resource: object, name: str, body: Json, namespace: str) -> Json:
        if self.fails == "before":
            raise UnavailableError("PATCH", 0, "", "no answer")
        known = self.objects[namespace, name]
        if body["metadata"]["resourceVersion"] != known["metadata"]["resourceVersion"]:
            raise ConflictError("PATCH", 409, "Conflict", "another version")
        self.version += 1
        self.writes += 1
        status = {**known["status"], **copy.deepcopy(body["status"])}
        metadata = {**known["metadata"], "resourceVersion": str(self.version)}
        kept = {key: value for key, value in status.items() if value is not None}
        self.objects[namespace, name] = {**known, "metadata": metadata, "status": kept}
        if self.fails == "after":
            raise UnavailableError("PATCH", 0, "", "no answer")
        return self.objects[namespace, name]


class Recorder:
    """Recorder of Events."""

    def __init__(self) -> None:
        self.announced: list[tuple[str, str]] = []

    def normal(self, _kind: str, about: Any, reason: str, _action: str, note: str) -> None:
        self.announced.append((about.name, reason))
        assert note

    warning = normal


class OperatorProcess:
    """One process of the operator: it reads the server's objects and makes one round."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.state = ClusterState(PODS, AgentLeases(20.0, lambda: 0.0))
        self.changes = 0
        self.control = BudgetControl(
            self.state,
            cast("Client", world.server),
            cast("Events", world.events),
            namespace=CENTRAL,
            half_life_s=7 * 86_400.0,
            now_ms=lambda: world.now_ms,
            written=lambda: world.written,
            acts=lambda: True,
            on_changed=self._changed,
        )
        self.read()
        self.control.begin()

    def _changed(self) -> None:
        self.changes += 1

    def read(self) -> None:
        for namespace in self.world.namespaces:
            self.state.namespace_labels.put(
                {"metadata": {"name": namespace, "uid": namespace, "resourceVersion": "1", "labels": {"team": "x"}}}
            )
        for raw in self.world.server.objects.values():
            self.state.budgets.put(raw)
        for raw in self.world.gpunodes():
            self.state.put_gpunode(raw)

    async def look(self) -> None:
        self.read()
        await self.control.look()
        self.read()


class World:
    """Server, counters of two nodes, and a clock."""

    def __init__(self) -> None:
        self.server = Server()
        self.events = Recorder()
        self.now_ms = START_MS
        self.namespaces = ["a", "b", CENTRAL]
        self.had: dict[tuple[str, str], int] = {}
        self.written: dict[tuple[str, str], ConsumedTotal] | None = {}
        self.holds_milli = 0
        """Request of a tenant of namespace `a` on node n0, which it has had since before the last report. In
        thousandths."""
        self.reported_at = "2026-01-01T00:00:01.000Z"
        self._version = 0

    def consume(self, namespace: str, milliseconds: int, node: str = "n0") -> None:
        self.had[node, namespace] = self.had.get((node, namespace), 0) + milliseconds

    def gpunodes(self) -> list[Json]:
        self._version += 1
        found: list[Json] = []
        for node in ("n0", "n1"):
            series = [
                {
                    "series": f"{node}-{namespace}",
                    "namespace": namespace,
                    "model": "A",
                    "since": "2026-01-01T00:00:00.000Z",
                    "heldMilliseconds": had // 2,
                    "reservedMilliseconds": had,
                }
                for (of, namespace), had in self.had.items()
                if of == node
            ]
            metadata = {"name": node, "uid": node, "resourceVersion": str(self._version), "generation": 1}
            found.append({"metadata": metadata, "spec": {}, "status": {"consumption": series}})
        if self.holds_milli:
            found[0]["spec"] = {"tenants": [self._row()]}
            found[0]["status"] |= {
                "consumptionAt": self.reported_at,
                "gpus": [{"uuid": UUID, "index": 0, "model": "A", "memory": 1 << 34}],
                "tenants": [{"id": "t0", "countedSince": "2026-01-01T00:00:00.000Z"}],
            }
        return found

    def _row(self) -> Json:
        return {
            "id": "t0",
            "namespace": "a",
            "podName": "one",
            "state": "Reserved",
            "gpus": [UUID],
            "requestMilli": self.holds_milli,
            "limitMilli": 1000,
            "memory": 1 << 30,
        }

    def status(self, name: str = "b1", namespace: str = "a") -> Json:
        status: Json = self.server.objects[namespace, name]["status"]
        return status

    def condition(self, kind: str, name: str = "b1", namespace: str = "a") -> Json:
        (found,) = (one for one in self.status(name, namespace)["conditions"] if one["type"] == kind)
        return cast("Json", found)


@pytest.mark.promise("budgets-spent-soon")
def test_a_budget_that_reservations_spend_between_two_reports_is_noticed_within_ten_seconds() -> None:
    world = World()
    world.holds_milli = 400
    world.server.put("b1", "a", {"gpuSeconds": 100, "whenSpent": "Queue"})
    loop = VirtualTimeLoop()
    try:
        spent_s = loop.run_until_complete(_until_spent(world, loop))
    finally:
        loop.close()
    assert 250 <= spent_s <= 260, "100 GPU-seconds at 0.4 last 250 s"
    assert world.server.writes <= 250 / 30 + 90 / 5 + 3
    assert (world.status()["left"], ("b1", "BudgetSpent") in world.events.announced) == (0, True)


async def _until_spent(world: World, loop: VirtualTimeLoop) -> float:
    """Return the seconds until new SharePods of the namespace must wait. The agent reports each minute, one
    second late."""
    began = loop.time()
    process = OperatorProcess(world)
    running = loop.create_task(process.control.run())
    while process.control.standing("a").waits_until is None and loop.time() < began + 600:
        await asyncio.sleep(0.5)
        seconds = loop.time() - began
        world.now_ms = START_MS + round(seconds * 1000)
        reported_s = max(0, int(seconds - 1) // 60 * 60)
        world.had["n0", "a"] = reported_s * world.holds_milli
        world.reported_at = f"2026-01-01T00:{reported_s // 60:02}:00.001Z"
        process.read()
    running.cancel()
    return loop.time() - began


@pytest.mark.promise("budgets-charged-once")
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("consume"), st.integers(1, 10**7)),
            st.tuples(st.just("time"), st.integers(1, 3 * HOUR_MS)),
            st.tuples(st.just("look"), st.sampled_from(["", "before", "after"])),
            st.tuples(st.just("restart"), st.just(0)),
            st.tuples(st.just("other leader"), st.just(0)),
        ),
        max_size=25,
    )
)
async def test_whoever_is_killed_whenever_each_millisecond_is_charged_once(steps: list[tuple[str, Any]]) -> None:
    world = World()
    world.server.put("b1", "a", {"gpuSeconds": 10_000_000})
    one = OperatorProcess(world)
    await one.look()
    other = OperatorProcess(world)  # this process has read the old object, and writes later
    for what, how in steps:
        if what == "consume":
            world.consume("a", how, node=f"n{how % 2}")
        elif what == "time":
            world.now_ms += how
        elif what == "look":
            world.server.fails = how
            await one.look()
            world.server.fails = ""
        elif what == "restart":
            one = OperatorProcess(world)
        else:
            await other.control.look()
            one, other = other, OperatorProcess(world)
    last = OperatorProcess(world)
    world.now_ms += 700_000
    await last.look()
    had = sum(world.had.values())
    books = world.status()["books"]
    assert (books["reserved"], books["held"]) == (had * 1000, sum(part // 2 for part in world.had.values()) * 1000)
    assert world.status()["left"] == (10_000_000_000 - had) // 1000


@pytest.mark.promise("budgets-events-once")
async def test_80_and_100_percent_and_the_refill_are_reported_once_over_restarts_of_the_operator() -> None:
    world = World()
    world.server.put("b1", "a", {"gpuSeconds": 1000, "period": "Day"})
    await OperatorProcess(world).look()
    for consumed in (500, 350, 20, 200, 100):
        world.consume("a", consumed * 1000)
        world.now_ms += 60_000
        for _ in range(2):
            await OperatorProcess(world).look()
    assert world.events.announced == [("b1", "BudgetNearlySpent"), ("b1", "BudgetSpent")]
    assert world.condition("WithinBudget")["reason"] == "BudgetSpent"
    assert world.condition("WithinBudget")["status"] == "False"
    assert world.status()["refillAt"] == "2026-01-02T00:00:00Z"
    assert world.status()["percent"] == 117
    world.now_ms = START_MS + 24 * HOUR_MS + 1000
    for _ in range(2):
        await OperatorProcess(world).look()
    assert world.events.announced[2:] == [("b1", "BudgetRefilled")]
    assert world.condition("WithinBudget")["status"] == "True"
    assert (world.status()["left"], "refillAt" in world.status()) == (1000, False)


async def test_a_budget_in_hours_is_charged_like_one_in_seconds_and_both_are_shown_in_hours() -> None:
    world = World()
    world.server.put("hours", "a", {"gpuTime": "1000h"})
    world.server.put("seconds", "b", {"gpuSeconds": 5400})
    await OperatorProcess(world).look()
    assert world.status("hours", "a")["shown"] == {"amountHours": "1000.0", "leftHours": "1000.0"}
    world.consume("a", 90_000_000)
    world.consume("b", 1_800_000)
    world.now_ms += 60_000
    await OperatorProcess(world).look()
    assert world.status("hours", "a")["shown"] == {"amountHours": "1000.0", "leftHours": "975.0"}
    assert world.status("hours", "a")["left"] == 975 * 3600
    assert world.status("seconds", "b")["shown"] == {"amountHours": "1.5", "leftHours": "1.0"}


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({}, "write gpuTime: 1000h"),
        ({"gpuTime": "1h", "gpuSeconds": 3600}, "exactly one of gpuTime and gpuSeconds"),
        ({"gpuTime": "1000"}, "write 1000h or 0.5h"),
        ({"gpuTime": "0.00h"}, "above 0"),
    ],
)
async def test_an_amount_that_is_missing_double_or_without_unit_has_the_fix(spec: dict[str, Any], text: str) -> None:
    world = World()
    world.server.put("b1", "a", spec)
    await OperatorProcess(world).look()
    assert text in world.condition("InForce")["message"]


@pytest.mark.promise("budgets-events-once")
async def test_one_that_takes_itself_for_the_leader_and_is_late_writes_and_tells_nothing() -> None:
    world = World()
    world.server.put("b1", "a", {"gpuSeconds": 1000})
    leader = OperatorProcess(world)
    await leader.look()
    late = OperatorProcess(world)
    world.consume("a", 900_000)
    world.now_ms += 60_000
    late.read()
    await leader.look()
    assert world.events.announced == [("b1", "BudgetNearlySpent")]
    writes = world.server.writes
    await late.control.look()
    assert (world.server.writes, world.events.announced) == (writes, [("b1", "BudgetNearlySpent")])


@pytest.mark.promise("budgets-malformed")
async def test_a_malformed_budget_gets_an_event_covers_nothing_and_affects_no_other() -> None:
    world = World()
    world.server.put("bad", "a", {"gpuSeconds": "much", "period": "Year"})
    world.server.put("good", "b", {"gpuSeconds": 10})
    operator = OperatorProcess(world)
    await operator.look()
    world.consume("a", 20_000)
    world.consume("b", 20_000)
    world.now_ms += 60_000
    await operator.look()
    assert world.condition("InForce", "bad", "a")["reason"] == "Unreadable"
    assert "gpuSeconds" in world.condition("InForce", "bad", "a")["message"]
    assert operator.control.standing("a") == WITHOUT_BUDGET
    assert world.status("good", "b")["left"] == 0
    writes = world.server.writes
    await operator.look()
    assert world.server.writes == writes, "written once"


@pytest.mark.promise("budgets-lowered")
async def test_a_spent_budget_lowers_its_namespaces_at_once_and_a_new_leader_knows_before_its_first_look() -> None:
    world = World()
    world.server.put("b1", "a", {"gpuSeconds": 10, "borrowPriority": -5})
    operator = OperatorProcess(world)
    await operator.look()
    assert operator.control.standing("a").effective_priority(100) == 100
    world.consume("a", 20_000)
    world.now_ms += 60_000
    before = operator.changes
    await operator.look()
    assert operator.changes == before + 1
    for one in (operator, OperatorProcess(world)):
        standing = one.control.standing("a")
        assert (standing.effective_priority(100), standing.over_budget_milli) == (-5, 1000)
        assert one.control.standing("b") == WITHOUT_BUDGET


@pytest.mark.promise("budgets-borrower-told")
async def test_that_a_borrowers_budget_counts_again_later_than_was_told_is_told() -> None:
    world = World()
    world.server.put("b1", "a", {"gpuSeconds": 1000, "refill": "Continuous", "cap": 1000})
    operator = OperatorProcess(world)
    await operator.look()
    world.consume("a", 100_000_000)
    world.now_ms += HOUR_MS
    await operator.look()
    before, promised, step = (
        operator.changes,
        operator.control.standing("a").refill_at,
        operator.control.standing("a").step,
    )
    world.consume("a", 200_000)
    world.now_ms += HOUR_MS // 2
    await operator.look()
    assert (operator.control.standing("a").lowered_to, operator.control.standing("a").step) == (-1000, step)
    assert operator.control.standing("a").refill_at != promised
    assert operator.changes == before + 1


@pytest.mark.parametrize(("when", "waits", "priority"), [("Queue", "2026-02-01T00:00:00Z", 100), ("Notify", None, 100)])
async def test_queue_lets_new_ones_wait_until_the_refill_and_notify_changes_nothing(
    when: str, waits: str | None, priority: int
) -> None:
    world = World()
    world.server.put("b1", "a", {"gpuSeconds": 10, "whenSpent": when})
    operator = OperatorProcess(world)
    await operator.look()
    world.consume("a", 20_000)
    world.now_ms += 60_000
    await operator.look()
    standing = operator.control.standing("a")
    assert (standing.waits_until, standing.effective_priority(100)) == (waits, priority)


@pytest.mark.promise("budgets-from-here-on", "budgets-one-each")
async def test_a_central_budget_by_selector_overrides_a_namespaces_own_and_both_report_it() -> None:
    world = World()
    world.server.put("own", "a", {"gpuSeconds": 10_000})
    operator = OperatorProcess(world)
    await operator.look()
    world.consume("a", 1_000_000)
    world.server.put("team", CENTRAL, {"gpuSeconds": 5000, "namespaceSelector": {"matchLabels": {"team": "x"}}})
    world.server.put("cheat", "b", {"gpuSeconds": 9, "namespaceSelector": {"matchLabels": {"team": "x"}}})
    world.now_ms += 60_000
    await operator.look()
    assert world.condition("InForce", "own", "a")["reason"] == "Superseded"
    assert f"{CENTRAL}/team" in world.condition("InForce", "own", "a")["message"]
    assert world.condition("InForce", "cheat", "b")["reason"] == "SelectorNotAllowed"
    assert world.status("team", CENTRAL)["namespaces"] == ["a", "b", CENTRAL]
    assert world.status("team", CENTRAL)["left"] == 5000, "charged from its first moment, not for earlier use"
    world.consume("a", 1_000_000)
    world.consume("b", 500_000)
    world.now_ms += 60_000
    await operator.look()
    assert world.status("team", CENTRAL)["left"] == 3500


async def test_models_are_charged_by_weight() -> None:
    world = World()
    models = [{"model": "A", "weight": 2.5}]
    world.server.put("b1", "a", {"gpuSeconds": 1000, "chargeBy": "Held", "models": models})
    operator = OperatorProcess(world)
    await operator.look()
    world.consume("a", 200_000)
    world.now_ms += 60_000
    await operator.look()
    assert (world.status()["held"], world.status()["reserved"], world.status()["left"]) == (250, 500, 750)


@pytest.mark.promise("budgets-charged-once")
async def test_after_a_node_is_gone_and_a_restart_charging_goes_on_from_what_is_written() -> None:
    world = World()
    world.server.put("b1", "a", {"gpuSeconds": 1000})
    operator = OperatorProcess(world)
    await operator.look()
    world.consume("a", 100_000, node="n0")
    world.consume("a", 200_000, node="n1")
    world.now_ms += 60_000
    await operator.look()
    assert world.status()["left"] == 700
    world.written = None
    del world.had["n1", "a"]
    operator = OperatorProcess(world)
    world.consume("a", 50_000, node="n0")
    world.now_ms += 60_000
    await operator.look()
    assert world.status()["left"] == 700, "incomplete figures charge nothing"
    world.written = {("a", "A"): ConsumedTotal(175_000, 350_000)}
    await operator.look()
    assert world.status()["left"] == 650


async def test_after_a_statement_was_deleted_a_budget_made_again_charges_at_once_and_another_later() -> None:
    world = World()
    world.server.put("b1", "a", {"gpuSeconds": 1000})
    world.server.put("b2", "b", {"gpuSeconds": 1000})
    await OperatorProcess(world).look()
    world.written = {("a", "A"): ConsumedTotal(0, 300_000), ("b", "A"): ConsumedTotal(0, 300_000)}
    world.now_ms += 60_000
    await OperatorProcess(world).look()
    assert [world.status("b1", "a")["left"], world.status("b2", "b")["left"]] == [700, 700]
    world.written = {("a", "A"): ConsumedTotal(0, 10_000), ("b", "A"): ConsumedTotal(0, 10_000)}
    del world.server.objects["b", "b2"]
    world.server.put("b2", "b", {"gpuSeconds": 1000})
    await OperatorProcess(world).look()
    for had, left in ((60_000, [700, 950]), (310_000, [690, 700])):
        world.written = {("a", "A"): ConsumedTotal(0, had), ("b", "A"): ConsumedTotal(0, had)}
        world.now_ms += 60_000
        await OperatorProcess(world).look()
        assert [world.status("b1", "a")["left"], world.status("b2", "b")["left"]] == left


async def test_where_nothing_is_consumed_little_is_written() -> None:
    world = World()
    world.server.put("b1", "a", {"gpuSeconds": 1000})
    operator = OperatorProcess(world)
    for _ in range(60):
        await operator.look()
        world.now_ms += 30_000
    assert world.server.writes <= 4


@pytest.mark.promise("budgets-malformed")
async def test_a_malformed_budget_gets_one_event_whatever_the_age_of_its_account() -> None:
    world = World()
    world.server.put("b1", "a", {"gpuSeconds": 10})
    operator = OperatorProcess(world)
    await operator.look()
    world.now_ms += HOUR_MS
    world.server.put("b1", "a", {"gpuSeconds": "much"})
    await operator.look()
    writes = world.server.writes
    await operator.look()
    assert world.server.writes == writes


@pytest.mark.promise("budgets-malformed")
async def test_an_account_of_another_age_costs_its_budget_alone() -> None:
    world = World()
    books = {"periodStart": 0, "at": START_MS, "since": 1 << 53, "usage": 1, "spending": 1}
    world.server.put("forged", "a", {"gpuSeconds": 10})["status"] = {"books": books}
    world.server.put("good", "b", {"gpuSeconds": 10})
    operator = OperatorProcess(world)
    await operator.look()
    world.consume("b", 20_000)
    world.now_ms += 60_000
    await operator.look()
    assert world.status("good", "b")["left"] == 0
    assert operator.control.standing("b").lowered_to == -1000
    assert operator.control.standing("b").refill_at == "2026-02-01T00:00:00Z"


@pytest.mark.promise("budgets-charged-once")
@pytest.mark.parametrize(("models", "charged"), [(4, 256), (20, 204)])
async def test_a_budget_of_many_namespaces_and_models_is_charged_as_far_as_its_account_has_room(
    models: int, charged: int
) -> None:
    world = World()
    world.namespaces = [CENTRAL, *(f"n{number}" for number in range(255))]
    world.server.put("team", CENTRAL, {"gpuSeconds": 10**6, "namespaceSelector": {}})
    operator = OperatorProcess(world)
    await operator.look()
    for had_ms in (1000, 3000, 6000):
        keys = ((namespace, f"model-{number}") for namespace in world.namespaces for number in range(models))
        world.written = dict.fromkeys(keys, ConsumedTotal(0, had_ms))
        world.now_ms += 60_000
        await operator.look()
    full = 6 * charged * models
    assert full <= world.status("team", CENTRAL)["reserved"] <= full + 256 * models, "none of it twice"
