"""CSI services of the node (Identity and Node): publish a tenant's directory in its pod, and in no other pod.

Guarantees:
- A volume is published only for the pod that the kubelet names.
- A volume is published only while the ledger has a share reserved on this node for this very pod.
- A refusal is a gRPC status. Its message, with the remedy, appears in `kubectl describe pod`. The kubelet retries.
- No call of the API server is made. Unpublishing a volume does not need the ledger either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import grpc
import structlog
from google.protobuf import wrappers_pb2

from sharepod.agent.kubelet.wire import csi_pb2 as csi
from sharepod.agent.kubelet.wire.rpc import RpcError, service
from sharepod.api.gpunode import Tenant
from sharepod.api.objects import CSI_DRIVER

from .admission import PodIdentity, VolumeRefusalReason, VolumeRefusedError, choose_tenant, identify
from .volumes import VolumeBusyError, VolumeError, Volumes

log = structlog.get_logger(__name__)

RESERVATION_WAIT_S = 3.0
"""Seconds that a publish waits for the ledger to show the pod's row. The operator writes the row before it creates the
pod, but the agent's watch may be behind the kubelet's. After this time the kubelet retries."""

_CODES = {
    VolumeRefusalReason.MALFORMED: grpc.StatusCode.INVALID_ARGUMENT,
    VolumeRefusalReason.NOT_ENTITLED: grpc.StatusCode.PERMISSION_DENIED,
    VolumeRefusalReason.NO_RESERVATION: grpc.StatusCode.FAILED_PRECONDITION,
}


class Ledger(Protocol):
    """The node's ledger, as this driver uses it."""

    @property
    def rows(self) -> Iterable[Tenant]:
        """The applied rows. The tenant of each row is set up, and its directory is complete."""

    @property
    def absent(self) -> str | None:
        """Why the ledger is unknown, as text; None while it is known."""

    async def changed(self) -> None:
        """Wait until `rows` is next replaced."""


class Driver:
    """CSI driver of one node: its Identity and Node service."""

    def __init__(
        self,
        *,
        node: str,
        version: str,
        volumes: Volumes,
        ledger: Ledger,
        directory: Callable[[str], Path | None],
        trouble: Callable[[str], str | None],
        reservation_wait_s: float = RESERVATION_WAIT_S,
    ) -> None:
        """Args:
        node: name of the node.
        version: version of the agent.
        volumes: the volumes of the node.
        ledger: the ledger of the node.
        directory: takes a tenant id; returns the directory for the tenant's pod, None if there is none. trouble: takes
        a tenant id; returns why the tenant has no directory, as text; None if unknown. reservation_wait_s: seconds that
        a call waits for a row that the ledger does not have yet."""
        self._node = node
        self._version = version
        self._volumes = volumes
        self._ledger = ledger
        self._directory = directory
        self._trouble = trouble
        self._reservation_wait_s = reservation_wait_s

    def services(self) -> tuple[Any, ...]:
        """Return the gRPC services of the CSI socket."""
        return (
            service(
                csi.DESCRIPTOR,
                "Identity",
                {
                    "GetPluginInfo": self.plugin_info,
                    "GetPluginCapabilities": self.plugin_capabilities,
                    "Probe": self.probe,
                },
            ),
            service(
                csi.DESCRIPTOR,
                "Node",
                {
                    "NodePublishVolume": self.publish,
                    "NodeUnpublishVolume": self.unpublish,
                    "NodeGetCapabilities": self.node_capabilities,
                    "NodeGetInfo": self.node_info,
                },
            ),
        )

    async def plugin_info(self, _: csi.GetPluginInfoRequest) -> csi.GetPluginInfoResponse:
        return csi.GetPluginInfoResponse(name=CSI_DRIVER, vendor_version=self._version)

    async def plugin_capabilities(self, _: csi.GetPluginCapabilitiesRequest) -> csi.GetPluginCapabilitiesResponse:
        return csi.GetPluginCapabilitiesResponse()

    async def probe(self, _: csi.ProbeRequest) -> csi.ProbeResponse:
        return csi.ProbeResponse(ready=wrappers_pb2.BoolValue(value=True))

    async def node_capabilities(self, _: csi.NodeGetCapabilitiesRequest) -> csi.NodeGetCapabilitiesResponse:
        return csi.NodeGetCapabilitiesResponse()

    async def node_info(self, _: csi.NodeGetInfoRequest) -> csi.NodeGetInfoResponse:
        return csi.NodeGetInfoResponse(node_id=self._node)

    async def publish(self, request: csi.NodePublishVolumeRequest) -> csi.NodePublishVolumeResponse:
        """Publish the tenant's directory at the target path. Idempotent."""
        target = _target(request)
        try:
            who = identify(request.volume_context)
            if self._volumes.pod_of(target) != who.uid:
                raise VolumeRefusedError(
                    VolumeRefusalReason.MALFORMED, f"target path {target} is not one of pod {who} (UID {who.uid})"
                )
            # Between the answer of `_reserved` and the mark that `publish` sets there is no await. So if the row
            # becomes Releasing now, its release already finds the volume published.
            tenant, source = await self._reserved(who)
            await self._volumes.publish(target=target, tenant_id=tenant.id, source=source)
        except VolumeRefusedError as refusal:
            raise RpcError(_CODES[refusal.reason], str(refusal)) from None
        except VolumeError as error:
            raise _volume_status(error) from error
        log.info("volume published", pod=str(who), pod_uid=who.uid, tenant=tenant.id, target=str(target))
        return csi.NodePublishVolumeResponse()

    async def unpublish(self, request: csi.NodeUnpublishVolumeRequest) -> csi.NodeUnpublishVolumeResponse:
        """Remove the volume from the target path. Idempotent."""
        target = _target(request)
        try:
            await self._volumes.unpublish(target)
        except VolumeError as error:
            raise _volume_status(error) from error
        log.info("volume unpublished", pod_uid=self._volumes.pod_of(target), target=str(target))
        return csi.NodeUnpublishVolumeResponse()

    async def _reserved(self, who: PodIdentity) -> tuple[Tenant, Path]:
        """Return the pod's tenant and its directory; wait up to `reservation_wait_s` for a row that the ledger does not
        have yet."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._reservation_wait_s
        while True:
            try:
                if self._ledger.absent is not None:
                    raise VolumeRefusedError(
                        VolumeRefusalReason.NO_RESERVATION, f"{self._ledger.absent}; the kubelet tries again"
                    )
                tenant = choose_tenant(self._ledger.rows, who, self._node)
                source = self._directory(tenant.id)
                if source is None:
                    why = self._trouble(tenant.id) or "no reason given; if this goes on, see the agent's log"
                    raise VolumeRefusedError(
                        VolumeRefusalReason.NO_RESERVATION,
                        f"the agent of node {self._node} cannot serve pod {who}: {why}",
                    )
            except VolumeRefusedError as refusal:
                if refusal.reason is not VolumeRefusalReason.NO_RESERVATION or loop.time() >= deadline:
                    raise
                try:
                    async with asyncio.timeout_at(deadline):
                        await self._ledger.changed()
                except TimeoutError:
                    continue
            else:
                return tenant, source


def _target(request: csi.NodePublishVolumeRequest | csi.NodeUnpublishVolumeRequest) -> Path:
    if not request.volume_id:
        raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, "volume_id is missing")
    path = Path(request.target_path)
    if not path.is_absolute() or ".." in path.parts:
        raise RpcError(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"target_path {request.target_path!r} must be an absolute path without '..'",
        )
    return path


def _volume_status(error: VolumeError) -> RpcError:
    if isinstance(error, VolumeBusyError):
        return RpcError(grpc.StatusCode.ABORTED, str(error))
    return RpcError(grpc.StatusCode.INTERNAL, str(error))
