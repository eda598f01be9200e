"""Processes of pods: the tenant of a process, and the processes that remain of a released tenant.

A process belongs to a tenant if it has the tenant's directory mounted, or runs in the cgroup of a pod of the tenant.
The kubelet names the pod of a volume. The pods of a claim are found by their processes that have the tenant's directory
mounted.

Guarantees:
- Every cgroup layout of kubelets is supported: cgroup v1 and v2, cgroupfs and systemd naming, any root.
- If the agent shares the host's PID namespace, it sees all processes of the node.
- Reading the mounts of a pod's processes takes a bounded part of the agent's time (`reading_time`).
- A tenant can neither hide a process of a known pod nor make it count for another pod. It cannot move a process out of
  its pod's cgroup. In a cgroup path, the outermost cgroup with the form of a pod's name counts, whatever names the
  tenant gives inner cgroups.

Reading all of /proc takes tens of milliseconds on a large node. It therefore runs in a thread, and only in two cases:
for a tenant in release whose directory is detached, and to find the tenant of an unknown pod.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from .attachments import Attachments
from .reading_time import LOOP_PER_S, THREAD_PER_S, ReadingTime
from .tenant_mounts import TenantMounts

log = structlog.get_logger(__name__)

PROC = Path("/proc")
SCAN_INTERVAL_S = 0.2
"""Shortest time between two scans of /proc, in seconds. While a process outlives its pod, each reading of the GPUs
requests a scan, once a second."""
STRANGER_INTERVAL_S = 10.0
"""Seconds between two scans of /proc that search for the tenant of the same unknown pod."""
_POD = re.compile(
    rb"(?:^|/)(?:pod([0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|[0-9a-f]{32})"
    rb"|(?:[^/]*-)?pod([0-9a-fA-F]{8}(?:_[0-9a-fA-F]{4}){3}_[0-9a-fA-F]{12}|[0-9a-f]{32})\.slice)(?=/|$)"
)
"""Pattern of a pod's cgroup within a cgroup path. A static pod's UID has no dashes; in a systemd slice's name,
underscores stand for them: kubepods-burstable-pod<uid with _ for ->.slice."""
_OWNERS_MAX = 65_536
"""Most processes whose tenant is remembered."""


def pod_of_cgroup(cgroup: bytes) -> str | None:
    """Return the UID of the pod in the content of a /proc/<pid>/cgroup; None if the process is in no pod.

    The outermost cgroup with the form of a pod's name counts, because a pod's own processes can name inner cgroups.
    """
    for line in cgroup.splitlines():
        found = _POD.search(line.split(b":", 2)[-1])
        if found is not None:
            return (found[1] or found[2].replace(b"_", b"-")).decode()
    return None


@dataclass
class ProcessScan:
    """Result of one scan of /proc. Zombies do not count: they hold no GPU."""

    processes: Counter[str] = field(default_factory=Counter)
    """Number of processes of each tenant."""
    pods: set[tuple[str, str]] = field(default_factory=set)
    """Pairs (tenant, pod): a process that has the tenant's directory mounted runs in the pod."""


def scan_processes(
    pods: Mapping[str, Iterable[str]], mounts: TenantMounts, reading_time: ReadingTime, proc: Path = PROC
) -> ProcessScan:
    """Scan /proc for the processes of tenants. Raise `OSError` if it cannot be read.

    Reading mounts is limited for each pod. Processes of a pod beyond the limit are attributed only by their cgroup.

    Args:
        pods: For each tenant in question: UIDs of its known pods.
        mounts: Tenants' directories.
        reading_time: Limit on the time for reading mounts, for each pod.
        proc: Where proc is mounted.
    """
    owners: dict[str, list[str]] = {}
    for tenant_id, uids in pods.items():
        for known in uids:
            owners.setdefault(known, []).append(tenant_id)
    seen: dict[str, frozenset[str]] = {}
    """For each mount namespace: its tenants. A node has far more processes than mount namespaces."""
    scan = ProcessScan()
    for name in os.listdir(proc):  # noqa: PTH208 - thousands of names, no need of Path objects
        if not name.isdecimal():
            continue
        text = _read(f"{proc}/{name}/cgroup")
        pod = pod_of_cgroup(text)
        space = _mount_namespace(name, proc)
        if space not in seen and reading_time.left(pod or ""):
            with reading_time.charged(pod or ""):
                seen[space] = mounts.of_process(int(name), proc)
        sees = seen.get(space, frozenset())
        found = sees | frozenset(owners.get(pod, ()) if pod is not None else ())
        if not found or _is_dead(_read(f"{proc}/{name}/stat")):
            continue
        scan.processes.update(found & pods.keys())
        if pod is not None:
            scan.pods.update((tenant_id, pod) for tenant_id in sees)
    return scan


def _mount_namespace(name: str, proc: Path) -> str:
    """Return the identity of a process's mount namespace. If it cannot be read: the pid, which is unique."""
    try:
        return os.readlink(f"{proc}/{name}/ns/mnt")  # noqa: PTH115 - thousands of them
    except OSError:
        return name


def _is_dead(stat: bytes) -> bool:
    """Return True if the content of a /proc/<pid>/stat (proc_pid_stat(5)) is that of a zombie without other threads, or
    empty.

    A process whose first thread has exited is also listed as a zombie, while its other threads still run.
    """
    fields = stat.rpartition(b")")[2].split()
    return len(fields) < 18 or (fields[0] in (b"Z", b"X") and int(fields[17]) <= 1)


def _start_of(stat: bytes) -> bytes:
    """Return the start time of a process from the content of its /proc/<pid>/stat. Empty if the process has exited."""
    fields = stat.rpartition(b")")[2].split()
    return fields[19] if len(fields) > 19 else b""


def _read(path: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, 65536)
    except OSError:  # ESRCH: the process exited between open and read
        return b""
    finally:
        os.close(descriptor)


class PodResidue:
    """Finds what remains on the node of tenants in release: the attached directory, then processes of its pods.

    A tenant counts as drained only after a scan of /proc that began after its directory was detached (the agent's part
    of LE5 released-means-gone in docs/design.md).
    """

    def __init__(self, attachments: Attachments, mounts: TenantMounts, proc: Path = PROC) -> None:
        self._attachments = attachments
        self._mounts = mounts
        self._proc = proc
        self._time, self._scan_time = ReadingTime(LOOP_PER_S), ReadingTime(THREAD_PER_S)
        self._owners: dict[int, tuple[bytes, str, str | None]] = {}
        """For each pid: (start time of the process, its tenant by its mounts, its pod). A process never changes its
        pod."""
        self._asked: set[str] = set()
        self._wanted = asyncio.Event()
        self._seen: dict[str, tuple[Hashable, int]] = {}
        """For each tenant: (`Attachments.run` at the last scan, number of its processes then)."""
        self._strangers: dict[str, float] = {}
        """Loop time of the last scan for the tenant of an unknown pod, by the pod's UID."""

    def residue(self, tenant_id: str) -> str | None:
        """Return what remains of the tenant, as text for a message. None if nothing remains. No I/O.

        After the directory was detached, the first answers may be that a scan still runs.
        """
        attached = self._attachments.attached(tenant_id)
        if attached is not None:
            self._seen.pop(tenant_id, None)
            return attached
        run = self._attachments.run(tenant_id)
        if run is None:
            return None
        looked_for, seen = self._seen.get(tenant_id, (None, None))
        if looked_for != run:
            seen = None  # the last scan was for an earlier run of the tenant
        if seen == 0:
            return None
        self._asked.add(tenant_id)
        self._wanted.set()
        if seen is None:
            return "its pod's processes are being looked for"
        return f"{seen} process{'es' if seen > 1 else ''} of its pod still run{'' if seen > 1 else 's'}"

    def owner_of(self, pid: int) -> str | None:
        """Return the id of the tenant of a process, by its mounts, else by its pod. None if it has no tenant.

        A process without a tenant's mount in an unknown pod gets no tenant at first. This call requests a scan of the
        pod's other processes, so a later call may attribute it.
        """
        known = self._attachments.tenants()
        started = _start_of(_read(f"{self._proc}/{pid}/stat"))
        before, owner, pod = self._owners.get(pid, (b"", "", None))
        tenant = owner if before == started and owner in known else None
        if tenant is None:
            pod = pod_of_cgroup(_read(f"{self._proc}/{pid}/cgroup"))
            tenant = self._by_mounts(pid, pod, known)
            if tenant is not None:
                self._remember(pid, started, tenant, pod)
        if tenant is not None:
            if pod is not None:
                self._attachments.learn(tenant, pod)
            return tenant
        owners = {uid: tenant_id for tenant_id in sorted(known) for uid in self._attachments.pods(tenant_id)}
        if pod in owners:
            return owners[pod]
        if pod is not None and known:
            self._look_for(pod)
        return None

    def _by_mounts(self, pid: int, pod: str | None, known: Set[str]) -> str | None:
        """Return the tenant whose directory a process has mounted. None if there is no such tenant, or if the process's
        pod has used up its reading time."""
        if not self._time.left(pod or ""):
            return None
        with self._time.charged(pod or ""):
            return min(self._mounts.of_process(pid, self._proc) & known, default=None)

    def _remember(self, pid: int, started: bytes, tenant_id: str, pod: str | None) -> None:
        self._owners.pop(pid, None)
        if len(self._owners) >= _OWNERS_MAX:
            del self._owners[next(iter(self._owners))]
        self._owners[pid] = (started, tenant_id, pod)

    async def run(self) -> None:
        """Scan /proc whenever it was requested, at most every `SCAN_INTERVAL_S`, until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            await self.look()
            await asyncio.sleep(SCAN_INTERVAL_S)

    async def look(self) -> None:
        """Scan once for all tenants for which `residue` has requested it since the last scan."""
        asked, self._asked = self._asked, set()
        runs = {
            tenant_id: self._attachments.run(tenant_id)
            for tenant_id in asked
            if self._attachments.attached(tenant_id) is None
        }
        pods = {tenant_id: self._attachments.pods(tenant_id) for tenant_id in runs}
        try:
            scan = await asyncio.to_thread(self._scan_settled, pods)
        except OSError as error:
            log.error("cannot scan for processes of released tenants; their shares stay reserved", error=str(error))
            return
        for tenant_id, pod in scan.pods:
            self._attachments.learn(tenant_id, pod)
        for tenant_id, run in runs.items():
            if self._attachments.attached(tenant_id) is None:
                self._seen[tenant_id] = (run, scan.processes[tenant_id])
        for tenant_id in self._seen.keys() - self._attachments.tenants():
            del self._seen[tenant_id]

    def _look_for(self, pod: str) -> None:
        now = asyncio.get_running_loop().time()
        self._strangers = {uid: at for uid, at in self._strangers.items() if now - at < STRANGER_INTERVAL_S}
        if pod not in self._strangers:
            self._strangers[pod] = now
            self._wanted.set()

    def _scan_settled(self, pods: Mapping[str, frozenset[str]]) -> ProcessScan:
        """Scan a second time if a tenant seems to have no process. One scan can miss a process that forks and exits
        during the scan; two scans are unlikely to."""
        scan = scan_processes(pods, self._mounts, self._scan_time, self._proc)
        if not scan.processes or any(tenant_id not in scan.processes for tenant_id in pods):
            second = scan_processes(pods, self._mounts, self._scan_time, self._proc)
            scan.processes |= second.processes
            scan.pods |= second.pods
        return scan
