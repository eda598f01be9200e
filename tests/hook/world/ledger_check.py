"""Memory of one tenant by a scripted agent's ledger and by the simulated driver, compared by kind."""

from __future__ import annotations

from collections.abc import Callable

from hook.conftest import GPU_0, MIB, Tenant
from hook.world.probe import OUT_OF_MEMORY
from sharepod.protocol import Reserve

PAGE = 2 * MIB
"""Bytes: granularity of physical memory and of graph memory on the double, as on a real driver."""


class LedgerCheck:
    """Tenant with a scripted agent and one probe with CUDA started. Both sides count its memory."""

    def __init__(self, tenant: Tenant, **environment: str) -> None:
        self.tenant, self.agent = tenant, tenant.agent()
        self.probe = tenant.probe(more=environment)
        self.probe.start_cuda()

    def taken(self, kind: str = "") -> int:
        """Return the bytes of the device that the process has, of one kind or of all."""
        usage = self.tenant.read().client("tenant").usage[GPU_0]
        return usage.kinds[kind] if kind else usage.memory

    def counted(self) -> int:
        """Return the bytes that the agent counts, minus the process's idle credits."""
        free, total = self.probe.ok("memory_info")
        return int(total - free)

    def asked(self) -> int:
        """Return how many times the process has requested bytes from the agent."""
        return len(self.agent.frames(self.agent.client(), Reserve))

    def same(self) -> int:
        """Return the bytes in use. AssertionError if ledger and device disagree, or the limit is exceeded."""
        taken = self.taken()
        assert self.counted() == taken <= self.agent.used(0) <= self.agent.gpus[0].memory
        return taken

    def refused(self, op: str, *arguments: object) -> None:
        """Make a call that must be refused like on a full device, and must leave nothing behind."""
        before = self.same()
        assert self.probe.call(op, *arguments).code == OUT_OF_MEMORY
        assert self.same() == before

    def fill(self, leave: int) -> int:
        """Allocate linear memory until `leave` bytes of the limit are left. Return the address of the memory."""
        address: int = self.probe.ok("alloc", self.agent.gpus[0].memory - self.same() - leave)
        return address


MakeCheck = Callable[..., LedgerCheck]
