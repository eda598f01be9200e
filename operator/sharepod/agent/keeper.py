"""Keeper: a process that has loaded everything and does nothing, and starts the agent anew when it was killed.

A child that was killed by a signal (a crash, the kernel's OOM killer, a person) is followed by the next within
milliseconds: nothing has to be imported again. The next has the descriptors that the former had kept. A child that ends
by itself ends the keeper, with its exit status; so does one that is killed again and again, and the kubelet then waits
before it starts the container anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable
from types import FrameType

import structlog

from sharepod.agent.state.kept_descriptors import DescriptorShelf, KeptDescriptors

log = structlog.get_logger(__name__)

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MOST_KILLED = 5
WITHIN_S = 60.0
"""`MOST_KILLED` children that were killed within so many seconds end the keeper."""
_PR_SET_PDEATHSIG = 1


def keep(agent: Callable[[KeptDescriptors], int]) -> int:
    """Run `agent` in a child process, and again after it was killed; return the exit status.

    To be called before any thread is started. SIGTERM, SIGINT and SIGHUP are passed on. The child is killed when this
    process ends.
    """
    gc.collect()
    gc.freeze()  # pages that no collection touches stay shared with the child
    killed: deque[float] = deque(maxlen=MOST_KILLED)
    shelf = DescriptorShelf()
    while True:
        status, told_to_end = _one(agent, shelf)
        if os.WIFEXITED(status):
            return os.WEXITSTATUS(status)
        if told_to_end:  # before it listened to signals, or after
            return 0
        number = os.WTERMSIG(status)
        killed.append(time.monotonic())
        if len(killed) == MOST_KILLED and killed[-1] - killed[0] < WITHIN_S:
            log.error("agent was killed again and again", signal=signal.Signals(number).name, times=len(killed))
            return 128 + number
        log.error("agent was killed: starting it again", signal=signal.Signals(number).name)


def _one(agent: Callable[[KeptDescriptors], int], shelf: DescriptorShelf) -> tuple[int, bool]:
    """Run one child to its end; return its wait status, and whether it was told to end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # none gets lost before there is a child to get it
    parent = os.getpid()
    kept = shelf.connect()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != parent:
                return os._exit(1)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            shelf.in_child()
            status = agent(kept)
        except BaseException:
            log.exception("the agent has failed")
        finally:
            os._exit(status)
    told_to_end = False

    def forward(number: int, _frame: FrameType | None) -> None:
        nonlocal told_to_end
        told_to_end = told_to_end or number in (signal.SIGTERM, signal.SIGINT)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    handlers = {number: signal.signal(number, forward) for number in FORWARDED}
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        _hold_until_end(child, shelf)
        return os.waitpid(child, 0)[1], told_to_end
    finally:
        shelf.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _hold_until_end(child: int, shelf: DescriptorShelf) -> None:
    """Follow the child's messages until it has ended, to the last one."""
    messages = shelf.in_parent().fileno()
    ended = os.pidfd_open(child)
    try:
        poll = select.poll()
        poll.register(messages, select.POLLIN)
        poll.register(ended, select.POLLIN)
        while ended not in {fd for fd, _event in poll.poll()}:
            if not shelf.take_in():
                poll.unregister(messages)  # the child closed it, and is about to end
    finally:
        os.close(ended)
    shelf.take_in()
