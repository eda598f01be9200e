"""Delay until a process beyond its tenant's share is found, and killed by `unenforced_policy: Kill`.

    python benchmarks/offences.py [--each N]

An offence begins when the driver first shows the process. The GPUs are simulated; processes, mounts and agent are real.
Offences begin at random times, and each has a tenant of its own. Writes build/results/offences.json: for each kind of
offence, the median and the longest time from its start until the finding is in the status of the node, and until the
process has ended.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from attack.tenant_container import TenantContainers, why_no_container
from results import Row, write
from sharepod import logs
from sharepod.agent.agent import Agent
from sharepod.agent.devices.inventory import SimulatedInventory
from sharepod.agent.settings import PACKAGED_HOOK, UnenforcedPolicy
from sharepod.api.gpunode import FindingReason
from unit.agent.client import GI, GPU0, row, settings_in

PROMISES = {
    "security-unhooked": ("max", "to_finding_longest", "ProcessWithoutHook"),
    "security-replaced": ("max", "to_finding_longest", "HookReplaced"),
    "security-kill": ("max", "finding_to_end_longest"),
}
_LOOK_S = 0.005
"""Seconds between two readings of findings and processes. This is the resolution of the figures."""
_APART_S = 0.3
"""Mean seconds between the beginnings of two offences."""
_LONGEST_S = 60.0
"""Seconds after which an offence counts as never found."""
_REPLACE = "exec unshare -Urm sh -c 'mount --bind $FAKE /etc/ld.so.preload; exec sh -c \"$PROGRAM\"'"
_IMITATOR = """
import os, socket, sys
from sharepod import protocol
os.chdir(sys.argv[1])
agent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
agent.connect("agent.sock")
agent.send(protocol.encode(protocol.Hello(1, 1)))
agent.recv(4096)
print("ready", flush=True)
sys.stdin.read()
"""
"""Program that sends the agent the same frames as a hook, so that its process counts as hooked."""


@dataclass(frozen=True)
class Kind:
    """Kind of offence, with the figures that the driver must show for it."""

    reason: FindingReason
    hooked: bool = False
    contained: bool = False
    memory: int = 1 << 20
    busy: float = 0.0


KINDS = (
    Kind(FindingReason.PROCESS_WITHOUT_HOOK),
    Kind(FindingReason.HOOK_REPLACED, contained=True),
    Kind(FindingReason.MEMORY_BEYOND_LIMIT, hooked=True, memory=6 * GI),
    Kind(FindingReason.BUSY_BEYOND_HELD, hooked=True, busy=1.0),
)


@dataclass
class Offence:
    """Offending process, and the times at which its offence began, was found, and was ended."""

    tenant: str
    process: subprocess.Popen[str]
    begun: float = 0.0
    found: float = 0.0
    ended: float = 0.0


@dataclass
class Measured:
    """Offences of one kind, on a node of their own."""

    kind: Kind
    root: Path
    stack: ExitStack
    offences: list[Offence] = field(default_factory=list)

    async def play(self, each: int) -> None:
        """Let `each` tenants commit this offence, one after the other. Wait until the last offending process has
        ended."""
        containers = TenantContainers(self.root)
        self.stack.callback(containers.close)
        self.print_progress()
        changes = {"inventory_interval_s": 1.0, "hook_file": PACKAGED_HOOK}
        settings = settings_in(self.root, unenforced_policy=UnenforcedPolicy.KILL, **changes)
        assert settings.inventory_file is not None
        agent = Agent(settings, SimulatedInventory(settings.inventory_file))
        owners: dict[int, str] = {}
        agent.owner_of = owners.get
        if self.kind.contained:
            agent.replaced = containers.integrity.replaced
        await agent.start()
        await agent.take_stock()
        try:
            await agent.tenants.apply([row(f"t{number}", 1000 // each) for number in range(each)])
            waiting = [self.start(containers, f"t{number}") for number in range(each)]
            owners.update({offence.process.pid: offence.tenant for offence in waiting})
            due = time.monotonic()
            while waiting or any(not offence.ended for offence in self.offences):
                if waiting and time.monotonic() >= due:
                    self.begin(waiting.pop())
                    due = time.monotonic() + random.expovariate(1 / _APART_S)
                self.look(agent)
                await asyncio.sleep(_LOOK_S)
        finally:
            await agent.close()

    def start(self, containers: TenantContainers, tenant: str) -> Offence:
        """Start the process of an offence. It offends only once the driver shows it."""
        if self.kind.contained:
            return Offence(tenant, containers.programs[containers.run(_REPLACE, tenant=tenant)])
        directory = str(containers.tenants / tenant)
        command = [sys.executable, "-c", _IMITATOR, directory] if self.kind.hooked else ["cat"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.stack.enter_context(process)
        self.stack.callback(process.kill)
        return Offence(tenant, process)

    def begin(self, offence: Offence) -> None:
        """Begin an offence: make the driver show its process."""
        self.offences.append(offence)
        offence.begun = time.monotonic()
        self.print_progress()

    def print_progress(self) -> None:
        """Write the inventory file with the processes that the driver shows now."""
        gpu = {"uuid": GPU0, "index": 0, "model": "Simulated", "memory": 1 << 40}
        shown = [
            {"pid": one.process.pid, "uuid": GPU0, "memory": self.kind.memory, "busy": self.kind.busy}
            for one in self.offences
            if not one.ended
        ]
        partial = self.root / "inventory.partial"
        partial.write_text(yaml.safe_dump({"gpus": [gpu], "processes": shown}))
        partial.replace(self.root / "inventory.yaml")

    def look(self, agent: Agent) -> None:
        """Record which offences have been found, and which processes have ended, since the last call."""
        ended = False
        for offence in self.offences:
            now = time.monotonic()
            if not offence.found:
                view = agent.tenants.view(offence.tenant)
                if view is not None and any(item.reason == self.kind.reason for item in view.findings):
                    offence.found = now
            if not offence.ended and offence.process.poll() is not None:
                offence.ended, ended = now, True
            if not offence.ended and now - offence.begun > _LONGEST_S:
                raise SystemExit(f"{self.kind.reason} of {offence.tenant} was not ended within {_LONGEST_S:.0f} s")
        if ended:
            self.print_progress()

    def rows(self) -> list[Row]:
        """Return the figures."""
        missed = [offence.tenant for offence in self.offences if not offence.found]
        if missed:
            raise SystemExit(f"{self.kind.reason}: ended without a finding: {', '.join(missed)}")
        found = [offence.found - offence.begun for offence in self.offences]
        ended = [offence.ended - offence.begun for offence in self.offences]
        after = [offence.ended - offence.found for offence in self.offences]
        rows = [Row(self.kind.reason, "offences", "count", len(found))]
        for name, values in (("to_finding", found), ("to_end", ended), ("finding_to_end", after)):
            rows.append(Row(self.kind.reason, f"{name}_p50", "s", round(statistics.median(values), 3)))
            rows.append(Row(self.kind.reason, f"{name}_longest", "s", round(max(values), 3)))
        return rows


def main() -> int:
    """Measure each kind of offence. Return 0 if every offence was found and every offending process ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=50, help="offences of each kind (50)")
    each = parser.parse_args().each
    lacking = why_no_container()
    if lacking is not None:
        print(f"cannot measure here: {lacking}", file=sys.stderr)
        return 1
    logs.configure("error", "console")
    rows: list[Row] = []
    for kind in KINDS:
        with tempfile.TemporaryDirectory(prefix="off") as directory, ExitStack() as stack:
            measured = Measured(kind, Path(directory), stack)
            asyncio.run(measured.play(each))
            rows.extend(measured.rows())
            print(f"{kind.reason}: {each} found and ended", flush=True)
    write("offences", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
