"""A program whose streams are full or wait until its own next step ends under the hook, as without it."""

from __future__ import annotations

import subprocess

import pytest
from hook.conftest import BUILD, Tenant

BLOCKED = str(BUILD / "programs" / "blocked")


def run(tenant: Tenant, arguments: str, **environment: str) -> None:
    """Run the program. CalledProcessError or TimeoutExpired if it fails or does not end."""
    program = [BLOCKED, *arguments.split()]
    subprocess.run(program, env=tenant.environment() | environment, check=True, timeout=30)


@pytest.mark.parametrize(
    ("arguments", "metered"),
    [
        pytest.param("crossed", True, marks=pytest.mark.promise("program-full-stream")),
        pytest.param("exited", False, marks=pytest.mark.promise("program-full-stream")),
        pytest.param("exited", True, marks=pytest.mark.promise("program-full-stream")),
        pytest.param("passed capture", False, marks=pytest.mark.promise("program-full-stream")),
        pytest.param("passed capture", True, marks=pytest.mark.promise("program-full-stream")),
        pytest.param("passed destroy", False, marks=pytest.mark.promise("program-full-stream")),
        pytest.param("passed destroy", True, marks=pytest.mark.promise("program-full-stream")),
        pytest.param("destroyed 1200", False, marks=pytest.mark.promise("program-full-stream")),
        pytest.param("destroyed 1200", True, marks=pytest.mark.promise("program-full-stream")),
        pytest.param("nodes 30", False, marks=pytest.mark.promise("program-held-launches")),
        pytest.param("exit", False, marks=pytest.mark.promise("program-held-launches")),
        pytest.param("exit", True, marks=pytest.mark.promise("program-held-launches")),
    ],
)
def test_a_program_that_ends_the_wait_of_its_stream_later_ends(tenant: Tenant, arguments: str, metered: bool) -> None:
    run(tenant, arguments, LD_PRELOAD="")
    agent = tenant.agent()
    agent.on_want = lambda _client: agent.next_grant(20 if metered else 0, metered=metered)
    run(tenant, arguments)
