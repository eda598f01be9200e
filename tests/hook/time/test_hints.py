"""The hints page: shared memory in which the agent shows all clients of a tenant which GPUs are contended."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest
from hook.conftest import Tenant
from hook.world.lifecycle import generous


def test_a_hints_page_in_hostile_hands_harms_nobody(tenant: Tenant) -> None:
    """A process that has the descriptor can neither shorten nor write the page, even if it opens the file again."""
    agent = generous(tenant)
    victim = tenant.loop("--kernel-us", "500")
    tenant.until(lambda: tenant.submitted() > 5, "launches")
    page = os.dup(agent.hints.fd)  # a copy of the descriptor, as every client gets it
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(page, 0)
        with pytest.raises(PermissionError):
            os.pwrite(page, b"\1" * 64, 0)
        with pytest.raises(PermissionError):
            mmap.mmap(page, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        for flags in (os.O_RDWR | os.O_TRUNC, os.O_WRONLY | os.O_TRUNC):
            with pytest.raises(PermissionError):
                os.open(f"/proc/self/fd/{page}", flags)
        again = os.open(f"/proc/self/fd/{page}", os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                os.pwrite(again, b"\1", 8)
            with pytest.raises(PermissionError):
                os.ftruncate(again, 1 << 20)
        finally:
            os.close(again)
        with mmap.mmap(page, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ) as mine:
            libc = ctypes.CDLL(None, use_errno=True)
            libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
            maps = next(
                line
                for line in Path("/proc/self/maps").read_text().splitlines()
                if "sharepod-hints" in line and line.split()[1].startswith("r--s")
            )
            address = int(maps.split("-")[0], 16)
            assert libc.mprotect(address, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE) == -1
            agent.hints.contended = True
            assert int.from_bytes(mine[8:12], "little") == 1, "the agent writes on"
    finally:
        os.close(page)
    before = tenant.submitted()
    tenant.until(lambda: tenant.submitted() > before + 20, "the victim's launches to go on")
    assert victim.poll() is None
