"""The life of a SharePod through any events: one run at a time, no share reassigned while a process uses it, and
restarts as its restartPolicy requires."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property.life_world import LifeWorld
from sharepod.controller.decisions.ends import LONGEST_PAUSE_S
from sharepod.controller.state.reading.timestamps import seconds

_OPERATOR = ("look", "look", "look", "look_and_crash", "crash", "go_on", "go_on")
_OTHERS = ("play", "play", "wait", "heal", "join")
_FAULTS = (
    "drain", "delete_pod", "force_delete", "fail", "evict_by_kubelet", "lose_row", "cut", "cut", "taint", "remove_node",
    "fail_gpu", "complete", "refuse", "refuse", "bind",
)  # fmt: skip
_HAPPENINGS = st.sampled_from(_OPERATOR) | st.sampled_from(_OTHERS) | st.sampled_from(_FAULTS)


def settle(world: LifeWorld) -> None:
    """Take all due steps until no step changes anything."""
    for _ in range(100):
        before = world.seen()
        world.look()
        world.play()
        if world.seen() == before:
            return
    raise AssertionError("it never comes to rest")


@pytest.mark.promise("operator-comes-back")
@settings(max_examples=400)
@given(
    st.sampled_from(("Always", "OnFailure", "Never")),
    st.integers(0, 1 << 16),
    st.booleans(),
    st.lists(_HAPPENINGS, max_size=40),
)
def test_a_life_keeps_its_promises(policy: str, seed: int, begun: bool, happenings: list[str]) -> None:
    world = LifeWorld(policy, seed)
    if begun:
        settle(world)
    for happening in happenings:
        if happening == "look_and_crash":
            world.look(crash=True)
        else:
            getattr(world, happening)()
        assert not world.problems
    world.heal()
    settle(world)
    world.now += LONGEST_PAUSE_S
    settle(world)
    assert not world.problems
    phase = world.status["phase"]
    if policy == "Never":
        assert len(world.runs) <= 1, "no work of Never runs twice"
        assert phase in ("Running", "Succeeded", "Failed")
    elif policy == "OnFailure" and "complete" in happenings and phase == "Succeeded":
        assert world.status["endTime"]
    else:
        assert phase == "Running", world.status
        assert world.pod is not None
        assert world.processes == {world.pod["metadata"]["uid"]: next(iter(world.rows))}


@pytest.mark.promise("operator-taken-back-crash")
@settings(max_examples=300)
@given(
    st.integers(0, 1 << 16),
    st.lists(st.sampled_from((*_OPERATOR, "look_and_crash", "play", "wait", "wait", "bind")), max_size=40),
)
def test_a_withdrawn_pod_is_no_run_whenever_the_operator_dies(seed: int, happenings: list[str]) -> None:
    world = LifeWorld("Never", seed)
    world.refuse()
    settle(world)
    for happening in happenings:
        if happening == "look_and_crash":
            world.look(crash=True)
        else:
            getattr(world, happening)()
        assert not world.problems
    world.heal()
    settle(world)
    assert not world.problems
    assert (world.status["phase"], len(world.runs)) == ("Running", 1)


@pytest.mark.promise("operator-back-off")
def test_the_back_off_of_a_repeatedly_failing_sharepod_grows() -> None:
    world = LifeWorld("Always", seed=1)
    for failures in range(8):
        settle(world)
        assert world.status["phase"] == "Running"
        assert world.status.get("restarts", 0) == failures
        world.fail()
        failed_at = world.now
        settle(world)
        retry_at = seconds(world.status["lastEnd"]["retryAt"])
        assert retry_at is not None
        assert retry_at == failed_at + min(360, 10 * 2**failures)
        world.now = retry_at - 1
        settle(world)
        assert world.status["phase"] == "Pending"
        world.now = retry_at
