"""A slice of `make soak-agent`: the real agent, hook and programs under random faults."""

from __future__ import annotations

import pytest
from harness.soak import slice_of
from hook.life.soak_agent import WANTED, soak
from hook.world.agent_node import built

pytestmark = pytest.mark.skipif(not built(), reason="hook or double not built: run `make shim doubles`")


@pytest.mark.soak
def test_whatever_befalls_one_tenant_or_the_agent_nobody_else_dies_waits_for_ever_or_gets_too_much() -> None:
    counts = soak(slice_of("agent"))
    assert {name: counts[name] for name in WANTED} == WANTED, counts
    assert counts["agent"] + counts["kill"] + counts["stop"] > 0, counts
