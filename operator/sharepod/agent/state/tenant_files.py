"""Files of shared tenants, opened for several tenants at a time."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from .handover import Handover, Inheritance


@dataclass(frozen=True)
class FilesWanted:
    """Shared tenant whose directory must be complete and whose files must be opened."""

    tenant_id: str
    limits: str
    """Content of the limits file."""
    gpus: tuple[str, ...]
    slots: int
    """Number of processes that the handover file has room for."""


@dataclass(frozen=True)
class TenantFiles:
    """Open files of one shared tenant. The owner closes them."""

    handover: Handover
    left: Inheritance
    """State of an earlier agent."""
    listener: socket.socket
    unwritten: OSError | None = None
    """Error of the disk for a change of the directory that an earlier agent had completed; None if the disk took the
    change."""

    def close(self) -> None:
        """Close all of them."""
        self.handover.close()
        self.listener.close()
