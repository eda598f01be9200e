"""Integrity of the hook in tenants' processes: compares the preload file and the mapped hook by device and inode.

A program can mount another file over /etc/ld.so.preload in its own mount namespace, or implement the hook's protocol
itself. Its paths then look unchanged, so the check compares which file is at the path, as Linux reports it.

Guarantees:
- No call reaches a filesystem of a tenant, because a path is resolved only in the kernel's dentry cache. A path that is
  not cached gives no verdict. Linux before 5.12 cannot restrict the look-up in this way, and asks the filesystem.
- A process whose /proc files block or are long (`reading_time`) delays only the verdicts on its own tenant.
- For a process that cannot be read, or has too many mappings, there is no verdict.
- The hook of an earlier agent is also accepted, because processes that were started with it keep it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import threading
import time
from collections.abc import Collection, Mapping, Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from sharepod.agent.state.directory import hook_files
from sharepod.api.objects import PRELOAD_PATH

from .reading_time import THREAD_PER_S, ReadingTime
from .tenant_mounts import TenantMounts, read_mountinfo

log = structlog.get_logger(__name__)

PROC = Path("/proc")
SOUND_S = 10.0
"""Seconds for which a process with a good verdict is not checked again. Reading the mappings of a large process takes
milliseconds, in which the process cannot map memory."""
_AGAIN_S = 0.2
"""Seconds between the two checks that a bad verdict needs: the first check may have met the process during execve."""
_MAPS_MAX = 16 << 20
"""Most bytes of a process's /proc/<pid>/maps that are read: twice the size of 65,530 mappings, Linux' default limit.
Some distributions allow sixteen times as many."""

# Constants of <linux/openat2.h>
_OPENAT2 = 437
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_IN_ROOT = 0x10
_RESOLVE_CACHED = 0x20
_OPEN_HOW = struct.Struct("QQQ")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

OTHER_PRELOAD = f"sees another {PRELOAD_PATH} than the mounted file"
"""Verdict on a process. A message continues with it after the pid."""
NO_HOOK_MAPPED = "has connected as a hook does, and the hook is not among its mappings"
"""Verdict on a process. A message continues with it after the pid."""


@dataclass
class _Looks:
    """Checks of the processes of one tenant."""

    running: Future[Mapping[int, str | None]] | None = None
    verdicts: dict[int, str | None] = field(default_factory=dict)
    """For each pid: the evidence that the process's hook was replaced. None if the process is good or cannot be
    read."""
    looked_at: dict[int, float] = field(default_factory=dict)
    """Monotonic time of the last check of each process."""


class HookIntegrity:
    """Integrity of the hook in the processes of all tenants of a node. Checks run in threads."""

    def __init__(self, tenants_dir: Path, tenant_mounts: TenantMounts, proc: Path = PROC) -> None:
        """Args:
        tenants_dir: folder of the tenants' directories.
        tenant_mounts: the same directories, as mounts of processes list them.
        proc: where proc is mounted."""
        self._tenants_dir = tenants_dir
        self._mounts = tenant_mounts
        self._proc = proc
        self._looks: dict[str, _Looks] = {}
        self._time = ReadingTime(THREAD_PER_S)

    def replaced(self, tenant_id: str, pids: Set[int], hooked: Set[int]) -> Mapping[int, str]:
        """Return the evidence for each process whose hook was replaced, by pid. No I/O.

        The answer comes from checks that earlier calls started. This call starts the next check in a thread, if one is
        due.

        Args:
            pids: its processes on its GPUs.
            hooked: pids of its processes whose connection came from the hook.
        """
        looks = self._looks.setdefault(tenant_id, _Looks())
        now = time.monotonic()
        if looks.running is not None and looks.running.done():
            looks.verdicts |= looks.running.result()
            looks.running = None
        looks.verdicts = {pid: verdict for pid, verdict in looks.verdicts.items() if pid in pids}
        looks.looked_at = {pid: at for pid, at in looks.looked_at.items() if pid in pids}
        due = {
            pid
            for pid in pids
            if pid not in looks.looked_at or looks.verdicts.get(pid) or now - looks.looked_at[pid] >= SOUND_S
        }
        if due and looks.running is None and self._time.left(tenant_id):
            looks.looked_at |= dict.fromkeys(due, now)
            looks.running = Future()
            # a daemon thread, so that a process that cannot be read does not keep the agent from exiting
            threading.Thread(
                target=self._look, args=(looks.running, tenant_id, due, frozenset(hooked)), name="hooks", daemon=True
            ).start()
        return {pid: verdict for pid, verdict in looks.verdicts.items() if verdict is not None}

    def forget_all_but(self, tenant_ids: Set[str]) -> None:
        """Drop the results for all other tenants."""
        self._looks = {tenant_id: looks for tenant_id, looks in self._looks.items() if tenant_id in tenant_ids}

    # ---- in the checking thread

    def _look(self, answer: Future[Mapping[int, str | None]], tenant_id: str, pids: Set[int], hooked: Set[int]) -> None:
        verdicts: dict[int, str | None] = dict.fromkeys(pids)
        try:
            verdicts = self._look_at_all(tenant_id, pids, hooked)
            suspects = [pid for pid, verdict in verdicts.items() if verdict is not None]
            if suspects:
                time.sleep(_AGAIN_S)
            for pid, again in self._look_at_all(tenant_id, suspects, hooked).items():
                verdicts[pid] = again if again == verdicts[pid] else None
        except OSError as error:
            log.warning("cannot check the hook in a tenant's processes", tenant=tenant_id, error=str(error))
        finally:
            answer.set_result(verdicts)

    def _look_at_all(self, tenant_id: str, pids: Collection[int], hooked: Set[int]) -> dict[int, str | None]:
        with self._time.charged(tenant_id):
            return {pid: self.look(tenant_id, pid, hooked=pid in hooked) for pid in pids}

    def look(self, tenant_id: str, pid: int, *, hooked: bool) -> str | None:
        """Check one process once. Return the evidence that its hook was replaced. None if the process is good or cannot
        be read.

        Raise `OSError` if the hook's files in the tenant's directory cannot be read.
        """
        if self._preload_is_another(tenant_id, pid):
            return OTHER_PRELOAD
        if hooked and self._hook_is_not_mapped(tenant_id, pid):
            return NO_HOOK_MAPPED
        return None

    def _preload_is_another(self, tenant_id: str, pid: int) -> bool:
        try:
            root = os.open(f"{self._proc}/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:  # the process has exited
            return False
        try:
            found = _open_cached(root, PRELOAD_PATH)
        except OSError:  # the file is missing, or its name is not in the dentry cache
            return False
        finally:
            os.close(root)
        try:
            mount_id = _mount_of_descriptor(found)
        finally:
            os.close(found)
        listed = read_mountinfo(pid, self._proc)
        return bool(listed) and not self._mounts.is_preload(tenant_id, listed, mount_id)

    def _hook_is_not_mapped(self, tenant_id: str, pid: int) -> bool:
        hooks = [_shown_in_maps(path) for path in hook_files(self._tenants_dir / tenant_id)]
        try:
            with open(f"{self._proc}/{pid}/maps", "rb") as file:  # noqa: PTH123 - as elsewhere for /proc
                maps = file.read(_MAPS_MAX)
        except OSError:  # the process has exited
            return False
        read = 0 < len(maps) < _MAPS_MAX  # no verdict on a cut listing: libraries come last
        return read and bool(hooks) and not any(_maps_file(maps, *hook) for hook in hooks)


def _open_cached(root: int, path: str) -> int:
    """Open a path below the directory `root` with O_PATH, as a process with this root directory would. Only names in
    the dentry cache are resolved.

    Raise `OSError`: BlockingIOError if a name is not in the cache.
    """
    try:
        return _open_in_root(root, path, _RESOLVE_CACHED)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return _open_in_root(root, path, 0)  # Linux before 5.12 lacks RESOLVE_CACHED


def _open_in_root(root: int, path: str, more: int) -> int:
    resolve = _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS | more
    how = _OPEN_HOW.pack(os.O_PATH | os.O_CLOEXEC, 0, resolve)
    descriptor = int(_libc.syscall(_OPENAT2, root, os.fsencode(path), how, ctypes.c_size_t(len(how))))
    if descriptor < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return descriptor


def _mount_of_descriptor(descriptor: int) -> str:
    """Return the mount id of an open file, as mountinfo has it. Reads only /proc."""
    lines = Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith("mnt_id:"))


def _shown_in_maps(path: Path) -> tuple[bytes, bytes]:
    """Return device and inode of a file as /proc/<pid>/maps lists them. On some filesystems they differ from stat.
    Raise `OSError`."""
    inode = str(path.stat().st_ino).encode()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ):
        own = Path("/proc/self/maps").read_bytes()
    for line in own.splitlines():
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[4] == inode and fields[5].endswith(path.name.encode()):
            return fields[3], inode
    raise OSError(f"{path} does not show among the agent's own mappings")


def _maps_file(maps: bytes, device: bytes, inode: bytes) -> bool:
    """Return whether the content of a /proc/<pid>/maps lists an executable mapping of the file with this device and
    inode."""
    wanted = b" " + device + b" " + inode + b" "
    at = maps.find(wanted)
    while at >= 0:
        begin = maps.rfind(b"\n", 0, at) + 1
        if b"x" in maps[begin:at].split(b" ")[1]:
            return True
        at = maps.find(wanted, at + 1)
    return False
