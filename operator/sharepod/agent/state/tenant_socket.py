"""Listening socket of a tenant: its file, and the identity of the file, which shows a replacement. No slow imports,
because the first process of a container listens before it imports the rest."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from . import files

FILE = "agent.sock"
"""Name of the socket in the tenant's directory."""
_TENANT_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
"""Pattern of tenant ids that are safe as the name of a directory."""
_NAME_MAX = 107
"""Most bytes of the path of a Unix socket."""
_BACKLOG = 128
"""Connections that may wait to be accepted: processes of one pod that start at the same moment."""


def serves(tenant_id: str) -> bool:
    """Return whether `tenant_id` can be the name of a directory."""
    return _TENANT_ID.match(tenant_id) is not None


def listen(directory: Path) -> tuple[socket.socket, str]:
    """Return a listening socket that any user in the tenant's containers can connect to, and its identity.

    The socket replaces an earlier one in the tenant's directory. Raise `OSError`.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        with _named_by_tenant(directory) as folder, files.replacing(folder / FILE) as fresh:
            listener.bind(str(fresh))
            fresh.chmod(0o666)
            listener.listen(_BACKLOG)
        return listener, identity(directory / FILE)
    except OSError:
        listener.close()
        raise


@contextlib.contextmanager
def _named_by_tenant(directory: Path) -> Iterator[Path]:
    """Yield a path of the directory that is short enough for a socket, and different for each tenant: the privileged
    process finds the tenant of a connection by the socket's path. Only with an id of more than some 70 characters, the
    path does not contain the id."""
    with files.short_path(directory.parent) as parent:
        folder = parent / directory.name
        if len(os.fsencode(folder / f".{FILE}.new")) <= _NAME_MAX:
            yield folder
            return
    with files.short_path(directory) as folder:
        yield folder


def identity(path: Path) -> str:
    """Return device and inode of a file as text. Raise `OSError`."""
    status = path.stat(follow_symlinks=False)
    return f"{status.st_dev}:{status.st_ino}"


def kept_name(tenant_id: str) -> str:
    """Return the name under which the supervisor keeps a tenant's socket."""
    return f"socket {tenant_id}"
