"""Many SharePods while the operator is killed, again and again, at random moments.

Guarantees: everything random comes from the seed: the requests, which SharePods are deleted while others are still
placed, how many reservations each kill waits for and how long after that it comes, and whether the successor is the
same pod started again or another one, which has to wait for the Lease. There are as many GPUs as SharePods, so that in
the end each SharePod that was not deleted must run.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from cluster.audit import Audit
from cluster.operator_world import World, wait
from harness.api import Api, ApiError, Object

REQUESTS = (200, 300, 400, 500, 600, 700, 800, 1000)  # thousandths
_CLIENTS = 4


@dataclass(frozen=True, slots=True)
class Asked:
    sharepods: int
    nodes: int
    kills: int
    seed: int
    deleted: int
    """Number of SharePods that are deleted while others are placed."""
    timeout: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """`lost`: SharePods that neither run nor were deleted. `doubled`: those with two rows in the end, or with two
    Pods that were ever bound. `over_committed`: GPUs that at any moment were promised more than they have.
    `left`: rows and Pods in the end of SharePods that are gone."""

    running: int
    lost: int
    doubled: int
    over_committed: int
    left: int
    kills: int
    watch_gaps: int
    longest_silence: float
    seconds: float


def run(world: World, audit: Audit, asked: Asked, prefix: str = "chaos") -> Outcome:
    """One run on nodes of its own. The operator of `world` must run; in the end another does."""
    chance = random.Random(asked.seed)
    names = [f"p{number}" for number in range(asked.sharepods)]
    requests = {name: chance.choice(REQUESTS) for name in names}
    to_delete = set(chance.sample(names, asked.deleted))
    after = sorted(chance.randrange(1, asked.sharepods - asked.deleted) for _ in range(asked.kills))
    kills = [(count, chance.uniform(0, 0.5), chance.random() < 0.5) for count in after]

    world.nodes(prefix, asked.nodes)
    namespace = world.cluster.namespace(prefix)
    before, begun = len(audit.reserved), time.monotonic()
    killing = _Killing(world, audit, kills, before)
    clients = [
        _Client(world, namespace, prefix, {name: requests[name] for name in names[first::_CLIENTS]}, to_delete)
        for first in range(_CLIENTS)
    ]
    threads: list[_Killing | _Client] = [killing, *clients]
    audit.expecting = True
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(asked.timeout)
        assert not thread.is_alive(), f"{thread.name}: not within {asked.timeout:g} s"
    audit.expecting = False
    failures = [failure for thread in threads for failure in thread.failures]
    assert not failures, failures

    staying = set(names) - to_delete
    with suppress(AssertionError):  # then the outcome tells what is wrong
        wait(lambda: _settled(world, audit, namespace, staying), what="settled", timeout=asked.timeout, interval=0.5)
    return _outcome(world, audit, namespace, staying, killing.done, time.monotonic() - begun)


class _Client(threading.Thread):
    """Creates its SharePods as fast as the API server takes them and deletes those that are to go, a few later."""

    def __init__(self, world: World, namespace: str, on: str, requests: dict[str, int], to_delete: set[str]) -> None:
        super().__init__(name="client", daemon=True)
        self._world = world
        self._namespace = namespace
        self._on = on
        self._requests = requests
        self._to_delete = to_delete
        self.failures: list[str] = []

    def run(self) -> None:
        try:
            doomed: list[str] = []
            for name, milli in self._requests.items():
                self._world.apply(self._namespace, name, {"request": milli / 1000}, on=self._on)
                if name in self._to_delete:
                    doomed.append(name)
                if len(doomed) > 5:
                    self._world.delete(self._namespace, doomed.pop(0))
            for name in doomed:
                self._world.delete(self._namespace, name)
        except (ApiError, OSError) as error:
            self.failures.append(str(error))


class _Killing(threading.Thread):
    """Kills the operator each time that so many reservations more were seen, and starts the next at once."""

    def __init__(self, world: World, audit: Audit, kills: list[tuple[int, float, bool]], before: int) -> None:
        super().__init__(name="killing", daemon=True)
        self._world = world
        self._audit = audit
        self._kills = kills
        self._before = before
        self.done = 0
        self.failures: list[str] = []

    def _has_reserved(self, wanted: int) -> bool:
        return len(self._audit.reserved) >= wanted

    def run(self) -> None:
        name = "operator"
        try:
            for count, later, same_pod in self._kills:
                wanted = self._before + count
                wait(partial(self._has_reserved, wanted), what=f"{count} reservations", timeout=300, interval=0.005)
                time.sleep(later)
                operator = self._world.operator
                assert operator is not None
                operator.signal(signal.SIGKILL)
                operator.wait(10)
                self.done += 1
                name = name if same_pod else f"operator-{self.done}"
                self._world.start_operator(name)
        except Exception as error:
            self.failures.append(repr(error))


def _running(api: Api, path: str) -> dict[str, Object]:
    """The SharePods that run, by name, as the API server shows them."""
    items = api.get(path)["items"]
    return {item["metadata"]["name"]: item for item in items if (item.get("status") or {}).get("phase") == "Running"}


def _mine(audit: Audit, namespace: str) -> tuple[list[Object], list[Object]]:
    rows = [row for _, row in audit.rows() if row["namespace"] == namespace]
    return rows, [pod for pod in audit.pods() if pod["metadata"]["namespace"] == namespace]


def _settled(world: World, audit: Audit, namespace: str, staying: set[str]) -> bool:
    rows, pods = _mine(audit, namespace)
    if not len(rows) == len(pods) == len(staying) or any(row["state"] != "Reserved" for row in rows):
        return False
    return _running(world.api, world.path(namespace)).keys() == staying


def _outcome(world: World, audit: Audit, namespace: str, staying: set[str], kills: int, seconds: float) -> Outcome:
    running = _running(world.api, world.path(namespace))
    rows, pods = _mine(audit, namespace)
    tenants = [row["id"] for row in rows]
    uids = {item["metadata"]["uid"] for item in running.values()}
    podded = {item["status"]["podUID"] for item in running.values()}
    return Outcome(
        running=len(running),
        lost=len(staying - running.keys()) + len(uids - set(tenants)),
        doubled=len(tenants) - len(set(tenants)) + len(audit.doubled),
        over_committed=len(audit.over_committed),
        left=len(set(tenants) - uids) + sum(pod["metadata"]["uid"] not in podded for pod in pods),
        kills=kills,
        watch_gaps=audit.gaps,
        longest_silence=audit.longest_silence,
        seconds=seconds,
    )
