"""The leader's Lease is stolen, deleted, or written with wrong times. In the end one operator acts, and no share is
assigned twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from cluster.audit import Audit
from cluster.operator_world import GIB, World, a_world, wait
from harness.api import ApiError, Object

pytestmark = pytest.mark.timeout(300)

LEASES = "/apis/coordination.k8s.io/v1/namespaces/sharepod-system/leases"
LEASE = f"{LEASES}/sharepod-operator"
_LASTS_S = 6
"""Duration of the Lease in these tests."""


@pytest.fixture(scope="module")
def sleepy() -> Iterator[World]:
    with a_world() as running:
        yield running


@pytest.fixture
def world(sleepy: World) -> World:
    """Return a world whose operator leads with these durations."""
    wait(lambda: leads(sleepy), what="an operator that leads")
    return sleepy


def leads(world: World, operator: str = "operator") -> bool:
    return world.metric("sharepod_operator_leader", operator) == 1.0


def steal(world: World, **spec: Any) -> Object:
    """Write another holder into the Lease. Retry while the leader's renewals conflict with the write. Return the
    Lease."""
    while True:
        lease: Object = world.api.get(LEASE)
        lease["spec"] |= {"holderIdentity": "thief", "leaseDurationSeconds": _LASTS_S, **spec}
        try:
            stolen: Object = world.api.request("PUT", LEASE, lease)
        except ApiError as error:
            if error.code != 409:
                raise
        else:
            return stolen


def placed_once(world: World, prefix: str, count: int, audit: Audit) -> None:
    """Check that each SharePod of a namespace runs in exactly one Pod, on one node."""
    for number in range(count):
        world.phase(prefix, f"p{number}", "Running")
    assert not audit.doubled
    assert not audit.over_committed


@pytest.mark.promise("operator-lease-taken")
@pytest.mark.parametrize("renewed", ["0001-01-01T00:00:00.000000Z", "9999-12-31T23:59:59.999999Z"])
def test_a_leader_whose_lease_is_stolen_stops_and_leads_again_whatever_time_the_thief_wrote(
    world: World, renewed: str
) -> None:
    prefix = f"stolen-{renewed[:4]}"
    (node,) = world.nodes(prefix)
    namespace = world.cluster.namespace(prefix)
    with Audit(world.api, memory=16 * GIB) as audit:
        stolen = steal(world, renewTime=renewed, acquireTime=renewed)
        wait(lambda: not leads(world), what="a leader that stops")
        world.apply(namespace, "p0", {"request": 0.4}, on=prefix)
        while world.api.get(LEASE)["metadata"]["resourceVersion"] == stolen["metadata"]["resourceVersion"]:
            assert world.pod(namespace, "p0") is None, "written without the Lease"
            assert not world.rows(node)
            time.sleep(0.05)
        wait(lambda: leads(world), what="the operator to lead again")
        placed_once(world, namespace, 1, audit)
    assert world.api.get(LEASE)["spec"]["holderIdentity"] == "operator"


@pytest.mark.promise("operator-lease-taken")
def test_a_lease_that_is_deleted_again_and_again_stops_nobody_and_doubles_nothing(world: World) -> None:
    world.nodes("deleted", 4)
    namespace = world.cluster.namespace("deleted")
    first, second = world.operator, world.start_operator("second")
    try:
        wait(lambda: world.ready("second"), what="a standby")
        with Audit(world.api, memory=16 * GIB) as audit:
            for number in range(16):
                world.apply(namespace, f"p{number}", {"request": 0.5}, on="deleted")
                if number % 2:
                    world.api.delete(LEASE)
                    world.cluster.wait_for(LEASE, bool, what="a new Lease", timeout=30)
            placed_once(world, namespace, 16, audit)
        wait(lambda: leads(world) != leads(world, "second"), what="one leader")
    finally:
        second.stop()
        world.operator = first


def test_a_lease_that_no_operator_can_read_stops_nobody(world: World) -> None:
    """The Lease lacks fields, or they have the largest values that they can hold."""
    world.nodes("odd")
    namespace = world.cluster.namespace("odd")
    odd: list[Object] = [
        {"holderIdentity": None, "leaseDurationSeconds": None, "renewTime": None, "acquireTime": None},
        {"leaseTransitions": (1 << 31) - 1, "renewTime": None},
        {"holderIdentity": "x" * 10_000, "leaseDurationSeconds": 1},
    ]
    for number, spec in enumerate(odd):
        steal(world, **spec)
        world.apply(namespace, f"p{number}", {"request": 0.2}, on="odd")
        world.phase(namespace, f"p{number}", "Running")
        wait(lambda: leads(world), what="the operator to lead")
