"""Attack: pods make the agent's reads of /proc expensive, for example by many long mount paths. The agent bounds its
reading time for each pod, and other pods do not wait."""

from __future__ import annotations

import ctypes
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import pytest
from sharepod.agent.kubelet import mounts
from sharepod.agent.kubelet.attachments import Attachments
from sharepod.agent.kubelet.dra.prepared_claims import PreparedClaims
from sharepod.agent.kubelet.hook_integrity import HookIntegrity
from sharepod.agent.kubelet.pod_processes import PodResidue, scan_processes
from sharepod.agent.kubelet.reading_time import LOOP_PER_S, THREAD_PER_S, ReadingTime
from sharepod.agent.kubelet.tenant_mounts import TenantMounts, read_mountinfo
from unit.agent.client import until
from unit.agent.kubelet.test_pod_processes import (
    LAYOUTS,
    OTHER,
    TENANTS,
    THERE,
    UID,
    Proc,
    attachments,
    claims,
    prepare,
    proc,
    volumes,
)

__all__ = ["attachments", "claims", "proc", "volumes"]

_NEW_MOUNTS, _BIND, _PRIVATE = 0x20000, 4096, 16384 | 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def many_mounts(root: Path) -> Iterator[int]:
    """Start a process with 80 mounts whose paths consist of backslashes, as a container can mount an emptyDir; yield
    its pid."""
    ready, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(ready)
            assert _libc.unshare(_NEW_MOUNTS) == 0
            assert _libc.mount(b"none", b"/", None, _PRIVATE, None) == 0
            assert _libc.mount(b"none", os.fsencode(root), b"tmpfs", 0, None) == 0
            for number in range(80):
                os.chdir(root)
                for name in [f"{number:03d}".ljust(250, "\\"), *["\\" * 250] * 12]:
                    Path(name).mkdir()
                    os.chdir(name)
                assert _libc.mount(os.fsencode(root), b".", None, _BIND, None) == 0
            os.write(done, b"x")
            signal.pause()
        finally:
            os._exit(1)
    os.close(done)
    try:
        assert os.read(ready, 1) == b"x"
        yield pid
    finally:
        os.close(ready)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes mounts")
def test_mount_paths_of_a_megabyte_of_backslashes_are_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: Counter[str] = Counter()
    unescape = mounts._unescape

    def counted(text: str) -> str:
        decoded["paths"] += 1
        return unescape(text)

    there = TenantMounts(PurePosixPath(TENANTS), "8:1")
    with many_mounts(tmp_path) as pid:
        monkeypatch.setattr(mounts, "_unescape", counted)
        assert len(read_mountinfo(pid, Path("/proc"))) > 1_000_000
        assert there.of_process(pid, Path("/proc")) == frozenset()
        assert HookIntegrity(tmp_path, there).look("tenant-a", pid, hooked=False) is None
        scan_processes({"tenant-a": [UID]}, there, ReadingTime(THREAD_PER_S))
    assert decoded["paths"] == 0


class Clock:
    """Clock that the test sets. Each reading of a process is counted, and takes `costs[pid]` seconds of processor
    time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, costs: dict[int, float]) -> None:
        self.now = self.spent = 0.0
        self.reads: Counter[int] = Counter()
        of_process = TenantMounts.of_process

        def slow(there: TenantMounts, pid: int, proc: Path) -> frozenset[str]:
            self.reads[pid] += 1
            self.spent += costs[pid]
            return of_process(there, pid, proc)

        monkeypatch.setattr(TenantMounts, "of_process", slow)

    def budget(self, per_s: float) -> ReadingTime:
        return ReadingTime(per_s, clock=lambda: self.now, spent=lambda: self.spent)


@pytest.mark.promise("security-reading-time")
async def test_only_the_pod_that_is_expensive_to_read_waits(
    claims: PreparedClaims, attachments: Attachments, proc: Proc, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, {7: 0.06, 8: 0.001, 9: 0.001})
    residue = PodResidue(attachments, THERE, proc.root)
    residue._time, residue._scan_time = clock.budget(LOOP_PER_S), clock.budget(THREAD_PER_S)
    await prepare(claims)
    proc.add(7, LAYOUTS["v1 cgroupfs"].replace(UID, OTHER))
    proc.mount(7)
    proc.add(8, LAYOUTS["v1 cgroupfs"])
    proc.mount(8, f"{TENANTS}/tenant-a")
    for _second in range(100):
        assert residue.owner_of(7) is None
        assert residue.owner_of(8) == "tenant-a"
        clock.now += 1.0
    assert clock.reads == {7: 3, 8: 1}, "at 0, 10 and 70 s; a tenant's process once"


@pytest.mark.promise("security-reading-time")
async def test_a_scan_skips_the_mounts_of_an_expensive_pod_and_counts_its_processes_by_pod(
    proc: Proc, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = range(10, 20)
    clock = Clock(monkeypatch, {**dict.fromkeys(pids, 0.04), 8: 0.001})
    for pid in pids:
        proc.add(pid, LAYOUTS["v1 cgroupfs"].replace(UID, OTHER))
        proc.mount(pid)
    proc.add(8, LAYOUTS["v1 cgroupfs"])
    proc.mount(8, f"{TENANTS}/tenant-a")
    scan = scan_processes({"tenant-a": [], "tenant-b": [OTHER]}, THERE, clock.budget(THREAD_PER_S), proc.root)
    assert scan.processes == {"tenant-a": 1, "tenant-b": 10}
    assert sum(clock.reads[pid] for pid in pids) == 2


@pytest.mark.promise("security-reading-time")
async def test_hook_checks_of_a_tenant_wait_once_its_time_is_used_and_those_of_others_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, {})
    integrity = HookIntegrity(tmp_path, THERE, tmp_path)
    integrity._time = clock.budget(THREAD_PER_S)
    looked: Counter[str] = Counter()

    def look(tenant_id: str, _pid: int, *, hooked: bool) -> str | None:
        looked[tenant_id] += 1
        clock.spent += 1.0 if tenant_id == "dear" else 0.0
        return None

    monkeypatch.setattr(integrity, "look", look)
    for pid in range(1, 4):
        for tenant in ("dear", "cheap"):
            integrity.replaced(tenant, {pid}, set())
            await until(lambda: all(each.running is None or each.running.done() for each in integrity._looks.values()))
    assert looked == {"dear": 1, "cheap": 3}
    clock.now += 1.0 / THREAD_PER_S
    integrity.replaced("dear", {4}, set())
    await until(lambda: looked["dear"] == 2)
