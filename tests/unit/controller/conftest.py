"""Check of all tests of this folder: an Event is a short sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sharepod.controller.apiserver.events import Events

MOST_WORDS = 25
QUOTING = ("Invalid", "PodForbidden", "PodRefused", "PodFailed", "AllocationTakenBack", "HolderRefused")
"""Reasons of Events that quote texts of users, of the API server or of a container."""


@pytest.fixture(autouse=True)
def short_events(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test in which the operator records an Event of more than `MOST_WORDS` words."""
    longer: list[str] = []
    record = Events._record

    def checked(self: Events, event: Any) -> None:
        if len(event.note.split()) > MOST_WORDS and event.reason not in QUOTING:
            longer.append(f"{event.reason}: {event.note}")
        record(self, event)

    monkeypatch.setattr(Events, "_record", checked)
    yield
    assert not longer
