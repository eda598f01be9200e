"""The kubelet of this node: where its directories lie, and making the CSI driver known to it without a sidecar.

The kubelet watches its `plugins_registry` for sockets, asks each who it is, and says what came of it; it does so again
whenever it or the agent starts anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from sharepod.agent.kubelet.csi import mounts
from sharepod.agent.kubelet.csi import registration_pb2 as registration
from sharepod.agent.kubelet.csi.rpc import SocketError, UnixServer, service
from sharepod.api.objects import CSI_DRIVER

log = structlog.get_logger(__name__)

CSI_VERSIONS = ("1.0.0",)
"""The CSI version as registration words it: the kubelet reads the major number."""

REGISTER_WITHIN_S = 30.0
CHECK_INTERVAL_S = 5.0
STOP_GRACE_S = 2.0


class KubeletRegistration:
    """Serves the CSI driver to the kubelet with this root directory. `problem` says why pods get no volumes, or is
    None.
    """

    def __init__(self, root: Path, services: tuple[Any, ...], *, changed: Callable[[], None] = lambda: None) -> None:
        """`services`: those of the CSI socket. `changed` is called when `problem` may have changed."""
        self._csi = UnixServer(csi_socket(root), *services)
        registrar = service(
            registration.DESCRIPTOR,
            "Registration",
            {"GetInfo": self._get_info, "NotifyRegistrationStatus": self._notify},
        )
        self._registration = UnixServer(root / "plugins_registry" / f"{CSI_DRIVER}-reg.sock", registrar)
        self._root = root
        self._changed = changed
        self._started_at = 0.0
        self._registered = False
        self._refusal: str | None = None

    @property
    def problem(self) -> str | None:
        """Why pods on this node get no volumes now, or None."""
        if self._refusal is not None:
            return f"the kubelet refused the driver: {self._refusal}"
        if not self._registered:
            return (
                f"the kubelet has not registered the driver; "
                f"is its --root-dir {self._root} (setting kubelet_root), and does it run?"
            )
        return None

    @property
    def settling(self) -> bool:
        """Whether a missing registration is still no reason to worry."""
        return not self._registered and asyncio.get_running_loop().time() - self._started_at < REGISTER_WITHIN_S

    async def start(self) -> None:
        """Serves; raises `SocketError`."""
        unseen = propagation_problem(pods_dir(self._root))
        if unseen is not None:
            log.warning("volumes may not reach pods", reason=unseen)
        self._started_at = asyncio.get_running_loop().time()
        try:
            await self._csi.start()
            await self._registration.start()
        except SocketError:
            await self.stop()
            raise

    async def run(self) -> None:
        """Puts back a socket that was taken away (a wiped plugin directory). Ends only when cancelled."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            for server in (self._csi, self._registration):
                if not server.path.is_socket():
                    log.warning("socket is gone, making it anew", socket=str(server.path))
                    await server.stop(STOP_GRACE_S)
                    try:
                        await server.start()
                    except SocketError as error:
                        log.error("cannot serve the kubelet", error=str(error))

    async def stop(self) -> None:
        """Takes the registration away, then the driver."""
        await self._registration.stop(STOP_GRACE_S)
        await self._csi.stop(STOP_GRACE_S)

    async def _get_info(self, _: registration.InfoRequest) -> registration.PluginInfo:
        return registration.PluginInfo(
            type="CSIPlugin", name=CSI_DRIVER, endpoint=str(self._csi.path), supported_versions=CSI_VERSIONS
        )

    async def _notify(self, status: registration.RegistrationStatus) -> registration.RegistrationStatusResponse:
        self._registered = status.plugin_registered
        self._refusal = None if status.plugin_registered else status.error or "it did not say why"
        if self._registered:
            log.info("registered with the kubelet", driver=CSI_DRIVER, socket=str(self._csi.path))
        else:
            log.error("the kubelet refused the driver", driver=CSI_DRIVER, reason=self._refusal)
        self._changed()
        return registration.RegistrationStatusResponse()


def pods_dir(root: Path) -> Path:
    """Where the kubelet keeps the pods' volumes."""
    return root / "pods"


def csi_socket(root: Path) -> Path:
    """Where the kubelet reaches the driver."""
    return root / "plugins" / CSI_DRIVER / "csi.sock"


def propagation_problem(pods: Path) -> str | None:
    """Why what is mounted under the kubelet's pods directory may not be seen outside the agent's container, or None.

    Where agent and kubelet run in one mount namespace (an agent outside of containers) nothing needs to propagate; from
    in here that looks the same as a container without propagation, but for the host's first process, which is compared
    where it can be seen.
    """
    on = mounts.holder_of(pods)
    if on is None or on.shared:
        return None
    try:
        same = Path("/proc/self/ns/mnt").readlink() == Path("/proc/1/ns/mnt").readlink()
    except OSError:
        same = False
    if same:
        return None
    return (
        f"{pods} has no shared mount propagation, so pods would not see their volumes; "
        "mount it with mountPropagation: Bidirectional"
    )
