"""Why clients of one tenant were closed: counted all, told in the log no more often than each few seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import StrEnum

import structlog

log = structlog.get_logger(__name__)

_EVERY_S = 10.0


class ClientRefusal(StrEnum):
    """What a client did, as metrics name it."""

    MALFORMED = "malformed"
    """It sent what is no frame."""
    OUT_OF_PLACE = "out_of_place"
    """It sent a frame that may not come now, or that asks for what is not its own."""
    UNREAD = "unread"
    """It does not read what it is sent."""
    SILENT = "silent"
    """It connected and did not say hello."""
    FLOOD = "flood"
    """It sent on and on, without a pause, while its tenant was over `frames_per_s` for a second."""
    FULL = "full"
    """Its tenant has as many connected as may be."""


class RefusalLog:
    """`clock`: seconds that never go back."""

    def __init__(self, tenant_id: str, clock: Callable[[], float]) -> None:
        self.counts: Counter[ClientRefusal] = Counter()
        self._tenant_id = tenant_id
        self._clock = clock
        self._said_at: float | None = None
        self._unsaid = 0

    def add(self, why: ClientRefusal, *, pid: int, error: str | None = None) -> None:
        """One more."""
        self.counts[why] += 1
        now = self._clock()
        if self._said_at is not None and now - self._said_at < _EVERY_S:
            self._unsaid += 1
            return
        log.warning(
            "client refused", tenant=self._tenant_id, why=why.value, pid=pid, error=error, unsaid_before=self._unsaid
        )
        self._said_at, self._unsaid = now, 0
