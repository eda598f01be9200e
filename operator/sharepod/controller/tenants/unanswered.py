"""Creations of Pods, and openings of their gates, that the API server did not answer in time. Some of them get a longer
timeout the next time.

An admission webhook may take 30 s, and the API server calls it again for each try. A webhook slower than the operator's
timeout for writes would otherwise block the Pods of its namespace permanently.

Guarantees:
- A call has a longer timeout only after a call of its kind for the same tenant was not answered, while the API server
  answered others.
- At most `MOST` calls have a longer timeout at a time, and at most `MOST_OF_A_NAMESPACE` of one namespace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

MOST = 16
"""Half of the operator's writers: slow work has places of its own, six times as many as the writers."""
MOST_OF_A_NAMESPACE = 4
PATIENCE_S = 65.0
"""Seconds for one such call. By then the API server has answered: it ends a call after 60 s."""


class Patience:
    """Calls that wait longer, by namespace."""

    def __init__(self) -> None:
        self._waiting: Counter[str] = Counter()

    @contextmanager
    def timeout_s(self, namespace: str, *, wanted: bool) -> Iterator[float | None]:
        """Yield the seconds for a call; None: the timeout of other writes. `wanted`: the last such call was not
        answered."""
        if not wanted or self._waiting.total() >= MOST or self._waiting[namespace] >= MOST_OF_A_NAMESPACE:
            yield None
            return
        self._waiting[namespace] += 1
        try:
            yield PATIENCE_S
        finally:
            self._waiting[namespace] -= 1
            self._waiting += Counter()  # forgets namespaces with no waiting call
