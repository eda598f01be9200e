"""The players of the API server double react to the operator's writes as scheduler, kubelets and agents do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from doubles.apiserver.kinds import Json, without_schemas
from doubles.apiserver.players import Players
from doubles.apiserver.storage import Storage

KINDS = {kind.plural: kind for kind in without_schemas()}
PODS, GPUNODES = KINDS["pods"], KINDS["gpunodes"]
PINNED: Json = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [
                {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node-1"]}]},
            ]
        }
    }
}
ROW: Json = {"id": "t", "state": "Reserved", "gpus": ["GPU-node-0-0"], "requestMilli": 400, "memory": 1 << 30}


@pytest.fixture
async def storage() -> AsyncIterator[Storage]:
    made = Storage(copies=False)
    players = Players(made, KINDS)
    players.add_nodes(2, 1)
    players.start()
    yield made
    await players.stop()


def pod(storage: Storage, name: str, **spec: object) -> None:
    storage.create(PODS, "n", {"metadata": {"name": name}, "spec": {"containers": [], **spec}})


async def settle() -> None:
    """Let the players handle their watch events. Each step is one turn of the event loop."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_pod_is_bound_to_its_pin_and_runs(storage: Storage) -> None:
    pod(storage, "one", affinity=PINNED)
    await settle()
    found = storage.get(PODS, "n", "one")
    assert (found["spec"]["nodeName"], found["status"]["phase"]) == ("node-1", "Running")


async def test_a_gated_pod_is_bound_once_its_gate_is_removed(storage: Storage) -> None:
    pod(storage, "one", schedulingGates=[{"name": "g"}])
    await settle()
    assert "nodeName" not in storage.get(PODS, "n", "one")["spec"]
    storage.update(PODS, "n", "one", lambda item: {**item, "spec": {"containers": []}})
    await settle()
    assert storage.get(PODS, "n", "one")["spec"]["nodeName"] in ("node-0", "node-1")


async def test_a_deleted_pod_goes(storage: Storage) -> None:
    pod(storage, "one")
    await settle()
    storage.delete(PODS, "n", "one")
    await settle()
    assert storage.select(PODS, "n") == []


async def test_an_agent_reports_a_changed_ledger_and_that_a_released_row_is_drained(storage: Storage) -> None:
    def released(state: str) -> Json:
        spec = {"pool": "dedicated", "tenants": [{**ROW, "state": state}]}
        return storage.update(GPUNODES, "", "node-0", lambda item: {**item, "spec": spec})

    async def until(drained: bool) -> Json:
        """Wait until the simulated agent, which writes once a second, reports `drained` of its tenant. Return the
        status."""
        async with asyncio.timeout(60):
            while True:
                seen = storage.get(GPUNODES, "", "node-0")["status"]
                if [item["drained"] for item in seen["tenants"]] == [drained]:
                    return dict(seen)
                await storage.wait(storage.version)

    generation = released("Reserved")["metadata"]["generation"]
    assert (await until(drained=False))["observedGeneration"] == generation
    generation = released("Releasing")["metadata"]["generation"]
    assert (await until(drained=True))["observedGeneration"] == generation
