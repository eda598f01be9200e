"""The metrics of the operator: rendering their text delays no other work, however long the text is."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from sharepod.controller import exposition, metrics
from sharepod.controller.exposition import MetricsText


class World:
    """Operator whose metrics take a fifth of a second to render."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.leading = True
        self.threads: list[int] = []
        self.measured = 0
        monkeypatch.setattr(exposition, "generate_latest", self._generate)
        self.text = MetricsText(self, lambda: self.now)

    def _generate(self, registry: Any) -> bytes:
        self.threads.append(threading.get_ident())
        if registry is metrics.REGISTRY:
            self.now += 0.2
            return b"own "
        return b"leaders "

    def measure(self) -> None:
        self.measured += 1

    def unready(self) -> str | None:
        return None

    def leads(self) -> bool:
        return self.leading

    def healthy(self) -> str:
        return "leads"


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


async def test_the_text_is_made_in_another_thread(world: World) -> None:
    assert await world.text.read() == b"own leaders "
    assert threading.get_ident() not in world.threads


async def test_many_that_ask_are_shown_one_text_which_takes_a_quarter_of_the_time(world: World) -> None:
    shown = await asyncio.gather(*(world.text.read() for _ in range(10)))
    assert (set(shown), world.measured) == ({b"own leaders "}, 1)
    world.now += 0.5
    await world.text.read()
    assert world.measured == 1
    world.now += 0.2
    world.leading = False
    assert await world.text.read() == b"own "
    assert world.measured == 2


async def test_one_that_stops_asking_keeps_no_other_from_the_text(world: World) -> None:
    first = asyncio.create_task(world.text.read())
    await asyncio.sleep(0)
    second = asyncio.create_task(world.text.read())
    await asyncio.sleep(0)
    first.cancel()
    assert await second == b"own leaders "
