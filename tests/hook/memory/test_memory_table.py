"""Every function of the driver that takes device memory, under the real hook and the real agent: `make memory-table`.

Guarantees that are checked for each function:
- The tenant can get memory by it up to the last byte of the limit, and no byte more.
- Nothing stays counted when the driver refuses the call.
- After the memory is freed, nothing stays counted.

The table of results is printed at the end (`pytest -s`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hook.world.agent_node import FAKE_CUDA, GI, GPUS, Node, running, tenant, wait_for
from hook.world.allocating import CONTEXTS, MODULES, WAYS, take
from hook.world.caller import Caller, DriverError, Out
from hook.world.ledger_and_driver import Driver, Observer, ledger_use
from table.render import read_table

MIB = 1 << 20
LIMIT = 1 * GI
CONTEXT = 64 * MIB
SIZE = 12 * MIB
LEAST = 512
OUT_OF_MEMORY = 2

# Functions of the class `memory` that take no memory: they free, report, or prepare for a function of WAYS, which take
# memory.
TAKES_NOTHING = {
    "cuArrayDestroy",
    "cuDeviceGraphMemTrim",
    "cuDeviceTotalMem",
    "cuMemExportToShareableHandle",
    "cuMemFree",
    "cuMemFreeAsync",
    "cuMemGetHandleForAddressRange",
    "cuMemGetInfo",
    "cuMemPoolCreate",
    "cuMemPoolDestroy",
    "cuMemPoolImportFromShareableHandle",
    "cuMemPoolTrimTo",
    "cuMemRelease",
    "cuMemUnmap",
    "cuMipmappedArrayDestroy",
    "cuMulticastCreate",
    "cuMulticastUnbind",
}
Table = dict[str, dict[str, str]]
REFUSED = [symbol for symbol in WAYS if symbol not in MODULES]


@dataclass
class Tenant:
    """Processes of one tenant on the node, and the memory that they use."""

    node: Node
    name: str
    observer: Observer
    driver: Driver
    callers: list[Caller]

    def process(self) -> Caller:
        """Start one more process, which has not called the driver yet."""
        environment = dict(os.environ) | {
            "LD_LIBRARY_PATH": str(FAKE_CUDA),
            "LD_PRELOAD": str(self.node.path(self.name) / "libsharepod.so"),
            "FAKE_CUDA_STATE": str(self.node.state),
            "FAKE_CUDA_VISIBLE": GPUS[0],
            "FAKE_CUDA_LABEL": self.name,
        }
        self.callers.append(Caller(environment))
        return self.callers[-1]

    def filler(self) -> Caller:
        """Return the first process, which the tests share."""
        if not self.callers:
            self.process().start()
        return self.callers[0]

    def user(self, symbol: str) -> Caller:
        """Return a process that can call the function: a new process without a context if the function creates a
        context.
        """
        if symbol in CONTEXTS:
            caller = self.process()
            caller.ok("cuInit", 0)
            return caller
        self.filler()
        if len(self.callers) == 1:
            self.process().start()
        return self.callers[1]

    def end(self, caller: Caller, symbol: str) -> None:
        """End a process that `user` started for one test."""
        if symbol in CONTEXTS:
            self.callers.remove(caller)
            caller.close()

    def use(self) -> int:
        """Return the bytes that the driver has taken for the processes.

        AssertionError unless the ledger has the same bytes, at once or after idle credits on their way have arrived.
        """
        begun = [caller for caller in self.callers if self.driver.memory(caller.pid) > 0]
        used = sum(self.driver.memory(caller.pid) for caller in begun)
        if begun:
            wait_for(lambda: ledger_use(self.observer, begun) == used, f"the ledger to have {used} bytes", 5)
        return used

    def close(self) -> None:
        for caller in self.callers:
            caller.close()
        self.observer.close()
        self.driver.close()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, double: Path, hook_file: Path) -> Iterator[Node]:
    rows = [tenant("limited", 0.5, memory=LIMIT), tenant("wide", 0.5, memory=15 * GI)]
    directory = tmp_path_factory.mktemp("t")
    with running(directory, *rows, context_bytes=CONTEXT, hook_file=str(hook_file)) as node:
        yield node


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    """Results of each function, by its symbol. They are printed at the end."""
    found: Table = {symbol: {} for symbol in REFUSED}
    yield found
    columns = ("takes", "limit", "refused by the driver", "freed")
    print(f"\n\n{'entry point':38} {columns[0]:>11}  {columns[1]:12} {columns[2]:22} {columns[3]}")
    for symbol, row in found.items():
        cells = [row.get(column, "-") for column in columns]
        print(f"{symbol:38} {cells[0]:>11}  {cells[1]:12} {cells[2]:22} {cells[3]}")
    for symbol in MODULES:
        print(f"{symbol:38} code and variables: counted by NVML, and not refused (test_memory_truth.py)")


@pytest.fixture(scope="module")
def limited(node: Node) -> Iterator[Tenant]:
    yield from tenant_of(node, "limited")


@pytest.fixture(scope="module")
def wide(node: Node) -> Iterator[Tenant]:
    """Tenant whose limit is larger than the memory that another process leaves on the GPU."""
    yield from tenant_of(node, "wide")


def tenant_of(node: Node, name: str) -> Iterator[Tenant]:
    made = Tenant(node, name, Observer(node.path(name) / "agent.sock"), Driver(node.state), [])
    try:
        yield made
    finally:
        made.close()


def fill(of: Tenant, caller: Caller, left: int) -> list[int]:
    """Allocate the tenant's whole limit except `left` bytes."""
    held, wanted = [], LIMIT - of.use() - left
    assert wanted >= 0
    while wanted > 0:
        size = min(wanted, 256 * MIB)
        held.append(caller.new("cuMemAlloc_v2", size))
        wanted -= size
    return held


def refused(symbol: str, caller: Caller) -> bool:
    with pytest.raises(DriverError) as failed:
        take(symbol, caller, SIZE).close()
    assert failed.value.code == OUT_OF_MEMORY, str(failed.value)
    return True


@pytest.mark.promise("memory-every-way")
@pytest.mark.parametrize("symbol", REFUSED)
def test_the_limit_is_kept_to_the_byte_and_all_comes_back(limited: Tenant, table: Table, symbol: str) -> None:
    filler, caller = limited.filler(), limited.user(symbol)
    before = limited.use()
    with take(symbol, caller, SIZE):
        cost = limited.use() - before
        assert cost >= SIZE or symbol in CONTEXTS
    assert limited.use() == before, "freed in full"
    held = fill(limited, filler, cost)
    with take(symbol, caller, SIZE):
        assert limited.use() == LIMIT, "the last byte can be had"
    held += [filler.new("cuMemAlloc_v2", LEAST)]
    assert refused(symbol, caller)
    assert limited.use() == LIMIT - cost + LEAST
    for address in held:
        filler.ok("cuMemFree_v2", address)
    assert limited.use() == before
    limited.end(caller, symbol)
    table[symbol] = {"takes": f"{cost:,}", "limit": "to the byte", "freed": "in full"}


@pytest.mark.promise("memory-every-way")
@pytest.mark.parametrize("symbol", REFUSED)
def test_what_the_driver_refuses_is_not_counted(wide: Tenant, table: Table, symbol: str) -> None:
    caller = wide.user(symbol)
    before = wide.use()
    with take(symbol, caller, SIZE):
        cost = wide.use() - before
    ballast = Caller(dict(os.environ) | {"LD_LIBRARY_PATH": str(FAKE_CUDA), "FAKE_CUDA_STATE": str(wide.node.state)})
    try:
        ballast.start()
        free = int.from_bytes(ballast.ok("cuMemGetInfo_v2", Out(8), Out(8))[0], "little")
        ballast.new("cuMemAlloc_v2", free - SIZE + LEAST)
        assert refused(symbol, caller)
    finally:
        ballast.close()  # without the ballast, the limit alone determines the free memory
    assert wide.use() == before
    with take(symbol, caller, SIZE):
        assert wide.use() == before + cost
    wide.end(caller, symbol)
    table[symbol]["refused by the driver"] = "rolled back"


@pytest.mark.promise("memory-every-way", "security-share")
def test_every_entry_of_the_table_that_takes_memory_is_tried_here() -> None:
    memory = {row.symbol: row.name for row in read_table() if row.kind == "memory"}
    untried = {symbol for symbol, name in memory.items() if symbol not in WAYS and name not in TAKES_NOTHING}
    assert not untried, "write a way in allocating.py, or add it to TAKES_NOTHING"
    assert not TAKES_NOTHING - set(memory.values())
