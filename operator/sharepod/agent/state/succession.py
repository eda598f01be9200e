"""Succession: which agent serves a state directory, and which stands by.

Guarantees:
- At most one agent serves a state directory: the one that holds `agent.lock`. Its supervisor holds the lock too: a
  killed process of the agent does not lose the turn, since another process may still serve.
- An agent that stands by serves as soon as the other one has ended, however it ended. If the one that is next is
  stopped then, another one serves two seconds later.
- An agent of which another process may still serve when it ends leaves the lock to its supervisor, which ends last.
- An agent that ends knows whether another stands by (which then holds `next.lock`).
- An agent that is told to end can pass its listening sockets on to those that stand by (`passing_on`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog

from . import turn_lock
from .directory import StateDirError
from .kept_descriptors import NOTHING_KEPT, KeptDescriptor, KeptDescriptors
from .passing_on import Awaiting, PassingOn

log = structlog.get_logger(__name__)

_LOOK_S = 0.01
"""Seconds between two looks at whether the other agent has ended: part of the gap between the two."""
_LATE_S = 1.0
"""Seconds between two looks at whether the agent that is next serves, by those that come after it: a hundred times what
it takes."""
_TELL_S = 60.0
"""Seconds between two lines of the log about waiting."""


class Succession:
    """Turn of one agent at a state directory. A context manager: at its end the next agent serves.

    Args:
        state_dir: The state directory; it is created if it is missing.
        kept: Takes what the agent passes on that served before.

    Raises `StateDirError` if the directory takes no files.
    """

    def __init__(self, state_dir: Path, kept: KeptDescriptors = NOTHING_KEPT) -> None:
        self._state_dir = state_dir
        self._kept = kept
        self._passing_on: PassingOn | None = None
        try:
            state_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
            held = kept.take(turn_lock.KEPT_NAME)
            self._serving = turn_lock.opened(state_dir / turn_lock.SERVING) if held is None else held.fd
            self._next = turn_lock.opened(state_dir / turn_lock.NEXT)
        except OSError as error:
            raise StateDirError(f"cannot use the state directory {state_dir}: {error}") from None
        self._looks_at = 0.0
        """Loop time of the next look at whether anybody serves, of an agent that is not next."""
        self._seen_free = False
        self.stands_by = False
        """True while another agent serves."""
        self.left_to_supervisor = False
        """True if the turn ends with the supervisor, and not with this process."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.left_to_supervisor:
            turn_lock.released(self._serving)  # for the supervisor too
        os.close(self._serving)
        os.close(self._next)
        if self._passing_on is not None:
            self._passing_on.close()

    def free(self) -> bool:
        """Return whether no other agent serves; this one does from then on."""
        return self._take_turn()

    async def turn(self) -> None:
        """Stand by until no other agent serves. Of several that wait, one is next, the others come after it."""
        self.stands_by = True
        began, told = asyncio.get_running_loop().time(), 0.0
        log.info("another agent serves: standing by", state_dir=str(self._state_dir))
        awaiting = Awaiting(self._state_dir, self._kept)
        try:
            while not self._turn_has_come(asyncio.get_running_loop().time()):
                await awaiting.look(_LOOK_S)
                waited = asyncio.get_running_loop().time() - began
                if waited - told > _TELL_S:
                    told = waited
                    log.warning(
                        "another agent still serves: standing by", state_dir=str(self._state_dir), waited_s=waited
                    )
            self.stands_by = False
        finally:
            awaiting.close(serves=not self.stands_by)
        turn_lock.released(self._next)

    def serve(self) -> None:
        """Let agents that stand by know where to wait for what is passed on. To be called once this agent serves."""
        self._passing_on = PassingOn(self._state_dir)

    async def pass_on(self, heirlooms: Mapping[str, KeptDescriptor]) -> None:
        """Pass on what agents that stand by are to have; nothing if this agent does not serve."""
        if self._passing_on is not None:
            await self._passing_on.pass_on(heirlooms)

    def _turn_has_come(self, now: float) -> bool:
        if turn_lock.taken(self._next) or self._next_is_late(now):
            return self._take_turn()
        return False

    def _next_is_late(self, now: float) -> bool:
        """Return whether nobody has served at two looks, although another agent is next: that one may be stopped."""
        if now < self._looks_at:
            return False
        self._looks_at = now + _LATE_S
        before, self._seen_free = self._seen_free, turn_lock.taken(self._serving)
        if self._seen_free:
            turn_lock.released(self._serving)
        return before and self._seen_free

    def _take_turn(self) -> bool:
        if not turn_lock.taken(self._serving):
            return False
        self._kept.keep(turn_lock.KEPT_NAME, self._serving)
        return True

    def awaited(self) -> bool:
        """Return whether another agent stands by."""
        if not turn_lock.taken(self._next):
            return True
        turn_lock.released(self._next)
        return False
