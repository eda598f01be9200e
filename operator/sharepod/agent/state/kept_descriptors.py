"""Kept descriptors: open files that survive a kill of the agent, because its supervisor holds copies.

A listening socket cannot be created again where the state directory is read-only, and memory without a file is lost
with its process. The supervisor holds copies of both for the next agent, which inherits them by fork.

Guarantees:
- The supervisor only keeps descriptors open: it reads no content, and waits only for its child and the child's
  messages.
- A name has one descriptor. A new descriptor replaces the former one.
- Without a supervisor nothing is kept, and nothing else differs.
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
"""Bytes of a message: a name and a mark, each far shorter."""
_Message = TypeAdapter(dict[str, str], config=ConfigDict(strict=True))
_SEND_S = 1.0
"""Seconds that a message may wait for the supervisor, which has no other work."""


@dataclass(frozen=True)
class KeptDescriptor:
    """Descriptor with a mark by its owner."""

    fd: int
    mark: str


class KeptDescriptors:
    """Agent's side: descriptors of the previous agent, and the socket by which descriptors are kept. Any thread may
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
        """Let the supervisor keep a copy of `fd` under `name`, instead of an earlier descriptor. `mark`: text that is
        returned with it.
        """
        self._forget(name)
        self._send(_kept_message(name, mark), [fd])

    def take(self, name: str) -> KeptDescriptor | None:
        """Return the previous agent's descriptor under `name`; the caller owns it. A second call returns None. The
        supervisor still keeps its copy.
        """
        return self._found.pop(name, None)

    def there(self, name: str) -> KeptDescriptor | None:
        """Return the previous agent's descriptor under `name`, without taking it."""
        return self._found.get(name)

    def drop(self, name: str) -> None:
        """Drop the descriptor under `name`."""
        self._forget(name)
        self._send({"drop": name})

    def drop_all_but(self, names: Collection[str]) -> None:
        """Drop every inherited descriptor that has not been taken, except those in `names`."""
        for name in self._found.keys() - set(names):
            self.drop(name)

    def adopt(self, name: str, found: KeptDescriptor) -> None:
        """Add a descriptor that another agent passed on to the inherited ones. Owns the descriptor."""
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
        except OSError as error:  # the supervisor has exited, and this process will exit too
            log.warning("the supervisor does not answer", error=str(error), **message)


NOTHING_KEPT = KeptDescriptors()
"""Descriptors of an agent without a supervisor: none."""


class DescriptorShelf:
    """Supervisor's side: the descriptors by name, at first `held`. Call `connect` before each fork."""

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
        self._childs.close()  # the child then has the only copy, so its exit ends the messages
        return self._ours

    def messages(self) -> socket.socket:
        """Return the socket that is readable when a message has arrived."""
        assert self._ours is not None
        return self._ours

    def take_in(self) -> bool:
        """Handle all messages that have arrived. Return False at the end of the messages."""
        assert self._ours is not None
        return take_in(self._ours, self._follow)

    def close(self) -> None:
        """Close the socket for messages. Held descriptors stay."""
        for end in (self._ours, self._childs):
            if end is not None:
                end.close()
        self._ours = self._childs = None

    def _follow(self, message: Mapping[str, str], descriptors: Collection[int]) -> None:
        name = message.get("keep") or message["drop"]
        before = self._held.pop(name, None)
        if before is not None:
            os.close(before.fd)
        for fd in descriptors:  # `descriptors` is empty if this process has no free descriptor
            os.set_inheritable(fd, False)
            self._held[name] = KeptDescriptor(fd, message["mark"])


def take_in(way: socket.socket, follow: Callable[[Mapping[str, str], Collection[int]], None]) -> bool:
    """Handle all messages that have arrived. Return False at the end of the messages. Raise `ValueError` for an invalid
    one."""
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
    """Send a copy of a descriptor, for `take_in` at the other end. Raise `OSError`."""
    _send(way, _kept_message(name, kept.mark), [kept.fd])


def _send(way: socket.socket, message: Mapping[str, str], descriptors: Collection[int]) -> None:
    socket.send_fds(way, [json.dumps(message).encode()], list(descriptors))


def _kept_message(name: str, mark: str) -> dict[str, str]:
    return {"keep": name, "mark": mark}
