"""Succession: decides which agent serves a state directory, and which agents are its standbys.

Guarantees:
- At most one agent serves a state directory: the agent that holds `agent.lock`. Its supervisor holds the lock too, so
  that the lock survives a kill of one process while another process of the agent may still serve.
- The next standby serves as soon as the serving agent has ended, however it ended. If that standby is stopped at that
  time, another standby serves two seconds later.
- If another process of a terminating agent may still serve, only the supervisor's exit releases the lock, because the
  supervisor exits last.
- A terminating agent knows whether there is a standby, because a standby holds `next.lock`.
- A terminating agent can pass its listening sockets on to standby agents (`passing_on`).
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
"""Seconds between two checks of the next standby whether the serving agent has ended. They add to the time without an
agent."""
_LATE_S = 1.0
"""Seconds between two checks of the other standbys whether the next standby serves, which takes it a hundredth of this
time."""
_LOG_S = 60.0
"""Seconds between two log lines about waiting."""


class Succession:
    """Turn of one agent at serving a state directory. It is a context manager; after its end the next agent can serve.

    Args:
        state_dir: The state directory; it is created if it is missing.
        kept: Takes the descriptors that the previous agent passes on.

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
        """Loop time of the next check whether any agent serves, by a standby that is not next."""
        self._seen_free = False
        self.stands_by = False
        """True while another agent serves."""
        self.left_to_supervisor = False
        """True if the supervisor's exit releases the lock, not this process's."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.left_to_supervisor:
            turn_lock.released(self._serving)  # also for the supervisor's copy of the descriptor
        os.close(self._serving)
        os.close(self._next)
        if self._passing_on is not None:
            self._passing_on.close()

    def free(self) -> bool:
        """Return True if no other agent serves. This agent then serves from now on."""
        return self._take_turn()

    async def turn(self) -> None:
        """Stand by until no other agent serves. Of several standbys the holder of `next.lock` is next."""
        self.stands_by = True
        began, logged_at = asyncio.get_running_loop().time(), 0.0
        log.info("another agent serves: standing by", state_dir=str(self._state_dir))
        awaiting = Awaiting(self._state_dir, self._kept)
        try:
            while not self._turn_has_come(asyncio.get_running_loop().time()):
                await awaiting.look(_LOOK_S)
                waited = asyncio.get_running_loop().time() - began
                if waited - logged_at > _LOG_S:
                    logged_at = waited
                    log.warning(
                        "another agent still serves: standing by", state_dir=str(self._state_dir), waited_s=waited
                    )
            self.stands_by = False
        finally:
            awaiting.close(serves=not self.stands_by)
        turn_lock.released(self._next)

    def serve(self) -> None:
        """Let standby agents connect for passed-on sockets. Call this once this agent serves."""
        self._passing_on = PassingOn(self._state_dir)

    async def pass_on(self, heirlooms: Mapping[str, KeptDescriptor]) -> None:
        """Send descriptors to the standby agents; do nothing if this agent does not serve."""
        if self._passing_on is not None:
            await self._passing_on.pass_on(heirlooms)

    def _turn_has_come(self, now: float) -> bool:
        if turn_lock.taken(self._next) or self._next_is_late(now):
            return self._take_turn()
        return False

    def _next_is_late(self, now: float) -> bool:
        """Return True if two checks in a row found no serving agent, although a standby is next. That standby may be
        stopped."""
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
        """Return whether there is a standby."""
        if not turn_lock.taken(self._next):
            return True
        turn_lock.released(self._next)
        return False
