"""NVIDIA's own DRA driver on this node, which gives whole GPUs to claims of its class.

Guarantees:
- The driver counts while something listens at the socket by which the kubelet finds it: one that was taken off the node
  may leave the file there.
"""

from __future__ import annotations

import socket
from pathlib import Path

_PATTERN = "gpu.nvidia.com*-reg.sock"
"""Names of its sockets: with its Pod's uid where it is replaced without a gap. Its driver of compute domains gives no
GPUs, and has another name."""


def nvidia_dra_socket(kubelet_root: Path) -> Path | None:
    """Return the socket at which NVIDIA's DRA driver for GPUs listens; None if it does not run here."""
    folder = kubelet_root / "plugins_registry"
    return next((path for path in sorted(folder.glob(_PATTERN)) if _listens(path)), None)


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        try:
            asking.connect(str(path))
        except BlockingIOError:  # more wait for it than it has taken
            return True
        except OSError:
            return False
        return True
