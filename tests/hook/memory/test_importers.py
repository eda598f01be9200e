"""Memory that another process has open when the process that created it frees it or dies. It is then in the credits of
neither process.

The driver assigns the memory to the only process that still has it open, as NVML then shows. The agent charges the
tenant of that process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hook.conftest import GPU_0, MIB, TENANT_MEMORY
from hook.world.agent_node import GI, Node, running, tenant, wait_for
from hook.world.caller import By, Caller, Out
from hook.world.ledger_and_driver import Driver, Observer
from hook.world.ledger_check import LedgerCheck, MakeCheck
from hook.world.probe import OUT_OF_MEMORY, Probe

SIZE = 64 * MIB


@dataclass
class Shared:
    """Memory that `maker` has created and `importer` has opened."""

    check: LedgerCheck
    importer: Probe
    made: int
    """Address or handle in the process `maker`."""
    opened: int
    pool: int = 0
    imported_pool: int = 0

    @property
    def maker(self) -> Probe:
        return self.check.probe

    def of_importer(self) -> int:
        """Return the bytes that the driver reports for the importer."""
        return self.check.tenant.read().client("importer").usage[GPU_0].memory


def by_ipc(check: LedgerCheck, importer: Probe) -> Shared:
    address = check.probe.ok("alloc", SIZE)
    return Shared(check, importer, address, importer.ok("ipc_open", check.probe.ok("ipc_handle", address)))


def by_fabric(check: LedgerCheck, importer: Probe) -> Shared:
    handle = check.probe.ok("physical_fabric", SIZE)
    return Shared(check, importer, handle, importer.ok("fabric_import", check.probe.ok("fabric_export", handle)))


def by_pool(check: LedgerCheck, importer: Probe) -> Shared:
    pool = check.probe.ok("pool_create", 0, 0, 1, 1)
    imported = importer.ok("pool_import", check.probe.pid, check.probe.ok("pool_export", pool))
    address = check.probe.ok("alloc_async", SIZE, "", pool)
    opened = importer.ok("pointer_import", imported, check.probe.ok("pointer_export", address))
    return Shared(check, importer, address, opened, pool, imported)


def end_pool(shared: Shared) -> None:
    shared.maker.ok("free_async", shared.made)
    shared.maker.ok("pool_destroy", shared.pool)
    shared.maker.ok("context_sync")


LET_GO: dict[Callable[[LedgerCheck, Probe], Shared], Callable[[Shared], None]] = {
    by_ipc: lambda shared: shared.maker.ok("free", shared.made),
    by_fabric: lambda shared: shared.maker.ok("physical_release", shared.made),
    by_pool: end_pool,
}
CLOSE: dict[Callable[[LedgerCheck, Probe], Shared], str] = {
    by_ipc: "ipc_close",
    by_fabric: "physical_release",
    by_pool: "free",
}
WAYS = pytest.mark.parametrize("way", list(LET_GO), ids=lambda way: way.__name__)
Way = Callable[[LedgerCheck, Probe], Shared]


@pytest.fixture
def pair(make_check: MakeCheck) -> tuple[LedgerCheck, Probe]:
    check = make_check(FAKE_CUDA_IMEX="1", FAKE_CUDA_POOL_CHUNK=str(SIZE))
    importer = check.tenant.probe("importer", more={"FAKE_CUDA_IMEX": "1"})
    importer.start_cuda()
    return check, importer


@WAYS
def test_what_is_open_elsewhere_counts_with_its_maker_alone(pair: tuple[LedgerCheck, Probe], way: Way) -> None:
    shared = way(*pair)
    assert shared.check.same() == SIZE == shared.check.agent.used(0)
    assert shared.of_importer() == 0
    shared.importer.ok(CLOSE[way], shared.opened)
    assert shared.check.same() == SIZE == shared.check.agent.used(0)
    LET_GO[way](shared)
    shared.check.tenant.until(lambda: shared.check.taken() == 0, "nothing to be taken")
    assert shared.check.same() == 0 == shared.of_importer()


@WAYS
@pytest.mark.promise("memory-left-to-importers")
def test_what_its_maker_frees_is_the_importers_and_no_process_credits_it(
    pair: tuple[LedgerCheck, Probe], way: Way
) -> None:
    shared = way(*pair)
    LET_GO[way](shared)
    shared.check.tenant.until(lambda: shared.check.taken() == 0, "the maker to have nothing")
    assert shared.check.same() == 0
    assert shared.of_importer() == SIZE
    shared.check.agent.wait(lambda: shared.check.agent.used(0) == 0, "no credits of it")
    shared.check.probe.ok("free", shared.check.probe.ok("alloc", TENANT_MEMORY))
    shared.importer.ok(CLOSE[way], shared.opened)
    assert shared.of_importer() == 0
    shared.check.agent.wait(lambda: shared.check.agent.used(0) == 0, "nothing given back twice")


@WAYS
def test_what_its_dead_maker_had_is_the_importers(pair: tuple[LedgerCheck, Probe], way: Way) -> None:
    shared = way(*pair)
    shared.maker.kill()
    shared.check.agent.wait(lambda: shared.check.agent.used(0) == 0, "the credits of the dead")
    shared.importer.ok("free", shared.importer.ok("alloc", SIZE))
    assert shared.of_importer() == SIZE
    shared.importer.ok(CLOSE[way], shared.opened)
    assert shared.of_importer() == 0


def test_a_handle_of_freed_memory_opens_nothing(pair: tuple[LedgerCheck, Probe]) -> None:
    check, importer = pair
    address, handle = check.probe.ok("alloc", SIZE), check.probe.ok("physical_fabric", SIZE)
    ipc, fabric = check.probe.ok("ipc_handle", address), check.probe.ok("fabric_export", handle)
    check.probe.ok("free", address)
    check.probe.ok("physical_release", handle)
    assert importer.call("ipc_open", ipc).code not in (0, OUT_OF_MEMORY)
    assert importer.call("fabric_import", fabric).code not in (0, OUT_OF_MEMORY)
    assert check.same() == 0


@pytest.fixture
def node(tmp_path: Path, double: Path, hook_file: Path) -> Iterator[Node]:
    rows = [tenant("makes", 0.5, memory=2 * GI), tenant("opens", 0.5, memory=GI)]
    with running(tmp_path, *rows, nvml=True, hook_file=str(hook_file)) as node:
        yield node


def process(node: Node, name: str) -> Caller:
    caller = Caller(node.environment(name))
    caller.start()
    return caller


@pytest.mark.promise("memory-left-to-importers")
def test_what_is_left_to_an_importer_counts_against_its_tenants_limit(node: Node) -> None:
    observer, driver = Observer(node.path("opens") / "agent.sock"), Driver(node.state)
    maker, importer = process(node, "makes"), process(node, "opens")
    try:
        address = maker.new("cuMemAlloc_v2", 600 * MIB)
        (handle,) = maker.ok("cuIpcGetMemHandle", Out(64), address)
        (opened,) = importer.ok("cuIpcOpenMemHandle_v2", Out(8), By(handle), 1)
        importer.ok("cuMemFree_v2", importer.new("cuMemAlloc_v2", GI))
        maker.ok("cuMemFree_v2", address)
        assert driver.memory(importer.pid) == 600 * MIB
        wait_for(lambda: observer.ask().used >= 600 * MIB, "the agent to see it")
        assert importer.code("cuMemAlloc_v2", Out(8), GI - 500 * MIB) == OUT_OF_MEMORY
        importer.ok("cuMemFree_v2", importer.new("cuMemAlloc_v2", GI - 600 * MIB))
        importer.ok("cuIpcCloseMemHandle", int.from_bytes(opened, "little"))
        wait_for(lambda: importer.code("cuMemAlloc_v2", Out(8), GI) == 0, "all of it to be free again")
    finally:
        for one in (maker, importer):
            one.close()
        observer.close()
        driver.close()
