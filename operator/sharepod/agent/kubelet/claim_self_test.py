"""Self-test of claims on this node: finds out whether a container with a claim gets the directory and the devices of
that claim.

A Pod of the DaemonSet sharepod-self-test-claim runs a program on this node, without privileges and under the node's
default runtime. The Pod has a claim. SharePod's driver prepares the claim, the kubelet passes the names of the claim's
CDI devices to the container runtime, and the runtime must apply them. The agent inspects the program's process from
outside.

Guarantees:
- A process is recognized by a mount of the self-test's directory at a special path. No tenant's pod can have such a
  mount.
- If the container of a prepared claim does not start within `_START_WITHIN_S`, the verdict is `NOT_STARTED`.
- A verdict stays valid for `_KEPT_S` after the end of its process. Without a prepared claim there is no verdict, and no
  process is inspected.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from sharepod.agent.kubelet.reading_time import THREAD_PER_S, ReadingTime
from sharepod.agent.kubelet.self_test import PROC, has_hook, is_by_claim, programs
from sharepod.agent.kubelet.tenant_mounts import TenantMounts
from sharepod.agent.state.directory import SELF_TEST
from sharepod.api.gpunode import CLAIMS_ATTACH_STARTING
from sharepod.api.objects import SELF_TEST_CLAIM, ConditionReason

log = structlog.get_logger(__name__)

_LOOK_S = 10.0
"""Seconds between two checks, each of a few milliseconds."""
_FIRST_LOOKS_S = 1.0
"""Seconds between two checks while the latest verdict is not `ATTACHED`, so that a repair is soon noticed."""
_KEPT_S = 300.0
"""Seconds for which a verdict outlives its process: longer than an upgrade of the self-test's Pod."""
_START_WITHIN_S = 120.0
"""Seconds that a container with a prepared claim may take to start. Its image is the agent's image, which the node
already has."""

_PODS = f"kubectl -n sharepod-system get pods -o wide -l app.kubernetes.io/name={SELF_TEST_CLAIM}"
_NOT_ATTACHED = (
    "a container with a claim did not get its devices: the node's container runtime ignores CDI devices. No Pod with a "
    "claim is placed on this node. containerd 1.7: enable_cdi = true in its CRI plugin (2.0 and newer, and CRI-O: as "
    "they come), and the agent's last cdi_dirs among the runtime's cdi_spec_dirs"
)
_NOT_LOADED = (
    "a container with a claim has the hook and does not load it, so shares would not be enforced: see condition "
    "HookLoads. No Pod with a claim is placed on this node"
)
_NOT_STARTED = (
    "the claim of the self-test is prepared, and its container does not start: the container runtime cannot apply the "
    "CDI devices of the claim or of a GPU, such as devices of an earlier driver (nvidia-ctk cdi generate writes them "
    f"again). No Pod with a claim is placed on this node. The Pod's events have more: {_PODS}"
)
_NO_SELF_TEST = f"no self-test by a claim runs on this node, so this is not known: {_PODS}"


class ClaimsAttachReason(ConditionReason):
    """Reason of the condition `ClaimsAttach`."""

    ATTACHED = "Attached", "True"
    STARTING = CLAIMS_ATTACH_STARTING, "Unknown"
    NOT_ATTACHED = "NotAttached", "False"
    NOT_LOADED = "NotLoaded", "False"
    NOT_STARTED = "NotStarted", "False"
    NO_SELF_TEST = "NoSelfTest", "Unknown"


_MESSAGES = {
    ClaimsAttachReason.ATTACHED: "",
    ClaimsAttachReason.STARTING: "no self-test by a claim has run under this agent yet",
    ClaimsAttachReason.NOT_ATTACHED: _NOT_ATTACHED,
    ClaimsAttachReason.NOT_LOADED: _NOT_LOADED,
    ClaimsAttachReason.NOT_STARTED: _NOT_STARTED,
    ClaimsAttachReason.NO_SELF_TEST: _NO_SELF_TEST,
}


class ClaimSelfTest:
    """Self-test of claims on one node. `run` keeps `verdict` up to date.

    Args:
        state_dir: the agent's state directory, in which the directory of the self-test lies.
        prepared_for_s: returns the seconds since a claim of the self-test was prepared; None without one.
        changed: called when the verdict has changed.
        proc: where proc is mounted.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        prepared_for_s: Callable[[], float | None],
        changed: Callable[[], None],
        proc: Path = PROC,
    ) -> None:
        self._mounts = TenantMounts.of(state_dir)
        self._prepared_for_s = prepared_for_s
        self._changed = changed
        self._proc = proc
        self._time = ReadingTime(THREAD_PER_S)
        self._judged_at = self._process_at = time.monotonic()
        """Monotonic seconds of the last check that had evidence, and of the last check that saw a process of the
        self-test. At first: of the agent's start."""
        self.verdict = ClaimsAttachReason.STARTING

    async def run(self) -> None:
        """Check at intervals, until cancelled."""
        while True:
            now = time.monotonic()
            self.take(await asyncio.to_thread(self.look, now), now)
            await asyncio.sleep(_LOOK_S if self.verdict is ClaimsAttachReason.ATTACHED else _FIRST_LOOKS_S)

    def look(self, now: float) -> ClaimsAttachReason | None:
        """Return the worst verdict on the self-test's processes; `NOT_STARTED` if none runs although one should
        by now; None without evidence. `now`: monotonic seconds."""
        prepared_for_s = self._prepared_for_s()
        if prepared_for_s is None:
            return None
        found = {
            self._examine(pid, mountinfo)
            for pid, mountinfo in programs(self._proc, self._time)
            if is_by_claim(self._mounts, mountinfo)
        }
        if found:
            self._process_at = now
        for reason in ClaimsAttachReason.NOT_ATTACHED, ClaimsAttachReason.NOT_LOADED, ClaimsAttachReason.ATTACHED:
            if reason in found:
                return reason
        waits = min(prepared_for_s, now - self._process_at) > _START_WITHIN_S
        return ClaimsAttachReason.NOT_STARTED if waits else None

    def take(self, verdict: ClaimsAttachReason | None, now: float) -> None:
        """Record the result of `look`. Without evidence, the former verdict stays valid for a while. `now`: monotonic
        seconds."""
        if verdict is None:
            starting = self.verdict is ClaimsAttachReason.STARTING
            if now - self._judged_at < (_START_WITHIN_S if starting else _KEPT_S):
                return
            verdict = ClaimsAttachReason.NO_SELF_TEST
        else:
            self._judged_at = now
        if verdict is self.verdict:
            return
        self.verdict = verdict
        if verdict.status == "False":
            log.error("self-test: a container with a claim does not get what it brings", reason=verdict.value)
        self._changed()

    @property
    def claims_attach(self) -> tuple[ClaimsAttachReason, str]:
        """Reason and message of the condition `ClaimsAttach`."""
        return self.verdict, _MESSAGES[self.verdict]

    def _examine(self, pid: int, mountinfo: bytes) -> ClaimsAttachReason:
        if SELF_TEST not in self._mounts.named(mountinfo):
            return ClaimsAttachReason.NOT_ATTACHED
        return ClaimsAttachReason.ATTACHED if has_hook(pid, self._proc) else ClaimsAttachReason.NOT_LOADED
