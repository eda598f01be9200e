"""The whole operator over an API server double with random delays and faults from a seed. Users create, resize and
delete SharePods and delete their Pods. Invariants are checked at each version of each object.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from contextlib import suppress
from typing import Any

import pytest
from doubles.apiserver.delays import Delays
from doubles.apiserver.errors import Refused
from doubles.apiserver.players import Players
from doubles.apiserver.server import ApiServer, api_server
from doubles.apiserver.storage import Change
from sharepod.api.objects import TENANT_LABEL
from sharepod.controller.operator import Operator
from sharepod.kube import Json
from unit.controller.test_operator import an_operator, running, until

NODES = 3
GPUS = 4
NAMES = 14
"""Largest number of SharePods at one time. Each requests 0.2 to 0.6 of a GPU, so all of them may exceed the GPUS."""
DOINGS = 60
EXPIRED = Refused(410, "Expired", "too old resource version")
LONGEST_UNSERVED_S = 0.4
"""Longest time in seconds for which a kind is not served. The operator retries several times within it."""


class Judge:
    """Check of each change. `problems`: promises that were broken at any moment."""

    def __init__(self, api: ApiServer) -> None:
        self.problems: list[str] = []
        self._bound: defaultdict[str, set[str]] = defaultdict(set)
        api.storage.listeners.append(self._see)

    def _see(self, change: Change) -> None:
        item = change.after
        if item is not None and change.kind.plural == "gpunodes":
            self._see_ledger(item)
        elif item is not None and change.kind.plural == "pods" and item["spec"].get("nodeName"):
            bound = self._bound[item["metadata"]["labels"][TENANT_LABEL]]
            bound.add(item["metadata"]["uid"])
            if len(bound) > 1:
                self.problems.append(f"{item['metadata']['name']} ran twice")

    def _see_ledger(self, item: Json) -> None:
        rows = item["spec"].get("tenants") or []
        given: Counter[str] = Counter()
        for row in rows:
            for gpu in row["gpus"]:
                given[gpu] += row["requestMilli"]
        self.problems += [f"{milli} thousandths of {gpu}" for gpu, milli in given.items() if milli > 1000]
        if len({row["id"] for row in rows}) < len(rows):
            self.problems.append(f"a tenant has two rows on {item['metadata']['name']}")


class Users:
    """Random users and random faults between operator and API server, from a seed."""

    def __init__(self, api: ApiServer, seed: int) -> None:
        self._api = api
        self._chance = random.Random(seed)
        self._kind = api.kind("sharepods")

    def do(self) -> None:
        """Do one thing."""
        does = (self._create, self._create, self._create, self._delete, self._resize, self._delete_pod, self._weather)
        with suppress(Refused):  # the object exists already, or does not exist
            self._chance.choice(does)()

    def _name(self) -> str:
        return f"p{self._chance.randrange(NAMES)}"

    def _create(self) -> None:
        gpu = {"request": self._chance.choice((0.2, 0.3, 0.5, 0.6))}
        spec: Json = {"gpu": gpu, "restartPolicy": "Never", "containers": [{"name": "c", "image": "i"}]}
        self._api.storage.create(self._kind, "n", {"metadata": {"name": self._name()}, "spec": spec})

    def _delete(self) -> None:
        self._api.storage.delete(self._kind, "n", self._name())

    def _resize(self) -> None:
        request = self._chance.choice((0.2, 0.4, 0.6))

        def change(item: Json) -> Json:
            item["spec"]["gpu"]["request"] = request
            return item

        self._api.storage.update(self._kind, "n", self._name(), change)

    def _delete_pod(self) -> None:
        self._api.storage.delete(self._api.kind("pods"), "n", self._name())

    def _weather(self) -> None:
        kind = self._chance.choice(("pods", "sharepods", "gpunodes"))
        error = Refused(500, "InternalError", "etcdserver: request timed out")
        faults: dict[str, Any] = self._chance.choice(({"lose_answer": True}, {"refusal": error}))
        match self._chance.randrange(6):
            case 0:
                self._api.cut_watches(kind, error=self._chance.choice((None, error, EXPIRED)))
            case 1:
                self._api.fail("patch", kind, times=self._chance.randint(1, 3), **faults)
            case 2:
                self._api.fail("create", "pods", **faults)
            case 3:
                self._api.fail(self._chance.choice(("get", "delete")), kind, times=self._chance.randint(1, 3), **faults)
            case 4:
                self._api.fail("list", kind, refusal=self._chance.choice((error, EXPIRED)))
            case _:
                self._api.unserved.add(kind)
                loop = asyncio.get_running_loop()
                loop.call_later(self._chance.uniform(0.0, LONGEST_UNSERVED_S), self._api.unserved.discard, kind)


@pytest.mark.promise("operator-no-over-commit", "operator-no-second-run")
@pytest.mark.parametrize("seed", range(3))
async def test_whatever_overtakes_what_nothing_is_lost_doubled_or_overcommitted(seed: int) -> None:
    chance = random.Random(seed)
    async with api_server() as api, running(operator := an_operator(api)):
        plurals = ("pods", "nodes", "gpunodes", "leases", "sharepods")
        players = Players(api.storage, {name: api.kind(name) for name in plurals})
        players.add_nodes(NODES, gpus=GPUS)
        players.start()
        judge, users = Judge(api), Users(api, seed)
        try:
            await until(lambda: operator._active and len(operator.state.nodes) == NODES)
            api.delays = Delays(seed)
            for _ in range(DOINGS):
                users.do()
                await asyncio.sleep(chance.uniform(0.0, 0.05))
            api.faults.clear()
            api.unserved.clear()
            with suppress(TimeoutError):
                await until(lambda: bool(judge.problems) or not _unsettled(api))
            assert (judge.problems, _unsettled(api)) == ([], [])
            await until(lambda: _known(operator) == {name: len(ids) for name, ids in _rows(api).items()})
        finally:
            await players.stop()


def _known(operator: Operator) -> dict[str, int]:
    """Return the number of reservations on each node in the operator's state."""
    return {item.name: len(operator.state.cluster.reservations(item.name)) for item in operator.state.nodes}


def _rows(api: ApiServer) -> dict[str, list[str]]:
    ledgers = api.storage.select(api.kind("gpunodes"), "")
    return {item["metadata"]["name"]: [row["id"] for row in item["spec"].get("tenants") or []] for item in ledgers}


def _unsettled(api: ApiServer) -> list[str]:
    """Return the objects that are not settled: rows and Pods of deleted SharePods, and SharePods that have not ended
    and lack a row or a Pod with an open gate."""
    found: list[str] = []
    wanted: Counter[str] = Counter()
    for item in api.storage.select(api.kind("sharepods"), "n"):
        phase = (item.get("status") or {}).get("phase")
        if phase == "Running":
            wanted[item["metadata"]["uid"]] = 1
        elif phase not in ("Succeeded", "Failed"):
            found.append(f"{item['metadata']['uid']} is {phase}")
    rows = Counter(tenant for ids in _rows(api).values() for tenant in ids)
    pods = [item for item in api.storage.select(api.kind("pods"), "n") if not item["spec"].get("schedulingGates")]
    runs = Counter(item["metadata"]["labels"][TENANT_LABEL] for item in pods)
    for what, held in (("rows", rows), ("Pods", runs)):
        found += [f"{tenant}: {what} {held[tenant]}" for tenant in held | wanted if held[tenant] != wanted[tenant]]
    return found
