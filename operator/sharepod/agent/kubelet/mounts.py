"""Bind mounts of a directory into a pod, by mount(2), umount2(2) and /proc/self/mountinfo.

Guarantees:
- A mount is read-only in every mount namespace that it reaches.
- All functions are idempotent and keep no state.
- Leftovers of a process killed between two calls are removed by the next `bind_readonly` or by `sweep`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MOUNTINFO = Path("/proc/self/mountinfo")

# Constants of <linux/mount.h>
_MS_RDONLY = 1
_MS_NOSUID = 2
_MS_NODEV = 4
_MS_REMOUNT = 32
_MS_BIND = 4096
_MS_PRIVATE = 1 << 18
_MNT_DETACH = 2
_UMOUNT_NOFOLLOW = 8

_STACKED_MAX = 32
"""Most mounts on one point that `unmount` removes. Far more than retries of the kubelet stack."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_void_p)
_libc.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)


@dataclass(frozen=True, slots=True)
class Mount:
    """Mount, as a line of /proc/self/mountinfo describes it."""

    root: str
    """Path of the mounted directory within its filesystem."""
    point: Path
    """Path of the mount point."""
    options: frozenset[str]
    shared: bool
    """True if mounts below this mount propagate to other mount namespaces."""
    device: str = ""
    """Device number of the filesystem, as `major:minor`."""
    id: str = ""
    """Linux' number of the mount, unique among existing mounts."""

    @property
    def readonly(self) -> bool:
        return "ro" in self.options


def parse_mountinfo(lines: Iterable[str]) -> tuple[Mount, ...]:
    """Parse the lines of a mountinfo (proc_pid_mountinfo(5)), in their order. If one point has several mounts, the last
    of them covers the others."""
    found = []
    for line in lines:
        fields = line.rstrip("\n").split(" ")
        if len(fields) < 7:
            continue
        optional = fields[6 : fields.index("-", 6)] if "-" in fields[6:] else []
        found.append(
            Mount(
                root=_unescape(fields[3]),
                point=Path(_unescape(fields[4])),
                options=frozenset(fields[5].split(",")),
                shared=any(field.startswith("shared:") for field in optional),
                device=fields[2],
                id=fields[0],
            )
        )
    return tuple(found)


def _unescape(text: str) -> str:
    """Decode octal escapes, which mountinfo uses for space, tab, newline and backslash."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)


def escaped(path: str) -> str:
    """Return a path as mountinfo writes it."""
    return re.sub(r"[ \t\n\\]", lambda match: f"\\{ord(match.group()):03o}", path)


def mounts() -> tuple[Mount, ...]:
    """Return all mounts of this process's mount namespace."""
    with MOUNTINFO.open(encoding="utf-8", errors="surrogateescape") as lines:
        return parse_mountinfo(lines)


def mounted_at(point: Path) -> Mount | None:
    """Return the topmost mount at exactly this path; None if there is none."""
    real = _real(point)
    return next((mount for mount in reversed(mounts()) if mount.point == real), None)


def mount_of(path: Path) -> Mount | None:
    """Return the mount that `path` lies on; None if none is listed."""
    real = path.resolve()
    on_path = [mount for mount in mounts() if mount.point == real or mount.point in real.parents]
    return max(reversed(on_path), key=lambda mount: len(mount.point.parts), default=None)


def _real(point: Path) -> Path:
    """Return the path as mountinfo lists a mount point: symbolic links resolved, except one as the last name."""
    return point.parent.resolve() / point.name


def is_bound_readonly(source: Path, target: Path) -> bool:
    """Return whether the directory `source` is mounted read-only at `target`. Raise `OSError`."""
    present = mounted_at(target)
    return present is not None and present.readonly and os.path.samestat(source.stat(), target.stat())


def bind_readonly(source: Path, target: Path, staging: Path) -> None:
    """Mount the directory `source` read-only at `target`, which is created; unmount anything else there.

    If a mount is made read-only after it has propagated, it stays writable in the namespaces that it has reached. The
    mount is therefore made read-only at `staging`, a private path of the agent, and cloned from there to `target`. The
    clone keeps the flags, and only the clone propagates.

    Raise `OSError`.
    """
    if is_bound_readonly(source, target):
        return
    unmount(target)
    target.mkdir(mode=0o750, parents=True, exist_ok=True)
    unmount(staging)
    staging.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        _mount(source, staging, _MS_BIND)
        _mount(None, staging, _MS_PRIVATE)
        _mount(None, staging, _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
        _mount(staging, target, _MS_BIND)
    finally:
        unmount(staging)
        with contextlib.suppress(OSError):
            staging.rmdir()


def unmount(target: Path) -> None:
    """Unmount all mounts at `target`. A mount in use is hidden at once, and ends with its last user. Raise
    `OSError`."""
    for _ in range(_STACKED_MAX):
        if mounted_at(target) is None:
            return
        if _libc.umount2(os.fsencode(target), _MNT_DETACH | _UMOUNT_NOFOLLOW) != 0:
            number = ctypes.get_errno()
            if number in (errno.EINVAL, errno.ENOENT):  # unmounted since it was listed
                continue
            raise OSError(number, f"cannot unmount: {os.strerror(number)}", str(target))
    raise OSError(errno.EBUSY, f"more than {_STACKED_MAX} mounts on top of each other", str(target))


def sweep(folder: Path) -> None:
    """Remove the staging mounts and folders in `folder` that a killed process has left."""
    if not folder.is_dir():
        return
    for left in folder.iterdir():
        unmount(left)
        with contextlib.suppress(OSError):
            left.rmdir()


def _mount(source: Path | None, target: Path, flags: int) -> None:
    if _libc.mount(os.fsencode(source) if source else None, os.fsencode(target), None, flags, None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot mount: {os.strerror(number)}", str(target))
