"""A slice of `make soak-memory`: the real agent, hook and random memory calls of several processes."""

from __future__ import annotations

import pytest
from harness.soak import slice_of
from hook.life.soak_memory import WANTED, soak
from hook.world.agent_node import built

pytestmark = pytest.mark.skipif(not built(), reason="hook or double not built: run `make shim doubles`")


@pytest.mark.promise("memory-limit")
@pytest.mark.soak
def test_after_every_call_the_ledger_has_what_the_driver_has_and_never_more_than_the_limit() -> None:
    counts = soak(slice_of("memory"))
    assert {name: counts[name] for name in WANTED} == WANTED, counts
    assert counts.get("taken", 0) + counts.get("refused", 0) > 0, counts
