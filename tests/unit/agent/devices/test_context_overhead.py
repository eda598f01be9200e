"""Context overhead: estimated from processes that reserved no memory for their contexts, and sent to later
processes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from sharepod.agent.devices.context_overhead import PROCESSES_MAX, ContextOverhead
from sharepod.agent.devices.inventory import Process
from sharepod.agent.state.files import FolderFiles
from unit.agent.client import GPU0, GPU1, Client, reading, row, settings_in, tenants_with

MI = 1 << 20


def learn(costs: ContextOverhead, *sizes: int, pid: int = 1) -> None:
    for size in sizes:
        costs.observe("H100", "580", GPU0, {pid: size})


def test_nothing_is_known_before_a_process_was_seen_for_a_while(tmp_path: Path) -> None:
    costs = ContextOverhead(FolderFiles(tmp_path))
    learn(costs, 400 * MI, 400 * MI)
    assert costs.kib("H100", "580") == 0
    learn(costs, 900 * MI)
    assert costs.kib("H100", "580") == 400 << 10, "modules that came later are not the context"
    assert costs.kib("H100", "590") == 0
    assert costs.kib("A100", "580") == 0


def test_a_single_outlier_does_not_change_the_learnt_size(tmp_path: Path) -> None:
    costs = ContextOverhead(FolderFiles(tmp_path))
    for pid, size in enumerate((300, 3000, 310, 305, 290)):
        learn(costs, *[size * MI] * 3, pid=pid)
    assert costs.kib("H100", "580") == 305 << 10


@given(st.lists(st.integers(-(1 << 40), 1 << 50), max_size=200))
def test_whatever_readings_say_what_is_learnt_is_a_contexts_size(sizes: list[int]) -> None:
    costs = ContextOverhead(FolderFiles(Path("/nonexistent")))
    for pid, size in enumerate(sizes):
        learn(costs, *[size] * 3, pid=pid)
    assert 0 <= costs.kib("H100", "580") <= 4 << 20
    assert all(len(learnt) <= PROCESSES_MAX for learnt in costs._learnt.values())


def test_what_was_learnt_outlives_the_agent_and_a_damaged_file_is_as_none(tmp_path: Path) -> None:
    path = tmp_path / "contexts.json"
    costs = ContextOverhead(FolderFiles(path.parent))
    learn(costs, *[400 * MI] * 3)
    assert costs.changed
    costs.save()
    assert not costs.changed
    again = ContextOverhead(FolderFiles(path.parent))
    again.load()
    assert again.kib("H100", "580") == 400 << 10
    path.write_text("{")
    again.load()
    assert again.kib("H100", "580") == 0


async def test_who_connects_later_is_told_and_teaches_nothing_any_more(tmp_path: Path) -> None:
    async with tenants_with(settings_in(tmp_path), [row("a", gpus=(GPU0, GPU1))]) as tenants:
        client = await Client.connect(tenants.directory("a"))
        assert client.welcome is not None
        assert [gpu.context_kib for gpu in client.welcome.gpus] == [0, 0]
        assert await client.reserve(64 * MI) == 64 * MI

        async def look(size: int) -> None:
            seen = reading(Process(os.getpid(), GPU0, size))
            await tenants.observe(seen, residue=lambda _: None, owner_of=lambda _: None)

        for _ in range(3):
            await look(364 * MI)
        later = await Client.connect(tenants.directory("a"))
        assert later.welcome is not None
        assert [gpu.context_kib for gpu in later.welcome.gpus] == [300 << 10, 300 << 10], "both are of one model"
        for _ in range(20):
            await look(2000 * MI)
        last = await Client.connect(tenants.directory("a"))
        assert last.welcome == later.welcome
        client.close()
        later.close()
        last.close()
        await asyncio.sleep(0)
    assert (tmp_path / "state" / "contexts.json").exists()
