"""Processes that may not launch: over the tenant's number of connections, or without the file `limits`."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hook.conftest import MIB, MakeTenant, Tenant, last_report, terms
from hook.world.agent_node import running, wait_for
from hook.world.agent_node import tenant as agent_tenant
from hook.world.lifecycle import Life, begin, generous
from hook.world.probe import OUT_OF_MEMORY, SYSTEM_NOT_READY
from sharepod.protocol import RefusedReason


@pytest.mark.promise("program-too-many")
def test_one_process_too_many_launches_nothing_says_why_and_comes_in_later(tenant: Tenant, lives: list[Life]) -> None:
    agent = generous(tenant)
    agent.refuse = RefusedReason.FULL
    life = begin(lives, tenant, "run")
    tenant.until(lambda: "refuses this process" in life.stderr, "word of it")
    time.sleep(1.5)
    assert tenant.submitted() == 0
    assert life.stderr.count("refuses") == 1
    agent.refuse = None
    life.hears("ran")
    assert life.ends() == 0


def test_one_process_too_many_goes_by_the_file_when_the_agent_goes(tenant: Tenant, lives: list[Life]) -> None:
    agent = tenant.agent()
    agent.refuse = RefusedReason.FULL
    life = begin(lives, tenant, "run")
    tenant.until(lambda: "refuses this process" in life.stderr, "word of it")
    assert tenant.submitted() == 0
    agent.vanish()
    life.hears("ran")
    assert life.ends() == 0


def test_one_that_is_turned_away_unheard_reads_why(tenant: Tenant, lives: list[Life]) -> None:
    """The agent closes the connection without having read HELLO. The operating system then reports the reset of the
    connection before the frame with the reason.
    """
    agent = tenant.agent()
    agent.turn_away = RefusedReason.FULL
    life = begin(lives, tenant, "run")
    tenant.until(lambda: "refuses this process" in life.stderr, "word of it")
    time.sleep(0.5)
    assert tenant.submitted() == 0


@pytest.mark.promise("program-fail-open")
def test_with_the_agents_leave_programs_go_on_without_limits(make_tenant: MakeTenant, lives: list[Life]) -> None:
    tenant = make_tenant(hasty=True, limits=False)
    (tenant.directory / "fail-open").touch()
    begun = time.monotonic()
    life = begin(lives, tenant, "hold")
    life.hears("held")
    assert time.monotonic() - begun > 0.9, "it has waited for the file first"
    tenant.until(lambda: "fail_open" in life.stderr, "word of it")
    loop = tenant.loop("--seconds", "1", "--kernel-us", "1000", "--memory", "600M", "--chunk", "100M")
    report = last_report(loop)
    assert report["refused_allocations"] == 0
    assert report["share"] > 0.6, "nothing is gated"


@pytest.mark.promise("program-fail-open")
def test_leave_to_go_on_ends_with_the_first_limits(make_tenant: MakeTenant) -> None:
    tenant = make_tenant(terms(request=200), hasty=True, limits=False)
    (tenant.directory / "fail-open").touch()
    tenant.loop("--kernel-us", "1000")
    tenant.until(lambda: tenant.submitted() > 50, "launches")
    tenant.write_limits()
    time.sleep(2.5)
    before, begun = tenant.read().busy_ns("tenant"), time.monotonic_ns()
    time.sleep(2)
    assert (tenant.read().busy_ns("tenant") - before) / (time.monotonic_ns() - begun) < 0.27


@pytest.mark.promise("security-fail-open")
@pytest.mark.parametrize("name", ["FAIL_OPEN", "SHAREPOD_FAIL_OPEN", "SHAREPOD_AGENT_FAIL_OPEN", "SHAREPOD_LIMITS"])
def test_no_variable_gives_that_leave(make_tenant: MakeTenant, name: str) -> None:
    tenant = make_tenant(hasty=True, limits=False)
    probe = tenant.probe(more={name: "1"})
    assert probe.call("init").code == SYSTEM_NOT_READY


def test_leave_is_of_no_use_where_there_are_limits(make_tenant: MakeTenant) -> None:
    tenant = make_tenant()
    tenant.agent()
    (tenant.directory / "fail-open").touch()
    probe = tenant.probe()
    probe.start_cuda()
    assert probe.call("alloc", 300 * MIB).code == OUT_OF_MEMORY


@pytest.mark.promise("program-too-many")
def test_under_the_agent_processes_beyond_its_bound_do_not_add_to_the_share(tmp_path: Path, double: Path) -> None:
    """Four processes, of which two may connect, get together the share that the tenant was granted."""
    assert double.is_dir()
    with running(tmp_path, agent_tenant("a", 0.3, 0.3), connections_max="2") as node:
        for rank in range(4):
            node.launch("a", "--kernel-us", "1000", "--sync-every", "4", label=f"rank{rank}")
        ranks = [f"rank{rank}" for rank in range(4)]
        wait_for(lambda: sum(node.devices().busy_ns(rank) > 0 for rank in ranks) == 2, "two ranks to run")
        shares = node.shares(2, *ranks)
        assert sum(share > 0 for share in shares.values()) == 2, shares
        assert sum(shares.values()) < 0.36, shares
