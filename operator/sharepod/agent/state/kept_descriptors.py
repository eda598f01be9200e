"""Kept descriptors: open files that survive a kill of the agent, because its supervisor holds copies.

A listening socket cannot be created again where the state directory is read-only, and an in-memory file is lost with
its process. The supervisor holds copies of both for the next agent, which inherits them by fork.

Guarantees:
- The supervisor only keeps descriptors open: it reads no content, and waits only for its child and the child's
  messages.
- A name has one descriptor. A new descriptor replaces the former one.
- Without a supervisor no descriptor is kept, and all else works the same.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import structlog
from pydantic import ConfigDict, TypeAdapter

log = structlog.get_logger(__name__)

_MESSAGE_MAX = 1024
"""Most bytes of a message. It has a name and a mark, which are far shorter."""
_Message = TypeAdapter(dict[str, str], config=ConfigDict(strict=True))
_SEND_S = 1.0
"""Seconds that sending a message may wait for the supervisor, which does nothing else."""


@dataclass(frozen=True)
class KeptDescriptor:
    """Descriptor with a mark, a text by which its owner recognizes what it belongs to."""

    fd: int
    mark: str


class KeptDescriptors:
    """Agent's side: the inherited descriptors of the previous agent, and the socket to the supervisor. Any thread may
    call it.

    Args:
        found: Descriptors of the previous agent, by name.
        supervisor: Socket to the supervisor; None without one.
    """

    def __init__(
        self, found: Mapping[str, KeptDescriptor] | None = None, supervisor: socket.socket | None = None
    ) -> None:
        self._found = dict(found or {})
        self._supervisor = supervisor

    def keep(self, name: str, fd: int, mark: str = "") -> None:
        """Let the supervisor keep a copy of `fd` under `name`, in place of an earlier descriptor of that name. `mark`:
        text that the next agent gets with it."""
        self._forget(name)
        self._send(_kept_message(name, mark), [fd])

    def take(self, name: str) -> KeptDescriptor | None:
        """Return the inherited descriptor `name`; the caller then owns it, and a second call returns None. The
        supervisor still keeps its copy."""
        return self._found.pop(name, None)

    def there(self, name: str) -> KeptDescriptor | None:
        """Return the inherited descriptor `name` without taking it; None if there is none."""
        return self._found.get(name)

    def drop(self, name: str) -> None:
        """Close the inherited descriptor `name`, and let the supervisor drop its copy."""
        self._forget(name)
        self._send({"drop": name})

    def drop_all_but(self, names: Collection[str]) -> None:
        """Drop every inherited descriptor that has not been taken, except those in `names`."""
        for name in self._found.keys() - set(names):
            self.drop(name)

    def adopt(self, name: str, found: KeptDescriptor) -> None:
        """Add a descriptor that another agent has passed on to the inherited ones. This object then owns it."""
        self.keep(name, found.fd, found.mark)
        self._found[name] = found

    def untaken(self) -> dict[str, KeptDescriptor]:
        """Return the inherited descriptors that have not been taken."""
        return dict(self._found)

    def close(self) -> None:
        """Send no more messages. Kept descriptors stay."""
        if self._supervisor is not None:
            self._supervisor.close()
            self._supervisor = None

    def _forget(self, name: str) -> None:
        found = self._found.pop(name, None)
        if found is not None:
            os.close(found.fd)

    def _send(self, message: Mapping[str, str], descriptors: Collection[int] = ()) -> None:
        if self._supervisor is None:
            return
        try:
            _send(self._supervisor, message, descriptors)
        except OSError as error:  # the supervisor has exited; this process will exit too
            log.warning("the supervisor does not answer", error=str(error), **message)


NOTHING_KEPT = KeptDescriptors()
"""For an agent without a supervisor: keeps no descriptor."""


class DescriptorShelf:
    """Supervisor's side: the kept descriptors by name. `held`: those to begin with. Call `connect` before each fork."""

    def __init__(self, held: Mapping[str, KeptDescriptor] | None = None) -> None:
        self._held = dict(held or {})
        self._ours: socket.socket | None = None
        self._childs: socket.socket | None = None

    def connect(self) -> KeptDescriptors:
        """Create a new socket for messages; return the next agent's side."""
        self.close()
        self._ours, self._childs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self._childs.settimeout(_SEND_S)
        return KeptDescriptors(self._held, self._childs)

    def in_child(self) -> None:
        """Close the parent's descriptors. Called in the child, after the fork."""
        assert self._ours is not None
        self._ours.close()

    def in_parent(self) -> socket.socket:
        """Close the child's descriptors. Return the socket that is readable when a message has arrived. Called after
        the fork.
        """
        assert self._ours is not None
        assert self._childs is not None
        self._childs.close()  # the child then has the only copy, so this socket reports its exit
        return self._ours

    def messages(self) -> socket.socket:
        """Return the socket that is readable when a message has arrived."""
        assert self._ours is not None
        return self._ours

    def take_in(self) -> bool:
        """Handle all messages that have arrived. Return False once the child has closed its end."""
        assert self._ours is not None
        return take_in(self._ours, self._follow)

    def close(self) -> None:
        """Close the socket for messages. The supervisor still holds the descriptors."""
        for end in (self._ours, self._childs):
            if end is not None:
                end.close()
        self._ours = self._childs = None

    def _follow(self, message: Mapping[str, str], descriptors: Collection[int]) -> None:
        name = message.get("keep") or message["drop"]
        before = self._held.pop(name, None)
        if before is not None:
            os.close(before.fd)
        for fd in descriptors:  # `descriptors` is empty if this process had no free descriptor to receive one
            os.set_inheritable(fd, False)
            self._held[name] = KeptDescriptor(fd, message["mark"])


def take_in(way: socket.socket, follow: Callable[[Mapping[str, str], Collection[int]], None]) -> bool:
    """Handle all messages that have arrived at `way`, by `follow`. Return False at their end. Raise `ValueError` for an
    invalid message."""
    while True:
        try:
            packet, descriptors, _flags, _address = socket.recv_fds(way, _MESSAGE_MAX, 1)
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        if not packet:
            return False
        try:
            message = _Message.validate_json(packet)
        except ValueError:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        follow(message, descriptors)


def send_kept(way: socket.socket, name: str, kept: KeptDescriptor) -> None:
    """Send a copy of a descriptor over the socket `way`, for `take_in` at the other end. Raise `OSError`."""
    _send(way, _kept_message(name, kept.mark), [kept.fd])


def _send(way: socket.socket, message: Mapping[str, str], descriptors: Collection[int]) -> None:
    socket.send_fds(way, [json.dumps(message).encode()], list(descriptors))


def _kept_message(name: str, mark: str) -> dict[str, str]:
    return {"keep": name, "mark": mark}
