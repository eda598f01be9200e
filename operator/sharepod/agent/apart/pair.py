"""Supervisor of the agent's two processes: forks both, connects them by a socket pair, and restarts a process that is
killed.

- While the privileged process is away, the worker keeps the connections.
- While the worker is away, the privileged process keeps the tenants' listening sockets; the supervisor has copies.
- If a process exits by itself, the supervisor ends all processes and exits with that exit status. It does the same
  after `MOST_KILLED` kills within `WITHIN_S`.
- A worker that runs but has lost its link is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType

import structlog

from sharepod.agent.state.kept_descriptors import DescriptorShelf, KeptDescriptor, KeptDescriptors

from . import confinement, control_end

log = structlog.get_logger(__name__)

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that are forwarded to the privileged process."""
MOST_KILLED = 5
WITHIN_S = 60.0
"""Seconds within which `MOST_KILLED` kills of children end the supervisor."""
_PR_SET_PDEATHSIG = 1
_ENDING_S = 5.0
"""Seconds that the worker may take to exit once the privileged process has exited."""


@dataclass
class _Child:
    name: str
    pid: int
    pidfd: int
    control: socket.socket
    """The supervisor's socket to the child. It carries links to the other child."""


def keep_pair(
    privileged: Callable[[socket.socket, KeptDescriptors], int],
    worker: Callable[[socket.socket], int],
    left_to_worker: Callable[[], list[int]],
    niceness: int,
    kept: Mapping[str, KeptDescriptor] | None = None,
) -> int:
    """Run both programs in child processes, the worker confined, and restart a child that was killed. Return the exit
    status.

    Call this as root, before any thread is started. SIGTERM, SIGINT and SIGHUP are forwarded to the privileged process.
    Both children are killed when this process exits.

    Args:
        privileged: Program of the privileged process; takes its control socket and the descriptors that it had kept.
        worker: Program of the worker; takes its control socket.
        left_to_worker: Descriptors that the worker gets in addition to its control socket.
        niceness: Nice value of the worker.
        kept: Descriptors, by name, that this process holds for the first privileged process.
    """
    gc.collect()
    gc.freeze()  # garbage collections then do not write to these pages, so they stay shared with the children
    return _Pair(privileged, worker, left_to_worker, niceness, kept or {}).run()


class _Pair:
    def __init__(
        self,
        privileged: Callable[[socket.socket, KeptDescriptors], int],
        worker: Callable[[socket.socket], int],
        left_to_worker: Callable[[], list[int]],
        niceness: int,
        kept: Mapping[str, KeptDescriptor],
    ) -> None:
        self._programs = privileged, worker
        self._left_to_worker = left_to_worker
        self._niceness = niceness
        self._shelf = DescriptorShelf(kept)
        self._killed: deque[float] = deque(maxlen=MOST_KILLED)
        self._ends = False
        self._links = 0
        self._privileged: _Child | None = None
        self._worker: _Child | None = None

    def run(self) -> int:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        self._mask = before
        handlers = {number: signal.signal(number, self._forward) for number in FORWARDED}
        try:
            self._worker = self._start_worker()
            self._privileged = self._start_privileged()
            self._connect()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return self._follow()
        finally:
            self._end(self._worker)
            self._end(self._privileged)
            self._shelf.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        self._ends = self._ends or number in (signal.SIGTERM, signal.SIGINT)
        if self._privileged is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._privileged.pid, number)

    def _follow(self) -> int:
        while True:
            privileged, worker = self._privileged, self._worker
            assert privileged is not None
            assert worker is not None
            ended = self._wait_for_end(privileged, worker)
            if ended is privileged:
                self._shelf.take_in()
            status = os.waitpid(ended.pid, 0)[1]
            _forget(ended)
            if ended is privileged:
                self._privileged = None
            else:
                self._worker = None
            if ended is privileged and os.WIFEXITED(status):
                return os.WEXITSTATUS(status)
            if self._ends and ended is privileged:
                return 0
            if os.WIFEXITED(status) and not self._ends:
                log.error("the process that serves tenants has ended by itself", status=os.WEXITSTATUS(status))
                return 1
            if os.WIFSIGNALED(status) and not self._ends and self._gives_up(ended, os.WTERMSIG(status)):
                return 128 + os.WTERMSIG(status)
            if ended is worker and self._ends:
                return self._last_of(privileged)
            with _blocked():
                if ended is privileged:
                    self._privileged = self._start_privileged()
                else:
                    self._worker = self._start_worker()
                self._connect()

    def _gives_up(self, child: _Child, number: int) -> bool:
        name = signal.Signals(number).name
        self._killed.append(time.monotonic())
        if len(self._killed) == MOST_KILLED and self._killed[-1] - self._killed[0] < WITHIN_S:
            log.error("agent was killed again and again", part=child.name, signal=name, times=len(self._killed))
            return True
        log.error(f"the {child.name} was killed: starting it again", signal=name)
        return False

    def _last_of(self, privileged: _Child) -> int:
        """Wait until the privileged process, which was sent a termination signal, exits. Return its exit status."""
        status = os.waitpid(privileged.pid, 0)[1]
        _forget(privileged)
        self._privileged = None
        return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0

    def _wait_for_end(self, privileged: _Child, worker: _Child) -> _Child:
        """Handle the messages of the privileged process until one of the children has exited. Return that child."""
        messages = self._shelf.messages().fileno()
        poll = select.poll()
        children = privileged, worker
        words = privileged.control.fileno()
        for descriptor in (messages, words, *(child.pidfd for child in children)):
            poll.register(descriptor, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _event in poll.poll()}
            if messages in ready and not self._shelf.take_in():
                poll.unregister(messages)  # the privileged process has closed its end, because it is about to exit
            for child in children:
                if child.pidfd in ready:
                    return child
            if words in ready and not self._take_word(privileged, worker):
                poll.unregister(words)

    def _take_word(self, privileged: _Child, worker: _Child) -> bool:
        """Read messages of the privileged process. Kill the worker if its link was lost. Return False at the end of the
        messages."""
        try:
            word = privileged.control.recv(32)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if word == control_end.lost(self._links) and not self._ends:
            log.error("privileged process and worker have lost their link: the worker is killed")
            os.kill(worker.pid, signal.SIGKILL)
        return bool(word)

    def _connect(self) -> None:
        """Connect the children by a new pair of sockets, sent to both."""
        assert self._privileged is not None
        assert self._worker is not None
        self._links += 1
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        for child, end in zip((self._privileged, self._worker), ends, strict=True):
            with end:
                try:
                    socket.send_fds(child.control, [control_end.brought(self._links)], [end.fileno()])
                except OSError:  # the child has exited, or does not read: after its restart a new link is sent
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child.pid, signal.SIGKILL)

    def _start_privileged(self) -> _Child:
        kept = self._shelf.connect()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent, pid = os.getpid(), os.fork()
        if pid == 0:

            def program() -> int:
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
                if os.getppid() != parent:
                    return 1
                self._shelf.in_child()
                ours.close()
                return self._programs[0](theirs, kept)

            self._in_child(program)
        self._shelf.in_parent()
        return _child("privileged", pid, ours, theirs)

    def _start_worker(self) -> _Child:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with confinement.next_child_alone():
            pid = os.fork()
            if pid == 0:

                def program() -> int:
                    confinement.confine({theirs.fileno(), *self._left_to_worker()}, self._niceness)
                    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
                    return self._programs[1](theirs)

                self._in_child(program)
        return _child("worker", pid, ours, theirs)

    def _in_child(self, program: Callable[[], int]) -> None:
        status = 1
        try:
            for number in FORWARDED:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            status = program()
        except BaseException:
            log.exception("the agent has failed")
        finally:
            os._exit(status)

    @staticmethod
    def _end(child: _Child | None) -> None:
        """Wait `_ENDING_S` for a child to exit by itself, then kill it."""
        if child is None:
            return
        poll = select.poll()
        poll.register(child.pidfd, select.POLLIN)
        child.control.close()  # this ends the worker
        if not poll.poll(_ENDING_S * 1000):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
        _forget(child)


def _child(name: str, pid: int, ours: socket.socket, theirs: socket.socket) -> _Child:
    theirs.close()
    ours.setblocking(False)
    return _Child(name, pid, os.pidfd_open(pid), ours)


def _forget(child: _Child) -> None:
    os.close(child.pidfd)
    child.control.close()


@contextlib.contextmanager
def _blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
