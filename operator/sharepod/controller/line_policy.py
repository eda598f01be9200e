"""Watcher of the policy that refuses Pods with a resource line and no claim: whether the cluster enforces it.

Nodes advertise the resources of the line only if it does. A Pod whose line was not turned into a claim must never be
bound, and without the resources no scheduler binds it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from sharepod.api.objects import PLAIN_PODS_POLICY
from sharepod.kube import ApiError, NotFoundError

from .apiserver.client import POLICIES, POLICY_BINDINGS, Client

PERIOD_S = 5.0
"""Seconds between two checks: the delay until lines work after an admin has applied the manifests."""

log = structlog.get_logger(__name__)


class LinePolicy:
    """Watcher of the policy and its binding, by two GETs every `PERIOD_S`: either may be deleted without the other.

    Args:
        client: The API server.
        acts: Asked before each check: a process that does not act needs no answer.
        on_changed: Called when the answer has changed.
    """

    def __init__(self, client: Client, acts: Callable[[], bool], on_changed: Callable[[], None]) -> None:
        self._client = client
        self._acts = acts
        self._on_changed = on_changed
        self.in_force: bool | None = None
        """True while the policy and a binding that denies exist; None until the API server has answered."""

    async def run(self) -> None:
        """Look every `PERIOD_S` until cancelled."""
        while True:
            if self._acts():
                await self.look()
            await asyncio.sleep(PERIOD_S)

    async def look(self) -> None:
        """Query the API server. Without an answer the cached answer stays."""
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
