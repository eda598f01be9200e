"""Registration of the agent's plugins with this node's kubelet, without a sidecar; and the paths of the kubelet.

The kubelet watches its folder `plugins_registry` for sockets, calls `GetInfo` on each, and answers with the result of
the registration. It registers a plugin again whenever it or the agent has restarted.

Guarantees:
- A socket that is removed, for example because the plugin folder was wiped, is created again within seconds.
- If the disk under the kubelet's folders is read-only, `problem` reports this, the agent retries, and keeps running.
- A refusal by the kubelet is logged and becomes the plugin's `problem`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from sharepod.agent.kubelet import mounts
from sharepod.agent.kubelet.wire import registration_pb2 as registration
from sharepod.agent.kubelet.wire.rpc import ReadOnlyError, SocketError, UnixServer, service
from sharepod.api.objects import CLAIM_DRIVER, CSI_DRIVER, SCHEDULER_DRIVER

log = structlog.get_logger(__name__)

REGISTER_WITHIN_S = 30.0
"""Seconds that the kubelet may take to register the driver before a missing registration is a problem."""
CHECK_INTERVAL_S = 5.0
"""Seconds between two checks that the sockets exist."""
STOP_GRACE_S = 2.0
"""Seconds that pending calls may take when a server stops."""


@dataclass(frozen=True)
class KubeletPlugin:
    """Plugin as the kubelet registers it. Type and name together are unique."""

    type: str
    """Type as the kubelet names it: `CSIPlugin` or `DRAPlugin`."""
    socket: str
    """Name of the socket that serves the plugin."""
    registration: str
    """Name of the registration socket."""
    versions: tuple[str, ...]
    """Versions of the plugin's interface."""
    effect: str
    """Name of the served resource in messages of `problem`."""
    name: str


CSI_PLUGIN = KubeletPlugin("CSIPlugin", "csi.sock", f"{CSI_DRIVER}-reg.sock", ("1.0.0",), "CSI volumes", CSI_DRIVER)
"""The CSI driver. Of a CSI driver's version, the kubelet reads only the major number."""
DRA_PLUGIN = KubeletPlugin(
    "DRAPlugin", "dra.sock", f"{CLAIM_DRIVER}-dra-reg.sock", ("v1.DRAPlugin",), "resource claims", CLAIM_DRIVER
)
"""The DRA driver. Kubelets call version 1 of the interface since Kubernetes 1.34."""

SCHEDULER_PLUGIN = KubeletPlugin(
    "DRAPlugin",
    "dra.sock",
    f"{SCHEDULER_DRIVER}-dra-reg.sock",
    ("v1.DRAPlugin",),
    "resource claims that kube-scheduler allocates",
    SCHEDULER_DRIVER,
)
"""The same DRA driver under a second name, for claims whose devices kube-scheduler allocates."""


class KubeletRegistration:
    """Plugin and registration sockets of one plugin."""

    def __init__(
        self,
        root: Path,
        services: tuple[Any, ...],
        plugin: KubeletPlugin = CSI_PLUGIN,
        *,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """Args:
        root: the kubelet's root directory.
        services: gRPC services of the plugin's socket.
        plugin: the plugin to register.
        changed: called when `problem` may have changed.
        """
        self._plugin = plugin
        self._server = UnixServer(plugin_socket(root, plugin), *services)
        registrar = service(
            registration.DESCRIPTOR,
            "Registration",
            {"GetInfo": self._get_info, "NotifyRegistrationStatus": self._notify},
        )
        self._registration = UnixServer(root / "plugins_registry" / plugin.registration, registrar)
        self._root = root
        self._changed = changed
        self._started_at = 0.0
        self._registered = False
        self._refusal: str | None = None
        self._read_only: str | None = None
        """Reason for which a socket could not be created on a read-only disk. None if both sockets exist."""

    @property
    def problem(self) -> str | None:
        """Reason, for a message, why the kubelet does not call the plugin. None if it does."""
        if self._read_only is not None:
            return f"the kubelet cannot call the driver for {self._plugin.effect}: {self._read_only}"
        if self._refusal is not None:
            return f"the kubelet refused the driver for {self._plugin.effect}: {self._refusal}"
        if not self._registered:
            return (
                f"the kubelet has not registered the driver for {self._plugin.effect}; "
                f"check that it runs and that its --root-dir is {self._root} (setting kubelet_root)"
            )
        return None

    @property
    def settling(self) -> bool:
        """True while the kubelet may still take its time to register the driver."""
        return (
            not self._registered
            and self._read_only is None
            and asyncio.get_running_loop().time() - self._started_at < REGISTER_WITHIN_S
        )

    async def start(self) -> None:
        """Create both sockets and serve. Raise `SocketError`, except on a read-only disk, where `run` retries."""
        self._started_at = asyncio.get_running_loop().time()
        try:
            await self._server.start()
            await self._registration.start()
        except ReadOnlyError as error:
            log.error("cannot serve the kubelet; trying again", error=str(error))
            self._read_only = str(error)
        except SocketError:
            await self.stop()
            raise

    async def run(self) -> None:
        """Create a removed socket again, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            for server in (self._server, self._registration):
                if not server.serving:
                    log.warning("socket is not served; creating it again", socket=str(server.path))
                    await server.stop(STOP_GRACE_S)
                    try:
                        await server.start()
                    except SocketError as error:
                        log.error("cannot serve the kubelet", error=str(error))
            if self._read_only is not None and self._server.serving and self._registration.serving:
                self._read_only = None
                self._started_at = asyncio.get_running_loop().time()
                self._changed()

    async def stop(self) -> None:
        """Remove the registration socket, then the driver's."""
        await self._registration.stop(STOP_GRACE_S)
        await self._server.stop(STOP_GRACE_S)

    async def _get_info(self, _: registration.InfoRequest) -> registration.PluginInfo:
        return registration.PluginInfo(
            type=self._plugin.type,
            name=self._plugin.name,
            endpoint=str(self._server.path),
            supported_versions=self._plugin.versions,
        )

    async def _notify(self, status: registration.RegistrationStatus) -> registration.RegistrationStatusResponse:
        before, self._registered = self._refusal, status.plugin_registered
        self._refusal = None if status.plugin_registered else status.error or "no reason given"
        plugin = {"driver": self._plugin.name, "type": self._plugin.type}
        if self._registered:
            log.info("registered with the kubelet", **plugin, socket=str(self._server.path))
        elif self._refusal != before:  # the kubelet retries indefinitely
            log.error("kubelet refused the driver", **plugin, reason=self._refusal)
        self._changed()
        return registration.RegistrationStatusResponse()


def pods_dir(root: Path) -> Path:
    """Return the folder in which the kubelet keeps the pods' volumes."""
    return root / "pods"


def plugin_socket(root: Path, plugin: KubeletPlugin) -> Path:
    """Return the path of the plugin's socket."""
    return root / "plugins" / plugin.name / plugin.socket


def warn_of_propagation(root: Path) -> None:
    """Log a warning if volumes may not reach pods, with the reason."""
    unseen = propagation_problem(pods_dir(root))
    if unseen is not None:
        log.warning("volumes may not reach pods", reason=unseen)


def propagation_problem(pods: Path) -> str | None:
    """Return the reason why mounts under the kubelet's pods folder may not leave the agent's container. None if they
    do.

    An agent in the kubelet's own mount namespace needs no propagation. From inside, this looks like a container without
    propagation. The difference is that process 1 of the host has the same mount namespace, so both are compared if
    process 1 is visible.
    """
    on = mounts.mount_of(pods)
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
