"""Observer of the admission policy that refuses Pods with a resource line and no claim: finds out whether the policy is
enforced.

Nodes advertise the resources of the line only while the policy is enforced. Without the policy, a Pod could be created
whose line was not turned into a claim. No scheduler binds such a Pod while no node advertises the resources.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from sharepod.api.objects import PLAIN_PODS_POLICY
from sharepod.kube import ApiError, NotFoundError

from .apiserver.client import POLICIES, POLICY_BINDINGS, Client

PERIOD_S = 5.0
"""Seconds between two checks, and so the longest time until lines work after an administrator has applied the
policy."""

log = structlog.get_logger(__name__)


class LinePolicy:
    """Observer of the policy. It reads the policy and its binding every `PERIOD_S`, as either may be deleted without
    the other.

    Args:
        client: The API server.
        acts: Returns True while this process acts as the leader. Otherwise nothing is checked.
        on_changed: Called when `in_force` has changed.
    """

    def __init__(self, client: Client, acts: Callable[[], bool], on_changed: Callable[[], None]) -> None:
        self._client = client
        self._acts = acts
        self._on_changed = on_changed
        self.in_force: bool | None = None
        """True while the policy and a binding with the action Deny exist. None until the API server has answered."""

    async def run(self) -> None:
        """Check the policy every `PERIOD_S` until cancelled."""
        while True:
            if self._acts():
                await self.look()
            await asyncio.sleep(PERIOD_S)

    async def look(self) -> None:
        """Read the policy and its binding; update `in_force`. If the API server does not answer, `in_force` stays as it
        is."""
        try:
            binding = await self._client.get(POLICY_BINDINGS, PLAIN_PODS_POLICY)
            await self._client.get(POLICIES, PLAIN_PODS_POLICY)
            found = "Deny" in ((binding.get("spec") or {}).get("validationActions") or ())
        except NotFoundError:
            found = False
        except ApiError as error:
            log.warning("cannot read whether the policy on resource lines is enforced", error=str(error))
            return
        if found != self.in_force:
            log.info("resource lines", in_use=found)
            self.in_force = found
            self._on_changed()
