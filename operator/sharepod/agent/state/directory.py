"""The state directory: hooks by content, and one directory per tenant that its pod gets as a volume.

Guarantees: a file that a running pod may look at changes only by rename; a tenant's directory is made once and lives
until it is removed, because mounts pin it; a hook is removed only when no tenant's directory has it.

    hooks/<sha256>.so
    tenants/<tenant-id>/{agent.sock, limits, libsharepod.so, ld.so.preload}, and `fail-open` where that is set
    handover/<tenant-id>, which no pod sees
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from sharepod.api.objects import HOOK_FILE, PRELOAD_FILE, VOLUME_MOUNT_PATH

SOCKET_FILE = "agent.sock"
LIMITS_FILE = "limits"
FAIL_OPEN_FILE = "fail-open"
_TENANT_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
_BACKLOG = 128


class StateDirError(Exception):
    """The state directory or the hook cannot be used. The message says what would help."""


class StateDir:
    """All methods are quick but do I/O: call them from a thread. One caller at a time."""

    def __init__(self, root: Path, hook: Path, *, fail_open: bool = False) -> None:
        self._hooks = root / "hooks"
        self._tenants = root / "tenants"
        self._handovers = root / "handover"
        self._hook = hook
        self._fail_open = fail_open
        self._installed: Path | None = None

    @staticmethod
    def serves(tenant_id: str) -> bool:
        """Whether this id can be the name of a directory."""
        return _TENANT_ID.match(tenant_id) is not None

    def prepare(self) -> str:
        """Makes the directories, puts the hook in place, and drops hooks that nobody has. Returns the hook's hash.

        Raises `StateDirError`.
        """
        try:
            content = self._hook.read_bytes()
        except OSError as error:
            raise StateDirError(
                f"cannot read the hook {self._hook}: {error.strerror}; build it with `make shim`, or set hook_file"
            ) from None
        digest = hashlib.sha256(content).hexdigest()
        try:
            for directory in (self._hooks, self._tenants):
                directory.mkdir(parents=True, exist_ok=True)
                directory.chmod(0o755)
            self._installed = self._hooks / f"{digest}.so"
            if not self._intact(self._installed, digest):
                _replace(self._installed, content, 0o755)
            for old in self._hooks.glob("*.so"):
                if old != self._installed and old.stat().st_nlink == 1:
                    old.unlink()
            present = self.existing()
            for left in self._handovers.glob("*"):
                if left.name not in present:
                    left.unlink()
        except OSError as error:
            raise StateDirError(f"cannot use the state directory {self._hooks.parent}: {error}") from None
        return digest

    def create(self, tenant_id: str, limits: str | None) -> Path:
        """The tenant's directory, made if it is not there, with the present hook; without one where `limits` is
        None."""
        directory = self.path(tenant_id)
        directory.mkdir(mode=0o755, exist_ok=True)
        directory.chmod(0o755)
        if limits is None:
            _write_once(directory / PRELOAD_FILE, b"")
            return directory
        self._link_hook(directory / HOOK_FILE)
        self.write_limits(tenant_id, limits)
        if self._fail_open:
            _write_once(directory / FAIL_OPEN_FILE, b"")
        else:
            (directory / FAIL_OPEN_FILE).unlink(missing_ok=True)
        _write_once(directory / PRELOAD_FILE, f"{VOLUME_MOUNT_PATH}/{HOOK_FILE}\n".encode())
        return directory

    def write_limits(self, tenant_id: str, limits: str) -> None:
        """Replaces the file by which the hook goes while there is no agent."""
        _replace(self.path(tenant_id) / LIMITS_FILE, limits.encode(), 0o644)

    def listen(self, tenant_id: str) -> socket.socket:
        """A socket that anyone in the tenant's containers can connect to, in place of an earlier agent's."""
        fd = os.open(self.path(tenant_id), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            # By way of the descriptor: the name of a Unix socket ends at 107 bytes, a state directory's may not.
            there = Path(f"/proc/self/fd/{fd}")
            fresh = there / f".{SOCKET_FILE}.new"
            fresh.unlink(missing_ok=True)
            listener.bind(str(fresh))
            fresh.chmod(0o666)
            listener.listen(_BACKLOG)
            fresh.rename(there / SOCKET_FILE)
        except OSError:
            listener.close()
            raise
        finally:
            os.close(fd)
        return listener

    def shut(self, tenant_id: str) -> None:
        """Removes socket and limits: nothing more starts in the tenant's name. The directory and its mounts stay."""
        for name in (FAIL_OPEN_FILE, SOCKET_FILE, LIMITS_FILE):
            (self.path(tenant_id) / name).unlink(missing_ok=True)
        self.handover(tenant_id).unlink(missing_ok=True)

    def remove(self, tenant_id: str) -> None:
        """Removes the tenant's directory, and the hook if nobody else has it."""
        self.handover(tenant_id).unlink(missing_ok=True)
        shutil.rmtree(self.path(tenant_id), ignore_errors=False)
        for hook in self._hooks.glob("*.so"):
            with contextlib.suppress(FileNotFoundError):
                if hook != self._installed and hook.stat().st_nlink == 1:
                    hook.unlink()

    def existing(self) -> tuple[str, ...]:
        """The tenants that have a directory."""
        return tuple(sorted(path.name for path in self._tenants.iterdir() if path.is_dir() and self.serves(path.name)))

    def path(self, tenant_id: str) -> Path:
        """Where a tenant's directory is or would be."""
        assert self.serves(tenant_id), f"{tenant_id!r} is not a name"
        return self._tenants / tenant_id

    def handover(self, tenant_id: str) -> Path:
        """What is left of the tenant to the next agent."""
        assert self.serves(tenant_id), f"{tenant_id!r} is not a name"
        return self._handovers / tenant_id

    def _link_hook(self, target: Path) -> None:
        assert self._installed is not None, "prepare comes first"
        with contextlib.suppress(FileNotFoundError):
            if target.samefile(self._installed):
                return
        with _fresh(target) as fresh:
            os.link(self._installed, fresh)

    @staticmethod
    def _intact(path: Path, digest: str) -> bool:
        try:
            return hashlib.sha256(path.read_bytes()).hexdigest() == digest
        except OSError:
            return False


@contextlib.contextmanager
def _fresh(target: Path) -> Iterator[Path]:
    """A name beside `target` whose file then replaces it."""
    fresh = target.with_name(f".{target.name}.new")
    fresh.unlink(missing_ok=True)
    try:
        yield fresh
        fresh.rename(target)
    finally:
        fresh.unlink(missing_ok=True)


def _replace(target: Path, content: bytes, mode: int) -> None:
    with _fresh(target) as fresh:
        fresh.write_bytes(content)
        fresh.chmod(mode)


def _write_once(target: Path, content: bytes) -> None:
    """Leaves a file alone that is right: mounts of it pin the inode."""
    try:
        if target.read_bytes() == content:
            return
    except OSError:
        pass
    _replace(target, content, 0o644)
