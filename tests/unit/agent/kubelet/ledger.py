"""Ledger that a test writes, as the kubelet's plugins read it."""

from __future__ import annotations

import asyncio

from sharepod.api.gpunode import Tenant


class LedgerOfTest:
    """Rows that the test sets. `absent`: why they are not known."""

    def __init__(self) -> None:
        self.rows: tuple[Tenant, ...] = ()
        self.absent: str | None = None
        self._moved = asyncio.Event()

    async def changed(self) -> None:
        await self._moved.wait()

    def set(self, *rows: Tenant) -> None:
        self.rows, self.absent = rows, None
        self._moved.set()
        self._moved = asyncio.Event()
