"""Node without Kubernetes: the real agent in standalone mode, on simulated GPUs.

Programs run under the real hook from a tenant's directory, as they would from the volume in their container.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from doubles.gpus import State, create_state, read_state
from hook.world.callers import Callers, Interruption
from hook.world.child import end
from hook.world.hook_build import built_hook
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

ROOT = Path(__file__).resolve().parents[3]
HOOK = ROOT / "operator" / "sharepod" / "agent" / "hook" / "libsharepod.so"
FAKE_CUDA = ROOT / "build" / "doubles" / "libcuda"
FAKE_NVML = ROOT / "build" / "doubles" / "libnvml"
PROGRAMS = ROOT / "build" / "programs"
GI = 1 << 30
MODEL = "Simulated"
GPUS = tuple(f"GPU-{index}0000000-0000-0000-0000-00000000000{index}" for index in range(1, 9))
PATIENCE_S = 60.0
CALLED_MOST = 12
"""Largest number of tenants to which callers connect: more callers would load the machine."""


def built() -> bool:
    """Return whether hook, double and programs are built."""
    return HOOK.exists() and (FAKE_CUDA / "libcuda.so.1").exists() and (PROGRAMS / "launchloop").exists()


def tenant(
    tenant_id: str, request: float, limit: float = 1.0, *, gpus: Sequence[str] = GPUS[:1], **changes: Any
) -> dict[str, Any]:
    """Return a row of the tenants file. `request` and `limit` are fractions of a GPU, as users write them."""
    return {
        "id": tenant_id,
        "namespace": "default",
        "podName": tenant_id,
        "gpus": list(gpus),
        "requestMilli": round(request * 1000),
        "limitMilli": round(limit * 1000),
        "memory": 4 * GI,
    } | changes


class Node:
    """One node: the agent, its state directory, its simulated GPUs and its programs. `running` creates it.

    Args:
        directory: Short path, because a Unix socket's path has at most 107 bytes.
        settings: Environment variables of the agent.
        context_bytes: Bytes that a process's contexts take on a GPU.
        known: Whether the agent has already measured `context_bytes`.
        nvml: Whether the agent reads the devices by NVML instead of from a file.
        apart: Whether the agent consists of two processes, as in its DaemonSet; needs root.
    """

    def __init__(
        self,
        directory: Path,
        settings: Mapping[str, str],
        *,
        context_bytes: int = 0,
        known: bool = True,
        nvml: bool = False,
        apart: bool = False,
    ) -> None:
        built_hook(HOOK)
        self._apart = apart
        self.directory = directory
        self.state = create_state(
            directory / "devices", [(gpu, "Simulated", 16 * GI) for gpu in GPUS], context_bytes=context_bytes
        )
        if context_bytes and known:
            (directory / "state").mkdir()
            learnt = {"bytes": {"Simulated / simulated": [context_bytes]}}
            (directory / "state" / "contexts.json").write_text(json.dumps(learnt))
        self._settings = dict(settings)
        self._nvml = nvml
        self._agent: subprocess.Popen[bytes] | None = None
        self._programs: list[Program] = []
        inventory = [{"uuid": gpu, "index": i, "model": MODEL, "memory": "16Gi"} for i, gpu in enumerate(GPUS)]
        (directory / "inventory.yaml").write_text(yaml.safe_dump({"gpus": inventory}))

    def set_tenants(self, *rows: Mapping[str, Any]) -> None:
        """Write the tenants file. If the agent runs, wait until the limits of each row are applied."""
        fresh = self.directory / "tenants.new"
        fresh.write_text(yaml.safe_dump({"tenants": [dict(row) for row in rows]}))
        fresh.rename(self.directory / "tenants.yaml")
        if self._agent is not None:
            for row in rows:
                wait_for(lambda row=row: self._in_force(row), f"the limits of {row['id']}")

    def start_agent(self, *rows: Mapping[str, Any]) -> None:
        """Start the agent, with these tenants if given, and wait until it serves them."""
        if rows:
            self.set_tenants(*rows)
        before, served = self._sockets(), self._served()
        self._agent = self._started()
        wait_for(lambda: self._serves_again(before, served), "the agent")

    def upgrade_agent(self) -> Interruption:
        """Start another agent. End the first one once the new one is ready. Return the longest time without an agent,
        as callers saw it."""
        former, stood_by = self._agent, self.log().count("standing by")
        assert former is not None
        following = self._started()
        wait_for(lambda: self.log().count("standing by") > stood_by, "the other agent standing by")
        self._agent = following
        with self._callers() as callers:
            former.send_signal(signal.SIGTERM)
            assert former.wait(PATIENCE_S) == 0
            return callers.settled()

    def kill_agent(self) -> Interruption:
        """Kill the privileged process and the worker. Return the longest time until the next processes served, as
        callers saw it."""
        children = [(pid, os.pidfd_open(pid)) for pid in self.agent_pids[1:]]
        with self._callers() as callers:
            for pid, _pidfd in children:
                os.kill(pid, signal.SIGKILL)
            for _pid, pidfd in children:
                select.select([pidfd], [], [], PATIENCE_S)
                os.close(pidfd)
            return callers.settled()

    def restart_container(self) -> Interruption:
        """Kill the agent and its supervisor, and start another agent. Return the longest time without an agent, as
        callers saw it."""
        with self._callers() as callers:
            self.stop_agent(signal.SIGKILL)
            self.start_agent()
            return callers.settled()

    def _callers(self) -> Callers:
        directories = sorted(path.parent for path in self._sockets())
        return Callers(directories[:: -(-len(directories) // CALLED_MOST)])

    def _sockets(self) -> dict[Path, tuple[int, int]]:
        """Return the tenants' sockets. Each has an identity by which a later socket at the same path differs
        from it."""
        return {path: _identity(path) for path in self.directory.glob("state/tenants/*/agent.sock")}

    def _serves_again(self, before: Mapping[Path, tuple[int, int]], served: int) -> bool:
        """Return whether every tenant has a socket that is not among those `before`, and more than `served` tenants
        were served.
        """
        assert self._agent is not None
        assert self._agent.poll() is None, self.log()
        listed = yaml.safe_load((self.directory / "tenants.yaml").read_text())["tenants"]
        paths = [self.path(row["id"]) / "agent.sock" for row in listed]
        return all(path.exists() and _identity(path) != before.get(path) for path in paths) and (
            self._served() >= served + len(listed)  # an agent in a new container listens before it serves
        )

    def _served(self) -> int:
        """Return how many times an agent has logged that it serves a tenant."""
        path = self.directory / "agent.log"
        return path.read_text().count("tenant is served") if path.exists() else 0

    def _started(self) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SHAREPOD_AGENT_")}
        environment |= {
            "SHAREPOD_AGENT_MODE": "standalone",
            "SHAREPOD_AGENT_STATE_DIR": str(self.directory / "state"),
            "SHAREPOD_AGENT_TENANTS_FILE": str(self.directory / "tenants.yaml"),
            "SHAREPOD_AGENT_HTTP_BIND": "127.0.0.1",
            "SHAREPOD_AGENT_HTTP_PORT": "0",
        } | self._settings
        if self._nvml:
            environment |= {"LD_LIBRARY_PATH": str(FAKE_NVML), "FAKE_CUDA_STATE": str(self.state)}
        else:
            environment["SHAREPOD_AGENT_INVENTORY_FILE"] = str(self.directory / "inventory.yaml")
        command = [sys.executable, "-m", "sharepod.agent.main", *(["--apart"] if self._apart else [])]
        with (self.directory / "agent.log").open("ab") as log:
            return subprocess.Popen(command, env=environment, stderr=log)

    def stop_agent(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send the agent a signal and wait for its end; return its exit status."""
        assert self._agent is not None
        self._agent.send_signal(number)
        try:
            return self._agent.wait(PATIENCE_S)
        finally:
            self._agent = None

    @property
    def agent_pids(self) -> tuple[int, ...]:
        """Pids of the running agent and its child processes."""
        children = Path(f"/proc/{self.agent_pid}/task/{self.agent_pid}/children").read_text().split()
        return (self.agent_pid, *map(int, children))

    @property
    def agent_pid(self) -> int:
        assert self._agent is not None
        return self._agent.pid

    def path(self, tenant_id: str) -> Path:
        return self.directory / "state" / "tenants" / tenant_id

    def launch(
        self,
        tenant_id: str,
        *arguments: str,
        label: str | None = None,
        gpus: Sequence[str] = GPUS[:1],
        extra: Mapping[str, str] | None = None,
        quiet: bool = False,
        program: str = "launchloop",
    ) -> Program:
        """Run a program of the tests under the tenant's hook, on the tenant's GPUs.

        Args:
            label: Label under which its device time is counted; by default the tenant's id.
            extra: Additional environment variables.
            quiet: Whether its standard error is discarded.
            program: Name of the program, in tests/hook/programs.
        """
        environment = self.environment(tenant_id, label=label, gpus=gpus) | dict(extra or {})
        started = Program([str(PROGRAMS / program), *arguments], environment, quiet=quiet)
        self._programs.append(started)
        return started

    def environment(
        self, tenant_id: str, *, label: str | None = None, gpus: Sequence[str] = GPUS[:1]
    ) -> dict[str, str]:
        """Return the environment of a program under the tenant's hook."""
        return dict(os.environ) | {
            "LD_LIBRARY_PATH": str(FAKE_CUDA),
            "LD_PRELOAD": str(self.path(tenant_id) / "libsharepod.so"),
            "FAKE_CUDA_STATE": str(self.state),
            "FAKE_CUDA_VISIBLE": ",".join(gpus),
            "FAKE_CUDA_LABEL": label or tenant_id,
        }

    def devices(self) -> State:
        """Return each program's use of the simulated devices."""
        return read_state(self.state)

    def shares(self, seconds: float, *labels: str, gpu: str = GPUS[0]) -> dict[str, float]:
        """Measure for `seconds` the fraction of a GPU's time that each label uses."""
        before, begin = self.devices(), time.monotonic()
        time.sleep(seconds)
        after, end = self.devices(), time.monotonic()
        return {
            label: (after.busy_ns(label, gpu) - before.busy_ns(label, gpu)) / 1e9 / (end - begin) for label in labels
        }

    def metrics(self) -> list[Sample]:
        """Return the agent's metrics as Prometheus reads them."""
        text = self.read("/metrics")
        return [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def read(self, path: str) -> str:
        """Return the agent's HTTP answer at a path."""
        found = re.findall(r'"port": (\d+)', self.log())
        with urllib.request.urlopen(f"http://127.0.0.1:{found[-1]}{path}", timeout=PATIENCE_S) as answer:
            return str(answer.read().decode())

    def log(self) -> str:
        return (self.directory / "agent.log").read_text()

    def close(self) -> None:
        """End all programs and the agent."""
        for program in self._programs:
            program.close()
        if self._agent is not None:
            self.stop_agent(signal.SIGKILL)

    def _in_force(self, row: Mapping[str, Any]) -> bool:
        if row.get("state") == "Releasing":
            return not (self.path(row["id"]) / "agent.sock").exists()
        wanted = f"request {row['requestMilli']} limit {row['limitMilli']} memory {row['memory']} "
        with contextlib.suppress(FileNotFoundError):
            return wanted in (self.path(row["id"]) / "limits").read_text()
        return False


class Program:
    """Program under the hook. Every line that it prints is a JSON report."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, quiet: bool = False) -> None:
        errors = subprocess.DEVNULL if quiet else None
        self.process = subprocess.Popen(
            command, env=dict(environment), stdout=subprocess.PIPE, stderr=errors, text=True
        )

    def report(self) -> dict[str, Any]:
        """Wait for the next report and return it. AssertionError if the program has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the program ended with {self.process.wait(PATIENCE_S)}"
        report: dict[str, Any] = json.loads(line)
        return report

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal to the program and wait for its end. Return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        """End the program, if it has not ended."""
        end(self.process)


@contextlib.contextmanager
def running(
    directory: Path,
    *rows: Mapping[str, Any],
    context_bytes: int = 0,
    known: bool = True,
    nvml: bool = False,
    apart: bool = False,
    **settings: str,
) -> Iterator[Node]:
    """Run a node with these tenants. `settings`: environment variables of the agent, without their prefix."""
    named = {f"SHAREPOD_AGENT_{name.upper()}": value for name, value in settings.items()}
    node = Node(directory, named, context_bytes=context_bytes, known=known, nvml=nvml, apart=apart)
    try:
        node.start_agent(*rows)
        yield node
    finally:
        node.close()


def _identity(path: Path) -> tuple[int, int]:
    """Return inode and time of a file, because the next file may get the same inode number."""
    status = path.stat()
    return status.st_ino, status.st_ctime_ns


def wait_for(condition: Any, what: str, seconds: float = PATIENCE_S, *, pause_s: float = 0.01) -> None:
    """Wait until the condition holds. AssertionError with `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(pause_s)
