"""Chaos: the operator is killed repeatedly at random moments while many shares are placed, optionally in bad weather.

The shares are SharePods. With `thirds`, a third each are SharePods, plain Pods with claims and plain Pods with a
resource line.

Guarantees: everything random comes from the seed:
- the requests, the ways to request them (SharePod, claim, line), and the SharePods that are deleted while others are
  placed;
- the number of reservations before each kill, and the delay after that;
- whether the successor is the same pod restarted, or another pod that has to wait for the Lease;
- the GPUs with a foreign process, the taken names of Pods, and the weather.

There are as many GPUs without foreign processes as SharePods. So at the end each SharePod that was not deleted must
run.
"""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path

from cluster.audit import Audit
from cluster.chaos_preemption import Preempting
from cluster.doors import DOOR_LABEL, Door, ask, asked_for, end, open_doors, thirds
from cluster.fake_agents import gpu_uuid
from cluster.operator_world import World, wait
from cluster.surely import surely
from cluster.weather.objects import foreign_pod
from cluster.weather.storm import Storm
from harness.api import ApiError, Object
from sharepod.api.objects import TENANT_LABEL

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
    """Seconds within which all SharePods must run or be deleted. The outcome is recorded then."""
    strangers: int = 0
    """Number of GPUs with a process of no tenant, which must take no tenant."""
    taken: int = 0
    """Number of SharePods whose Pod's name another Pod has, until the faults end."""
    preempted: int = 0
    """Number of additional SharePods that are preempted repeatedly, on separate nodes."""
    thirds: bool = False
    """A third of the shares each are SharePods, plain Pods with claims and plain Pods with a line."""
    spread: float = 0.0
    """Seconds over which the SharePods are created; 0: as fast as the API server takes them."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a run.

    `lost`: stored SharePods that neither run nor were deleted. `doubled`: SharePods with two rows at the end, or with
    two Pods that were ever bound. `over_committed`: GPUs with more assigned than they have at any moment, or with any
    assignment while a stranger's process was on them. `left`: rows and Pods of deleted SharePods at the end. `ended`:
    operators that ended without a request. `failed`: parts of the run itself that failed or were late.
    """

    running: int
    lost: int
    doubled: int
    over_committed: int
    left: int
    kills: int
    ended: int
    failed: tuple[str, ...]
    watch_gaps: int
    longest_silence: float
    seconds: float
    preempted: int = 0
    """Number of SharePods that ran after preempting others."""


def run(world: World, audit: Audit, asked: Asked, prefix: str = "chaos", storm: Storm | None = None) -> Outcome:
    """Run once on separate nodes; return the outcome. An operator must be running in `world`. Because operators are
    killed, another one runs at the end."""
    chance = random.Random(asked.seed)
    names = [f"p{number}" for number in range(asked.sharepods)]
    requests = {name: chance.choice(REQUESTS) for name in names}
    to_delete = set(chance.sample(names, asked.deleted))
    after = sorted(chance.randrange(1, asked.sharepods - asked.deleted) for _ in range(asked.kills))
    kills = [(count, chance.uniform(0, 0.5), chance.random() < 0.5) for count in after]
    nodes = [f"{prefix}-{number}" for number in range(asked.nodes)]
    strangers = {gpu_uuid(node, chance.randrange(2)) for node in chance.sample(nodes, asked.strangers)}
    doors = thirds(names, asked.seed) if asked.thirds else dict.fromkeys(names, Door.SHAREPOD)
    sharepods = {name for name in names if doors[name] is Door.SHAREPOD}
    taken = chance.sample(sorted(sharepods - to_delete), asked.taken)

    stage = _Stages()
    audit.forbidden |= strangers
    world.agents.strangers(strangers)
    world.nodes(prefix, asked.nodes)
    stage(f"{asked.nodes} nodes are there")
    namespace = world.cluster.namespace(prefix)
    over = threading.Event()
    preempting = (
        Preempting(world, audit, f"{prefix}-low", asked.preempted, asked.seed, over) if asked.preempted else None
    )
    if preempting is not None:
        preempting.prepare()
    if asked.thirds:
        open_doors(world, namespace, REQUESTS)
    for name in taken:
        world.api.create(f"/api/v1/namespaces/{namespace}/pods", foreign_pod(name))
    before, begun = len(audit.reserved), time.monotonic()
    deadline = begun + asked.timeout
    killing = _Killing(world, audit, kills, before, over)
    clients = [
        _Client(
            world,
            namespace,
            prefix,
            {name: (requests[name], doors[name]) for name in names[first::_CLIENTS]},
            to_delete,
            asked,
            over,
        )
        for first in range(_CLIENTS)
    ]
    others = [thread for thread in (preempting, storm) if thread is not None]
    threads: list[_Killing | _Client | Storm | Preempting] = [*clients, killing, *others]
    audit.expecting = True
    for thread in threads:
        thread.start()
    failed: list[str] = []
    for thread in threads:
        failed += _join(thread, killing, deadline)
        stage(f"{thread.name} is done")
    over.set()
    if storm is not None:
        storm.stop()
    for name in taken:
        with suppress(ApiError):
            world.api.delete(f"/api/v1/namespaces/{namespace}/pods/{name}", grace=0)

    failed += _settle(world, audit, namespace, killing, deadline, preempting)
    stage("it is over" if failed else "all is at rest")
    outcome = _outcome(world, audit, namespace, killing, failed, time.monotonic() - begun, preempting)
    audit.expecting = False
    return outcome


def restored(
    world: World, audit: Audit, backup: Path, timeout: float, prefix: str = "chaos", preempted: int = 0
) -> Outcome:
    """Restore etcd to a copy, as from a backup. Return the outcome for the restored objects, within `timeout` seconds.
    `preempted`: as requested for the run."""
    begun, over = time.monotonic(), threading.Event()
    killing = _Killing(world, audit, [], 0, over)
    world.cluster.restore(backup)
    world.kubelets.forget()
    audit.forget()
    audit.expecting = True
    for pod in world.cluster.pods(prefix, selector=f"!{TENANT_LABEL},!{DOOR_LABEL}"):
        world.api.delete(f"/api/v1/namespaces/{prefix}/pods/{pod['metadata']['name']}", grace=0)
    preempting = Preempting(world, audit, f"{prefix}-low", preempted, 0, over) if preempted else None
    if preempting is not None:
        preempting.withdraw()
    failed = _settle(world, audit, prefix, killing, begun + timeout, preempting)
    outcome = _outcome(world, audit, prefix, killing, failed, time.monotonic() - begun, preempting)
    audit.expecting = False
    return outcome


def _join(thread: _Killing | _Client | Storm | Preempting, killing: _Killing, deadline: float) -> list[str]:
    """Wait for a thread's end; restart an operator that ends in this time, as a Deployment does. Return the
    failures."""
    while thread.is_alive():
        if time.monotonic() > deadline:
            return [f"{thread.name} is not done in time; {killing.state()}"]
        thread.join(0.5)
        killing.keep()
    return thread.failures


def _settle(
    world: World, audit: Audit, namespace: str, killing: _Killing, deadline: float, preempting: Preempting | None
) -> list[str]:
    """Wait until every stored SharePod runs. Return the failures."""

    def settled() -> bool:
        killing.keep()
        return _settled(world, audit, namespace) and (preempting is None or preempting.settled())

    try:
        wait(settled, what="all at rest", timeout=max(0.0, deadline - time.monotonic()), interval=0.5)
    except AssertionError as error:
        return [f"{error}; {killing.state()}"]
    return []


class _Stages:
    """Stages of a run, printed with the seconds since its start, so that a long run shows its progress."""

    def __init__(self) -> None:
        self._begun = time.monotonic()

    def __call__(self, what: str) -> None:
        print(f"chaos: after {time.monotonic() - self._begun:.0f} s {what}", file=sys.stderr, flush=True)


class _Client(threading.Thread):
    """Client that creates the SharePods, and deletes each chosen SharePod after it has created a few more."""

    def __init__(
        self,
        world: World,
        namespace: str,
        on: str,
        requests: dict[str, tuple[int, Door]],
        to_delete: set[str],
        asked: Asked,
        over: threading.Event,
    ) -> None:
        super().__init__(name="a client", daemon=True)
        self._pause = asked.spread / max(1, len(requests))
        self._over = over
        self._world = world
        self._namespace = namespace
        self._on = on
        self._requests = requests
        self._to_delete = to_delete
        self.failures: list[str] = []

    def run(self) -> None:
        try:
            doomed: list[str] = []
            for name, (milli, door) in self._requests.items():
                surely(
                    partial(ask, self._world, self._namespace, name, milli, door, on=self._on),
                    done=409,
                    over=self._over,
                )
                if name in self._to_delete:
                    doomed.append(name)
                if len(doomed) > 5:
                    self._delete_one(doomed.pop(0))
                if self._over.wait(self._pause):
                    return
            for name in doomed:
                self._delete_one(name)
        except (ApiError, OSError, HTTPException) as error:
            self.failures.append(repr(error))

    def _delete_one(self, name: str) -> None:
        _, door = self._requests[name]
        surely(partial(end, self._world, self._namespace, name, door), done=404, over=self._over)


class _Killing(threading.Thread):
    """Thread that kills the operator each time a further number of reservations exists, and then starts the next
    operator."""

    def __init__(
        self, world: World, audit: Audit, kills: list[tuple[int, float, bool]], before: int, over: threading.Event
    ) -> None:
        super().__init__(name="killer of operators", daemon=True)
        self._over = over
        self._world = world
        self._audit = audit
        self._kills = kills
        self._before = before
        self._lock = threading.Lock()
        self._operator = "operator"
        """Name of the operator that runs now."""
        self.done = 0
        self.ended = 0
        """Number of operators that ended without a request."""
        self.failures: list[str] = []

    def keep(self) -> None:
        """Start the operator again if it has ended."""
        with self._lock:
            operator = self._world.operator
            if operator is not None and not operator.running():
                self.ended += 1
                print(f"chaos: the operator ended\n{operator.log_tail(8)}", file=sys.stderr, flush=True)
                self._world.start_operator(self._operator)

    def state(self) -> str:
        """Return the operator's progress, with the end of its log."""
        with self._lock:
            operator = self._world.operator
        log = operator.log_tail(20) if operator is not None else "(no operator)"
        return f"{len(self._audit.reserved) - self._before} reservations, {self.done} kills; the operator's log:\n{log}"

    def _has_reserved(self, wanted: int) -> bool:
        return self._over.is_set() or len(self._audit.reserved) >= wanted

    def run(self) -> None:
        try:
            for count, later, same_pod in self._kills:
                wanted = self._before + count
                wait(partial(self._has_reserved, wanted), what=f"{count} reservations", timeout=300, interval=0.005)
                if self._over.wait(later):
                    return
                with self._lock:
                    self._kill(same_pod)
        except Exception as error:
            self.failures.append(repr(error))

    def _kill(self, same_pod: bool) -> None:
        operator = self._world.operator
        assert operator is not None
        if operator.running():
            operator.signal(signal.SIGKILL)
            operator.wait(10)
        self.done += 1
        self._operator = self._operator if same_pod else f"operator-{self.done}"
        self._world.start_operator(self._operator)


def _names(world: World, namespace: str) -> set[str]:
    """Return the names of the stored objects that request a share and are not being deleted."""
    items = asked_for(world, namespace)
    return {item["metadata"]["name"] for item in items if "deletionTimestamp" not in item["metadata"]}


def _running(world: World, namespace: str) -> dict[str, Object]:
    """Return the running SharePods and plain Pods with a share, by name, as the API server shows them."""
    items = asked_for(world, namespace)
    return {item["metadata"]["name"]: item for item in items if (item.get("status") or {}).get("phase") == "Running"}


def _mine(audit: Audit, namespace: str) -> tuple[list[Object], list[Object]]:
    rows = [row for _, row in audit.rows() if row["namespace"] == namespace]
    return rows, [pod for pod in audit.pods() if pod["metadata"]["namespace"] == namespace]


def _settled(world: World, audit: Audit, namespace: str) -> bool:
    rows, pods = _mine(audit, namespace)
    if len(rows) != len(pods) or any(row["state"] != "Reserved" for row in rows):
        # no list is made here, because frequent lists would load the API server more than all calls of the operator
        return False
    staying = _names(world, namespace)
    return len(rows) == len(staying) and _running(world, namespace).keys() == staying


def _why_lost(world: World, namespace: str, names: set[str]) -> Counter[str]:
    """Count the combinations of phase and reasons of these SharePods."""
    found: Counter[str] = Counter()
    for item in asked_for(world, namespace):
        if item["metadata"]["name"] in names:
            status = item.get("status") or {}
            conditions = [f"{one['type']} {one['reason']}" for one in status.get("conditions") or ()]
            found[", ".join([str(status.get("phase")), *conditions])] += 1
    return found


def _outcome(
    world: World,
    audit: Audit,
    namespace: str,
    killing: _Killing,
    failed: list[str],
    seconds: float,
    preempting: Preempting | None,
) -> Outcome:
    staying = _names(world, namespace)
    running = _running(world, namespace)
    rows, pods = _mine(audit, namespace)
    for words, count in _why_lost(world, namespace, staying - running.keys()).items():
        print(f"chaos: {count} not running: {words}", file=sys.stderr, flush=True)
    tenants = [row["id"] for row in rows]
    uids = {item["metadata"]["uid"] for item in running.values()}
    podded = {item["status"]["podUID"] for item in running.values()}
    for row in rows:
        if row["id"] not in uids:
            print(f"chaos: a row of nothing that runs: {row}", file=sys.stderr, flush=True)
    for name, item in running.items():
        if item["metadata"]["uid"] not in tenants:
            print(f"chaos: {name} runs without a row: {item['metadata']}", file=sys.stderr, flush=True)
    for words in failed:
        print(f"chaos: {words}", file=sys.stderr, flush=True)
    lost, doubled = (preempting.lost(), preempting.doubled()) if preempting is not None else ([], [])
    return Outcome(
        running=len(running),
        lost=len(staying - running.keys()) + len(uids - set(tenants)) + len(lost),
        doubled=len(tenants) - len(set(tenants)) + len(audit.doubled) + len(doubled),
        over_committed=len(audit.over_committed),
        left=len(set(tenants) - uids) + sum(pod["metadata"]["uid"] not in podded for pod in pods),
        kills=killing.done,
        ended=killing.ended,
        failed=tuple(failed),
        watch_gaps=audit.gaps,
        longest_silence=audit.longest_silence,
        seconds=seconds,
        preempted=preempting.ran if preempting is not None else 0,
    )
