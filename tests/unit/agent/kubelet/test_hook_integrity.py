"""Checks of the hook in tenants' processes: which process is checked when, and the effect of a check that does
not return."""

from __future__ import annotations

import ctypes
import errno
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sharepod.agent.kubelet import hook_integrity
from sharepod.agent.kubelet.hook_integrity import NO_HOOK_MAPPED, OTHER_PRELOAD, HookIntegrity
from sharepod.agent.kubelet.tenant_mounts import TenantMounts
from sharepod.api.objects import HOOK_FILE


class ScriptedIntegrity(HookIntegrity):
    """HookIntegrity with scripted verdicts. A check of a pid in `stuck` returns when the test releases it."""

    def __init__(self) -> None:
        super().__init__(Path("/nowhere"), TenantMounts(None, ""))
        self.verdicts: dict[int, list[str | None]] = {}
        self.looked_at: list[int] = []
        self.stuck: set[int] = set()
        self.released = threading.Event()

    def look(self, tenant_id: str, pid: int, *, hooked: bool) -> str | None:
        if pid in self.stuck:
            self.released.wait(60)
        self.looked_at.append(pid)
        scripted = self.verdicts.get(pid, [None])
        return scripted.pop(0) if len(scripted) > 1 else scripted[0]

    def settle(self, tenant_id: str, *pids: int) -> dict[int, str]:
        """Start a check, wait until it has ended, and return the findings."""
        self.replaced(tenant_id, set(pids), set())
        running = self._looks[tenant_id].running
        if running is not None:
            running.result(60)
        return dict(self.replaced(tenant_id, set(pids), set()))


@pytest.fixture
def integrity(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedIntegrity]:
    monkeypatch.setattr(hook_integrity, "_AGAIN_S", 0)
    made = ScriptedIntegrity()
    yield made
    made.released.set()


def test_what_two_looks_agree_on_is_said(integrity: ScriptedIntegrity) -> None:
    integrity.verdicts = {7: [OTHER_PRELOAD], 8: [OTHER_PRELOAD, None]}
    assert integrity.settle("a", 7, 8, 9) == {7: OTHER_PRELOAD}


def test_a_sound_process_is_looked_at_again_after_a_while_and_another_at_each_reading(
    integrity: ScriptedIntegrity, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    integrity.verdicts = {8: [OTHER_PRELOAD]}
    integrity.settle("a", 7, 8)
    integrity.settle("a", 7, 8)
    assert integrity.looked_at.count(7) == 1
    assert integrity.looked_at.count(8) > 2
    now += hook_integrity.SOUND_S
    integrity.settle("a", 7, 8)
    assert integrity.looked_at.count(7) == 2


def test_a_process_that_left_the_gpu_is_looked_at_when_it_comes_back(integrity: ScriptedIntegrity) -> None:
    integrity.settle("a", 7)
    integrity.settle("a")
    integrity.settle("a", 7)
    assert integrity.looked_at == [7, 7]


def test_a_process_that_does_not_let_itself_be_read_delays_only_its_own_tenant(integrity: ScriptedIntegrity) -> None:
    integrity.stuck = {7}
    integrity.verdicts = {7: [OTHER_PRELOAD], 8: [OTHER_PRELOAD]}
    before = threading.active_count()
    for _ in range(20):
        assert integrity.replaced("a", {7}, set()) == {}
    assert threading.active_count() == before + 1, "one look at a time"
    assert integrity.settle("b", 8) == {8: OTHER_PRELOAD}


def test_a_removed_tenant_is_dropped(integrity: ScriptedIntegrity) -> None:
    integrity.verdicts = {7: [OTHER_PRELOAD]}
    integrity.settle("a", 7)
    integrity.forget_all_but({"b"})
    assert integrity.replaced("a", {7}, set()) == {}


class OldKernel:
    """Kernel whose `openat2` does not know RESOLVE_CACHED, as in Linux 5.6 to 5.11."""

    def __init__(self) -> None:
        self._real = ctypes.CDLL(None, use_errno=True)

    def syscall(self, number: int, root: int, path: bytes, how: bytes, size: ctypes.c_size_t) -> int:
        if int.from_bytes(how[16:24], "little") & hook_integrity._RESOLVE_CACHED:
            ctypes.set_errno(errno.EINVAL)
            return -1
        return int(self._real.syscall(number, root, path, how, size))


def test_a_kernel_that_cannot_look_in_its_cache_alone_is_asked_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook_integrity, "_libc", OldKernel())
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "ld.so.preload").touch()
    (tmp_path / "proc" / "7").mkdir(parents=True)
    (tmp_path / "proc" / "7" / "root").symlink_to(tmp_path)
    (tmp_path / "proc" / "7" / "mountinfo").write_text("1 0 0:1 / / rw - tmpfs none rw\n")
    integrity = HookIntegrity(tmp_path, TenantMounts(None, ""), tmp_path / "proc")
    assert integrity.look("a", 7, hooked=False) == OTHER_PRELOAD


def test_mappings_that_are_too_many_to_be_read_are_no_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / HOOK_FILE).write_bytes(b"hook")
    (tmp_path / "proc" / "7" / "root").mkdir(parents=True)
    maps = b"7f00-7f01 r-xp 00000000 00:01 5                          /usr/lib/other.so\n"
    (tmp_path / "proc" / "7" / "maps").write_bytes(maps * 10)
    integrity = HookIntegrity(tmp_path, TenantMounts(None, ""), tmp_path / "proc")
    assert integrity.look("a", 7, hooked=True) == NO_HOOK_MAPPED
    monkeypatch.setattr(hook_integrity, "_MAPS_MAX", len(maps) * 9)
    assert integrity.look("a", 7, hooked=True) is None
