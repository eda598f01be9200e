"""Live reads that precede the reassignment of a share, with a server that is ahead of the watches."""

from __future__ import annotations

from typing import Any, cast

import pytest
from sharepod.api.sharepod import Phase
from sharepod.controller.apiserver.client import Client
from sharepod.controller.apiserver.events import Events
from sharepod.controller.decisions.ends import Absence, EndReason
from sharepod.controller.decisions.snapshot import TenantSnapshot
from sharepod.controller.decisions.steps import Finish, RemovalReason, RemoveRow
from sharepod.controller.nodes import CONDITION_AGENT_ALIVE, NodeReconciler
from sharepod.controller.placing.ledger_writer import LedgerWriter
from sharepod.controller.settings import OperatorSettings
from sharepod.controller.state.facts.sharepod_facts import sharepod_facts
from sharepod.controller.state.memos import TenantMemo, TenantMemos
from sharepod.controller.tenants.confirmations import Confirmations
from sharepod.controller.tenants.pods import PodControl
from sharepod.controller.tenants.reconciler import TenantReconciler
from sharepod.controller.tenants.snapshots import asks_for_another_share
from sharepod.kube import Json
from unit.controller.fakes import FakeServer
from unit.controller.objects import PODS, TENANT, pod_object, reserved, sharepod_object
from unit.controller.state.test_cluster_state import gpunode_object, new_state, node_object


class Operator:
    """All parts that work on tenants and nodes, on one server. Their loops do not run."""

    def __init__(self) -> None:
        self.server, self.state = FakeServer(), new_state()
        client = cast(Client, self.server)
        self.events = Events(client, "test", lambda: 0.0)
        self.pod_control = PodControl(self.state, client, self.events, PODS)
        self.confirmations = Confirmations(self.state, client, self.pod_control)
        ledger, settings = LedgerWriter(self.state, client, self.events, 1), OperatorSettings(namespace="system")
        memos = TenantMemos()
        self.nodes = NodeReconciler(self.state, client, ledger, self.events, settings, lambda: 0.0)
        self.tenants = TenantReconciler(
            self.state,
            client,
            ledger,
            self.pod_control,
            self.events,
            memos,
            settings,
            lambda: 0.0,
            advertises=self.nodes.advertises_enough,
        )

    def serve(self, plural: str, raw: Json) -> None:
        key = (plural, raw["metadata"].get("namespace", ""), raw["metadata"]["name"])
        self.server.objects[key] = raw

    async def may_remove(self, node: str, reason: RemovalReason, snapshot: TenantSnapshot) -> bool:
        return await self.confirmations.may_remove(snapshot, TENANT, "one", "n", RemoveRow(node, reason))


def snapshot(**fields: Any) -> TenantSnapshot:
    return TenantSnapshot(
        **{"sharepod": None, "pod": None, "reserved": (reserved("node-a"), reserved("node-b")), **fields}
    )


@pytest.mark.parametrize("why", [RemovalReason.NEVER_BOUND, RemovalReason.POD_ELSEWHERE])
async def test_a_row_is_not_removed_under_a_pod_that_no_watch_has_told_of_yet(why: RemovalReason) -> None:
    operator = Operator()
    assert await operator.may_remove("node-b", why, snapshot())
    operator.serve("pods", pod_object(pin="node-b", node="node-b", phase="Running"))
    assert not await operator.may_remove("node-b", why, snapshot())
    assert operator.state.pod_of(TENANT) is not None
    assert await operator.may_remove("node-a", why, snapshot())


async def test_a_pod_of_that_name_that_is_not_the_tenants_keeps_nothing() -> None:
    operator = Operator()
    operator.serve("pods", pod_object(owner="another", pin="node-b"))
    assert await operator.may_remove("node-b", RemovalReason.NEVER_BOUND, snapshot())


async def test_a_node_that_came_back_without_its_label_is_not_taken_as_gone() -> None:
    operator = Operator()
    operator.state.node_is_gone("node-a")
    releasing = snapshot(reserved=(reserved(releasing=True, override=RemovalReason.NODE_GONE),))
    assert await operator.may_remove("node-a", RemovalReason.NODE_GONE, releasing)
    operator.serve("nodes", node_object(labels={}))
    assert not await operator.may_remove("node-a", RemovalReason.NODE_GONE, releasing)
    assert "node-a" not in operator.state.gone_nodes


async def test_a_reservation_whose_row_cannot_be_read_is_not_lost() -> None:
    operator = Operator()
    spoiled = gpunode_object(TENANT)
    spoiled["spec"]["tenants"][0]["state"] = "Borrowed"
    operator.serve("gpunodes", spoiled)
    running = pod_object(node="node-a", phase="Running")
    operator.state.put_pod(running)
    lost = Finish(Phase.FAILED, EndReason.RESERVATION_LOST, "", Absence.ROW)
    seen = snapshot(pod=operator.state.pod_of(TENANT))
    assert not await operator.confirmations.ended(seen, TENANT, "one", "n", lost)
    operator.serve("gpunodes", gpunode_object(version=2))
    assert await operator.confirmations.ended(seen, TENANT, "one", "n", lost)


@pytest.mark.parametrize(("deleting", "reason"), [(True, "PodTerminating"), (False, "PodNameTaken")])
async def test_a_former_pod_of_the_name_is_waited_for_and_a_strangers_is_not(deleting: bool, reason: str) -> None:
    operator, memo = Operator(), TenantMemo()
    stranger = pod_object(owner="another", deleting=deleting)
    operator.serve("pods", stranger)
    sharepod = sharepod_facts(sharepod_object(), PODS)
    assert await operator.pod_control.create(sharepod, memo, 0.0) is None
    assert memo.blocked is not None
    assert memo.blocked.reason == reason


async def test_a_pod_with_the_owner_but_without_our_label_is_not_adopted() -> None:
    operator, memo = Operator(), TenantMemo()
    bare = pod_object()
    del bare["metadata"]["labels"]
    operator.serve("pods", bare)
    assert await operator.pod_control.create(sharepod_facts(sharepod_object(), PODS), memo, 0.0) is None
    assert memo.blocked is not None
    assert memo.blocked.reason == "PodNameTaken"
    assert operator.state.pod_of(TENANT) is None


def test_memory_by_default_is_not_resized_because_a_gpu_is_reported_otherwise() -> None:
    operator = Operator()
    operator.state.put_node(node_object())
    operator.state.put_gpunode(gpunode_object(TENANT, memory=1 << 35))
    granted = operator.state.gpunodes.named("node-a")
    assert granted is not None
    for seen, asked in ((1, False), (None, True)):
        status = {"observedGeneration": seen} if seen else {}
        sharepod = sharepod_facts(sharepod_object(status=status), PODS)
        known = snapshot(sharepod=sharepod, reserved=(reserved(),))
        assert asks_for_another_share(operator.state, known, TenantMemo()) is asked


async def test_a_node_that_lost_its_label_with_tenants_gets_advice() -> None:
    operator = Operator()
    conditions: list[Json] = []

    async def apply_status(_resource: object, _name: str, body: Json) -> Json:
        conditions.extend(body["status"]["conditions"])
        return gpunode_object(TENANT, version=2)

    operator.server.apply_status = apply_status  # type: ignore[attr-defined]
    operator.serve("nodes", node_object(labels={}))
    operator.state.put_gpunode(gpunode_object(TENANT))
    await operator.nodes.reconcile("node-a")
    assert [(item["type"], item["status"], item["reason"]) for item in conditions] == [
        (CONDITION_AGENT_ALIVE, "False", "PoolLabelGone")
    ]
    assert "Put the label back" in conditions[0]["message"]
