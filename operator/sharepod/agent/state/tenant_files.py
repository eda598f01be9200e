"""Open files of shared tenants, requested and returned for several tenants at a time."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from .handover import Handover, Inheritance


@dataclass(frozen=True)
class FilesWanted:
    """Request for the files of one shared tenant, whose directory is completed first."""

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
    """State that an earlier agent has left."""
    listener: socket.socket
    unwritten: OSError | None = None
    """Error if the disk could not store a change of the directory, which an earlier agent had completed. None if it
    could."""

    def close(self) -> None:
        """Close the handover file and the socket."""
        self.handover.close()
        self.listener.close()
