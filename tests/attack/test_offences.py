"""Offences that the agent finds from outside the process: reported by default, killed by `unenforced_policy` of the
node.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from sharepod.agent.devices.inventory import Process
from sharepod.agent.settings import AgentSettings, UnenforcedPolicy
from sharepod.agent.tenants.registry import TenantRegistry
from sharepod.api.gpunode import FindingReason
from unit.agent.client import GI, GPU0, reading, row, settings_in, tenants_with

TENANT = "tenant-a"


@pytest.fixture
def programs() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def program(programs: ExitStack) -> subprocess.Popen[bytes]:
    """Start a process that waits. The test sets the driver's report about it."""
    started = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    programs.enter_context(started)
    programs.callback(started.kill)
    return started


def killing(directory: Path) -> AgentSettings:
    return settings_in(directory, unhooked_after_s=0, unenforced_policy=UnenforcedPolicy.KILL)


async def observe(
    tenants: TenantRegistry, *pids: int, of: int | None = None, replaced: dict[int, str] | None = None
) -> None:
    """Give the agent one reading with these processes on the GPU.

    `of`: pid of the only process in the tenant's pod; the others are in no pod. `replaced`: by pid, evidence that the
    hook was replaced.
    """
    await tenants.observe(
        reading(*(Process(pid, GPU0, GI) for pid in pids)),
        residue=lambda _: None,
        owner_of=lambda pid: TENANT if pid == of else None,
        replaced=lambda *_: replaced or {},
    )


@pytest.mark.promise("node-kill", "security-kill")
async def test_a_process_without_the_hook_is_ended_with_the_reading_that_finds_it(
    tmp_path: Path, programs: ExitStack
) -> None:
    offender, neighbour = program(programs), program(programs)
    async with tenants_with(killing(tmp_path), [row(TENANT), row("tenant-b")]) as tenants:
        await observe(tenants, offender.pid, neighbour.pid, of=offender.pid)
        assert offender.wait(10) == -9
        assert neighbour.poll() is None
        [finding] = tenants.status()[0].findings
        assert finding.reason == FindingReason.PROCESS_WITHOUT_HOOK
        assert "unenforced_policy: Kill" in finding.message
        assert tenants.killed == {FindingReason.PROCESS_WITHOUT_HOOK: 1}


@pytest.mark.promise("node-kill")
async def test_a_process_with_another_hook_is_ended(tmp_path: Path, programs: ExitStack) -> None:
    offender = program(programs)
    settings = killing(tmp_path).model_copy(update={"unhooked_after_s": 600})
    async with tenants_with(settings, [row(TENANT)]) as tenants:
        await observe(tenants, offender.pid, of=offender.pid, replaced={offender.pid: "sees another file"})
        assert offender.wait(10) == -9


@pytest.mark.promise("node-kill-report")
async def test_by_default_no_process_is_ended(tmp_path: Path, programs: ExitStack) -> None:
    offender = program(programs)
    assert AgentSettings().unenforced_policy is UnenforcedPolicy.REPORT
    async with tenants_with(settings_in(tmp_path, unhooked_after_s=0), [row(TENANT)]) as tenants:
        await observe(tenants, offender.pid, of=offender.pid, replaced={offender.pid: "sees another file"})
        assert len(tenants.status()[0].findings) == 2
    assert offender.poll() is None


async def test_a_reused_pid_is_not_killed(tmp_path: Path, programs: ExitStack) -> None:
    """The driver's list is some milliseconds old: by the time of the kill the pid may be another process's."""
    other = program(programs)
    answers = [TENANT, None]
    async with tenants_with(killing(tmp_path), [row(TENANT)]) as tenants:
        await tenants.observe(
            reading(Process(other.pid, GPU0, GI)), residue=lambda _: None, owner_of=lambda _: answers.pop(0)
        )
        assert answers == []
        assert tenants.killed == {}
    assert other.poll() is None


@pytest.mark.parametrize("pid", [0, -1, 1 << 22])
async def test_an_unused_pid_causes_no_error(pid: int, tmp_path: Path) -> None:
    async with tenants_with(killing(tmp_path), [row(TENANT)]) as tenants:
        await observe(tenants, pid, of=pid)
        assert tenants.killed == {}
    assert os.getpid() > 1


async def test_a_repeated_reading_ends_no_process(tmp_path: Path, programs: ExitStack) -> None:
    """While the driver hangs, the agent gets its last reading again, with pids that may be reused."""
    other = program(programs)
    async with tenants_with(killing(tmp_path), [row(TENANT)]) as tenants:
        stale = replace(reading(Process(other.pid, GPU0, GI)), fresh=False)
        await tenants.observe(stale, residue=lambda _: None, owner_of=lambda _: TENANT)
    assert other.poll() is None
