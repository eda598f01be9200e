"""Directories of released tenants: removed once nothing of the tenant is left, not earlier."""

from __future__ import annotations

import asyncio
from typing import cast

from sharepod.agent.state.directory import StateDir
from sharepod.agent.tenants.leftovers import Leftovers


class Disk:
    """State directory that plays only the removal of tenants' directories."""

    def __init__(self) -> None:
        self.directories = {"a", "b"}
        self.failing = False
        self.asked = 0

    def remove(self, tenant_id: str) -> None:
        self.asked += 1
        if self.failing:
            raise OSError(16, "Device or resource busy")
        if tenant_id not in self.directories:
            raise FileNotFoundError(tenant_id)
        self.directories.discard(tenant_id)


def leftovers_on(disk: Disk) -> Leftovers:
    leftovers = Leftovers(cast(StateDir, disk))
    leftovers.add(["a", "b"])
    return leftovers


async def test_a_directory_stays_while_anything_of_its_tenant_is_left() -> None:
    disk = Disk()
    leftovers = leftovers_on(disk)
    leftovers.sweep(lambda tenant_id: "a volume" if tenant_id == "a" else None)
    await leftovers.wait()
    assert disk.directories == {"a"}
    leftovers.sweep(lambda _: None)
    await leftovers.wait()
    assert disk.directories == set()
    leftovers.sweep(lambda _: None)
    await leftovers.wait()
    assert disk.asked == 2, "a removed directory is not checked again"


async def test_a_removal_that_failed_is_tried_again() -> None:
    disk = Disk()
    leftovers = leftovers_on(disk)
    disk.failing = True
    leftovers.sweep(lambda _: None)
    await leftovers.wait()
    assert disk.directories == {"a", "b"}
    disk.failing = False
    leftovers.sweep(lambda _: None)
    await leftovers.wait()
    assert disk.directories == set()


async def test_the_directory_of_a_returned_tenant_is_kept() -> None:
    disk = Disk()
    leftovers = leftovers_on(disk)
    await leftovers.keep("a")
    leftovers.sweep(lambda _: None)
    await leftovers.wait()
    assert disk.directories == {"a"}


async def test_a_tenant_that_is_back_waits_for_a_removal_under_way() -> None:
    disk = Disk()
    leftovers = leftovers_on(disk)
    leftovers.sweep(lambda _: None)
    async with asyncio.timeout(10):
        await leftovers.keep("a")
    assert "a" not in disk.directories, "it is removed, and can be created again"
