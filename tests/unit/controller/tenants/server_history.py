"""History of one tenant's objects, as the API server double has stored them."""

from __future__ import annotations

from typing import Any

from unit.controller.acting_world import World


def versions(world: World, plural: str, what: Any) -> list[int]:
    """Return the versions at which `what` was first true of each object of a kind, in order."""
    return [
        change.version
        for change in world.server.storage.history
        if change.kind.plural == plural and change.after is not None and what(change.after)
    ]


def gates(world: World, pod: str = "one") -> list[str]:
    """Return the names of a Pod's scheduling gates."""
    return [gate["name"] for gate in (world.read("pods", pod) or {})["spec"].get("schedulingGates", ())]
