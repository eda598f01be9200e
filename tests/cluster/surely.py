"""Writes of a test's clients that happen exactly once, whatever the weather between them and the API server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http.client import HTTPException

from harness.api import ApiError

_LATER = (403, 404, 409, 429, 500, 503, 504)
"""Answers after which a write is tried again: the API server is away, or has just begun."""


def surely(write: Callable[[], object], *, done: int, over: threading.Event) -> None:
    """Write, repeatedly while the API server is away or starting. The code `done` means that an earlier write without
    an answer has succeeded: only this test uses these names. Once `over` is set, a failure is raised."""
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
