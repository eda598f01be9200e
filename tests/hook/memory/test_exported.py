"""Exported memory is charged to the process that created it, until no descriptor and no importer of it is left."""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hook.conftest import MIB, TENANT_MEMORY, Tenant
from hook.world.driver_script import MEMORY_PRELUDE, PRELUDE
from hook.world.ledger_check import PAGE, LedgerCheck, MakeCheck
from hook.world.probe import OUT_OF_MEMORY, Probe

PIECE = 64 * MIB
_PIDFD_GETFD = 438
"""Number of the system call pidfd_getfd, on every architecture."""


def exported(check: LedgerCheck, size: int = PIECE) -> int:
    """Create memory to which only a descriptor refers. Return the descriptor."""
    handle = check.probe.ok("physical", size)
    descriptor: int = check.probe.ok("physical_export", handle)
    check.probe.ok("physical_release", handle)
    return descriptor


def until(check: LedgerCheck, size: int) -> None:
    """Wait until the driver has taken `size` bytes. The ledger must then have the same number."""
    check.tenant.until(lambda: check.taken() == size, f"{size} bytes taken")
    assert check.same() == size


@pytest.fixture
def other(make_check: MakeCheck) -> tuple[LedgerCheck, Probe]:
    check = make_check()
    other = check.tenant.probe("other")
    other.start_cuda()
    return check, other


@pytest.mark.promise("memory-importer-files")
def test_an_importer_keeps_a_quarter_of_the_files_that_it_may_open(other: tuple[LedgerCheck, Probe]) -> None:
    """The hook keeps a copy of each imported descriptor, as the double does. It makes no more copies when less than a
    quarter of the process's open-file limit is left.
    """
    check, importer = other
    descriptor, files, imports = exported(check), 256, 20
    resource.prlimit(importer.pid, resource.RLIMIT_NOFILE, (files, files))

    def free() -> int:
        return files - len(list(Path(f"/proc/{importer.pid}/fd").iterdir()))

    while free() > files // 4 + 6:
        importer.ok("descriptor_copy", descriptor, check.probe.pid)
    for _ in range(imports):
        importer.ok("physical_import", descriptor, check.probe.pid)
    assert free() >= files // 4 - imports


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


@pytest.mark.promise("memory-exported")
def test_a_descriptor_that_is_on_its_way_to_another_process_keeps_the_memory(make_check: MakeCheck) -> None:
    """While a message carries the descriptor, it is in no process's descriptor table."""
    check = make_check()
    descriptor = exported(check)
    process = os.pidfd_open(check.probe.pid)
    own = ctypes.CDLL(None).syscall(_PIDFD_GETFD, process, descriptor, 0)
    os.close(process)
    assert own >= 0
    check.probe.ok("descriptor_close", descriptor)
    assert check.same() == PIECE
    sender, receiver = socket.socketpair()
    with sender, receiver:
        socket.send_fds(sender, [b"memory"], [own])
        os.close(own)
        check.probe.ok("physical", TENANT_MEMORY - PIECE)
        check.refused("physical", PAGE)
        assert check.same() == TENANT_MEMORY
    until(check, TENANT_MEMORY - PIECE)


def test_bytes_of_a_closed_descriptor_go_back_to_the_agent(make_check: MakeCheck) -> None:
    check = make_check()
    descriptor = exported(check, 200 * MIB)
    check.probe.ok("descriptor_close", descriptor)
    check.agent.wait(lambda: check.agent.used(0) == 0, "the bytes, without a call of the program")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_process_that_has_given_up_its_rights_goes_on_and_counts(make_check: MakeCheck) -> None:
    """After the process has given up root, most of its files in /proc belong to root. The hook must
    still notice closed descriptors.
    """
    check = make_check()
    descriptors = [exported(check)]
    check.probe.ok("become_nobody")
    assert Path(f"/proc/{check.probe.pid}/fd").stat().st_uid == 0, "it is not to be dumped"
    descriptors.append(exported(check))
    assert check.same() == 2 * PIECE
    for descriptor in descriptors:
        check.probe.ok("descriptor_close", descriptor)
    check.agent.wait(lambda: check.agent.used(0) == 0, "the bytes, without a call of the program")
    assert check.probe.ok("physical", PIECE)


FIRST_THREAD_ENDS = """
import platform, threading

def goes_on():
    while open(f"/proc/{os.getpid()}/stat").read().rpartition(")")[2].split()[0] != "Z":
        pass
    for _ in range(2):
        handle = new("cuMemCreate", c_size_t(200 * MIB), byref(Physical(1, 1, Where(1, 0))), c_uint64(0), kind=c_uint64)
        descriptor = new("cuMemExportToShareableHandle", handle, c_int(1), c_uint64(0), kind=c_int)
        ok("cuMemRelease", handle)
        os.close(descriptor.value)
    os._exit(7)

threading.excepthook = lambda failure: os._exit(f"{failure.exc_value}".startswith("cuMemCreate"))
threading.Thread(target=goes_on).start()
ctypes.CDLL(None).syscall(60 if platform.machine() == "x86_64" else 93, 0)
"""


@pytest.mark.promise("memory-exported")
def test_closed_descriptors_are_seen_once_the_first_thread_has_ended(tenant: Tenant) -> None:
    """A program may end its main thread by pthread_exit and continue. The process's own folder in /proc then shows no
    descriptors. The second allocation needs memory whose descriptor was closed just before; the hook thread may be
    returning the charge of that memory at the same time.
    """
    tenant.agent()
    done = subprocess.run(
        [sys.executable, "-S", "-c", PRELUDE + MEMORY_PRELUDE + FIRST_THREAD_ENDS],
        env=tenant.environment(TESTS=str(Path(__file__).resolve().parents[2])),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (7, "")


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


@pytest.mark.promise("memory-exported")
def test_each_import_counts_under_a_low_limit_of_open_files(other: tuple[LedgerCheck, Probe]) -> None:
    check, importer = other
    _, most = resource.prlimit(importer.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(importer.pid, resource.RLIMIT_NOFILE, (1024, most))
    imported = []
    for _ in range(60):
        handle = check.probe.ok("physical", PAGE)
        descriptor = check.probe.ok("physical_export", handle)
        imported.append(importer.ok("physical_import", descriptor, check.probe.pid))
        check.probe.ok("descriptor_close", descriptor)
        check.probe.ok("physical_release", handle)
    check.refused("physical", TENANT_MEMORY - 60 * PAGE + PAGE)
    assert check.same() == 60 * PAGE
    for handle in imported:
        importer.ok("physical_release", handle)
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
    # From the first export on, the hook has two descriptors of its own
    check.probe.ok("descriptor_close", exported(check))
    until(check, 0)
    before = len(check.probe.ok("facts")["files"])
    handles = [check.probe.ok("physical", PAGE) for _ in range(40)]
    again = [check.probe.ok("physical_again", handle) for handle in handles]
    for handle in (*handles, *again):
        check.probe.ok("physical_release", handle)
    until(check, 0)
    assert len(check.probe.ok("facts")["files"]) == before


@pytest.mark.promise("memory-exported")
def test_a_descriptor_of_addresses_keeps_linear_memory_that_was_freed(other: tuple[LedgerCheck, Probe]) -> None:
    check, holder = other
    addresses = [check.probe.ok("alloc", PIECE) for _ in range(TENANT_MEMORY // PIECE)]
    descriptors = [check.probe.ok("range_export", address, PIECE) for address in addresses]
    for address in addresses:
        check.probe.ok("free", address)
    check.refused("alloc", PAGE)
    assert check.same() == TENANT_MEMORY
    sent = holder.ok("descriptor_copy", descriptors[0], check.probe.pid)
    for descriptor in descriptors:
        check.probe.ok("descriptor_close", descriptor)
    until(check, PIECE)
    holder.ok("descriptor_close", sent)
    until(check, 0)
    check.probe.ok("alloc", TENANT_MEMORY)


def test_each_descriptor_of_the_same_addresses_keeps_them(make_check: MakeCheck) -> None:
    check = make_check()
    address = check.probe.ok("alloc", PIECE)
    check.probe.ok("alloc", PAGE)
    first, inside = check.probe.ok("range_export", address, PIECE), check.probe.ok("range_export", address + PAGE, PAGE)
    check.probe.ok("descriptor_close", first)
    again = check.probe.ok("range_export", address, PAGE)
    assert check.same() == PIECE + PAGE
    check.probe.ok("descriptor_close", again)
    check.probe.ok("free_async", address)
    assert check.same() == PIECE + PAGE, "all of it, though the last descriptor is of a part"
    check.probe.ok("descriptor_close", inside)
    until(check, PAGE)


def test_a_descriptor_of_addresses_outlives_the_context(make_check: MakeCheck) -> None:
    check = make_check()
    check.probe.ok("own_context", "c")
    before = check.same()
    kept, closed = (check.probe.ok("alloc", PIECE) for _ in range(2))
    descriptor = check.probe.ok("range_export", kept, PIECE)
    check.probe.ok("descriptor_close", check.probe.ok("range_export", closed, PIECE))
    check.probe.ok("context_destroy", "c")
    until(check, before + PIECE)
    check.probe.ok("descriptor_close", descriptor)
    until(check, before)


@pytest.mark.promise("memory-exported")
def test_a_descriptor_of_several_mappings_keeps_each_of_them(make_check: MakeCheck) -> None:
    check = make_check()
    handles = [check.probe.ok("physical", PIECE) for _ in range(3)]
    address = check.probe.ok("addresses", 3 * PIECE)
    for number, handle in enumerate(handles):
        check.probe.ok("map", address + number * PIECE, PIECE, handle)
        check.probe.ok("physical_release", handle)
    both = check.probe.ok("range_export", address, 2 * PIECE)
    one = check.probe.ok("range_export", address + PIECE, PIECE)
    check.probe.ok("unmap", address, 3 * PIECE)
    until(check, 2 * PIECE)
    check.probe.ok("descriptor_close", one)
    check.refused("physical", TENANT_MEMORY - PIECE)
    assert check.same() == 2 * PIECE, "the other is of both"
    check.probe.ok("descriptor_close", both)
    until(check, 0)


def test_a_range_that_the_driver_refuses_to_export_leaves_nothing(make_check: MakeCheck) -> None:
    check = make_check()
    address, managed = check.probe.ok("alloc", PIECE), check.probe.ok("alloc_managed", PIECE)
    assert check.probe.call("range_export", address, 2 * PIECE).code not in (0, OUT_OF_MEMORY)
    assert check.probe.call("range_export", managed, PIECE).code not in (0, OUT_OF_MEMORY)
    for each in (address, managed):
        check.probe.ok("free", each)
    assert check.same() == 0


def test_freeing_beside_many_descriptors_is_no_dearer(tenant: Tenant) -> None:
    """To check exports the hook reads the process's whole descriptor table, so it does that only in some of the
    frees.
    """
    tenant.agent()
    few, many = (tenant.probe(label) for label in ("few", "many"))
    for probe in (few, many):
        probe.start_cuda()
    assert many.ok("free_exported", 1500, 100) < 10 * few.ok("free_exported", 15, 100)
