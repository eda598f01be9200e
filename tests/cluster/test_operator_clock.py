"""A leader whose clock is wrong by hours. It evicts no other Pod because of that, and assigns no share twice."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from cluster.audit import Audit
from cluster.operator_world import GIB, TIMES, World, a_world, wait

pytestmark = pytest.mark.timeout(300)

_SHIFTED = """
import datetime, sys, time
off, seconds, nanoseconds, true = float(sys.argv.pop(1)), time.time, time.time_ns, datetime.datetime

class Shifted(true):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(seconds() + off, tz)

time.time = lambda: seconds() + off
time.time_ns = lambda: nanoseconds() + int(off * 1e9)
datetime.datetime = Shifted
from sharepod.controller.main import main
main()
"""
"""Program of an operator whose time of day is wrong by its first argument, in seconds. Its other clocks are right."""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with a_world(times={**TIMES, "SHAREPOD_MOVE_AFTER": "3600"}) as running:
        running.api.create("/apis/scheduling.k8s.io/v1/priorityclasses", {"metadata": {"name": "high"}, "value": 1000})
        yield running


def starts_off_by(world: World, hours: float) -> None:
    """Restart the operator with a clock that is wrong by this many hours."""
    assert world.operator is not None
    world.operator.stop()
    program = [sys.executable, "-c", _SHIFTED, str(hours * 3600)]
    world.operator = world.installation.start_operator("operator", env=dict(world.times), program=program)


@pytest.mark.promise("operator-clock-off")
@pytest.mark.parametrize("hours", [6.0, -6.0], ids=["ahead", "behind"])
def test_a_leader_whose_clock_is_off_waits_for_a_pod_that_leaves_instead_of_evicting_another(
    world: World, hours: float
) -> None:
    """By the operator's clock, the Pod should have ended hours ago, or will end in some hours."""
    on = "ahead" if hours > 0 else "behind"
    nodes = world.nodes(on, 2)
    namespace = world.cluster.namespace(on)
    slowly = {"test.sharepod.dev/termination-seconds": "8"}
    low = [f"low{number}" for number in range(4)]
    starts_off_by(world, hours)
    with Audit(world.api, memory=16 * GIB) as audit:
        for name in low:
            share = {"request": 0.5, "memory": "12Gi", "movable": True}
            world.apply(namespace, name, share, on=on, restartPolicy="Always", annotations=slowly)
        pods = {name: world.phase(namespace, name, "Running")["status"]["podUID"] for name in low}
        leaves, *others = low
        world.delete(namespace, leaves)
        world.apply(namespace, "high", {"request": 0.5, "memory": "12Gi"}, on=on, priorityClassName="high")
        world.phase(namespace, "high", "Running")
        assert {name: world.sharepod(namespace, name)["status"].get("podUID") for name in others} == {
            name: pods[name] for name in others
        }
        wait(lambda: sum(len(world.rows(node)) for node in nodes) == len(low), what="a row for each GPU")
        assert not audit.over_committed, audit.over_committed
        assert not audit.doubled, audit.doubled
