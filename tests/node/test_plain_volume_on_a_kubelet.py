"""Plain Pods with a resource line on a real node of a cluster without claims: gate, CSI volume and NVIDIA's runtime
give them the shares of their lines, next to other tenants of the same GPU.

API server, its policies, the operator's webhook, scheduler, controllers, kubelet, containerd, operator, agent and hook
are real; the GPUs are simulated.
"""

from __future__ import annotations

import pytest
from harness.cluster import wait_until
from node.claim_system import ClaimSystem
from node.plain_workloads import (
    await_complete,
    await_running,
    await_sharing,
    example,
    kubectl,
    share_as_asked,
    with_line,
)

SYSTEM = {"gpus": 8, "volume": True}
"""Options of the file's system (conftest.py)."""


@pytest.mark.promise("operator-line-volume-examples")
@pytest.mark.timeout(420)  # longer than usual, for a machine that does other work
@pytest.mark.alone
def test_the_examples_share_by_their_lines_through_volumes_too_and_end(system: ClaimSystem) -> None:
    for number in ("01", "02", "04", "05", "06", "07"):
        system.apply(*example(number))
    rows = await_sharing(system, 13)
    assert sorted(row["requestMilli"] for row in rows) == [200] * 2 + [250] * 4 + [300] * 3 + [500] * 4
    assert all(row.get("claim") is None and row["id"] == row["podUID"] for row in rows)
    share_as_asked(system, rows)

    kubectl(system, "delete", "job/line-batch")
    await_sharing(system, 11)
    running = set(with_line(system))
    system.apply(*example("02", seconds=10))
    await_running(system, "line-batch", 2)
    system.machine.real.restart_kubelet()
    system.kill_agent()
    system.start_agent()
    await_complete(system, "line-batch", 4)
    assert running == with_line(system).keys()
    assert system.restarts() == 0
    share_as_asked(system, await_sharing(system, 11))

    kubectl(system, "delete", "deployments,statefulsets,jobs", "--all")
    kubectl(system, "delete", "pods", "--all")
    wait_until(lambda: not system.rows(), what="the shares released", timeout=60)
