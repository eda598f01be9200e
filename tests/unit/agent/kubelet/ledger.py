"""Ledger with rows that a test sets, in the form in which the kubelet's plugins read it."""

from __future__ import annotations

import asyncio

from sharepod.api.gpunode import Tenant


class LedgerOfTest:
    """Rows that the test sets. `absent`: why the ledger is unknown; None if it is known."""

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
