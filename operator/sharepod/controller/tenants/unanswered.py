"""Longer timeouts for calls that got no answer in time: creations of Pods, and openings of their gates.

An admission webhook may take 30 s, and the API server calls it again for each try. So with the usual timeout
(`write_timeout`), a slow webhook would block the Pods of its namespace permanently.

Guarantees:
- A call has the longer timeout only if the last such call for the same tenant got no answer while the API server
  answered other calls.
- At most `MOST` calls have a longer timeout at a time, and at most `MOST_OF_A_NAMESPACE` of one namespace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

MOST = 16
"""Number of calls that may have the longer timeout at the same time: half of the default `writers`. Slow work has its
own lane (`worker_lanes.py`), so these calls do not delay other work."""
MOST_OF_A_NAMESPACE = 4
PATIENCE_S = 65.0
"""Longer timeout in seconds. The API server ends a call after 60 s, so it has answered by then."""


class Patience:
    """Counter of the running calls with the longer timeout, by namespace."""

    def __init__(self) -> None:
        self._waiting: Counter[str] = Counter()

    @contextmanager
    def timeout_s(self, namespace: str, *, wanted: bool) -> Iterator[float | None]:
        """Yield the timeout of a call in seconds. None means the usual timeout of writes. `wanted`: True if the call
        repeats an unanswered call for the same tenant."""
        if not wanted or self._waiting.total() >= MOST or self._waiting[namespace] >= MOST_OF_A_NAMESPACE:
            yield None
            return
        self._waiting[namespace] += 1
        try:
            yield PATIENCE_S
        finally:
            self._waiting[namespace] -= 1
            self._waiting += Counter()  # adding an empty Counter drops namespaces without a running call
