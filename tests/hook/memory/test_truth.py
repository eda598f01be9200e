"""Memory that the driver takes without a call that the hook could refuse is charged too: the agent reads it by NVML.

The real agent with the double of NVML, the real hook, and the double of libcuda.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hook.world.agent_node import GI, Node, running, tenant, wait_for
from hook.world.allocating import take
from hook.world.caller import Caller, Out
from hook.world.ledger_and_driver import Driver, Observer, ledger_use

MIB = 1 << 20
CONTEXT = 96 * MIB
CODE = 400 * MIB
OUT_OF_MEMORY = 2


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, double: Path, hook_file: Path) -> Iterator[Node]:
    rows = [tenant("a", 0.5, memory=GI), tenant("b", 0.5, memory=2 * GI)]
    with running(
        tmp_path_factory.mktemp("m"), *rows, context_bytes=CONTEXT, known=False, nvml=True, hook_file=str(hook_file)
    ) as node:
        yield node


def process(node: Node, name: str) -> Caller:
    caller = Caller(node.environment(name))
    caller.start()
    return caller


@pytest.mark.promise("memory-contexts")
def test_what_the_first_contexts_take_is_learnt_and_reserved_by_the_next(node: Node) -> None:
    observer, driver = Observer(node.path("b") / "agent.sock"), Driver(node.state)
    first = process(node, "b")
    second = None
    try:
        assert ledger_use(observer, [first]) in (0, CONTEXT), "not known at first, but seen"
        wait_for(lambda: (node.directory / "state" / "contexts.json").exists(), "the agent to learn it")
        first.kill()
        wait_for(lambda: observer.ask().used == 0, "the first to be forgotten")
        second = process(node, "b")
        assert ledger_use(observer, [second]) == driver.memory(second.pid) == CONTEXT, "at once"
        left = 2 * GI - CONTEXT
        assert second.code("cuMemAlloc_v2", Out(8), left + 512) == OUT_OF_MEMORY
        second.new("cuMemAlloc_v2", left)
    finally:
        for one in (first, second):
            if one is not None:
                one.close()
        observer.close()
        driver.close()


@pytest.mark.promise("memory-driver-counts")
def test_what_modules_take_counts_against_the_limit_of_all_processes(node: Node) -> None:
    observer, driver = Observer(node.path("a") / "agent.sock"), Driver(node.state)
    loading, sibling = process(node, "a"), process(node, "a")
    try:
        with take("cuModuleLoadData", loading, CODE):
            taken = driver.memory(loading.pid) + driver.memory(sibling.pid)
            assert taken >= CODE + 2 * CONTEXT
            wait_for(lambda: observer.ask().used >= taken, "the agent to see it")
            assert sibling.code("cuMemAlloc_v2", Out(8), GI - taken + 512) == OUT_OF_MEMORY
            address = sibling.new("cuMemAlloc_v2", GI - taken)
            free, total = sibling.ok("cuMemGetInfo_v2", Out(8), Out(8))
            assert (int.from_bytes(free, "little"), int.from_bytes(total, "little")) == (0, GI)
            sibling.ok("cuMemFree_v2", address)
        wait_for(lambda: observer.ask().used < taken, "memory of the unloaded module to be free")
    finally:
        loading.close()
        sibling.close()
        observer.close()
        driver.close()
