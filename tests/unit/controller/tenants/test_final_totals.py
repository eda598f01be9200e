"""Final totals of a SharePod: they are written before its row is removed, whatever happens during the release."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from doubles.apiserver.errors import Refused
from sharepod.kube import ApiError
from unit.controller.acting_world import World

COUNT: dict[str, Any] = {
    "countedSince": "2026-01-01T00:00:00.000Z",
    "heldSeconds": 40,
    "borrowedSeconds": 10,
    "reservedSeconds": 100,
    "memoryMebibyteSeconds": 7,
}


@pytest.mark.promise("budgets-sharepod-final")
async def test_totals_are_final_though_somebody_changes_the_sharepod_at_that_moment(world: World) -> None:
    await world.releasing()
    world.report({"id": world.tenant, "drained": True, **COUNT})
    await world.relist()
    world.change("sharepods", "one", lambda item: item["metadata"].update(labels={"changed": "during"}))
    await world.tenants.reconcile(world.tenant)
    assert world.tenant in world.rows(), "the agent forgets the count with the row"
    await world.look()
    await world.until(lambda: world.tenant not in world.rows())
    assert world.status()["consumed"]["heldSeconds"] == 40


@pytest.mark.promise("budgets-sharepod-final")
async def test_totals_are_as_last_reported_where_no_agent_confirms_anything(world: World) -> None:
    await world.releasing()
    world.report({"id": world.tenant, **COUNT})
    await world.look()
    assert "consumed" not in world.status(), "too little to be written while more may come"
    world.change(
        "gpunodes",
        "node-a",
        lambda item: item["metadata"].update(annotations={"sharepod.dev/force-release": world.tenant}),
    )
    await world.look()
    await world.until(lambda: world.tenant not in world.rows())
    consumed = world.status()["consumed"]
    assert {name: consumed[name] for name in COUNT} == COUNT


@pytest.mark.parametrize("status", [403, 422])
async def test_a_refused_status_keeps_no_share(world: World, status: int) -> None:
    await world.releasing()
    world.report({"id": world.tenant, "drained": True, **COUNT})
    for _ in range(20):
        world.server.fail("patch", "sharepods", refusal=Refused(status, "Invalid", "a policy does not like it"))
    for _ in range(3):
        with suppress(ApiError):  # of the refused write, which the next call tries again
            await world.look()
    await world.until(lambda: world.tenant not in world.rows())


async def test_a_sharepod_deleted_before_the_write_keeps_no_row(world: World) -> None:
    await world.releasing()
    world.report({"id": world.tenant, "drained": True, **COUNT})
    await world.relist()
    world.delete("sharepods")
    for _ in range(3):
        await world.tenants.reconcile(world.tenant)
    await world.until(lambda: world.tenant not in world.rows())
