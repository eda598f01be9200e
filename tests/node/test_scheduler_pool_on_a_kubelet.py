"""A node of pool `scheduler`: kube-scheduler allocates from the slice that the agent publishes, the kubelet prepares by
the driver of that slice, and the hook enforces the shares of the allocations.

API server, scheduler, controllers, kubelet, containerd, operator, agent and hook are real; the GPU is simulated.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from harness.api import Object
from harness.cluster import wait_until
from node.claim_system import ClaimSystem
from sharepod.agent.cluster.device_slice import slice_name

CLASS = "scheduler.sharepod.dev"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"


def label(system: ClaimSystem, pool: str) -> None:
    """Set the label of the node's pool, and wait until the ledger has it."""
    path = f"/api/v1/nodes/{system.machine.node}"
    system.cluster.api.patch(path, {"metadata": {"labels": {"sharepod.dev/pool": pool}}})
    system.cluster.wait_for(
        system.gpunode, lambda seen: seen and seen["spec"]["pool"] == pool, what=f"pool {pool}", timeout=60
    )


@pytest.fixture
def scheduled(system: ClaimSystem) -> Iterator[ClaimSystem]:
    """Return the module's system. During the test, its node is in pool `scheduler`."""
    label(system, "scheduler")
    system.await_condition("SlicesPublished", "Published")
    yield system
    system.clear()
    label(system, "dedicated")
    assert not published(system), "a node of another pool publishes nothing"


def published(system: ClaimSystem) -> list[str]:
    """Return the names of the devices that the node publishes."""
    items = system.cluster.api.get(SLICES)["items"]
    mine = [item for item in items if item["metadata"]["name"] == slice_name(system.machine.node)]
    return [device["name"] for item in mine for device in item["spec"].get("devices") or ()]


def template(system: ClaimSystem, name: str, milli: int) -> Object:
    made = system.template(name, milli)
    made["spec"]["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"] = CLASS
    return made


@pytest.mark.promise("operator-scheduler-pool-row")
@pytest.mark.alone
def test_shares_that_kube_scheduler_has_allocated_are_kept_by_the_hook(scheduled: ClaimSystem) -> None:
    assert len(published(scheduled)) == 2
    scheduled.apply(template(scheduled, "small", 300), template(scheduled, "large", 700))
    scheduled.apply(scheduled.pod("small", template="small"), scheduled.pod("large", template="large"))
    for name in ("small", "large"):
        scheduled.await_running(name)
    small, large = scheduled.rows()
    assert small["gpus"] == large["gpus"], "first fit"
    time.sleep(3)
    scheduled.machine.shares().expect(small=30, large=70)


@pytest.mark.promise("operator-scheduler-pool-hold")
def test_a_forced_deletion_while_the_agent_is_down_assigns_no_share_twice(scheduled: ClaimSystem) -> None:
    scheduled.apply(template(scheduled, "most", 900))
    scheduled.apply(*(scheduled.pod(f"pod{number}", template="most") for number in range(2)))
    for number in range(2):
        scheduled.await_running(f"pod{number}")
    scheduled.kill_agent()
    wait_until(lambda: not published(scheduled), what="the kubelet deletes the slice", timeout=60)
    scheduled.cluster.kubectl("delete", "pod", "pod0", "-n", "team-c", "--force", "--grace-period=0", timeout=60)
    scheduled.apply(scheduled.pod("next", template="most"))
    assert len(scheduled.rows()) == 2
    scheduled.start_agent()
    wait_until(lambda: len(published(scheduled)) == 2, what="the agent publishes again", timeout=60)
    scheduled.await_running("next", timeout=150)
    taken = [(row["gpus"][0], row["requestMilli"]) for row in scheduled.rows()]
    assert sorted(milli for _, milli in taken) == [900, 900]
    assert len({gpu for gpu, _ in taken}) == 2
