"""The agent's state directory: one directory per tenant, which its pod gets as a volume, and the installed hooks, named
by their hash.

    hooks/<sha256>.so
    tenants/<tenant-id>/{agent.sock, limits, libsharepod.so, ld.so.preload}, and `fail-open` if that is set;
    `.earlier-<n>.so`: hooks of earlier agents, with which processes of the tenant may have started
    handover/<tenant-id>: the tenant's state for the next agent, which no pod sees
    self-test/{libsharepod.so, ld.so.preload}: what the Pod of the self-test mounts instead of a tenant's directory

Guarantees:
- A file that a running pod may read changes only by rename.
- A tenant's directory is created once and stays the same directory until it is removed, because mounts of it pin the
  inode.
- A hook is removed only when no tenant's directory links to it.
- A listening socket that a killed agent has left is used only if the socket file in the tenant's directory is still its
  own.

No file here is flushed to disk: after a restart of the node the agent writes all of them again from the ledger, before
containers get their volumes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import socket
from collections.abc import Collection, Sequence
from pathlib import Path

import structlog

from sharepod.api.objects import HOOK_FILE, PRELOAD_FILE, VOLUME_MOUNT_PATH

from . import files, tenant_socket
from .handover import Handover, Inheritance
from .kept_descriptors import NOTHING_KEPT, KeptDescriptor, KeptDescriptors
from .tenant_files import FilesWanted, TenantFiles

log = structlog.get_logger(__name__)

SELF_TEST = "self-test"
"""Directory of the self-test."""
SOCKET_FILE = tenant_socket.FILE
LIMITS_FILE = "limits"
FAIL_OPEN_FILE = "fail-open"
_EARLIER_HOOK = ".earlier-{}.so"
_PRELOAD = f"{VOLUME_MOUNT_PATH}/{HOOK_FILE}\n".encode()


class StateDirError(Exception):
    """Error for a state directory or hook that cannot be used. The message has the remedy."""


class StateDir:
    """State directory at `root`. Its methods do I/O: call them from a thread, one at a time."""

    def __init__(
        self, root: Path, hook: Path, *, fail_open: bool = False, kept: KeptDescriptors = NOTHING_KEPT
    ) -> None:
        """Args:
        root: The directory.
        hook: Shared object of the hook, as installed with the agent.
        fail_open: True if pods run without limits when they cannot reach an agent.
        kept: Descriptors that survive a kill of this agent."""
        self._hooks = root / "hooks"
        self._tenants = root / "tenants"
        self._handovers = root / "handover"
        self._hook = hook
        self._fail_open = fail_open
        self._installed: Path | None = None
        self._kept = kept
        self._heard: dict[str, tuple[int, str]] = {}
        """For each tenant with a listening socket: (its descriptor, the identity of its file)."""

    @staticmethod
    def serves(tenant_id: str) -> bool:
        """Return whether `tenant_id` can be the name of a directory."""
        return tenant_socket.serves(tenant_id)

    def prepare(self) -> str:
        """Create the directories, install the hook and remove unused hooks. Return the hook's SHA-256.

        Raise `StateDirError`.
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
                _allow(directory)
        except OSError as error:
            raise StateDirError(f"cannot use the state directory {self._hooks.parent}: {error}") from None
        try:
            self._install(content, digest)
        except OSError as error:
            log.error(
                "the state directory takes no files; tenants with a directory are served with the hook that they have",
                state_dir=str(self._hooks.parent),
                error=str(error),
            )
        return digest

    def _install(self, content: bytes, digest: str) -> None:
        installed = self._hooks / f"{digest}.so"
        if not self._intact(installed, digest):
            files.replace(installed, content, mode=0o755, durable=False)
        self._installed = installed
        self._complete_self_test(self._hooks.parent / SELF_TEST)
        for old in self._hooks.glob("*.so"):
            if old != installed and old.stat().st_nlink == 1:
                old.unlink()
        present = self.existing()
        for left in self._handovers.glob("*"):
            if left.name not in present:
                left.unlink()

    def _complete_self_test(self, directory: Path) -> None:
        directory.mkdir(mode=0o755, exist_ok=True)
        _allow(directory)
        self._link_hook(directory / HOOK_FILE)
        for earlier in directory.glob(_EARLIER_HOOK.format("*")):
            earlier.unlink()  # not needed: the self-test accepts any hook file
        _write_once(directory / PRELOAD_FILE, _PRELOAD)

    def create(self, tenant_id: str, limits: str | None) -> Path:
        """Create or complete the tenant's directory; return its path.

        Args:
            tenant_id: names the directory.
            limits: content of the limits file; None for an Exclusive tenant, which gets no hook.
        """
        directory = self.path(tenant_id)
        directory.mkdir(mode=0o755, exist_ok=True)
        _allow(directory)
        if limits is None:
            _write_once(directory / PRELOAD_FILE, b"")
            return directory
        self._link_hook(directory / HOOK_FILE)
        self.write_limits(tenant_id, limits)
        if self._fail_open:
            _write_once(directory / FAIL_OPEN_FILE, b"")
        elif (directory / FAIL_OPEN_FILE).exists():
            (directory / FAIL_OPEN_FILE).unlink(missing_ok=True)
        _write_once(directory / PRELOAD_FILE, _PRELOAD)
        return directory

    def complete(self, tenant_id: str, limits: str | None) -> OSError | None:
        """Create or complete the tenant's directory, see `create`. If the disk cannot store a change but an earlier
        agent had completed the directory, return the error. Return None on success."""
        try:
            self.create(tenant_id, limits)
        except OSError as error:
            if not self._usable(tenant_id, limited=limits is not None):
                raise
            return error
        return None

    def open_all(self, wanted: Sequence[FilesWanted]) -> list[TenantFiles | OSError]:
        """Complete the directories of shared tenants and open their files. Return files or errors in the same order."""
        return [self._open_or_error(each) for each in wanted]

    def _open_or_error(self, wanted: FilesWanted) -> TenantFiles | OSError:
        try:
            unwritten = self.complete(wanted.tenant_id, wanted.limits)
            handover, left = self.open_handover(wanted.tenant_id, wanted.gpus, wanted.slots)
        except OSError as error:
            return error
        try:
            return TenantFiles(handover, left, self.listen(wanted.tenant_id), unwritten)
        except OSError as error:
            handover.close()
            return error

    def write_limits(self, tenant_id: str, limits: str) -> None:
        """Replace the limits file. The hook obeys it while no agent runs."""
        _write_once(self.path(tenant_id) / LIMITS_FILE, limits.encode())

    def _usable(self, tenant_id: str, *, limited: bool) -> bool:
        """Return whether the tenant's directory was complete before. `limited`: True if it must contain limits and the
        hook."""
        needed = (PRELOAD_FILE, HOOK_FILE, LIMITS_FILE) if limited else (PRELOAD_FILE,)
        return all((self.path(tenant_id) / name).exists() for name in needed)

    def listen(self, tenant_id: str) -> socket.socket:
        """Return a listening socket that any user in the tenant's containers can connect to.

        The socket replaces an earlier agent's. Raise `OSError`.
        """
        listener, identity = tenant_socket.listen(self.path(tenant_id))
        self._heard[tenant_id] = (
            listener.fileno(),
            identity,
        )  # before `keep`, so that `heirlooms` always contains the tenant's socket
        self._kept.keep(tenant_socket.kept_name(tenant_id), listener.fileno(), identity)
        return listener

    def inherit(self, tenant_id: str) -> socket.socket | None:
        """Return the tenant's listening socket that a killed agent has left, for use if the directory takes no new one.
        None if the directory contains another socket. Throughout, `heirlooms` contains the socket, so that a
        terminating agent can pass it on."""
        name = tenant_socket.kept_name(tenant_id)
        kept = self._kept.there(name)
        if kept is None:
            return None
        try:
            same = kept.mark == tenant_socket.identity(self._socket(tenant_id))
        except OSError:
            same = False
        if same:
            self._heard[tenant_id] = (kept.fd, kept.mark)
        self._kept.take(name)
        listener = socket.socket(fileno=kept.fd)
        if not same:
            listener.close()
            return None
        listener.setblocking(False)
        return listener

    def unheard(self, tenant_id: str) -> None:
        """Let the supervisor drop its copy of the tenant's listening socket."""
        self._heard.pop(tenant_id, None)
        self._kept.drop(tenant_socket.kept_name(tenant_id))

    def unheard_all_but(self, tenant_ids: Collection[str]) -> None:
        """Drop all descriptors that a killed agent has left, except these tenants'."""
        names = (tenant_socket.kept_name, _handover_name)
        self._kept.drop_all_but({name(each) for each in tenant_ids for name in names})

    def heirlooms(self) -> dict[str, KeptDescriptor]:
        """Return the descriptors to pass on, by name: listening sockets, and unused descriptors of a killed agent."""
        heard = self._heard.items()
        return self._kept.untaken() | {tenant_socket.kept_name(each): KeptDescriptor(*found) for each, found in heard}

    def open_handover(self, tenant_id: str, gpus: Sequence[str], slots: int) -> tuple[Handover, Inheritance]:
        """Open the tenant's handover file, see `Handover.open`."""
        return Handover.open(self.handover(tenant_id), gpus, slots, kept=self._kept, name=_handover_name(tenant_id))

    def make_handover(self, tenant_id: str, gpus: Sequence[str], slots: int) -> tuple[int, int, Inheritance]:
        """Create the tenant's handover file, see `Handover.made`."""
        return Handover.made(self.handover(tenant_id), gpus, slots, kept=self._kept, name=_handover_name(tenant_id))

    def heard(self, tenant_id: str, listener: socket.socket) -> bool:
        """Return whether clients that connect at the tenant's directory reach `listener`. False: the file was
        replaced."""
        try:
            there = tenant_socket.identity(self._socket(tenant_id))
        except OSError:
            return False
        return self._heard.get(tenant_id) == (listener.fileno(), there)

    def shut(self, tenant_id: str) -> None:
        """Remove socket and limits, so that no new process of the tenant starts. The directory and its mounts stay."""
        self._kept.drop(_handover_name(tenant_id))
        for name in (FAIL_OPEN_FILE, SOCKET_FILE, LIMITS_FILE):
            (self.path(tenant_id) / name).unlink(missing_ok=True)
        self.handover(tenant_id).unlink(missing_ok=True)

    def remove(self, tenant_id: str) -> None:
        """Remove the tenant's directory, and its hook if no other tenant's directory links to it."""
        self._kept.drop(_handover_name(tenant_id))
        self.handover(tenant_id).unlink(missing_ok=True)
        shutil.rmtree(self.path(tenant_id), ignore_errors=False)
        for hook in self._hooks.glob("*.so"):
            with contextlib.suppress(FileNotFoundError):
                if hook != self._installed and hook.stat().st_nlink == 1:
                    hook.unlink()

    def existing(self) -> tuple[str, ...]:
        """Return the ids of the tenants that have a directory, sorted."""
        return tuple(sorted(path.name for path in self._tenants.iterdir() if path.is_dir() and self.serves(path.name)))

    def path(self, tenant_id: str) -> Path:
        """Return the path of a tenant's directory, which need not exist."""
        assert self.serves(tenant_id), f"{tenant_id!r} is not a name"
        return self._tenants / tenant_id

    def handover(self, tenant_id: str) -> Path:
        """Return the path of a tenant's handover file, which need not exist."""
        assert self.serves(tenant_id), f"{tenant_id!r} is not a name"
        return self._handovers / tenant_id

    def _socket(self, tenant_id: str) -> Path:
        return self.path(tenant_id) / SOCKET_FILE

    def _link_hook(self, target: Path) -> None:
        if self._installed is None:
            raise OSError(errno.ENOSPC, "the state directory did not take the hook", str(self._hooks))
        with contextlib.suppress(FileNotFoundError):
            if target.samefile(self._installed):
                return
            earlier = target.with_name(_EARLIER_HOOK.format(target.stat().st_ino))
            with contextlib.suppress(FileExistsError):
                os.link(target, earlier)
        with files.replacing(target) as fresh:
            os.link(self._installed, fresh)

    @staticmethod
    def _intact(path: Path, digest: str) -> bool:
        try:
            return hashlib.sha256(path.read_bytes()).hexdigest() == digest
        except OSError:
            return False


def hook_files(directory: Path) -> tuple[Path, ...]:
    """Return the hooks with which processes of a tenant may have started: the present one and earlier ones; none if the
    directory does not exist."""
    present = directory / HOOK_FILE
    return (*([present] if present.exists() else ()), *directory.glob(_EARLIER_HOOK.format("*")))


def _handover_name(tenant_id: str) -> str:
    return f"handover {tenant_id}"


def _allow(directory: Path) -> None:
    """Let every user enter the directory. Its mode is changed only if needed, because a read-only disk refuses the
    change."""
    if directory.stat().st_mode & 0o777 != 0o755:
        directory.chmod(0o755)


def _write_once(target: Path, content: bytes) -> None:
    """Replace the file, unless it already has this content. A container that has mounted the file would keep the old
    inode."""
    try:
        if target.read_bytes() == content:
            return
    except OSError:
        pass
    files.replace(target, content, durable=False)
