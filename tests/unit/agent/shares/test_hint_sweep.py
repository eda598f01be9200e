"""Hints are raised at once, and lowered by a sweep that runs while any hint is raised."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sharepod.agent.shares import hint_sweep
from sharepod.agent.shares.hint_sweep import HintSweep
from unit.agent.client import until


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hint_sweep, "SWEEP_S", 0.001)


async def test_a_hint_is_raised_at_once_and_sweeps_continue_while_any_is_raised() -> None:
    up: list[bool] = []
    sweeps = [True, True, False]
    hinting = HintSweep(lambda: sweeps.pop(0))
    hinting.up([up.append, up.append])
    assert up == [True, True]
    await until(lambda: not sweeps)
    sweeps.append(False)
    hinting.up([])
    await until(lambda: not sweeps)


async def test_nothing_is_swept_after_the_end() -> None:
    swept: list[int] = []

    def sweeper(number: int) -> Callable[[], bool]:
        def sweep() -> bool:
            swept.append(number)
            return False

        return sweep

    hinting, other = HintSweep(sweeper(1)), HintSweep(sweeper(2))
    hinting.up([])
    other.up([])
    hinting.close()
    await until(lambda: bool(swept))
    assert swept == [2]
