"""Steps with one ResourceClaim that several tests share."""

from __future__ import annotations

from typing import Any

from sharepod.controller.tenants.snapshots import LOOK_AGAIN_S
from unit.controller.acting_world import World

UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "message": "0/2 nodes are available: 2 Insufficient cpu."}


async def placed(world: World, *claims: str, pod: str = "user") -> None:
    """Reconcile the claims of one Pod, and wait until all have their rows: one decision places all of them."""
    for claim in claims or ("share",):
        await world.look_at_claim(claim)
    wanted = {world.claim_uid(claim) for claim in claims or ("share",)}

    def written() -> bool:
        return wanted <= {row for node in world._nodes() for row in world.rows(node)}

    await world.until(written)


async def allocated(world: World, **claim: Any) -> None:
    """Create a claim with a row and an allocation, for which a Pod waits."""
    world.claim(**claim)
    world.pod_with("share")
    await placed(world)
    await world.look_at_claim()
    assert world.allocation() is not None


async def running(world: World) -> None:
    """Create a claim whose Pod runs."""
    await allocated(world)
    world.binds()
    await world.look_at_claim()


async def lets_go(world: World, claim: str = "share") -> None:
    """Make the second part of an allocation's removal, which follows once kube-scheduler could see the first part."""
    await world.look_at_claim(claim)
    world.now += LOOK_AGAIN_S
    await world.look_at_claim(claim, times=2)


async def until_gone(world: World, node: str = "node-a") -> None:
    await world.until(lambda: world.claim_uid() not in world.rows(node))
