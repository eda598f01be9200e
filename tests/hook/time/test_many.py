"""A launch costs about the same with thousands of threads, streams and graphs as with ten."""

from __future__ import annotations

import subprocess

import pytest
from hook.conftest import BUILD, Tenant

CALLS, ROUNDS = 20_000, 5


def added_ns(tenant: Tenant, stream: str, call: str = "launch", *, metered: bool = False, **more: str) -> float:
    """Return the processor time in ns that the hook adds to a launch of a libcuda that does nothing; median of the
    rounds.
    """
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(metered=metered)
    done = subprocess.run(
        [str(BUILD / "programs" / "launchcost"), "1", str(CALLS), str(ROUNDS), call, stream],
        env=tenant.environment(double=BUILD / "doubles" / "hollow", **more),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    agent.vanish()
    return next(float(line.split()[2]) for line in done.stdout.splitlines() if line.startswith("hooked"))


@pytest.mark.promise("program-no-cliffs")
def test_a_launch_beside_many_threads_is_no_dearer(tenant: Tenant) -> None:
    """Each living thread that has launched has a slot. A busy machine adds some ns."""
    few = added_ns(tenant, "stream", LAUNCHCOST_ALIVE="10")
    assert added_ns(tenant, "stream", LAUNCHCOST_ALIVE="1100") < 10 * few + 100


@pytest.mark.promise("program-no-cliffs")
def test_a_launch_into_one_of_many_streams_is_no_dearer(tenant: Tenant) -> None:
    """The cost stays within twice the cost with ten streams, plus a few ns for cache lines that other processes evict.
    A stream that the thread does not remember would cost 30 ns: a lookup in the registry.
    """
    few = added_ns(tenant, "10", LAUNCHCOST_ALIVE="1")
    assert added_ns(tenant, "4000", LAUNCHCOST_ALIVE="1", LAUNCHCOST_STREAMS="10000") < 2 * few + 10


@pytest.mark.promise("program-no-cliffs")
def test_a_metered_launch_of_one_of_many_graphs_is_no_dearer(tenant: Tenant) -> None:
    """The hook stores each graph's duration by its handle, and compilers create thousands of graphs for one model."""
    few = added_ns(tenant, "stream", "graph", metered=True, LAUNCHCOST_ALIVE="1", LAUNCHCOST_GRAPHS="10")
    many = added_ns(tenant, "stream", "graph", metered=True, LAUNCHCOST_ALIVE="1", LAUNCHCOST_GRAPHS="4000")
    assert many < 2 * few + 100
