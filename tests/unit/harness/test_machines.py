"""The command that finds the agents of a node, whose scheduling policy is changed while shares are measured."""

from __future__ import annotations

import subprocess

from harness.installation import AGENT
from harness.machines import AGENTS


def _found(command: str) -> tuple[int, list[int]]:
    """Return the pid of a shell that runs `command`, and the pids that it prints."""
    shell = subprocess.Popen(["sh", "-c", f"{command}; true"], stdout=subprocess.PIPE, text=True)
    output, _ = shell.communicate(timeout=20)
    return shell.pid, [int(line) for line in output.split()]


def test_an_agent_is_found_by_its_command_line_and_the_searching_shell_is_not() -> None:
    with subprocess.Popen(["sh", "-c", "read line", *AGENT], stdin=subprocess.PIPE) as agent:
        shell, pids = _found(AGENTS)
        assert agent.pid in pids
        assert shell not in pids
        agent.communicate(b"\n", timeout=20)
