"""Runs of the program lifecycle. A test waits for the lines that it prints, and lets it continue step by step."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Iterator

from hook.conftest import BUILD, Tenant
from hook.world.child import end
from hook.world.scripted_agent import Client, ScriptedAgent
from sharepod.protocol import Drained, Want


class Life:
    """Run of the program lifecycle, and the lines that it prints."""

    def __init__(self, tenant: Tenant, *arguments: str, **more: str) -> None:
        self._process = subprocess.Popen(
            [BUILD / "programs" / "lifecycle", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=tenant.environment() | more,
        )
        self._said: list[str] = []
        self._complaints: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=pair, daemon=True)
            for pair in ((self._process.stdout, self._said), (self._process.stderr, self._complaints))
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stderr(self) -> str:
        return "".join(self._complaints)

    def hears(self, word: str, timeout: float = 20) -> str:
        """Wait for a line that begins with `word`, and return the rest of the line."""
        deadline = time.monotonic() + timeout
        while True:
            for line in list(self._said):
                if line.split()[0] == word:
                    return line.removeprefix(word).strip()
            assert "error" not in "".join(self._said), self._said
            assert time.monotonic() < deadline, f"{word} was not printed within {timeout} s, but {self._said}"
            assert self._process.poll() is None or any(reader.is_alive() for reader in self._readers), self._said
            time.sleep(0.002)

    def proceed(self) -> None:
        """Let the program continue with its next step."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def ends(self, timeout: float = 20) -> int:
        """Wait for the end of the program. Return the exit status. AssertionError if a step failed."""
        code = self._process.wait(timeout)
        for reader in self._readers:
            reader.join(timeout)
        assert code != 1, self._said + self._complaints
        return code

    def close(self) -> None:
        """End the program, if it has not ended."""
        end(self._process)
        for reader in self._readers:
            reader.join(5)

    @staticmethod
    def _read(stream: Iterator[str], lines: list[str]) -> None:
        with contextlib.suppress(ValueError):  # closed while reading
            lines.extend(stream)


def begin(lives: list[Life], tenant: Tenant, *arguments: str, **more: str) -> Life:
    """Start a run that ends with the test. `lives`: the fixture with this name."""
    lives.append(Life(tenant, *arguments, **more))
    return lives[-1]


def generous(tenant: Tenant, quantum_ms: float = 0) -> ScriptedAgent:
    """Return a scripted agent of the tenant that grants every WANT. `quantum_ms` 0: until revoked."""
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(quantum_ms)
    return agent


def asked(agent: ScriptedAgent, client: Client) -> int:
    """Return how many times the client has requested the token, by WANT or with DRAINED."""
    return len(agent.frames(client, Want)) + sum(frame.wanting for frame in agent.frames(client, Drained))
