"""Processes of pods: the pod that a process belongs to, and whether processes of a released tenant's pod still run.

Guarantees:
- Every cgroup layout that kubelets create is understood: cgroup v1 and v2, cgroupfs and systemd naming, any root.
- All processes of the node are seen, provided that the agent shares the host's PID namespace.
- A tenant cannot hide a process: it cannot move one out of its pod's cgroup.

Reading all of /proc takes tens of milliseconds on a large node. It is therefore done in a thread, and only for tenants
whose volume is unpublished and whose release waits for it.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import structlog

from sharepod.agent.kubelet.csi.volumes import Volumes

log = structlog.get_logger(__name__)

PROC = Path("/proc")
SCAN_INTERVAL_S = 1.0
"""Seconds between two scans of /proc: the delay of a release that waits for the pod's last process."""


class PodCgroups:
    """Names that the cgroups of given pods have. Cheap to create and to search."""

    def __init__(self, uids: Iterable[str]) -> None:
        self._cgroupfs = {f"pod{uid}".encode(): uid for uid in uids}
        # systemd allows no dash within the name of a slice: kubepods-burstable-pod<uid with _ for ->.slice
        self._systemd = {f"pod{uid.replace('-', '_')}.slice".encode(): uid for uid in self._cgroupfs.values()}

    def find(self, cgroup: bytes) -> str | None:
        """Return the UID of the pod that the content of a /proc/<pid>/cgroup names; None if it names none."""
        if b"pod" not in cgroup:
            return None
        for line in cgroup.splitlines():
            for component in line.split(b":", 2)[-1].split(b"/"):
                if component.endswith(b".slice"):
                    found = self._systemd.get(component.rpartition(b"-")[2])
                else:
                    found = self._cgroupfs.get(component)
                if found is not None:
                    return found
        return None


def pod_of_process(pid: int, pods: PodCgroups, proc: Path = PROC) -> str | None:
    """Return the UID of the pod that a process runs in; None if it runs in none of `pods` or has ended."""
    text = _read(f"{proc}/{pid}/cgroup")
    return pods.find(text) if text else None


def count_processes(uids: Iterable[str], proc: Path = PROC) -> Counter[str]:
    """Return the number of processes of each pod, by UID. Zombies do not count: they hold no GPU.

    Raise `OSError` if /proc cannot be read.
    """
    pods = PodCgroups(uids)
    counts: Counter[str] = Counter()
    for name in os.listdir(proc):  # noqa: PTH208 - thousands of names, no need of Path objects
        if not name.isdecimal():
            continue
        text = _read(f"{proc}/{name}/cgroup")
        uid = pods.find(text) if text else None
        if uid is not None and not _is_dead(_read(f"{proc}/{name}/stat")):
            counts[uid] += 1
    return counts


def _is_dead(stat: bytes) -> bool:
    """Return whether the content of a /proc/<pid>/stat is that of a zombie, or empty. See proc_pid_stat(5).

    A process whose first thread has exited shows as a zombie while its other threads still run.
    """
    fields = stat.rpartition(b")")[2].split()
    return len(fields) < 18 or (fields[0] in (b"Z", b"X") and int(fields[17]) <= 1)


def _read(path: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, 65536)
    except OSError:  # ESRCH: the process ended between open and read
        return b""
    finally:
        os.close(descriptor)


class PodResidue:
    """Residue of released tenants outside the agent: the published volume, then processes of its pods.

    A tenant has no residue only after a scan of /proc that began after its volume was unpublished (the agent's part of
    LE5 released-means-gone in docs/design.md).
    """

    def __init__(self, volumes: Volumes, proc: Path = PROC) -> None:
        self._volumes = volumes
        self._proc = proc
        self._asked: set[str] = set()
        self._wanted = asyncio.Event()
        self._seen: dict[str, tuple[frozenset[str], int]] = {}
        """By tenant: its pods at the last scan, and how many of their processes there were."""

    def residue(self, tenant_id: str) -> str | None:
        """Return in words what is left of the tenant; None if nothing is. No I/O.

        The first answers after the volume was unpublished may be that its processes are being looked for.
        """
        published = self._volumes.published(tenant_id)
        if published:
            self._seen.pop(tenant_id, None)
            return f"its volume is still published at {published[0]}"
        pods = self._volumes.pods(tenant_id)
        if not pods:
            return None
        looked_for, seen = self._seen.get(tenant_id, (frozenset[str](), None))
        if looked_for != pods:
            seen = None  # the scan was for an earlier run
        if seen == 0:
            return None
        self._asked.add(tenant_id)
        self._wanted.set()
        if seen is None:
            return "its pod's processes are being looked for"
        return f"{seen} process{'es' if seen > 1 else ''} of its pod still run{'' if seen > 1 else 's'}"

    def owner_of(self, pid: int) -> str | None:
        """Return the id of the tenant in whose pod a process runs; None if it runs in no tenant's pod."""
        owners = {uid: tenant_id for tenant_id in self._volumes.tenants() for uid in self._volumes.pods(tenant_id)}
        uid = pod_of_process(pid, PodCgroups(owners), self._proc)
        return owners[uid] if uid is not None else None

    async def run(self) -> None:
        """Scan /proc for the tenants that were asked about, at most each `SCAN_INTERVAL_S`, until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            await self.look()
            await asyncio.sleep(SCAN_INTERVAL_S)

    async def look(self) -> None:
        """Scan once for all tenants that were asked about since the last scan."""
        asked, self._asked = self._asked, set()
        pods = {
            tenant_id: self._volumes.pods(tenant_id) for tenant_id in asked if not self._volumes.published(tenant_id)
        }
        uids = frozenset[str]().union(*pods.values())
        try:
            counts: Mapping[str, int] = await asyncio.to_thread(self._count_settled, uids)
        except OSError as error:
            log.error("cannot look for processes of released tenants; their shares stay reserved", error=str(error))
            return
        for tenant_id, uids_of_tenant in pods.items():
            if not self._volumes.published(tenant_id):
                self._seen[tenant_id] = (uids_of_tenant, sum(counts.get(uid, 0) for uid in uids_of_tenant))
        for tenant_id in self._seen.keys() - self._volumes.tenants():
            del self._seen[tenant_id]

    def _count_settled(self, uids: frozenset[str]) -> Counter[str]:
        """Count twice if a pod seems empty: one scan can miss a process that forks and ends meanwhile, two hardly."""
        counts = count_processes(uids, self._proc)
        if not counts or any(uid not in counts for uid in uids):
            second = count_processes(uids, self._proc)
            counts |= second
        return counts
