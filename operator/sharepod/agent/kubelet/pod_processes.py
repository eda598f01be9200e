"""Which pod a process belongs to, and whether anything of a pod still runs.

Goes by /proc/<pid>/cgroup, which names a process's cgroups in every layout that kubelets make (cgroup v1 and v2,
cgroupfs and systemd naming, any cgroup root) and is complete as long as the agent shares the host's PID namespace. A
tenant cannot move its processes out of its pod's cgroup. Reading all of /proc takes tens of milliseconds on a large
node, so it is done in a thread, only for tenants whose volume is unpublished and that somebody asks about.
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


class PodCgroups:
    """Recognizes the cgroups of given pods. Cheap to make and to ask."""

    def __init__(self, uids: Iterable[str]) -> None:
        self._cgroupfs = {f"pod{uid}".encode(): uid for uid in uids}
        # systemd takes no dash within a slice's name: kubepods-burstable-pod<uid with _ for ->.slice
        self._systemd = {f"pod{uid.replace('-', '_')}.slice".encode(): uid for uid in self._cgroupfs.values()}

    def find(self, cgroup: bytes) -> str | None:
        """The pod that the text of a /proc/<pid>/cgroup names, or None."""
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
    """Which of the pods this process runs in; None where it is in none of them or is gone."""
    text = _read(f"{proc}/{pid}/cgroup")
    return pods.find(text) if text else None


def count_processes(uids: Iterable[str], proc: Path = PROC) -> Counter[str]:
    """How many processes each of these pods has. Zombies do not count: they hold nothing. Raises `OSError` without
    /proc.
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
    """Whether /proc/<pid>/stat is that of a process which only waits to be reaped (or is gone). See proc_pid_stat(5).

    A leader that has exited shows as a zombie while other threads of its process run on.
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
    except OSError:  # ESRCH: ended between open and read
        return b""
    finally:
        os.close(descriptor)


class PodResidue:
    """What is left of a tenant outside the agent: its published volume, then its pods' processes.

    A tenant is clean only after a look at /proc that was taken after its volume was unpublished.
    """

    def __init__(self, volumes: Volumes, proc: Path = PROC) -> None:
        self._volumes = volumes
        self._proc = proc
        self._asked: set[str] = set()
        self._wanted = asyncio.Event()
        self._seen: dict[str, int] = {}

    def residue(self, tenant_id: str) -> str | None:
        """What is still there, in words, or None. No I/O; the first answers after the volume is gone may be "being
        looked for".
        """
        published = self._volumes.published(tenant_id)
        if published:
            self._seen.pop(tenant_id, None)
            return f"its volume is still published at {published[0]}"
        if not self._volumes.pods(tenant_id):
            return None
        seen = self._seen.get(tenant_id)
        if seen == 0:
            return None
        self._asked.add(tenant_id)
        self._wanted.set()
        if seen is None:
            return "its pod's processes are being looked for"
        return f"{seen} process{'es' if seen > 1 else ''} of its pod still run{'' if seen > 1 else 's'}"

    def owner_of(self, pid: int) -> str | None:
        """The tenant in whose pod a process runs, or None."""
        owners = {uid: tenant_id for tenant_id in self._volumes.tenants() for uid in self._volumes.pods(tenant_id)}
        uid = pod_of_process(pid, PodCgroups(owners), self._proc)
        return owners[uid] if uid is not None else None

    async def run(self) -> None:
        """Looks at /proc for the tenants that were asked about, at most once a second. Ends only when cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            await self.look()
            await asyncio.sleep(SCAN_INTERVAL_S)

    async def look(self) -> None:
        """One look, for all who were asked about since the last."""
        asked, self._asked = self._asked, set()
        pods = {
            tenant_id: self._volumes.pods(tenant_id) for tenant_id in asked if not self._volumes.published(tenant_id)
        }
        uids = frozenset[str]().union(*pods.values())
        try:
            counts: Mapping[str, int] = await asyncio.to_thread(self._count_settled, uids)
        except OSError as error:
            log.error("cannot look for processes of released tenants; their shares stay taken", error=str(error))
            return
        for tenant_id, uids_of_tenant in pods.items():
            if not self._volumes.published(tenant_id):
                self._seen[tenant_id] = sum(counts.get(uid, 0) for uid in uids_of_tenant)
        for tenant_id in self._seen.keys() - self._volumes.tenants():
            del self._seen[tenant_id]

    def _count_settled(self, uids: frozenset[str]) -> Counter[str]:
        """A process that forks and ends while /proc is being read can be missed by one look, hardly by two."""
        counts = count_processes(uids, self._proc)
        if not counts or any(uid not in counts for uid in uids):
            second = count_processes(uids, self._proc)
            counts |= second
        return counts
