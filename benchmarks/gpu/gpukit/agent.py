"""The agent, standalone on this machine, and its tenants.

`set` returns when the agent has applied the tenants' terms. All files are in the directory of this run.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpukit.gpu import AnyGpu

_START_S = 30.0
_IN_FORCE_S = 15.0
_CACHED_S = 1.1
"""Seconds after which a scrape surely has newer figures than the last one: the agent updates its metrics once a
second."""


class AgentError(Exception):
    """Raised if the agent does not start or does not apply its tenants. The message contains its last output."""


@dataclass(frozen=True)
class Tenant:
    """Tenant and its terms. `memory`: bytes. `interactive`: True if it requests short waits. `co_running`: False if it
    requires exclusive turns. `group`: group of tenants whose tokens are granted together."""

    name: str
    request: float
    limit: float
    memory: int
    interactive: bool = False
    co_running: bool = True
    group: str | None = None

    def row(self, gpu: str) -> dict[str, object]:
        """Return the tenant's row of the agent's tenants file."""
        return {
            "id": self.name,
            "namespace": "kit",
            "podName": self.name,
            "gpus": [gpu],
            "requestMilli": round(self.request * 1000),
            "limitMilli": round(self.limit * 1000),
            "memory": self.memory,
            **({"latency": "Interactive"} if self.interactive else {}),
            **({} if self.co_running else {"coRunning": "Deny"}),
            **({} if self.group is None else {"group": self.group}),
        }

    def in_force(self, limits: str) -> bool:
        """Return whether a tenant's file `limits` contains the terms of this tenant."""
        wanted = f"request {round(self.request * 1000)} limit {round(self.limit * 1000)} memory {self.memory} "
        return wanted in limits


class Agent:
    """The agent, with its tenants. `directory`: directory of this run. `log`: file for the agent's log."""

    def __init__(self, *, kit: Path, site: Path, gpu: AnyGpu, directory: Path, log: Path) -> None:
        self._gpu = gpu
        self._directory = directory
        self._log = log
        self._tenants: tuple[Tenant, ...] = ()
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0
        self._asked_at = 0.0
        self._environment = {
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            "PYTHONPATH": os.pathsep.join((str(kit / "lib"), str(site))),
            "PYTHONDONTWRITEBYTECODE": "1",
            "SHAREPOD_AGENT_MODE": "standalone",
            "SHAREPOD_AGENT_STATE_DIR": str(directory / "state"),
            "SHAREPOD_AGENT_TENANTS_FILE": str(directory / "tenants.json"),
            "SHAREPOD_AGENT_HTTP_BIND": "127.0.0.1",
            "SHAREPOD_AGENT_HTTP_PORT": "0",
        }
        if "LD_LIBRARY_PATH" in os.environ:
            self._environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        if gpu.inventory is not None:
            inventory = directory / "inventory.json"
            inventory.write_text(json.dumps({"gpus": gpu.inventory}))
            self._environment["SHAREPOD_AGENT_INVENTORY_FILE"] = str(inventory)
        self._command = [sys.executable, str(kit / "gpukit" / "agent_process.py")]

    def set(self, *tenants: Tenant) -> None:
        """Replace all tenants of the agent by these. Start the agent if it does not run. Raises `AgentError`."""
        self._tenants = tenants
        target = self._directory / "tenants.json"
        draft = target.with_suffix(".new")
        draft.write_text(json.dumps({"tenants": [tenant.row(self._gpu.uuid) for tenant in tenants]}))
        draft.replace(target)
        if self._process is None:
            self._start()
        self._wait(self._set, "the terms of its tenants to be in force", _IN_FORCE_S)

    def hook(self, name: str) -> Path:
        """Return the path of the hook that a program of this tenant must preload."""
        return self._of(name) / "libsharepod.so"

    def accounts(self) -> dict[str, dict[str, float]]:
        """Return totals by tenant, all for the same moment: seconds for which the tenant `held` its token, seconds
        `surcharged` because NVML saw the tenant busy for longer than it held the token, and number of `turns`."""
        families = {
            "held": "sharepod_tenant_held_seconds_total",
            "surcharged": "sharepod_tenant_surcharged_seconds_total",
            "turns": "sharepod_tenant_grants_total",
        }
        text = self._scrape()
        return {name: _by_tenant(text, family) for name, family in families.items()}

    def progress(self) -> dict[str, float]:
        """Return the progress of each tenant, from the counters of its hooks: the seconds that it would have needed for
        its work so far without neighbours."""
        text = self._scrape()
        held, together, made = (
            _by_tenant(text, f"sharepod_tenant_{name}_seconds_total") for name in ("held", "co_run", "co_run_progress")
        )
        return {name: held[name] - together[name] + made[name] for name in held}

    def in_flight(self) -> dict[str, float]:
        """Return, by tenant, the part of the time in which work was in flight while the tenant held the GPU alone. A
        tenant without a measurement is missing."""
        return self._metric("sharepod_tenant_in_flight_ratio")

    def usage_ratios(self) -> dict[str, float]:
        """Return, by tenant, the part of the last 10 s in which the tenant held its token."""
        return self._metric("sharepod_tenant_usage_ratio")

    def busy_ratios(self) -> dict[str, float]:
        """Return, by tenant, the part of the last 10 s in which NVML saw its kernels. A tenant is missing if NVML does
        not report this.
        """
        return self._metric("sharepod_tenant_busy_ratio")

    def used_bytes(self, name: str) -> int:
        """Return the bytes of device memory that the agent counts for a tenant."""
        return int(self._metric("sharepod_tenant_memory_used_bytes").get(name, 0))

    def close(self) -> None:
        """End the agent."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5.0)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process = None

    def _start(self) -> None:
        with self._log.open("ab") as log:
            begin = log.tell()
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdin=subprocess.PIPE, stdout=log, stderr=log
            )

        def serves() -> bool:
            with self._log.open("rb") as log:
                log.seek(begin)
                for line in log:
                    if b"serving metrics and health" in line:
                        self._port = int(json.loads(line)["port"])
                        return True
            return False

        self._wait(serves, "its start", _START_S)

    def _set(self) -> bool:
        for tenant in self._tenants:
            try:
                limits = (self._of(tenant.name) / "limits").read_text()
            except OSError:
                return False
            if not tenant.in_force(limits) or not (self._of(tenant.name) / "agent.sock").exists():
                return False
        return True

    def _of(self, name: str) -> Path:
        return self._directory / "state" / "tenants" / name

    def _metric(self, family: str) -> dict[str, float]:
        """Return a metric's values by tenant, summed over all GPUs."""
        return _by_tenant(self._scrape(), family)

    def _scrape(self) -> str:
        """Return the agent's metrics as text, with figures computed after this call. Raises `AgentError`."""
        time.sleep(max(0.0, self._asked_at + _CACHED_S - time.monotonic()))
        self._asked_at = time.monotonic()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=5) as answer:
                return str(answer.read().decode())
        except OSError as error:
            raise AgentError(f"the agent's metrics cannot be read ({error}): {self._last_words()}") from None

    def _wait(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self._process is not None
            if self._process.poll() is not None:
                raise AgentError(f"the agent has ended: {self._last_words()}")
            if time.monotonic() > deadline:
                raise AgentError(f"waited {timeout_s:.0f} s in vain for {what}: {self._last_words()}")
            time.sleep(0.02)

    def _last_words(self) -> str:
        words = self._log.read_text(errors="replace").strip().splitlines()
        return words[-1][:500] if words else "no output"


def _by_tenant(text: str, family: str) -> dict[str, float]:
    """Return a metric's values by tenant, from the metrics' text. Values of several GPUs are summed."""
    values: dict[str, float] = {}
    for labels, value in re.findall(rf"^{family}\{{([^}}]*)\}} (\S+)$", text, re.MULTILINE):
        tenant = re.search(r'tenant="([^"]*)"', labels)
        if tenant is not None:
            values[tenant[1]] = values.get(tenant[1], 0.0) + float(value)
    return values
