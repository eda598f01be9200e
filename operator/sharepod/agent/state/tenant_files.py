"""Files of shared tenants, opened several tenants at a time: what an agent serves a tenant with."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from .handover import Handover, Inheritance


@dataclass(frozen=True)
class FilesWanted:
    """Shared tenant whose directory is to be complete and whose files are to be opened."""

    tenant_id: str
    limits: str
    """Content of the limits file."""
    gpus: tuple[str, ...]
    slots: int
    """Number of processes that the handover file has room for."""


@dataclass(frozen=True)
class TenantFiles:
    """Open files of one shared tenant. Whoever has them closes them."""

    handover: Handover
    left: Inheritance
    """State that an earlier agent left."""
    listener: socket.socket
    unwritten: OSError | None = None
    """Reason why the disk did not take the directory, which an earlier agent completed; None if it did."""

    def close(self) -> None:
        """Close all of them."""
        self.handover.close()
        self.listener.close()
