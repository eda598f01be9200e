"""Writes of a test's clients that take effect exactly once, whatever faults affect the connection to the API server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http.client import HTTPException

from harness.api import ApiError

_LATER = (403, 404, 409, 429, 500, 503, 504)
"""HTTP statuses after which a write is retried: the API server is away, or has just started."""


def surely(write: Callable[[], object], *, done: int, over: threading.Event) -> None:
    """Call `write`, and call it again while the API server is away or starting. Only this test uses the names that it
    writes. So the HTTP status `done` means that an earlier call took effect and its answer was lost. Once `over` is
    set, a failure is raised."""
    while True:
        try:
            write()
            return
        except ApiError as error:
            if error.code == done:
                return
            if error.code not in _LATER or over.is_set():
                raise
        except (OSError, HTTPException):
            if over.is_set():
                raise
        time.sleep(0.2)
