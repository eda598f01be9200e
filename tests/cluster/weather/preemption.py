"""Faults during preemptions. Each function plays one and returns the seconds until the SharePods of higher priority
ran; AssertionError if more tenants are ended than needed, or any share is assigned twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cluster.audit import Audit
from cluster.operator_world import GIB, wait
from harness.proxy import Call, Hold, LoseAnswer, Refuse, Reset, Rule

from .world import Weather

HIGH = "high"
"""PriorityClass of the preempting SharePods."""
_LOW, _MANY = 4, 2
"""Number of SharePods of low priority, which fill the nodes, and number of SharePods of higher priority."""
_OUTAGE_S = 8.0
"""Seconds without the API server: longer than the renew deadline, so that the operator loses leadership."""
_SHARE = {"request": 0.5, "memory": "12Gi"}


def high_priority(weather: Weather) -> None:
    """Create the PriorityClass of the preempting SharePods."""
    weather.world.api.create("/apis/scheduling.k8s.io/v1/priorityclasses", {"metadata": {"name": HIGH}, "value": 1000})


def evicts(call: Call) -> bool:
    """Return whether the call is an eviction or its dry run."""
    return call.verb == "create" and call.subresource == "eviction"


def bad_evictions(weather: Weather) -> float:
    """Evictions are refused with 503, reset, performed without an answer, and answered late; each in turn."""
    hold = Hold()
    rules = [
        Rule(fault, where=evicts, times=times)
        for fault, times in ((Refuse(503, "ServiceUnavailable"), 3), (Reset(), 2), (LoseAnswer(), 3), (hold, 2))
    ]
    with _preempting(weather, "evictions", slow=False) as run, weather.proxy.weather(*rules):
        run.begin()
        assert hold.held.wait(60), "fewer evictions than faults"
        weather.outlast(4.0)
        hold.release()
        return run.settled()


def outage(weather: Weather) -> float:
    """While the first victim ends, the API server is away for so long that the operator loses leadership."""
    with _preempting(weather, "away") as run:
        run.begin()
        run.until_one_ends()
        with weather.proxy.weather(Rule(Refuse(503, "ServiceUnavailable"))):
            weather.proxy.cut()
            weather.outlast(_OUTAGE_S)
        return run.settled()


def silence(weather: Weather) -> float:
    """All watches go silent while the first victim ends: the operator does not see the end."""
    with _preempting(weather, "silent") as run:
        run.begin()
        run.until_one_ends()
        assert weather.proxy.silence() > 0
        return run.settled()


def bad_ledger_writes(weather: Weather) -> float:
    """Shares are lowered while some writes of the ledger are lost, and some answers to them."""
    world, (namespace, (node,)) = weather.world, weather.place("lowered")
    low = [f"low{number}" for number in range(4)]

    def shares() -> dict[str, int]:
        return {row["podName"]: row["requestMilli"] for row in world.rows(node)}

    with Audit(world.api, memory=16 * GIB) as audit:
        for name in low:
            world.apply(namespace, name, {"request": 0.5, "memory": "2Gi"}, on="lowered", restartPolicy="Always")
        for name in low:
            world.phase(namespace, name, "Running")
        began = time.monotonic()
        with weather.proxy.weather(*_bad_patches()):
            world.apply(namespace, "high", {"request": 1.0, "memory": "4Gi"}, on="lowered", priorityClassName=HIGH)
            world.phase(namespace, "high", "Running", timeout=60)
            seconds = time.monotonic() - began
        assert sorted(shares()[name] for name in low) == [0, 0, 500, 500], shares()
        with weather.proxy.weather(*_bad_patches()):
            world.delete(namespace, "high")
            wait(lambda: shares() == dict.fromkeys(low, 500), what="the shares as they were", timeout=60)
        for name in low:
            assert not world.sharepod(namespace, name)["status"].get("restarts"), "no Pod is ended for time"
        assert not audit.over_committed, audit.over_committed
    return seconds


def _bad_patches() -> list[Rule]:
    return [
        Rule(fault, verbs=("patch",), resources=("gpunodes",), times=times)
        for fault, times in ((LoseAnswer(), 1), (Refuse(503, "ServiceUnavailable"), 1), (Reset(), 1))
    ]


class _Preempting:
    """Preemption of two of four SharePods, which fill two nodes, by two others."""

    def __init__(self, weather: Weather, prefix: str, audit: Audit, slow: bool) -> None:
        self._weather = weather
        self._prefix = prefix
        self._audit = audit
        self._low = [f"low{number}" for number in range(_LOW)]
        self._high = [f"high{number}" for number in range(_MANY)]
        self._began = 0.0
        world, (self._namespace, _) = weather.world, weather.place(prefix, _LOW // 2)
        annotations = {"test.sharepod.dev/termination-seconds": "3"} if slow else {}
        for name in self._low:
            world.apply(self._namespace, name, _SHARE, on=prefix, restartPolicy="Always", annotations=annotations)
        self._pods = {name: world.phase(self._namespace, name, "Running")["status"]["podUID"] for name in self._low}

    def begin(self) -> None:
        """Create the SharePods of higher priority."""
        self._began = time.monotonic()
        for name in self._high:
            self._weather.world.apply(self._namespace, name, _SHARE, on=self._prefix, priorityClassName=HIGH)

    def until_one_ends(self) -> None:
        """Wait until a victim is being ended."""

        def ending() -> bool:
            found = (self._weather.world.pod(self._namespace, name) for name in self._low)
            return any(pod is None or "deletionTimestamp" in pod["metadata"] for pod in found)

        wait(ending, what="a victim that ends")

    def settled(self) -> float:
        """Wait until all SharePods of higher priority run; return the seconds since their creation."""
        world = self._weather.world
        for name in self._high:
            world.phase(self._namespace, name, "Running", timeout=90)
        seconds = time.monotonic() - self._began
        world.await_untouched(self._namespace, self._pods, _LOW - _MANY)
        for name in self._high:
            world.delete(self._namespace, name)
        for name in self._low:
            world.phase(self._namespace, name, "Running", timeout=60)
        assert not self._audit.over_committed, self._audit.over_committed
        return seconds


@contextmanager
def _preempting(weather: Weather, prefix: str, *, slow: bool = True) -> Iterator[_Preempting]:
    """Run a preemption under an audit. `slow`: True if the victims take some seconds to end."""
    with Audit(weather.world.api, memory=16 * GIB) as audit:
        yield _Preempting(weather, prefix, audit, slow)


FAULTS: tuple[Callable[[Weather], float], ...] = (bad_evictions, outage, silence, bad_ledger_writes)
