"""Claims of the node's self-test. Their container gets what a tenant's container gets, with the directory of the
self-test instead of a tenant's.

    sharepod.self-test-<claim's UID>.json: kind sharepod.dev/self-test, one device named by the UID

Guarantees:
- Only a claim in SharePod's own namespace can belong to the self-test. Such a claim needs no row and has no share.
- The device is written, found and removed like a tenant's, in the same directory.
- The container gets the devices of all GPUs of the node, so that a specification that the runtime cannot apply is
  detected. The self-test's program opens none of the devices.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from sharepod.agent.state.boot import boot_id
from sharepod.agent.state.directory import SELF_TEST
from sharepod.api.claims.self_test_claim import has_name_of_self_test

from .entitlement import ClaimIdentity, ClaimRefusedError, is_safe_uid
from .tenant_devices import SELF_TEST_KIND, TenantDevices, device_id

log = structlog.get_logger(__name__)


class PreparedSelfTests:
    """Claims of the self-test that are prepared on this node."""

    def __init__(
        self,
        *,
        cdi_dir: Path,
        state_dir: Path,
        namespace: str,
        gpu_devices: Callable[[], Sequence[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        cdi_dir: CDI directory for the devices.
        state_dir: State directory of the agent, in which the directory of the self-test lies.
        namespace: Namespace of SharePod itself.
        gpu_devices: Returns the CDI devices of the node's GPUs.
        clock: Monotonic seconds."""
        self._devices = TenantDevices(cdi_dir, boot_id(), SELF_TEST_KIND)
        self._directory = state_dir / SELF_TEST
        self._namespace = namespace
        self._gpu_devices = gpu_devices
        self._clock = clock
        self._prepared: dict[str, float] = {}
        """Monotonic seconds of the preparation, by claim UID."""

    def recover(self) -> None:
        """Take over the devices of an earlier agent of this boot, and remove older ones. Call once, first."""
        for uid, found in self._devices.present().items():
            if found is not None:
                self._prepared[uid] = self._clock()
                continue
            try:
                self._devices.remove(uid)
            except OSError as error:
                log.warning("cannot remove a CDI device of an earlier boot", claim_uid=uid, error=str(error))

    def prepared_for_s(self) -> float | None:
        """Return the seconds since the last preparation of a claim that is still prepared. None if no claim is."""
        return self._clock() - max(self._prepared.values()) if self._prepared else None

    def has(self, claim: ClaimIdentity) -> bool:
        """Return whether a claim belongs to the self-test."""
        return claim.namespace == self._namespace and has_name_of_self_test(claim.name)

    async def prepare(self, claim: ClaimIdentity) -> list[str]:
        """Write the CDI device of a claim. Return the CDI devices for its container: this one, and all GPUs of the
        node.

        Raise `OSError`, and `ClaimRefusedError` for a UID that cannot be part of a file name.
        """
        if not is_safe_uid(claim.uid):
            raise ClaimRefusedError(f"the kubelet names claim {claim} with the UID {claim.uid[:64]!r}", lasting=True)
        await asyncio.to_thread(self._devices.write, claim.uid, SELF_TEST, self._directory)
        self._prepared.setdefault(claim.uid, self._clock())
        return [device_id(claim.uid, SELF_TEST_KIND), *self._gpu_devices()]

    async def unprepare(self, claim: ClaimIdentity) -> None:
        """Remove the CDI device of a claim, if there is one. Raise `OSError`."""
        if is_safe_uid(claim.uid):
            await asyncio.to_thread(self._devices.remove, claim.uid)
        self._prepared.pop(claim.uid, None)
