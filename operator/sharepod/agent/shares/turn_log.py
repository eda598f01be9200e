"""Log of the last turns of all tenants, from which the agent answers requests for traces (`telemetry/trace.py`). Pure.

Guarantees:
- A turn is kept whole or not at all. At most `_KEPT` turns are kept.
- A turn is one entry, which is added when the turn ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

_KEPT = 8192
"""Most turns that are kept: ten seconds of a node with 800 turns a second, about a megabyte."""


class LoggedTurn(NamedTuple):
    """Turn of one tenant on all its GPUs, or its wait for one. Times in nanoseconds of the agent's clock; None: not
    yet, or unknown."""

    tenant: str
    gpus: tuple[str, ...]
    waited_since: int | None
    """Start of the wait for the turn."""
    begin: int | None
    """Start of the turn. None while the tenant still waits."""
    draining: int | None
    """Moment at which all its processes had closed their gates."""
    lost: int | None
    """Moment from which other tenants could hold the GPUs although this tenant had not drained."""
    end: int | None
    """Moment at which all its work had ended. None while it still holds."""


class TurnLog:
    """The last turns that have ended."""

    def __init__(self) -> None:
        self._turns: deque[LoggedTurn] = deque(maxlen=_KEPT)

    def add(self, turn: LoggedTurn) -> None:
        """Add a turn that has ended."""
        self._turns.append(turn)

    def on(self, gpu: str, since: int) -> Iterator[LoggedTurn]:
        """Yield the turns on a GPU that ended after `since`, in the order of their ends."""
        for turn in self._turns:
            if gpu in turn.gpus and turn.end is not None and turn.end > since:
                yield turn

    def complete_since(self) -> int:
        """Return the moment since which all ended turns are in the log. 0 if no turn was dropped."""
        return self._turns[0].end or 0 if len(self._turns) == _KEPT else 0
