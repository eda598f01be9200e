"""Exported memory counts, with the process that made it, until no descriptor and no importer has it any more."""

from __future__ import annotations

import pytest
from hook.conftest import MIB, TENANT_MEMORY
from hook.world.ledger_check import PAGE, LedgerCheck, MakeCheck
from hook.world.probe import Probe

PIECE = 64 * MIB


def exported(check: LedgerCheck, size: int = PIECE) -> int:
    """Make memory of which nothing but a descriptor is left; return the descriptor."""
    handle = check.probe.ok("physical", size)
    descriptor: int = check.probe.ok("physical_export", handle)
    check.probe.ok("physical_release", handle)
    return descriptor


def until(check: LedgerCheck, size: int) -> None:
    """Wait until the driver has taken `size`; then the ledger has to have the same."""
    check.tenant.until(lambda: check.taken() == size, f"{size} bytes taken")
    assert check.same() == size


@pytest.fixture
def other(make_check: MakeCheck) -> tuple[LedgerCheck, Probe]:
    check = make_check()
    other = check.tenant.probe("other")
    other.start_cuda()
    return check, other


@pytest.mark.promise("memory-exported")
def test_descriptors_alone_keep_to_the_limit(make_check: MakeCheck) -> None:
    check = make_check()
    descriptors = [exported(check) for _ in range(TENANT_MEMORY // PIECE)]
    check.refused("physical", PAGE)
    assert check.same() == TENANT_MEMORY
    check.probe.ok("descriptor_close", descriptors.pop())
    until(check, TENANT_MEMORY - PIECE)
    check.probe.ok("physical", PIECE)
    for descriptor in descriptors:
        check.probe.ok("descriptor_close", descriptor)
    until(check, PIECE)


def test_bytes_of_a_closed_descriptor_go_back_to_the_agent(make_check: MakeCheck) -> None:
    check = make_check()
    descriptor = exported(check, 200 * MIB)
    check.probe.ok("descriptor_close", descriptor)
    check.agent.wait(lambda: check.agent.used(0) == 0, "the bytes, without a call of the program")


@pytest.mark.promise("memory-exported")
def test_an_importers_copy_counts_with_the_process_that_made_it(other: tuple[LedgerCheck, Probe]) -> None:
    check, importer = other
    descriptor = exported(check, 200 * MIB)
    handle = importer.ok("physical_import", descriptor, check.probe.pid)
    check.probe.ok("descriptor_close", descriptor)
    assert check.same() == 200 * MIB
    check.refused("physical", PIECE)
    address = importer.ok("addresses", 200 * MIB)
    importer.ok("map", address, 200 * MIB, handle)
    importer.ok("physical_release", handle)
    assert check.same() == 200 * MIB, "it is mapped there"
    importer.ok("unmap", address, 200 * MIB)
    until(check, 0)


def test_a_second_handle_of_its_own_keeps_the_memory(make_check: MakeCheck) -> None:
    check = make_check()
    handle = check.probe.ok("physical", PIECE)
    again = check.probe.ok("physical_again", handle)
    check.probe.ok("physical_release", handle)
    assert check.same() == PIECE
    check.probe.ok("physical_release", again)
    until(check, 0)


def test_a_child_of_fork_keeps_nothing_for_an_importer(other: tuple[LedgerCheck, Probe]) -> None:
    check, importer = other
    descriptor = exported(check)
    before = set(importer.ok("facts")["files"])
    imported = importer.ok("physical_import", descriptor, check.probe.pid)
    check.probe.ok("descriptor_close", descriptor)
    made = {file for file in importer.ok("facts")["files"] if file.startswith("socket:")} - before
    [(_, facts)] = importer.ok("fork", ["facts"])
    assert len(made) == 2, "the driver's own and the hook's copy"
    assert len(made & set(facts["files"])) == 1
    importer.ok("physical_release", imported)
    until(check, 0)


def test_no_descriptor_of_the_hooks_is_left_behind(make_check: MakeCheck) -> None:
    check = make_check()
    check.probe.ok("descriptor_close", exported(check))  # from now on two of its own watch them
    until(check, 0)
    before = len(check.probe.ok("facts")["files"])
    handles = [check.probe.ok("physical", PAGE) for _ in range(40)]
    again = [check.probe.ok("physical_again", handle) for handle in handles]
    for handle in (*handles, *again):
        check.probe.ok("physical_release", handle)
    until(check, 0)
    assert len(check.probe.ok("facts")["files"]) == before
