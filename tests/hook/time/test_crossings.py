"""Grants that arrive while another grant is held, is revoked or drains (T5 and T6, token.h)."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass

import pytest
from doubles.gpus import release_hung_kernels
from hook.conftest import Tenant
from hook.world.probe import SUCCESS, Probe, Result
from hook.world.scripted_agent import Client, ScriptedAgent
from sharepod.protocol import Drained, Grant, Want


@dataclass
class Scene:
    """Process that holds the first grant. A kernel runs under this grant and does not end by itself."""

    tenant: Tenant
    agent: ScriptedAgent
    probe: Probe
    client: Client
    first: Grant

    def revoke_first(self, *, closed: bool = True) -> Future[Result]:
        """Revoke the first grant. Return a launch that waits at the gate. `closed`: begin the launch only after the
        gate is closed.
        """
        self.agent.revoke(self.client, self.first)
        while closed:
            waiting = self.launch()
            try:
                waiting.result(0.2)
            except TimeoutError:
                return waiting
        return Future()

    def launch(self) -> Future[Result]:
        """Launch into a stream that does not wait for the kernel that never ends."""
        return self.probe.post("launch", "noop", "other", thread="other")

    def drained(self) -> list[int]:
        """Return the ids of the grants whose DRAINED has arrived."""
        return [frame.grant_id for frame in self.agent.frames(self.client, Drained)]

    def last_drained(self, count: int) -> Drained:
        """Wait until `count` DRAINED frames have arrived. Return the last one."""
        return self.agent.next_frame(self.client, Drained, count - 1)

    def end_kernel(self) -> None:
        release_hung_kernels(self.tenant.state)


def scene_of(tenant: Tenant, *, grace_ms: int = 10_000) -> Scene:
    agent = tenant.agent(grace_ms=grace_ms)
    probe = tenant.probe()
    probe.start_cuda()
    for name in ("hung", "other"):
        probe.ok("stream", name)
    probe.ok("context_use", thread="other")
    launched = probe.post("launch", "hang", "hung")
    client = agent.client()
    agent.next_frame(client, Want)
    first = agent.grant(client)
    assert launched.result(10).code == SUCCESS
    return Scene(tenant, agent, probe, client, first)


@pytest.fixture
def scene(tenant: Tenant) -> Scene:
    return scene_of(tenant)


@pytest.mark.parametrize("closed", [True, False], ids=["drains", "just revoked"])
def test_a_grant_that_comes_before_a_drain_is_over_opens_the_gate_after_it(scene: Scene, closed: bool) -> None:
    waiting = scene.revoke_first(closed=closed)
    second = scene.agent.grant(scene.client)
    launched = waiting if closed else scene.launch()
    assert scene.drained() == []
    scene.end_kernel()
    assert not scene.last_drained(1).wanting, "the kept grant is the answer"
    assert launched.result(10).code == SUCCESS
    assert len(scene.agent.frames(scene.client, Want)) == 1
    scene.agent.revoke(scene.client, second)
    scene.last_drained(2)
    assert scene.drained() == [scene.first.grant_id, second.grant_id]
    counted = [frame.launches for frame in scene.agent.frames(scene.client, Drained)]
    assert sum(counted) == scene.tenant.submitted()


@pytest.mark.parametrize("way", ["revoked", "over"])
def test_a_kept_grant_that_has_ended_opens_nothing(scene: Scene, way: str) -> None:
    waiting = scene.revoke_first()
    second = scene.agent.grant(scene.client, 1 if way == "over" else 0)
    if way == "revoked":
        scene.agent.revoke(scene.client, second)
    time.sleep(0.01)  # longer than the quantum
    before = scene.tenant.submitted()
    scene.end_kernel()
    back = scene.last_drained(2)
    assert scene.drained() == [scene.first.grant_id, second.grant_id]
    assert (back.launches, back.wanting) == (0, True)
    assert scene.tenant.submitted() == before
    scene.agent.grant(scene.client)
    assert waiting.result(10).code == SUCCESS


def test_a_kept_grant_takes_new_terms(scene: Scene) -> None:
    waiting = scene.revoke_first()
    second = scene.agent.grant(scene.client, 1)
    scene.agent.send(scene.client, Grant(second.grant_id, 0, 1, metered=False, renews=True))
    time.sleep(0.01)  # the sleep is longer than the quantum
    scene.end_kernel()
    assert waiting.result(10).code == SUCCESS
    assert scene.last_drained(1).grant_id == scene.first.grant_id


def test_of_two_grants_that_come_during_a_drain_the_later_one_is_kept(scene: Scene) -> None:
    waiting = scene.revoke_first()
    second, third = (scene.agent.grant(scene.client) for _ in range(2))
    assert scene.last_drained(1).launches == 0
    scene.end_kernel()
    assert waiting.result(10).code == SUCCESS
    scene.agent.revoke(scene.client, third)
    assert scene.last_drained(3).launches == 1
    assert scene.drained() == [second.grant_id, scene.first.grant_id, third.grant_id]


@pytest.mark.promise("program-waiting-work")
def test_a_kept_grant_opens_the_gate_beside_a_drain_that_is_overdue(tenant: Tenant) -> None:
    """The kernel may be waiting for the launch that waits at the gate (T3), so the kept grant must open the gate."""
    scene = scene_of(tenant, grace_ms=50)
    waiting = scene.revoke_first()
    launched = tenant.submitted()
    second = scene.agent.grant(scene.client)
    assert waiting.result(10).code == SUCCESS
    assert scene.drained() == []
    scene.end_kernel()
    scene.agent.revoke(scene.client, second)
    assert scene.last_drained(1).launches == launched + 1
    assert scene.drained() == [second.grant_id]


def test_a_kept_grant_ends_with_the_connection(scene: Scene) -> None:
    scene.revoke_first()
    scene.agent.grant(scene.client)
    scene.agent.vanish()
    scene.agent.appear()
    client = scene.agent.client()
    scene.end_kernel()
    scene.agent.next_frame(client, Want)
    assert scene.agent.frames(client, Drained) == []


def test_a_grant_that_comes_while_another_is_held_takes_its_place_without_a_drain(scene: Scene) -> None:
    second = scene.agent.grant(scene.client, metered=True)
    scene.tenant.until(lambda: scene.client.pulse().grant_id == second.grant_id, "the second grant in the pulse")
    scene.agent.revoke(scene.client, scene.first)
    assert [scene.launch().result(10).code for _ in range(3)] == [SUCCESS] * 3
    assert scene.drained() == []
    assert len(scene.agent.frames(scene.client, Want)) == 1
    scene.end_kernel()
    scene.agent.revoke(scene.client, second)
    assert scene.last_drained(1).launches == 4
    assert scene.drained() == [second.grant_id]
