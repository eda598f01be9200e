"""Calls between the agent's two processes, with descriptors, over a private socket pair.

A frame is a header (size of the body, kind, number of descriptors, number of the call) and a body in JSON. Both
processes are forked from one program, so both have the same version.

Guarantees:
- Each call ends with an answer or an error: of the other process, of the link's end, or of its timeout. Frames are
  handled in the order of arrival.
- Input is validated before use. An invalid or oversized frame ends the link.
- At most `_ANSWERING_MAX` calls of the other process, and `_BYTES_MAX` bytes of calls or unread answers, are in memory.
  Further calls wait in the socket. If the other process does not read its answers, the link ends.
- A received descriptor that no handler takes is closed. If more descriptors arrive than the frames announce, the link
  ends.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import itertools
import os
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import structlog
from pydantic import TypeAdapter, ValidationError

from .outbox import Outbox, close_all

log = structlog.get_logger(__name__)

Argument = TypeVar("Argument")
Result = TypeVar("Result")

DESCRIPTORS_MAX = 64
"""Most descriptors of one frame; Linux' limit is 253."""
_BODY_MAX = 8 << 20
"""Most bytes of a body; a ledger of 256 rows has some 200 KB."""
SMALL = 1 << 16
"""Most bytes of a call's encoded body, unless the kind of call declares more."""
_BYTES_MAX = 16 << 20
_UNREAD_MAX = 64 << 20
"""Most bytes that may wait to be sent. Beyond this the link ends."""
_ANSWERING_MAX = 128
_READ = 1 << 16
"""Most bytes that are read before the loop runs other tasks: some 0.1 ms of parsing."""
_HEADER = struct.Struct("=IBBQ")
_CALL, _NOTICE, _ANSWER, _FAILED = range(4)


class LinkLostError(OSError):
    """Error of a call: the other process is not connected, or does not answer."""

    def __init__(self, text: str) -> None:
        super().__init__(errno.ENOTCONN, text)


class NoAnswerError(LinkLostError):
    """Error of a call: the other process is connected, but does not answer in time."""


@dataclass(frozen=True)
class Call(Generic[Argument, Result]):
    """Kind of call: its name, and the types of its argument and result."""

    name: str
    argument: TypeAdapter[Argument]
    result: TypeAdapter[Result]
    body_max: int = SMALL
    """Most bytes of the encoded call."""


@dataclass(frozen=True)
class Failure:
    """Error of a call, in the form in which it is sent."""

    kind: str
    text: str
    errno: int | None = None
    filename: str | None = None


_FAILURE = TypeAdapter(Failure)
Answerer = Callable[[Any, list[int]], Awaitable[tuple[Any, Sequence[int]]]]
"""Handler of a call: takes the argument and descriptors, which it then owns. It returns the result and descriptors to
send, which are closed after sending."""
Taker = Callable[[Any], None]
"""Handler of a notice (a message without answer); it runs at once."""


@dataclass(frozen=True)
class PartService:
    """Handlers that one process offers to the other, by the name of the call or notice."""

    answers: Mapping[str, tuple[Call[Any, Any], Answerer]]
    takes: Mapping[str, tuple[Call[Any, Any], Taker]]
    errors: Mapping[str, type[Exception]]
    """Errors that arrive with their type, by name; so does `OSError`. Every other error arrives as `OSError`."""


class PartLink:
    """One socket to the other process, until either end closes it. Owns `sock`.

    Args:
        sock: Connected stream socket.
        service: What this process offers to the other.
        lost: Called once, when the socket has been closed.
    """

    def __init__(self, sock: socket.socket, service: PartService, lost: Callable[[], None]) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._service = service
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[tuple[bytes, list[int]]]] = {}
        self._answering: dict[asyncio.Task[None], int] = {}
        """Tasks that answer a call, with the size of that call's body in bytes."""
        self._read = bytearray()
        self._descriptors: deque[int] = deque()
        self._outbox = Outbox(sock, self.close, self._go_on)
        self._open = self._reading = True
        self._loop.add_reader(sock.fileno(), self._readable)

    async def call(
        self, call: Call[Argument, Result], argument: Argument, descriptors: Sequence[int], timeout_s: float
    ) -> tuple[Result, list[int]]:
        """Call the other process; return its result and its descriptors, which the caller owns.
        Raises `LinkLostError`, or the error that the other process raised."""
        number = next(self._numbers)
        answer: asyncio.Future[tuple[bytes, list[int]]] = self._loop.create_future()
        self._pending[number] = answer
        try:
            copies = [os.dup(descriptor) for descriptor in descriptors]
            self._send(_CALL, number, _named(call.name, call.argument.dump_json(argument, by_alias=True)), copies)
            async with asyncio.timeout(timeout_s):
                body, received = await answer
        except TimeoutError:
            raise NoAnswerError(f"no answer to {call.name} within {timeout_s:g} s") from None
        finally:
            self._pending.pop(number, None)
        try:
            return call.result.validate_json(body), received
        except ValidationError as error:
            close_all(received)
            raise LinkLostError(f"the answer to {call.name} is none: {error.error_count()} errors") from None

    def notify(self, call: Call[Argument, None], argument: Argument) -> None:
        """Send a notice, which gets no answer."""
        self._send(_NOTICE, 0, _named(call.name, call.argument.dump_json(argument, by_alias=True)), [])

    def close(self) -> None:
        """Close the socket. Pending calls fail."""
        if not self._open:
            return
        self._open = False
        if self._reading:
            self._loop.remove_reader(self._sock.fileno())
        self._outbox.close()
        self._sock.close()
        close_all(self._descriptors)
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(LinkLostError("the other process has gone"))
        self._lost()

    # ---- sending

    def _send(self, kind: int, number: int, body: bytes, descriptors: list[int]) -> None:
        """Send a frame, and close its descriptors."""
        if not self._open:
            close_all(descriptors)
            if kind == _CALL:
                raise LinkLostError("the other process has gone")
            return
        frame = _HEADER.pack(len(body), kind, len(descriptors), number) + body
        self._outbox.put(frame, descriptors, answer=kind in (_ANSWER, _FAILED))
        if self._outbox.waiting > _UNREAD_MAX:
            self._break_off("nothing: the other process does not read")

    # ---- receiving

    def _readable(self) -> None:
        try:
            data, ancillary, flags, _address = self._sock.recvmsg(
                _READ, socket.CMSG_SPACE(4 * DESCRIPTORS_MAX), socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data, ancillary, flags = b"", [], 0
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                received = array.array("i")
                received.frombytes(content[: len(content) // 4 * 4])
                self._descriptors.extend(received)
        if not data or flags & socket.MSG_CTRUNC:
            self.close()
            return
        self._read += data
        self._take_frames()
        if len(self._descriptors) > (2 * DESCRIPTORS_MAX if self._read else 0):
            self._break_off("descriptors of no frame")

    def _take_frames(self) -> None:
        while self._open and len(self._read) >= _HEADER.size:
            length, kind, count, number = _HEADER.unpack_from(self._read)
            if length > _BODY_MAX or kind > _FAILED or count > DESCRIPTORS_MAX:
                self._break_off("a frame that is none")
                return
            end = _HEADER.size + length
            if len(self._read) < end:
                return
            if len(self._descriptors) < count:
                self._break_off("a frame without its descriptors")
                return
            if kind == _CALL and self._busy():
                self._pause()
                return
            body = bytes(self._read[_HEADER.size : end])
            del self._read[:end]
            self._take(kind, number, body, [self._descriptors.popleft() for _ in range(count)])

    def _take(self, kind: int, number: int, body: bytes, descriptors: list[int]) -> None:
        if kind in (_ANSWER, _FAILED):
            answer = self._pending.get(number)
            if answer is None or answer.done():
                close_all(descriptors)
            elif kind == _ANSWER:
                answer.set_result((body, descriptors))
            else:
                close_all(descriptors)
                answer.set_exception(self._error(body))
            return
        name, _newline, content = body.partition(b"\n")
        table: Mapping[str, tuple[Call[Any, Any], Any]] = (
            self._service.takes if kind == _NOTICE else self._service.answers
        )
        known = table.get(name.decode(errors="replace"))
        try:
            if known is not None and len(content) > known[0].body_max:
                known = None
            argument = known[0].argument.validate_json(content) if known is not None else None
        except ValidationError:
            known = None
        if known is None:
            close_all(descriptors)
            self._break_off(f"a call that is none: {name[:40]!r}")
        elif kind == _NOTICE:
            close_all(descriptors)
            known[1](argument)
        else:
            task = self._loop.create_task(self._answer(number, *known, argument, descriptors), name=known[0].name)
            self._answering[task] = len(body)
            task.add_done_callback(self._answered)

    async def _answer(
        self, number: int, call: Call[Any, Any], answerer: Answerer, argument: Any, descriptors: list[int]
    ) -> None:
        try:
            result, passed_on = await answerer(argument, descriptors)
        except Exception as error:
            if not isinstance(error, (OSError, *self._service.errors.values())):
                log.exception("a call of the other process has failed", call=call.name)
            self._send(_FAILED, number, _FAILURE.dump_json(failure_of(error)), [])
        else:
            self._send(_ANSWER, number, call.result.dump_json(result, by_alias=True), list(passed_on))

    def _answered(self, task: asyncio.Task[None]) -> None:
        del self._answering[task]
        self._go_on()

    def _busy(self) -> bool:
        """Return True if no call may be read now, because too many are being answered or unread."""
        return (
            len(self._answering) + self._outbox.answers >= _ANSWERING_MAX
            or sum(self._answering.values()) + self._outbox.of_answers >= _BYTES_MAX
        )

    def _go_on(self) -> None:
        if self._open and not self._reading and not self._busy():
            self._reading = True
            self._loop.add_reader(self._sock.fileno(), self._readable)
            self._loop.call_soon(self._take_frames)

    def _pause(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._sock.fileno())

    def _break_off(self, why: str) -> None:
        log.error("the other process sends what it may not; its link is closed", why=why)
        self.close()

    def _error(self, body: bytes) -> Exception:
        try:
            failure = _FAILURE.validate_json(body)
        except ValidationError:
            return LinkLostError("an error that is none")
        kind = self._service.errors.get(failure.kind, OSError)
        if issubclass(kind, OSError):
            return kind(failure.errno or errno.EIO, failure.text, failure.filename)
        return kind(failure.text)


class Line:
    """Connection to the other process across its restarts: each new process brings a new link.

    Args:
        service: What this process offers to the other.
        arrived: Called with each new link.
        lost: Called when a link has ended.
    """

    def __init__(
        self, service: PartService, arrived: Callable[[], None] = lambda: None, lost: Callable[[], None] = lambda: None
    ) -> None:
        self._service = service
        self._arrived = arrived
        self._lost = lost
        self._link: PartLink | None = None
        self._up = asyncio.Event()

    @property
    def up(self) -> bool:
        """True while the other process is connected."""
        return self._link is not None

    def connect(self, sock: socket.socket) -> None:
        """Use, and own, the socket to a newly started other process."""
        self.close()
        self._link = PartLink(sock, self._service, self._down)
        self._up.set()
        self._arrived()

    async def call(
        self,
        call: Call[Argument, Result],
        argument: Argument,
        descriptors: Sequence[int] = (),
        *,
        timeout_s: float = 30.0,
        wait_s: float = 0.0,
    ) -> tuple[Result, list[int]]:
        """Call the other process, see `PartLink.call`. Wait for it up to `wait_s`."""
        if self._link is None and wait_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._up.wait(), wait_s)
        if self._link is None:
            raise LinkLostError("the other process is away")
        return await self._link.call(call, argument, descriptors, timeout_s)

    def notify(self, call: Call[Argument, None], argument: Argument) -> None:
        """Send the other process a notice. Do nothing if it is not connected."""
        if self._link is not None:
            self._link.notify(call, argument)

    async def wait(self) -> None:
        """Wait until the other process is connected."""
        await self._up.wait()

    def close(self) -> None:
        """End the link."""
        if self._link is not None:
            self._link.close()

    def _down(self) -> None:
        self._link = None
        self._up.clear()
        self._lost()


def _named(name: str, content: bytes) -> bytes:
    return name.encode() + b"\n" + content


def failure_of(error: Exception) -> Failure:
    """Return an error in the form in which it is sent."""
    if isinstance(error, OSError):
        filename = error.filename if isinstance(error.filename, str) else None
        return Failure(type(error).__name__, error.strerror or str(error), error.errno, filename)
    return Failure(type(error).__name__, str(error))
