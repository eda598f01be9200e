"""Leftovers: directories of tenants whose rows were removed. They are deleted once nothing of the tenant is left on the
node.

Guarantees:
- A directory is deleted only after `residue` has found nothing of its tenant, because running pods may have it mounted.
- A failed deletion is retried at the next sweep.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import structlog

from .surroundings import TenantDirectories

log = structlog.get_logger(__name__)


class Leftovers:
    """Tenants that have no row any more and whose directories still exist."""

    def __init__(self, state: TenantDirectories) -> None:
        self._state = state
        self._ids: set[str] = set()
        self._removing: asyncio.Task[None] | None = None

    @property
    def ids(self) -> frozenset[str]:
        """Ids of the tenants whose directories still exist."""
        return frozenset(self._ids)

    def add(self, tenant_ids: Iterable[str]) -> None:
        """Add tenants whose directories will be removed once nothing of the tenants is left."""
        self._ids.update(tenant_ids)

    async def keep(self, tenant_id: str) -> None:
        """Keep the directory of a tenant whose row is back. Wait for a running deletion."""
        self._ids.discard(tenant_id)
        await self.wait()

    def sweep(self, residue: Callable[[str], str | None]) -> None:
        """Start deleting the directories of tenants of which nothing is left. Do nothing while a deletion runs.

        Args:
            residue: Returns, by tenant id, what remains of the tenant beyond its connections, as text, or None.
        """
        if not self._ids or (self._removing is not None and not self._removing.done()):
            return
        free = [tenant_id for tenant_id in sorted(self._ids) if residue(tenant_id) is None]
        if free:
            self._ids.difference_update(free)
            self._removing = asyncio.create_task(self._remove(free), name="remove-tenants")

    async def wait(self) -> None:
        """Wait for a running deletion."""
        if self._removing is not None:
            await asyncio.gather(self._removing, return_exceptions=True)

    async def _remove(self, tenant_ids: list[str]) -> None:
        for tenant_id in tenant_ids:
            try:
                await asyncio.to_thread(self._state.remove, tenant_id)
                log.info("tenant's directory removed", tenant=tenant_id)
            except FileNotFoundError:
                pass
            except OSError as error:
                log.warning("cannot remove a tenant's directory, trying again", tenant=tenant_id, error=str(error))
                self._ids.add(tenant_id)
