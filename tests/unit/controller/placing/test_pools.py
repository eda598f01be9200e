"""The pool of a node while its label names another pool."""

from __future__ import annotations

from typing import Any

import pytest
from sharepod.api.gpunode import GPUNodeSpec, Pool, Tenant, manifest
from sharepod.api.objects import POOL_LABEL
from sharepod.controller.placing.pools import InPool, next_pool
from sharepod.controller.state.facts.node_facts import GpuNodeFacts, gpunode_facts
from sharepod.placement.state.types import Reservation
from unit.controller.acting_world import acting_world

ROW = Tenant(id="t", namespace="n", gpus=("GPU-0",), request_milli=1, limit_milli=1, memory=1)


def ledger(pool: Pool, *, reason: str = "", seen: int = 0, **spec: Any) -> GpuNodeFacts:
    """Return a ledger of generation 4. `reason`: reason of the agent's condition. `seen`: generation that the agent has
    applied."""
    body: dict[str, Any] = dict(manifest("node-a", GPUNodeSpec(pool=pool, **spec)))
    body["metadata"] |= {"uid": "u", "generation": 4, "resourceVersion": "1"}
    conditions = [{"type": "SlicesPublished", "status": "False", "reason": reason}] if reason else []
    body["status"] = {"conditions": conditions, "observedGeneration": seen}
    return gpunode_facts(body)


@pytest.mark.parametrize("now", list(Pool))
def test_a_node_stays_where_its_label_says_and_does_not_leave(now: Pool) -> None:
    assert next_pool(ledger(now, leaving=True), now, occupied=True) == InPool(now)


@pytest.mark.parametrize("label", [Pool.SCHEDULER, Pool.DEVICE_PLUGIN])
def test_the_operators_node_goes_once_nothing_is_on_it_or_on_its_way(label: Pool) -> None:
    assert next_pool(ledger(Pool.DEDICATED), label, occupied=False) == InPool(label)
    assert next_pool(ledger(Pool.DEDICATED), label, occupied=True) == InPool(Pool.DEDICATED)
    assert next_pool(ledger(Pool.DEDICATED, tenants=(ROW,)), label, occupied=False) == InPool(Pool.DEDICATED)


@pytest.mark.parametrize("now", list(Pool))
def test_a_node_without_a_pool_by_its_label_keeps_its_own_and_publishes_nothing(now: Pool) -> None:
    stays = InPool(now, leaving=now is Pool.SCHEDULER)
    assert next_pool(ledger(now), None, occupied=False) == stays
    assert next_pool(ledger(now, leaving=True, reason="Withdrawn", seen=4), None, occupied=False) == stays


def test_kube_schedulers_node_says_first_that_it_leaves() -> None:
    written = ledger(Pool.SCHEDULER, reason="Withdrawn", seen=4)
    assert next_pool(written, Pool.DEDICATED, occupied=False) == InPool(Pool.SCHEDULER, leaving=True)


@pytest.mark.parametrize(
    ("fields", "occupied", "goes"),
    [
        ({"reason": "Withdrawn", "seen": 4}, False, True),
        ({"reason": "Withdrawn", "seen": 4}, True, False),
        ({"reason": "Withdrawn", "seen": 4, "tenants": (ROW,)}, False, False),
        ({"reason": "Withdrawn", "seen": 3}, False, False),
        ({"reason": "Published", "seen": 4}, False, False),
        ({"seen": 4}, False, False),
    ],
)
def test_and_goes_once_its_agent_has_withdrawn_its_devices_and_no_claim_has_one(
    fields: dict[str, Any], occupied: bool, goes: bool
) -> None:
    now = ledger(Pool.SCHEDULER, leaving=True, **fields)
    stays = InPool(Pool.SCHEDULER, leaving=True)
    assert next_pool(now, Pool.DEDICATED, occupied=occupied) == (InPool(Pool.DEDICATED) if goes else stays)


async def test_a_decision_on_its_way_keeps_the_node_in_its_pool() -> None:
    async with acting_world() as world:
        world.node()
        await world.relist()
        row = Reservation.of_row(ROW.model_copy(update={"gpus": ("GPU-node-a-0",)}))
        world.state.cluster.reserve("node-a", row)
        world.change("nodes", "node-a", lambda item: item["metadata"]["labels"].update({POOL_LABEL: "scheduler"}))
        await world.relist()
        base = world.state.gpunodes.named("node-a")
        assert base is not None
        assert world.ledger._pool(base) == InPool(Pool.DEDICATED)
        world.state.cluster.release("node-a", row.tenant)
        assert world.ledger._pool(base) == InPool(Pool.SCHEDULER)
