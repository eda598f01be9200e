"""The cluster's attach mode, CSI or claims: checked, changed after failures, and shown on each node."""

from __future__ import annotations

from typing import Any

import pytest
from sharepod.api.claims.share_claims import Attach
from sharepod.controller.attach_mode import NOT_HONOURED_S, AttachMode
from sharepod.controller.decisions.attaching import CONDITION_BY_CLAIMS, AttachReason
from sharepod.kube import ApiError, Json, NotFoundError
from unit.controller.acting_world import World, acting_world


class _Bindings:
    """API server that has the policy's binding, lacks it, or does not answer."""

    def __init__(self) -> None:
        self.answer: Json | ApiError = {}
        self.asked = 0

    async def get(self, _resource: Any, name: str) -> Json:
        self.asked += 1
        assert name == "sharepod-share-claims"
        if isinstance(self.answer, ApiError):
            raise self.answer
        return self.answer


def mode_of(world: World, setting: Attach = Attach.AUTO) -> tuple[AttachMode, _Bindings, list[AttachReason]]:
    server, changes = _Bindings(), []
    client: Any = server
    mode = AttachMode(
        setting,
        world.state,
        client,
        served=lambda: True,
        acts=lambda: True,
        on_changed=lambda: changes.append(mode.now.reason),
        clock=lambda: world.now,
    )
    return mode, server, changes


async def test_the_policy_is_looked_at_and_an_absent_server_changes_nothing() -> None:
    async with acting_world() as world:
        world.node()
        await world.relist()
        mode, server, changes = mode_of(world)
        assert not mode.by_claims()
        server.answer = NotFoundError("GET binding", 404, "NotFound", "none")
        await mode.look()
        server.answer = {}
        await mode.look()
        assert mode.by_claims()
        server.answer = ApiError("GET binding", 503, "Refused", "away")
        await mode.look()
        assert mode.by_claims()
        assert changes == [AttachReason.POLICY_ABSENT, AttachReason.CLAIMS]


@pytest.mark.promise("operator-attach-doubt")
async def test_what_was_not_honoured_leads_to_csi_for_ten_minutes() -> None:
    async with acting_world() as world:
        world.node()
        await world.relist()
        mode, _, changes = mode_of(world)
        await mode.look()
        mode.not_honoured("kube-scheduler did not take it")
        assert not mode.by_claims()
        assert "did not take it" in mode.now.message
        world.now += NOT_HONOURED_S - 1
        await mode.look()
        assert not mode.by_claims()
        world.now += 1
        await mode.look()
        assert mode.by_claims()
        assert changes == [AttachReason.CLAIMS, AttachReason.NOT_HONOURED, AttachReason.CLAIMS]


@pytest.mark.parametrize(("setting", "asked"), [(Attach.CSI, 0), (Attach.CLAIMS, 0), (Attach.AUTO, 1)])
async def test_only_auto_asks_the_api_server(setting: Attach, asked: int) -> None:
    async with acting_world() as world:
        mode, server, _ = mode_of(world, setting)
        await mode.look()
        assert server.asked == asked
        assert mode.by_claims() is (setting is Attach.CLAIMS)


def shown(world: World) -> Json:
    conditions = ((world.read("gpunodes", "node-a") or {}).get("status") or {}).get("conditions", ())
    found: Json = next((item for item in conditions if item["type"] == CONDITION_BY_CLAIMS), {})
    return found


@pytest.mark.promise("operator-attach-shown")
async def test_each_node_says_how_gpus_are_attached_and_why() -> None:
    async with acting_world() as world:
        world.node()
        await world.relist()
        mode, _, _ = mode_of(world)
        await mode.look()
        world.nodes.attaching = mode.now
        await world.look_at_node()
        assert (shown(world)["status"], shown(world)["reason"]) == ("True", "Claims")
        for why in ("first", "second"):
            mode.not_honoured(why)
            world.nodes.attaching = mode.now
            await world.look_at_node()
            found = shown(world)
            assert (found["status"], found["reason"], found["message"]) == ("False", "AllocationNotHonoured", why)
        writes = len(world.server.made("patch", "gpunodes"))
        await world.look_at_node()
        assert len(world.server.made("patch", "gpunodes")) == writes


async def test_a_cluster_that_never_asked_for_claims_shows_nothing() -> None:
    async with acting_world() as world:
        world.node()
        mode, _, _ = mode_of(world, Attach.CSI)
        await mode.look()
        world.nodes.attaching = mode.now
        await world.look_at_node()
        assert shown(world) == {}
