"""Confinement of the worker: namespaces of its own, a root directory with only the program, a user of its own, no
capability.

Guarantees, for a process in which `confine` has returned:
- It sees no other process, no network, and no file except libraries and the program, which are read-only.
- It has a user of its own and no capability. No program or system call can give it a capability.
- Its real user belongs to no tenant, so no tenant can use up Linux' limits per real user (`take_own_user`).
- It has only the descriptors that `confine` was given, and cannot grow the files behind them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import secrets
import stat
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from . import system_calls

SHOWN = 64321
"""Effective user and group of the confined process. Tenants can see them, which does no harm: Linux keeps no limits by
the effective user."""
_OWN_USERS = range(1 << 31, (1 << 32) - 2)
"""Range of the random real user. No tenant has such a user: the API server refuses a `runAsUser` above 2^31 - 1."""
_NEW_SPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x40000000
"""Flags of new namespaces: mounts, cgroups, host name, IPC, network."""
_NEW_PIDS = 0x20000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_DETACH = 2
_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _AMBIENT_CLEAR = 4, 24, 38, 47, 4
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_LIBRARIES = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64")
_ROOT = Path("/tmp")  # noqa: S108 - a mount point, in a mount namespace of its own
"""Mount point on which the new root directory is assembled."""

_FILE_MAX = 1 << 20
"""Largest size in bytes to which the process may grow a file. Handover files have their full size from the start. If
the log is a file, there is no such limit."""

_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def next_child_alone() -> Iterator[None]:
    """Context manager: the next child that this process forks in the block gets a PID namespace of its own. Raise
    `OSError`."""
    ours = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _checked(_libc.unshare(_NEW_PIDS), "a PID namespace")
        try:
            yield
        finally:
            _checked(_libc.setns(ours, _NEW_PIDS), "the former PID namespace")
    finally:
        os.close(ours)


def take_own_user() -> None:
    """Set a random real user for this process. Its effective user stays root. Raise `OSError`.

    Linux limits some resources per real user over all containers: descriptors in flight between sockets, epoll watches,
    threads, pending signals, locked pages, pipes, keys, inotify watches. A tenant with the same user could exhaust
    them.
    """
    user = secrets.choice(_OWN_USERS)
    try:
        os.setresuid(user, -1, -1)
    except OSError as error:
        raise OSError(error.errno, f"cannot take user {user}; this node's user namespace needs all user ids") from None


def confine(descriptors: Collection[int], niceness: int) -> None:
    """Confine this process permanently. It keeps only `descriptors` and descriptors 0 to 2 open. Raise `OSError`.

    Call this as root, in the first process of a PID namespace, before any thread is started.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
    _close_all_but({0, 1, 2, *descriptors})
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not stat.S_ISREG(os.fstat(2).st_mode):  # else the limit would apply to the log
        resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_MAX, _FILE_MAX))
    _checked(_libc.unshare(_NEW_SPACES), "namespaces")
    _enter_root(_program_folders())
    for number in range(64):
        _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)  # fails for numbers beyond the last capability
    _libc.prctl(_PR_CAP_AMBIENT, _AMBIENT_CLEAR, 0, 0, 0)
    os.setgroups([])
    take_own_user()
    os.setresgid(SHOWN, SHOWN, SHOWN)
    os.setresuid(-1, SHOWN, os.getuid())
    _checked(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "no dump")
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    system_calls.restrict()


def _program_folders() -> list[Path]:
    """Return the folders of the program and its libraries. None of them is inside another."""
    found = {Path(each).resolve() for each in (*_LIBRARIES, *sys.path, sys.prefix) if each and Path(each).is_dir()}
    return [each for each in sorted(found) if not any(parent in found for parent in each.parents)]


def _enter_root(folders: Collection[Path]) -> None:
    _mount("none", "/", None, _REC | _PRIVATE)
    sources = {folder: os.open(folder, os.O_PATH | os.O_CLOEXEC) for folder in folders}
    _mount("root", _ROOT, "tmpfs", _NOSUID | _NODEV, "size=64k,mode=0755")
    for folder, source in sources.items():
        place = _ROOT / folder.relative_to("/")
        place.mkdir(parents=True)
        _mount(f"/proc/self/fd/{source}", place, None, _BIND)
        _mount("none", place, None, _BIND | _REMOUNT | _RDONLY | _NOSUID | _NODEV)
        os.close(source)
    for link in ("/lib", "/lib64"):
        if Path(link).is_symlink():
            (_ROOT / link[1:]).symlink_to(Path(link).readlink())
    (_ROOT / "proc").mkdir()
    _mount("proc", _ROOT / "proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    _mount("none", _ROOT, None, _BIND | _REMOUNT | _RDONLY | _NOSUID | _NODEV)
    os.chdir(_ROOT)
    _checked(_libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), "a root of its own")
    _checked(_libc.umount2(b".", _DETACH), "leaving the former root")
    os.chdir("/")


def _mount(source: str, target: str | Path, kind: str | None, flags: int, options: str = "") -> None:
    _checked(
        _libc.mount(
            source.encode(),
            str(target).encode(),
            kind.encode() if kind else None,
            ctypes.c_ulong(flags),
            options.encode() or None,
        ),
        f"mounting {target}",
    )


def _close_all_but(descriptors: Collection[int]) -> None:
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names that are numbers
        if int(name) not in descriptors:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _checked(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        name = errno.errorcode.get(number, number)
        raise OSError(number, f"cannot confine the process that serves tenants: {what}: {name}; run the agent as root")
