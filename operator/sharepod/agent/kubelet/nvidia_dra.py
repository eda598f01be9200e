"""NVIDIA's own DRA driver on this node, which allocates whole GPUs to claims of its class.

Guarantees:
- The driver counts as running while a process listens at its kubelet socket. The file alone is no evidence, because a
  removed driver may leave it.
"""

from __future__ import annotations

import socket
from pathlib import Path

_PATTERN = "gpu.nvidia.com*-reg.sock"
"""Registration sockets of NVIDIA's DRA driver for GPUs. They include its Pod's UID if upgrades have no gap. NVIDIA's
driver for compute domains has another name and serves no GPUs."""


def nvidia_dra_socket(kubelet_root: Path) -> Path | None:
    """Return the socket at which NVIDIA's DRA driver for GPUs listens; None if it does not run here."""
    folder = kubelet_root / "plugins_registry"
    return next((path for path in sorted(folder.glob(_PATTERN)) if _listens(path)), None)


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        try:
            asking.connect(str(path))
        except BlockingIOError:  # a socket with a full backlog: a process listens
            return True
        except OSError:
            return False
        return True
