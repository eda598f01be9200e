"""Self-test of the node: finds out whether a container that is set up like a tenant's loads the hook, and whether the
default runtime gives it GPUs.

A Pod of the DaemonSet sharepod-self-test runs a program on this node, without privileges and under the node's default
runtime. The container has the hook at the same paths as a tenant's container, and NVIDIA_VISIBLE_DEVICES=all. The agent
inspects the program's process from outside.

Guarantees:
- A process of the self-test is recognized by its mount of the self-test's directory, which no tenant's pod can have.
  The name of its program is not enough.
- Without such a process there is no verdict. A verdict stays valid for `_KEPT_S` after the end of its process.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import structlog

from sharepod.agent.state.directory import SELF_TEST
from sharepod.api.gpunode import ENV_INJECTION_ACCEPTED
from sharepod.api.objects import HOOK_FILE, PRELOAD_PATH, VOLUME_MOUNT_PATH, ConditionReason

from . import mounts
from .pod_processes import pod_of_cgroup
from .reading_time import THREAD_PER_S, ReadingTime
from .tenant_mounts import TenantMounts, read_mountinfo

log = structlog.get_logger(__name__)

PROC = Path("/proc")
_PROGRAM = b"sleep\n"
"""Name of the self-test's program in /proc/<pid>/comm. Mounts are read only of processes with this name."""
_MARK = frozenset((Path(f"{VOLUME_MOUNT_PATH}-self-test"),))
"""Path at which the Pod of the other self-test (`claim_self_test`) has the self-test's directory. No tenant's claim
mounts anything there."""
_LOOK_S = 10.0
"""Seconds between two checks, each of a few milliseconds."""
_FIRST_LOOKS_S = 1.0
"""Seconds between two checks until the first verdict, so that placement on a node without working hook stops soon."""
_KEPT_S = 300.0
"""Seconds for which a verdict outlives its process: longer than an upgrade of the self-test's Pod."""
_DRIVER = re.compile(r"^(/dev/nvidia|/proc/driver/nvidia)|/(nvidia-smi$|libcuda\.so|libnvidia-ml\.so)")
"""Pattern of the mount points by which NVIDIA's runtime gives a container GPUs or the driver."""

_NOT_LOADED = (
    f"a program in a tenant's container does not load the hook that {PRELOAD_PATH} names, so shares would not be "
    "enforced and no SharePod is placed on this node. The usual cause is SELinux: add the component manifests/selinux "
    "(docs/platforms.md). Else see whether /var/lib/sharepod is on a filesystem that is mounted noexec"
)
_INJECTED = (
    "the node's default container runtime is NVIDIA's: every container whose image sets NVIDIA_VISIBLE_DEVICES gets "
    "GPUs without a share, whatever policies say. No SharePod is placed on this node. Make runc the default runtime "
    "and keep NVIDIA's as RuntimeClass nvidia (containerd: default_runtime_name; GPU Operator: toolkit.env "
    'CONTAINERD_SET_AS_DEFAULT="false"), or accept it: env_injection: Accept in the agent\'s settings'
)
_NO_SELF_TEST = (
    "no self-test runs on this node, so this is not known: kubectl -n sharepod-system get pods -o wide "
    "-l app.kubernetes.io/name=sharepod-self-test"
)


class HookLoadsReason(ConditionReason):
    """Reason of the condition `HookLoads`."""

    LOADED = "Loaded", "True"
    NOT_LOADED = "NotLoaded", "False"
    NO_SELF_TEST = "NoSelfTest", "Unknown"


class EnvInjectionReason(ConditionReason):
    """Reason of the condition `EnvInjection`."""

    INJECTED = "DefaultRuntimeInjects", "True"
    ACCEPTED = ENV_INJECTION_ACCEPTED, "True"
    NOT_INJECTED = "NotInjected", "False"
    NO_SELF_TEST = "NoSelfTest", "Unknown"


@dataclass(frozen=True, slots=True)
class SelfTestVerdict:
    """Verdict on one process of the self-test, or on all of them. `injected`: it got GPUs or the driver unasked."""

    hook_loads: bool
    injected: bool


class SelfTest:
    """Self-test of one node. `run` keeps `verdict` up to date.

    Args:
        state_dir: the agent's state directory, in which the directory of the self-test lies.
        accept_injection: True if the administrator accepts that the default runtime gives GPUs to containers.
        changed: called when the verdict has changed.
        proc: where proc is mounted.
    """

    def __init__(
        self, state_dir: Path, *, accept_injection: bool, changed: Callable[[], None], proc: Path = PROC
    ) -> None:
        self._mounts = TenantMounts.of(state_dir)
        self._accept_injection = accept_injection
        self._changed = changed
        self._proc = proc
        self._time = ReadingTime(THREAD_PER_S)
        self._seen_at = 0.0
        """Monotonic seconds of the last check that saw a process of the self-test."""
        self.verdict: SelfTestVerdict | None = None

    async def run(self) -> None:
        """Check at intervals, until cancelled."""
        while True:
            self.take(await asyncio.to_thread(self.look), time.monotonic())
            await asyncio.sleep(_FIRST_LOOKS_S if self.verdict is None else _LOOK_S)

    def look(self) -> SelfTestVerdict | None:
        """Return the worst verdict on the processes of the self-test; None if there is no such process."""
        found = [self._examine(pid, mountinfo) for pid, mountinfo in self._processes()]
        if not found:
            return None
        return SelfTestVerdict(
            hook_loads=all(verdict.hook_loads for verdict in found), injected=any(verdict.injected for verdict in found)
        )

    def take(self, verdict: SelfTestVerdict | None, now: float) -> None:
        """Record the result of `look`; None keeps the former verdict for `_KEPT_S`. `now`: monotonic seconds."""
        if verdict is None and self.verdict is not None and now - self._seen_at < _KEPT_S:
            return
        self._seen_at = now
        if verdict == self.verdict:
            return
        self.verdict = verdict
        if verdict is not None and not verdict.hook_loads:
            log.error("self-test: the hook does not load in containers of this node")
        if verdict is not None and verdict.injected:
            log.warning("self-test: the default runtime gives GPUs to containers", accepted=self._accept_injection)
        self._changed()

    @property
    def hook_loads(self) -> tuple[HookLoadsReason, str]:
        """Reason and message of the condition `HookLoads`."""
        if self.verdict is None:
            return HookLoadsReason.NO_SELF_TEST, _NO_SELF_TEST
        return (HookLoadsReason.LOADED, "") if self.verdict.hook_loads else (HookLoadsReason.NOT_LOADED, _NOT_LOADED)

    @property
    def env_injection(self) -> tuple[EnvInjectionReason, str]:
        """Reason and message of the condition `EnvInjection`."""
        if self.verdict is None:
            return EnvInjectionReason.NO_SELF_TEST, _NO_SELF_TEST
        if not self.verdict.injected:
            return EnvInjectionReason.NOT_INJECTED, ""
        if self._accept_injection:
            return EnvInjectionReason.ACCEPTED, "env_injection: Accept in the agent's settings"
        return EnvInjectionReason.INJECTED, _INJECTED

    def _processes(self) -> Iterator[tuple[int, bytes]]:
        """Yield pid and mountinfo of each process of the self-test."""
        for pid, mountinfo in programs(self._proc, self._time):
            if SELF_TEST in self._mounts.named(mountinfo) and not is_by_claim(self._mounts, mountinfo):
                yield pid, mountinfo

    def _examine(self, pid: int, mountinfo: bytes) -> SelfTestVerdict:
        listed = mounts.parse_mountinfo(mountinfo.decode(errors="surrogateescape").splitlines())
        points = [str(mount.point) for mount in listed]
        try:
            devices = os.listdir(f"{self._proc}/{pid}/root/dev")  # noqa: PTH208 - as elsewhere for /proc
        except OSError:  # the process has exited
            devices = []
        return SelfTestVerdict(
            hook_loads=has_hook(pid, self._proc),
            injected=any(map(_DRIVER.search, points)) or any(name.startswith("nvidia") for name in devices),
        )


def programs(proc: Path, reading_time: ReadingTime) -> Iterator[tuple[int, bytes]]:
    """Yield pid and mountinfo of each process whose program has the self-test's name. Any program may have that
    name."""
    for name in os.listdir(proc):  # noqa: PTH208 - thousands of names, no need of Path objects
        if name.isdecimal() and _content(f"{proc}/{name}/comm") == _PROGRAM:
            pod = pod_of_cgroup(_content(f"{proc}/{name}/cgroup")) or ""
            if reading_time.left(pod):  # any pod may run a program of this name, so its reading time is limited
                with reading_time.charged(pod):
                    mountinfo = read_mountinfo(int(name), proc)
                yield int(name), mountinfo


def is_by_claim(tenant_mounts: TenantMounts, mountinfo: bytes) -> bool:
    """Return whether a process with this mountinfo belongs to the other self-test (`claim_self_test`). `tenant_mounts`:
    of the agent's state directory."""
    return SELF_TEST in tenant_mounts.named(mountinfo, _MARK)


def has_hook(pid: int, proc: Path) -> bool:
    """Return whether a process has loaded the hook."""
    return f"/{HOOK_FILE}".encode() in _content(f"{proc}/{pid}/maps")


def _content(path: str) -> bytes:
    """Return the content of a file of /proc; empty if its process has exited."""
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""
