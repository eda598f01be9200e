"""Refused clients of one tenant: counted by reason, logged at most every 10 s."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import StrEnum

import structlog

log = structlog.get_logger(__name__)

_LOG_EVERY_S = 10.0
"""Seconds between two log lines about one tenant's clients, so that a tenant cannot fill the node's log."""


class ClientRefusal(StrEnum):
    """Reason for disconnecting a client. The values are the values of the metric's label `why`."""

    MALFORMED = "malformed"
    """A packet was no frame."""
    OUT_OF_PLACE = "out_of_place"
    """A frame that is not allowed at this point, or that names a GPU or memory that is not the client's."""
    UNREAD = "unread"
    """The client does not read the agent's frames."""
    SILENT = "silent"
    """The client connected and sent no Hello in time."""
    FLOOD = "flood"
    """The client sent without a pause while its tenant was over `frames_per_s` for a second."""
    FULL = "full"
    """The tenant has `connections_max` processes connected already."""


class RefusalLog:
    """Counter and rate-limited log of one tenant's refused clients.

    Args:
        tenant_id: The tenant, as logged.
        clock: Monotonic clock in seconds.
    """

    def __init__(self, tenant_id: str, clock: Callable[[], float]) -> None:
        self.counts: Counter[ClientRefusal] = Counter()
        self._tenant_id = tenant_id
        self._clock = clock
        self._logged_at: float | None = None
        self._suppressed = 0
        """Number of refusals since the last log line."""

    def add(self, why: ClientRefusal, *, pid: int, error: str | None = None) -> None:
        """Count one refusal. Log it unless a refusal was logged within the last 10 s."""
        self.counts[why] += 1
        now = self._clock()
        if self._logged_at is not None and now - self._logged_at < _LOG_EVERY_S:
            self._suppressed += 1
            return
        log.warning(
            "client refused", tenant=self._tenant_id, why=why.value, pid=pid, error=error, suppressed=self._suppressed
        )
        self._logged_at, self._suppressed = now, 0
