"""Processes of a tenant share one limit under the real agent: idle credits of one process never make another's call
fail.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from hook.conftest import MIB
from hook.world.agent_node import GPUS, PROGRAMS, Node, built, running, tenant, wait_for
from hook.world.ledger_and_driver import Observer
from hook.world.probe import OUT_OF_MEMORY, Probe

pytestmark = pytest.mark.skipif(not built(), reason="hook or double not built: run `make shim doubles`")

LIMIT = 256 * MIB


@contextmanager
def siblings(directory: Path, count: int = 2) -> Iterator[tuple[Node, list[Probe]]]:
    """Function that starts processes of one tenant with 256 MiB. Each has a context."""
    with running(directory, tenant("a", 0.5, memory=LIMIT)) as node:
        probes = [Probe(node.environment("a", label=f"p{n}")) for n in range(count)]
        try:
            for probe in probes:
                probe.start_cuda()
            yield node, probes
        finally:
            for probe in probes:
                probe.close()


def in_use(node: Node) -> int:
    return sum(client.usage[GPUS[0]].memory for client in node.devices().clients if client.alive)


@pytest.mark.promise("memory-recall")
def test_what_fits_the_limit_is_not_refused_for_a_siblings_idle_credits(tmp_path: Path) -> None:
    with siblings(tmp_path, 3) as (node, probes):
        for less in range(0, 4 * 512, 512):
            asker = probes[0]
            for probe in probes[1:]:  # each process keeps the memory that it has freed as idle credits for a while
                probe.ok("free", probe.ok("alloc", 30 * MIB))
            address = asker.ok("alloc", LIMIT - less)
            assert asker.call("alloc", LIMIT).code == OUT_OF_MEMORY
            assert in_use(node) == LIMIT - less
            asker.ok("free", address)
            probes.append(probes.pop(0))


@pytest.mark.promise("memory-returned")
def test_a_killed_processs_bytes_come_back_at_once(tmp_path: Path) -> None:
    with siblings(tmp_path, 3) as (node, probes):
        for dying, heir in pairwise(probes):
            dying.ok("alloc", LIMIT)
            assert heir.call("alloc", 1).code == OUT_OF_MEMORY
            dying.kill()
            heir.ok("free", heir.ok("alloc", LIMIT))
            wait_for(lambda: in_use(node) == 0, "the memory of the dead")


def test_threads_and_processes_that_race_for_the_last_bytes_never_pass_the_limit(tmp_path: Path) -> None:
    with siblings(tmp_path, 3) as (node, probes):
        threads = [f"t{n}" for n in range(4)]
        for probe in probes:
            for thread in threads:
                probe.ok("context_use", thread=thread)
        posted = [
            (probe, probe.post("alloc", 10 * MIB, thread=thread))
            for _ in range(4)
            for probe in probes
            for thread in threads
        ]
        got = [probe for probe, future in posted if future.result(20).code == 0]
        assert len(got) == LIMIT // (10 * MIB)
        assert in_use(node) == len(got) * 10 * MIB


@pytest.mark.promise("time-resized", "memory-raised")
def test_a_raised_limit_is_used_at_once_and_a_lowered_one_refuses(tmp_path: Path) -> None:
    with siblings(tmp_path) as (node, (first, second)):
        address = first.ok("alloc", LIMIT)
        assert second.call("alloc", MIB).code == OUT_OF_MEMORY
        node.set_tenants(tenant("a", 0.5, memory=2 * LIMIT))
        wait_for(lambda: second.ok("total_memory") == 2 * LIMIT, "the raised limit")
        second.ok("alloc", LIMIT)
        node.set_tenants(tenant("a", 0.5, memory=LIMIT))
        wait_for(lambda: second.ok("total_memory") == LIMIT, "the lowered limit")
        assert second.call("alloc", 512).code == OUT_OF_MEMORY
        first.ok("free", address)
        assert second.call("alloc", 512).code == OUT_OF_MEMORY, "the sibling uses all of the limit"


@pytest.mark.promise("memory-written-first", "node-handover")
def test_an_agent_that_is_killed_and_started_again_counts_nothing_twice_and_loses_nothing(tmp_path: Path) -> None:
    with siblings(tmp_path, 3) as (node, (first, second, third)):
        first.ok("alloc", 100 * MIB)
        second.ok("alloc", 100 * MIB)
        node.stop_agent(signal.SIGKILL)
        waiting = [probe.post("alloc", 50 * MIB) for probe in (first, second, third)]
        node.start_agent()
        got = [future.result(40).code for future in waiting]
        assert sorted(got) == [0, OUT_OF_MEMORY, OUT_OF_MEMORY], "there is room for one"
        assert in_use(node) == 250 * MIB
        third.ok("alloc", 6 * MIB)
        assert third.call("alloc", 512).code == OUT_OF_MEMORY
        assert first.ok("memory_info") == [0, LIMIT]


@pytest.mark.promise("memory-freed-meanwhile")
def test_what_a_process_frees_while_no_agent_runs_is_free_under_the_next_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The process makes no call after the free, so the hook thread must report it to the next agent."""
    with siblings(tmp_path) as (node, (first, second)):
        address = first.ok("alloc", 200 * MIB)
        second.ok("alloc", 20 * MIB)
        node.stop_agent(signal.SIGKILL)
        wait_for_no_agent(capfd, processes=2)
        first.ok("free", address)
        node.start_agent()
        second.ok("alloc", 200 * MIB)
        wait_for(lambda: credited(node) == 220 * MIB, "nothing to be counted for the first process")


@pytest.mark.promise("memory-siblings-remembered")
@pytest.mark.parametrize("asked_before", [True, False])
def test_free_memory_does_not_grow_by_the_siblings_use_while_the_agent_is_away(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], asked_before: bool
) -> None:
    with siblings(tmp_path, 1) as (node, (first,)):
        first.ok("alloc", 200 * MIB)
        second = Probe(node.environment("a", label="later"))
        try:
            second.start_cuda()
            address = second.ok("alloc", 20 * MIB)
            if asked_before:
                assert second.ok("memory_info") == [36 * MIB, LIMIT]
            node.stop_agent(signal.SIGKILL)
            wait_for_no_agent(capfd, processes=2)
            assert second.ok("memory_info") == [36 * MIB, LIMIT]
            second.ok("free", address)
            assert second.ok("memory_info") == [56 * MIB, LIMIT]
        finally:
            second.close()


def test_a_hundred_threads_that_ask_at_once_all_see_the_siblings(tmp_path: Path) -> None:
    with siblings(tmp_path) as (_, (first, second)):
        first.ok("alloc", 200 * MIB)
        threads = [f"t{n}" for n in range(100)]
        for thread in threads:
            second.ok("context_use", thread=thread)
        posted = [second.post("memory_info", thread=thread) for _ in range(10) for thread in threads]
        assert {tuple(future.result(20).value) for future in posted} == {(LIMIT - 200 * MIB, LIMIT)}


def wait_for_no_agent(capfd: pytest.CaptureFixture[str], processes: int) -> None:
    """Wait until so many processes have reported that the agent is absent."""
    heard = [""]

    def reported() -> bool:
        heard.append(capfd.readouterr().err)
        return "".join(heard).count("going on by the file `limits`") >= processes

    wait_for(reported, "the processes to see no agent")


LARGEST_CALL = 24 * MIB
ANY, IN_POOL, GRAPHS = 0, 5, 9
"""Kinds of memory in memoryrace. Each kind has two pools: the device's default pool, and a pool that the program
created.
"""


@pytest.mark.parametrize(("kind", "pools"), [(ANY, 2), (IN_POOL, 1), (GRAPHS, 0)])
def test_threads_that_race_for_the_last_bytes_stay_within_the_limit(tmp_path: Path, kind: int, pools: int) -> None:
    """The test reads the driver's peak. The peak may exceed the limit by one call's memory for each pool, because the
    hook undoes a pool's growth only after the call.
    """
    with running(tmp_path, tenant("a", 0.5, memory=LIMIT)) as node:
        racing = subprocess.Popen(
            [PROGRAMS / "memoryrace", "1", "8", "800", str(kind)],
            env=node.environment("a") | {"FAKE_CUDA_POOL_CHUNK": str(2 * MIB)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert racing.stdout is not None
            counts = json.loads(racing.stdout.readline())
            assert counts["failed"] == 0
            assert counts["taken"] > 0
            assert counts["refused"] > 0
            assert counts["held"] > 0
            usage = node.devices().client("a").usage[GPUS[0]]
            assert usage.peak <= LIMIT + pools * LARGEST_CALL
            assert usage.memory == 0, "all of it came back"
            wait_for(lambda: credited(node) == 0, "nothing to be counted any more")
        finally:
            racing.kill()
            racing.communicate()


def credited(node: Node) -> int:
    observer = Observer(node.path("a") / "agent.sock")
    try:
        return observer.ask().used
    finally:
        observer.close()
