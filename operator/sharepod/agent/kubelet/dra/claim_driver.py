"""DRA driver of the node: prepares a claim once its row is applied, and unprepares it.

Guarantees:
- A claim is prepared only while the ledger has a share reserved on this node for this very claim. A claim of the node's
  self-test is prepared without a share.
- A call waits for a missing row or CDI device, because the kubelet retries a failed call only after a minute or more.
- Each claim of a call has its own answer, so a failure of one claim does not affect other claims.
- Unpreparing a claim needs neither the API server nor the ledger, and succeeds for an unknown claim.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import structlog

from sharepod.agent.kubelet.wire import dra_pb2 as dra
from sharepod.agent.kubelet.wire.rpc import service
from sharepod.api.gpunode import Tenant
from sharepod.api.objects import SELF_TEST_POOL, device_name

from .entitlement import ClaimIdentity, ClaimRefusedError, entitled_tenant
from .prepared_claims import PreparedClaims
from .prepared_self_tests import PreparedSelfTests
from .tenant_devices import device_id

log = structlog.get_logger(__name__)

PATIENCE_S = 40.0
"""Seconds that a call waits for a missing row or device. The kubelet's timeout is 45 s."""
_LOOK_S = 1.0
"""Seconds between two checks while a call waits. A new row ends the wait at once; a new CDI device of a GPU does
not."""

GpuDevicesOf = Callable[[Sequence[str]], Mapping[str, str]]
"""Function: UUIDs -> CDI device of each GPU that had one at the last check."""


class ClaimLedger(Protocol):
    """The node's ledger, as this driver uses it."""

    @property
    def rows(self) -> Sequence[Tenant]:
        """The applied rows. The tenant of each row is set up, and its directory is complete."""

    @property
    def absent(self) -> str | None:
        """Why the ledger is unknown, as text; None while it is known."""

    async def changed(self) -> None:
        """Wait until `rows` is next replaced."""


class ClaimDriver:
    """DRA driver of one node."""

    def __init__(
        self,
        *,
        node: str,
        claims: PreparedClaims,
        ledger: ClaimLedger,
        directory: Callable[[str], Path | None],
        trouble: Callable[[str], str | None],
        gpu_devices: GpuDevicesOf,
        self_test: PreparedSelfTests,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Args:
        node: name of the node, and of its pool.
        claims: the prepared claims of the node.
        ledger: the ledger of the node.
        directory: takes a tenant id; returns the directory for the tenant's containers, None if there is none. trouble:
        takes a tenant id; returns why the tenant has no directory, as text; None if unknown. gpu_devices: returns the
        CDI devices of GPUs.
        self_test: the claims of the node's self-test.
        patience_s: seconds that a call waits for a missing row or device."""
        self._node = node
        self._claims = claims
        self._ledger = ledger
        self._directory = directory
        self._trouble = trouble
        self._gpu_devices = gpu_devices
        self._self_test = self_test
        self._patience_s = patience_s

    def services(self) -> tuple[Any, ...]:
        """Return the gRPC services of the DRA socket."""
        return (
            service(
                dra.DESCRIPTOR,
                "DRAPlugin",
                {"NodePrepareResources": self.prepare, "NodeUnprepareResources": self.unprepare},
            ),
        )

    async def prepare(self, request: dra.NodePrepareResourcesRequest) -> dra.NodePrepareResourcesResponse:
        """Prepare the claims of a call, concurrently. Idempotent."""
        answer = dra.NodePrepareResourcesResponse()
        deadline = asyncio.get_running_loop().time() + self._patience_s

        async def one(claim: dra.Claim) -> None:
            result = answer.claims[claim.uid]
            who = _identity(claim)
            try:
                if self._self_test.has(who):
                    found = await self._self_test.prepare(who)
                    result.devices.add(pool_name=SELF_TEST_POOL, device_name=SELF_TEST_POOL, cdi_device_ids=found)
                else:
                    result.devices.extend(await self._prepare(who, deadline))
            except (ClaimRefusedError, OSError) as error:
                result.error = str(error)
                log.warning("claim not prepared", claim=str(who), claim_uid=who.uid, reason=str(error))
            except Exception as error:
                result.error = f"the agent of node {self._node} failed: {error}; see its log"
                log.exception("claim not prepared", claim=str(who), claim_uid=who.uid)

        await asyncio.gather(*(one(claim) for claim in request.claims))
        return answer

    async def unprepare(self, request: dra.NodeUnprepareResourcesRequest) -> dra.NodeUnprepareResourcesResponse:
        """Unprepare the claims of a call. Idempotent."""
        answer = dra.NodeUnprepareResourcesResponse()
        for claim in request.claims:
            result = answer.claims[claim.uid]
            try:
                if self._self_test.has(_identity(claim)):
                    await self._self_test.unprepare(_identity(claim))
                elif await self._claims.unprepare(claim.uid):
                    log.info("claim unprepared", claim=str(_identity(claim)), claim_uid=claim.uid)
            except OSError as error:
                result.error = f"cannot unprepare the claim: {error}"
                log.error("claim not unprepared", claim=str(_identity(claim)), claim_uid=claim.uid, error=str(error))
        return answer

    async def _prepare(self, who: ClaimIdentity, deadline: float) -> list[dra.Device]:
        loop = asyncio.get_running_loop()
        while True:
            try:
                gpus, devices = self._reserved(who)
                await self._claims.prepare(who, lambda: self._entitled(who)[0].id)
            except ClaimRefusedError as refusal:
                if refusal.lasting or loop.time() >= deadline:
                    raise
                try:
                    async with asyncio.timeout_at(min(deadline, loop.time() + _LOOK_S)):
                        await self._ledger.changed()
                except TimeoutError:
                    continue
            else:
                break
        log.info("claim prepared", claim=str(who), claim_uid=who.uid, gpus=gpus)
        return [
            # only for people and metrics: the kubelet does not use the names of the devices
            dra.Device(
                pool_name=self._node,
                device_name=device_name(uuid),
                cdi_device_ids=[*([device_id(who.uid)] if place == 0 else []), devices[uuid]],
            )
            for place, uuid in enumerate(gpus)
        ]

    def _reserved(self, who: ClaimIdentity) -> tuple[Sequence[str], Mapping[str, str]]:
        """Return the GPUs of the claim's tenant and the CDI device of each. Raise `ClaimRefusedError`."""
        tenant, _ = self._entitled(who)
        devices = self._gpu_devices(tenant.gpus)
        lacking = [uuid for uuid in tenant.gpus if uuid not in devices]
        if lacking:
            raise ClaimRefusedError(
                f"node {self._node} has no CDI device for {', '.join(lacking)}; install NVIDIA's container "
                "toolkit there and run `nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`"
            )
        return tenant.gpus, devices

    def _entitled(self, who: ClaimIdentity) -> tuple[Tenant, Path]:
        """Return the claim's tenant and its directory. Raise `ClaimRefusedError`."""
        if self._ledger.absent is not None:
            raise ClaimRefusedError(self._ledger.absent)
        tenant = entitled_tenant(self._ledger.rows, who, self._node)
        directory = self._directory(tenant.id)
        if directory is None:
            why = self._trouble(tenant.id) or "no reason given; if this goes on, see the agent's log"
            raise ClaimRefusedError(f"the agent of node {self._node} cannot serve claim {who}: {why}")
        return tenant, directory


def _identity(claim: dra.Claim) -> ClaimIdentity:
    return ClaimIdentity(namespace=claim.namespace, name=claim.name, uid=claim.uid)
