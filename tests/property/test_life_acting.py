"""The life of a SharePod with the operator's own code, which may die between any two of its writes."""

from __future__ import annotations

import random

import pytest
from doubles.apiserver.server import api_server
from property.acting_life import ActingLife

_FAULTS = (
    "drain", "drain", "delete_pod", "force_delete", "fail", "complete", "cut", "taint", "refuse", "set_clock", "heal",
)  # fmt: skip
_LENGTH = 18
"""Events in one life, in addition to steps of the operator and the nodes."""


@pytest.mark.promise("operator-crash", "operator-one-run-at-a-time", "operator-released-means-gone")
@pytest.mark.parametrize("policy", ["Always", "OnFailure", "Never"])
@pytest.mark.parametrize("seed", range(4))
async def test_a_life_keeps_its_promises_whenever_the_operator_dies(policy: str, seed: int) -> None:
    chance = random.Random(f"{policy} {seed}")
    happened: list[str] = []
    async with api_server() as server:
        life = ActingLife(server, policy, seed)
        await life.begin()
        try:
            for _ in range(_LENGTH):
                for _ in range(chance.randrange(1, 7)):
                    await life.look()
                    life.play()
                happened.append(chance.choice((*_FAULTS, "wait", "wait", "die_soon", "die_soon", "die_soon")))
                getattr(life, happened[-1])()
                assert not life.problems, (life.problems, happened)
            life.heal()
            life.world.clock_set = 0.0
            if not life.world.died:
                life.world.writes_left = None
            wanted = "Running" if policy != "Never" else ""
            await life.settle(wanted)
            assert not life.problems, (life.problems, happened)
            status = life.world.status()
            if policy == "Never":
                assert len(life.runs) <= 1, happened
                assert status["phase"] in ("Running", "Succeeded", "Failed"), (status, happened)
            elif policy == "OnFailure" and status["phase"] == "Succeeded":
                assert "complete" in happened
            else:
                assert status["phase"] == "Running", (status, happened)
                assert len(life.processes) == 1
        finally:
            await life.end()
