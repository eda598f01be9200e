"""The recorder of Events: its bounds for one object, one reason and one namespace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sharepod.controller.apiserver import events
from sharepod.controller.apiserver.client import Client
from sharepod.controller.apiserver.events import Events
from sharepod.controller.state.facts.object_facts import ObjectFacts
from sharepod.kube import Json, UnavailableError


def about(namespace: str, name: str = "a") -> ObjectFacts:
    """Return the facts of an object that an Event about it contains: namespace, name and uid."""
    return cast(ObjectFacts, SimpleNamespace(namespace=namespace, name=name, uid=f"{namespace}/{name}"))


@dataclass
class World:
    """A recorder, its clock, and an API server that is slow or refuses, by namespace."""

    now: float = 1000.0
    slow: set[str] = field(default_factory=set)
    refusing: set[str] = field(default_factory=set)
    written: list[Json] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.events = Events(cast(Client, self), "test", lambda: self.now)

    async def create(self, _resource: Any, body: Json, namespace: str) -> None:
        while namespace in self.slow:  # noqa: ASYNC110  in steps of the event loop
            await asyncio.sleep(0)
        if namespace in self.refusing:
            raise UnavailableError("create", 429, "TooManyRequests", "later")
        self.written.append(body)

    def record(self, namespace: str, note: str, *, name: str = "a", reason: str = "Failing") -> None:
        self.events.warning("SharePod", about(namespace, name), reason, "Test", note)

    def notes(self, namespace: str) -> list[str]:
        return [item["note"] for item in self.written if item["metadata"]["namespace"] == namespace]

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Write Events in the background. All Events that wait are written before the block ends."""
        task = asyncio.create_task(self.events.run())
        try:
            yield
            for _ in range(5000):
                await asyncio.sleep(0)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.mark.promise("security-events")
async def test_of_one_reason_about_one_object_ten_are_written_at_once_and_then_one_a_minute() -> None:
    world = World()
    async with world.writing():
        for number in range(100):
            world.record("team", f"failure {number}")
        world.record("team", "of another reason", reason="Other")
        world.record("team", "of another object", name="b")
    assert len(world.notes("team")) == events._BURST + 2
    async with world.writing():
        world.now += events._PERIOD_S
        world.record("team", "a minute later")
        world.record("team", "and at once")
    assert world.notes("team")[-1] == "a minute later"


async def test_the_same_message_is_written_again_after_ten_minutes() -> None:
    world = World()
    async with world.writing():
        for _ in range(3):
            world.record("team", "the same")
            world.now += events._REPEAT_S / 2
    assert world.notes("team") == ["the same", "the same"]


@pytest.mark.promise("security-events")
async def test_one_namespace_fills_a_quarter_of_what_may_wait_and_others_pass_it() -> None:
    world = World(slow={"flood"})
    for number in range(2 * events._WAITING):
        world.record("flood", "failure", name=f"pod-{number}")
    world.record("team", "heard")
    async with world.writing():
        pass
    assert world.notes("team") == ["heard"]
    world.slow.clear()
    async with world.writing():
        pass
    assert len(world.notes("flood")) <= events._WAITING_OF_ONE


async def test_an_event_that_cannot_be_written_costs_no_other() -> None:
    world = World(refusing={"refused"})
    async with world.writing():
        world.record("refused", "lost")
        world.record("team", "heard")
    assert [item["note"] for item in world.written] == ["heard"]


async def test_notes_are_cut_to_what_the_api_server_takes() -> None:
    world = World()
    async with world.writing():
        world.record("team", "ü" * 5000)
    assert len(world.written[0]["note"].encode()) <= events._NOTE_LIMIT


async def test_a_note_with_half_a_pair_in_it_is_written() -> None:
    world = World()
    async with world.writing():
        world.record("team", "\ud83d" * 600)
    (note,) = world.notes("team")
    assert note.startswith("\ufffd")
    assert note.endswith("…")
