"""Surroundings of the tenants: how the registry reaches its node: directly (`on_this_node`), or from the worker through
the privileged process."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sharepod.agent.settings import AgentSettings
from sharepod.agent.sockets.peers import NodePeers, Peers
from sharepod.agent.state.directory import StateDir
from sharepod.agent.state.files import FolderFiles, KeptFiles
from sharepod.agent.state.tenant_files import FilesWanted, TenantFiles

from .process_end import EndProcess, end_here


class TenantDirectories(Protocol):
    """Tenants' directories, see `StateDir` for each method. All methods except `path`, `unheard` and `unheard_all_but`
    do I/O: call them from a thread, one at a time."""

    def prepare(self) -> str:
        """Create the directories, install the hook; return its SHA-256. Raise `StateDirError`."""

    def create(self, tenant_id: str, limits: str | None) -> Path:
        """Create or complete a tenant's directory; return its path."""

    def complete(self, tenant_id: str, limits: str | None) -> OSError | None:
        """Create or complete a tenant's directory. If the disk cannot store a change but the directory was complete
        before, return the error.
        """

    def open_all(self, wanted: Sequence[FilesWanted]) -> list[TenantFiles | OSError]:
        """Complete directories of shared tenants and open their files. Return files or errors in the same order."""

    def unheard(self, tenant_id: str) -> None:
        """Drop the supervisor's copy of a tenant's socket."""

    def unheard_all_but(self, tenant_ids: Collection[str]) -> None:
        """Drop all descriptors that a killed agent has left, except these tenants'."""

    def shut(self, tenant_id: str) -> None:
        """Remove a tenant's socket and limits."""

    def remove(self, tenant_id: str) -> None:
        """Remove a tenant's directory."""

    def existing(self) -> tuple[str, ...]:
        """Return the ids of the tenants that have a directory."""

    def path(self, tenant_id: str) -> Path:
        """Return the path of a tenant's directory."""


@dataclass(frozen=True)
class Surroundings:
    """Interfaces by which the registry reaches its node."""

    directories: TenantDirectories
    files: KeptFiles
    """Files by which an agent leaves state to the next agent."""
    peers: Peers
    end_process: EndProcess


def on_this_node(settings: AgentSettings) -> Surroundings:
    """Return direct access, for a process with the node's rights."""
    return Surroundings(
        directories=StateDir(settings.state_dir, settings.hook_file, fail_open=settings.fail_open),
        files=FolderFiles(settings.state_dir),
        peers=NodePeers(),
        end_process=end_here,
    )
