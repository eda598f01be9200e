"""A tenant with latency Interactive, under the real agent and the real hook, waits for one kernel of its neighbour at
most.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from hook.world.agent_node import Node, Program, built, running, tenant, wait_for

pytestmark = pytest.mark.skipif(not built(), reason="hook or double not built: run `make shim doubles`")

KERNEL_MS = 40
STEPS = 60


def waits_ms(node: Node) -> list[float]:
    """Return for each request of a service its wait in ms for a turn, next to kernels of `KERNEL_MS`."""
    asking = node.launch(
        "service", "--kernel-us", "2000", "--sync-every", "1", "--idle-us", "33000", "--spread", "exponential"
    )
    wait_for(lambda: node.devices().busy_ns("service") > 0, "device time of the service")
    node.launch("busy", "--kernel-us", f"{KERNEL_MS}000")
    wait_for(lambda: node.devices().busy_ns("busy") > 0, "device time of its neighbour")
    _steps(asking, 20)
    return _steps(asking, STEPS)


def _steps(program: Program, count: int) -> list[float]:
    found: list[float] = []
    while len(found) < count:
        found += program.report().get("delays_ms", [])
    return found


@pytest.mark.alone
@pytest.mark.promise("time-interactive")
def test_an_interactive_tenant_waits_for_no_more_than_the_kernel_that_runs(tmp_path: Path) -> None:
    with running(tmp_path, tenant("service", 0.3, latency="Interactive"), tenant("busy", 0.7)) as node:
        waits = waits_ms(node)
        busy = node.shares(3, "busy")["busy"]
    assert statistics.median(waits) <= KERNEL_MS
    assert busy >= 0.6
