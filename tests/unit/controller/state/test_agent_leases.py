"""Liveness of agents: it follows from observed changes of their Leases, not from the agents' clocks."""

from __future__ import annotations

import datetime

from sharepod.controller.state.agent_leases import AgentLeases
from sharepod.kube import Json


class World:
    def __init__(self) -> None:
        self.monotonic = 100.0
        self.wall = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
        self.agents = AgentLeases(20.0, lambda: self.monotonic, lambda: self.wall)

    def lease(self, node: str = "a", *, renewed: datetime.datetime | None, holder: str = "agent") -> Json:
        spec: Json = {"holderIdentity": holder, "leaseDurationSeconds": 20}
        if renewed is not None:
            spec["renewTime"] = renewed.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {"metadata": {"name": f"sharepod-agent-{node}", "uid": f"lease-{node}"}, "spec": spec}

    def pass_time(self, seconds: float) -> None:
        self.monotonic += seconds
        self.wall += datetime.timedelta(seconds=seconds)


def test_an_agent_is_alive_for_as_long_after_each_change_as_its_lease_lasts() -> None:
    world = World()
    world.agents.put(world.lease(renewed=world.wall))
    for _ in range(3):
        world.pass_time(19)
        assert world.agents.alive("a")
        world.agents.put(world.lease(renewed=world.wall))
    world.pass_time(19)
    # the same Lease again is no change
    world.agents.put(world.lease(renewed=world.wall - datetime.timedelta(seconds=19)))
    world.pass_time(2)
    assert not world.agents.alive("a")


def test_an_agent_whose_clock_is_wrong_is_alive_once_its_lease_was_seen_to_change() -> None:
    world = World()
    wrong = world.wall - datetime.timedelta(days=3)
    world.agents.put(world.lease(renewed=wrong))
    assert not world.agents.alive("a")
    world.agents.put(world.lease(renewed=wrong + datetime.timedelta(seconds=5)))
    assert world.agents.alive("a")


def test_an_agent_long_dead_is_not_taken_for_alive_at_the_start() -> None:
    world = World()
    world.agents.put(world.lease(renewed=world.wall - datetime.timedelta(minutes=5)))
    assert not world.agents.alive("a")


def test_a_lease_given_up_or_gone_or_never_seen_is_no_sign_of_life() -> None:
    world = World()
    assert not world.agents.alive("a")
    world.agents.put(world.lease(renewed=world.wall))
    world.agents.put(world.lease(renewed=world.wall, holder=""))
    assert not world.agents.alive("a")
    world.agents.put(world.lease("b", renewed=world.wall))
    world.agents.drop("lease-b")
    assert not world.agents.alive("b")


def test_other_leases_of_the_namespace_are_none_of_an_agent() -> None:
    world = World()
    world.agents.put(
        {"metadata": {"name": "sharepod-operator", "uid": "x"}, "spec": {"renewTime": "2026-01-01T00:00:00Z"}}
    )
    assert world.agents.changed(["a", "operator", "sharepod-operator"]) == []


def test_starts_and_ends_of_agents_are_reported_once() -> None:
    world = World()
    world.agents.put(world.lease("a", renewed=world.wall))
    world.agents.put(world.lease("b", renewed=world.wall))
    assert world.agents.changed(["a", "b"]) == ["a", "b"]
    assert world.agents.changed(["a", "b"]) == []
    world.pass_time(15)
    world.agents.put(world.lease("b", renewed=world.wall))
    world.pass_time(10)
    assert world.agents.changed(["a", "b"]) == ["a"]


def test_a_moment_without_an_agent_is_told_of_if_somebody_has_seen_it() -> None:
    world = World()
    for node in ("a", "b"):
        world.agents.put(world.lease(node, renewed=world.wall))
    assert world.agents.changed(["a", "b"]) == ["a", "b"]
    world.pass_time(21)
    # a reader saw that agent a was away, so its return is a change; no reader saw agent b away
    assert not world.agents.alive("a")
    for node in ("a", "b"):
        world.agents.put(world.lease(node, renewed=world.wall))
    assert world.agents.changed(["a", "b"]) == ["a"]
    assert world.agents.changed(["a", "b"]) == []


def test_a_moment_with_an_agent_is_told_of_if_somebody_has_seen_it() -> None:
    world = World()
    assert world.agents.changed(["a"]) == []
    world.agents.put(world.lease(renewed=world.wall))
    assert world.agents.alive("a")
    world.agents.put(world.lease(renewed=world.wall, holder=""))
    assert world.agents.changed(["a"]) == ["a"]
    assert world.agents.changed(["a"]) == []
