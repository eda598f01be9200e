"""Free shares in the ConfigMap for users who may not read GPUNodes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sharepod.api.units import Bytes, GpuUuid, Milli, TenantId
from sharepod.controller.apiserver.client import Resource
from sharepod.controller.free_shares import FreeShares
from sharepod.kube import ApiError, Json, NotFoundError
from sharepod.placement.state.cluster import Cluster
from sharepod.placement.state.needs import parse_taints
from sharepod.placement.state.types import GpuState, NodeState, Reservation

GIB = 1 << 30


class _Server:
    """API server that accepts merge patches, or refuses them."""

    def __init__(self) -> None:
        self.patches: list[list[Json]] = []
        self.refusal: ApiError | None = None

    async def patch_merge(self, resource: Resource, name: str, body: Json, namespace: str) -> Json:
        assert (resource.plural, name, namespace) == ("configmaps", "sharepod-free", "system")
        if self.refusal is not None:
            raise self.refusal
        self.patches.append(json.loads(body["data"]["free.json"]))
        return {}


class _Spec:
    def __init__(self, pool: str) -> None:
        self.pool = pool


class _GpuNode:
    def __init__(self, name: str, pool: str) -> None:
        self.name, self.spec = name, _Spec(pool)


class _State:
    def __init__(self) -> None:
        self.cluster = Cluster()
        self.gpunodes: list[_GpuNode] = []

    def node(
        self, name: str, *, model: str = "L4", unavailable: str | None = None, spec: Json | None = None, **gpu: Any
    ) -> None:
        gpus = tuple(
            GpuState(uuid=GpuUuid(f"{name}-{index}"), index=index, model=model, memory=Bytes(24 * GIB), **gpu)
            for index in range(2)
        )
        if name not in [one.name for one in self.gpunodes]:
            self.gpunodes.append(_GpuNode(name, "dedicated"))
        self.cluster.upsert_node(
            NodeState(name=name, gpus=gpus, unavailable=unavailable, taints=parse_taints(spec or {}))
        )

    def tenant(self, name: str, gpu: str, milli: int) -> None:
        node = gpu.rpartition("-")[0]
        row = Reservation(
            tenant=TenantId(name),
            namespace="secret-team",
            pod_name=name,
            gpus=(GpuUuid(gpu),),
            request_milli=Milli(milli),
            limit_milli=Milli(1000),
            memory=Bytes(4 * GIB),
        )
        self.cluster.reserve(node, row)


def world() -> tuple[_State, _Server, FreeShares]:
    state, server = _State(), _Server()
    any_state: Any = state
    any_client: Any = server
    return state, server, FreeShares(any_state, any_client, "system", lambda: True)


@pytest.mark.promise("operator-free-shares")
async def test_totals_name_the_largest_free_share_and_no_tenant() -> None:
    state, server, shares = world()
    state.node("node-a")
    state.tenant("secret-job", "node-a-0", 700)
    state.node("node-b", model="A10", unavailable="is not ready")
    state.node("node-c", taken=True)
    state.node("node-d", available=False)
    await shares.write()
    (a10, l4) = server.patches[0]
    assert a10 == {"model": "A10", "pool": "dedicated", "gpus": 2, "unused": 0, "freeMilli": 0, "largest": None}
    assert (l4["gpus"], l4["unused"], l4["freeMilli"]) == (6, 1, 1300)
    assert l4["largest"] == {"requestMilli": 1000, "memory": 24 * GIB}
    assert "secret" not in str(server.patches)
    assert "node" not in str(server.patches)


async def test_a_cordoned_node_has_no_free_share_until_it_is_uncordoned() -> None:
    state, server, shares = world()
    state.node("node-a", spec={"unschedulable": True})
    await shares.write()
    state.node("node-a")
    await shares.write()
    assert [(entry[0]["gpus"], entry[0]["unused"], entry[0]["freeMilli"]) for entry in server.patches] == [
        (2, 0, 0),
        (2, 2, 2000),
    ]


@pytest.mark.promise("operator-free-shares")
async def test_only_changed_totals_are_written_and_a_failed_write_is_repeated() -> None:
    state, server, shares = world()
    state.node("node-a")
    await shares.write()
    await shares.write()
    state.node("node-a", numa_node=1)  # this change affects no total
    await shares.write()
    assert len(server.patches) == 1
    state.tenant("job", "node-a-0", 400)
    server.refusal = ApiError("PATCH", 503, "Refused", "away")
    await shares.write()
    server.refusal = None
    await shares.write()
    assert [entry[0]["freeMilli"] for entry in server.patches] == [2000, 1600]
    shares.forget()
    await shares.write()
    assert len(server.patches) == 3, "another operator may have written other totals"


@pytest.mark.promise("operator-free-shares")
async def test_nothing_is_published_where_the_config_map_was_left_out() -> None:
    state, server, shares = world()
    state.node("node-a")
    server.refusal = NotFoundError("PATCH", 404, "NotFound", "none")
    await shares.write()
    server.refusal = None
    await shares.write()
    assert server.patches == []
    state.tenant("job", "node-a-0", 400)
    await shares.write()
    assert len(server.patches) == 1, "it was applied since"
