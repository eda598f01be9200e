"""The node's ResourceSlice: its devices, its lifetime, and the agent's condition about it."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
from sharepod.agent.cluster.device_slice import slice_body, slice_name, slice_spec
from sharepod.agent.cluster.slice_publisher import SlicePublisher
from sharepod.agent.cluster.status_report import SliceReason
from sharepod.api.gpunode import Gpu
from sharepod.kube import AlreadyExistsError, ConflictError, ForbiddenError, Json, NotFoundError

NODE, NAME = "node-a", "scheduler.sharepod.dev-node-a"
GIB = 1 << 30


def gpu(index: int, **fields: Any) -> Gpu:
    return Gpu(**{"uuid": f"GPU-{index}", "index": index, "model": "Test", "memory": 16 * GIB + 7, **fields})


async def turns() -> None:
    """Let all other tasks run."""
    for _ in range(20):
        await asyncio.sleep(0)


class Slices:
    """API server with ResourceSlices, which returns quantities in another notation than it was sent. `gate`: True if
    the feature gate DRAConsumableCapacity is on."""

    def __init__(self) -> None:
        self.slices: dict[str, Json] = {}
        self.gate = True
        self.node_uid: str | None = "node-uid"
        self.forbidden = False
        self.version = 0
        self.writes = 0
        self.events: asyncio.Queue[Json] = asyncio.Queue()

    @property
    def own(self) -> Json | None:
        """Return the slice with the node's own name. None if there is none."""
        return self.slices.get(NAME)

    @own.setter
    def own(self, found: Json | None) -> None:
        self.slices.pop(NAME, None)
        if found is not None:
            self.slices[NAME] = found

    def _kept(self, body: Json) -> Json:
        kept = copy.deepcopy(body)
        self.version += 1
        kept["metadata"]["resourceVersion"] = str(self.version)
        for device in kept["spec"]["devices"]:
            device["capacity"]["timeMilli"]["value"] = "1k"
            if not self.gate:
                del device["allowMultipleAllocations"]
        return kept

    async def call(self, method: str, path: str, body: Json | None = None, *, query: Json | None = None) -> Json:
        if self.forbidden:
            raise ForbiddenError(f"{method} {path}", 403, "Forbidden", "no")
        if method == "POST":
            assert body is not None
            return self._kept(body) if query == {"dryRun": "All"} else await self.create(path, body)
        name = path.rpartition("/")[2]
        if name not in self.slices:
            raise NotFoundError(f"{method} {path}", 404, "NotFound", "deleted")
        if method == "DELETE":
            del self.slices[name]
            return {}
        assert body is not None
        if body["metadata"]["resourceVersion"] != self.slices[name]["metadata"]["resourceVersion"]:
            raise ConflictError(f"{method} {path}", 409, "Conflict", "changed")
        if query == {"dryRun": "All"}:
            return self._kept(body)
        self.slices[name], self.writes = self._kept(body), self.writes + 1
        return copy.deepcopy(self.slices[name])

    async def create(self, path: str, body: Json) -> Json:
        if path.endswith("selfsubjectreviews"):
            extra = {"authentication.kubernetes.io/node-uid": [self.node_uid]} if self.node_uid else {}
            return {"status": {"userInfo": {"extra": extra}}}
        name = body["metadata"]["name"]
        if name in self.slices:
            raise AlreadyExistsError(f"POST {path}", 409, "AlreadyExists", "there")
        self.slices[name], self.writes = self._kept(body), self.writes + 1
        return copy.deepcopy(self.slices[name])

    async def get(self, path: str, query: Json | None = None) -> Json:
        if query is not None:
            found = self.slices.get(query["fieldSelector"].partition("=")[2])
            items = [copy.deepcopy(found)] if found is not None else []
            return {"metadata": {"resourceVersion": str(self.version)}, "items": items}
        name = path.rpartition("/")[2]
        if name not in self.slices:
            raise NotFoundError(f"GET {path}", 404, "NotFound", "deleted")
        return copy.deepcopy(self.slices[name])

    def report_ready(self) -> None:
        """Send the slice's current state to the open watch."""
        found = copy.deepcopy(self.own)
        kind = "MODIFIED" if found is not None else "DELETED"
        self.events.put_nowait({"type": kind, "object": found or {"metadata": {"resourceVersion": str(self.version)}}})

    async def watch(self, path: str, query: Json, since: str) -> AsyncIterator[Json]:
        while True:
            yield await self.events.get()


class Ledger:
    """Applied ledger, with the properties that the publisher reads."""

    def __init__(self) -> None:
        self.uid: str | None = "gpunode"
        self.of_scheduler = True
        self.publishes = True

    async def changed(self) -> None:
        await asyncio.sleep(0)


class Bench:
    def __init__(self) -> None:
        self.api, self.ledger = Slices(), Ledger()
        self.gpus = [gpu(1), gpu(0)]
        self.unfit: str | None = None
        self.settling = False
        self.publisher = self.start()

    def start(self) -> SlicePublisher:
        """Return the publisher of a new agent, which does not know what an earlier agent has published."""
        self.publisher = SlicePublisher(
            self.api,  # type: ignore[arg-type]
            node=NODE,
            ledger=self.ledger,  # type: ignore[arg-type]
            gpus=lambda: self.gpus,
            settling=lambda: self.settling,
            unfit=lambda: self.unfit,
            changed=lambda: None,
        )
        return self.publisher

    @property
    def reason(self) -> SliceReason | None:
        if (verdict := self.publisher.verdict) is None:
            return None
        assert isinstance(verdict.reason, SliceReason)
        return verdict.reason

    def devices(self) -> list[str]:
        return [device["name"] for device in (self.api.own or {"spec": {"devices": []}})["spec"]["devices"]]

    def leave(self) -> None:
        self.ledger.publishes = False


@pytest.mark.promise("operator-scheduler-pool-slice")
async def test_the_gpus_are_published_as_devices_of_the_node_and_go_with_it() -> None:
    bench = Bench()
    await bench.publisher.step()
    found = bench.api.own
    assert found is not None
    assert found["metadata"]["name"] == slice_name(NODE) == NAME
    assert found["metadata"]["ownerReferences"] == [
        {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": "node-uid"}
    ]
    spec = found["spec"]
    assert (spec["driver"], spec["nodeName"], spec["pool"]["name"]) == ("scheduler.sharepod.dev", NODE, NODE)
    assert bench.devices() == ["gpu-0", "gpu-1"]
    assert bench.reason is SliceReason.PUBLISHED


@pytest.mark.promise("operator-scheduler-pool-slice")
def test_a_device_is_a_whole_gpu_of_which_shares_are_taken_as_a_ledger_takes_them() -> None:
    (device,) = slice_spec(NODE, [gpu(0)], 1)["devices"]
    assert device["allowMultipleAllocations"] is True
    assert device["attributes"] == {"uuid": {"string": "GPU-0"}, "model": {"string": "Test"}}
    assert device["capacity"] == {
        "timeMilli": {
            "value": "1000",
            "requestPolicy": {"default": "1000", "validRange": {"min": "0", "max": "1000", "step": "1"}},
        },
        "limitMilli": {
            "value": "256000",
            "requestPolicy": {"default": "1000", "validRange": {"min": "1", "max": "1000", "step": "1"}},
        },
        "memory": {
            "value": "16384Mi",
            "requestPolicy": {"default": "16384Mi", "validRange": {"min": "1Mi", "max": "16384Mi", "step": "1Mi"}},
        },
        "tenants": {"value": "256", "requestPolicy": {"default": "1", "validRange": {"min": "1", "max": "1"}}},
    }
    eight = slice_spec(NODE, [gpu(index) for index in range(8)], 1)["devices"]
    assert {device["capacity"]["tenants"]["value"] for device in eight} == {"32"}, "256 rows for all of them"


async def test_an_up_to_date_slice_is_not_written_again() -> None:
    bench = Bench()
    for _ in range(3):
        await bench.publisher.step()
    assert bench.api.writes == 1


async def test_a_gpu_that_fails_leaves_and_the_pool_is_of_a_later_generation() -> None:
    bench = Bench()
    await bench.publisher.step()
    bench.gpus.pop()
    await bench.publisher.step()
    assert bench.devices() == ["gpu-1"]
    assert bench.api.own is not None
    assert bench.api.own["spec"]["pool"]["generation"] == 2


async def test_a_node_that_takes_no_tenants_publishes_no_device() -> None:
    bench = Bench()
    bench.unfit = "the agent is not ready"
    await bench.publisher.step()
    assert bench.devices() == []
    assert (bench.reason, bench.publisher.verdict.message) == (SliceReason.NOT_READY, bench.unfit)  # type: ignore[union-attr]
    bench.unfit = None
    await bench.publisher.step()
    assert len(bench.devices()) == 2
    assert bench.reason is SliceReason.PUBLISHED


async def test_a_slice_that_was_deleted_or_changed_is_written_again() -> None:
    bench = Bench()
    await bench.publisher.step()
    watching = asyncio.create_task(bench.publisher.follow())
    await turns()
    bench.api.own = None
    bench.api.report_ready()
    await turns()
    await bench.publisher.step()
    assert len(bench.devices()) == 2
    assert bench.api.own is not None
    bench.api.own["spec"]["devices"].clear()
    bench.api.version += 1
    bench.api.own["metadata"]["resourceVersion"] = str(bench.api.version)
    bench.api.report_ready()
    await turns()
    await bench.publisher.step()
    assert len(bench.devices()) == 2
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching


async def test_a_slice_that_a_restored_backup_has_brought_back_is_written_again() -> None:
    bench = Bench()
    await bench.publisher.step()
    before = copy.deepcopy(bench.api.own)
    bench.gpus.pop()
    for _ in range(2):
        await bench.publisher.step()
    assert bench.devices() == ["gpu-1"]
    bench.api.own = before  # older than the last version that the publisher saw
    watching = asyncio.create_task(bench.publisher.follow())
    await turns()
    await bench.publisher.step()
    assert bench.devices() == ["gpu-1"]
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching


async def test_an_agent_that_is_only_starting_leaves_what_is_published_as_it_is() -> None:
    bench = Bench()
    await bench.publisher.step()
    bench.start()
    bench.settling, bench.unfit, bench.gpus = True, "not ready", []
    await bench.publisher.step()
    assert (len(bench.devices()), bench.reason) == (2, SliceReason.STARTING)


async def test_the_next_agent_takes_the_slice_of_the_one_before() -> None:
    bench = Bench()
    await bench.publisher.step()
    bench.gpus.pop()
    bench.start()
    for _ in range(2):
        await bench.publisher.step()
    assert bench.devices() == ["gpu-1"]
    assert bench.reason is SliceReason.PUBLISHED


@pytest.mark.promise("operator-scheduler-pool-leaves")
async def test_a_node_reports_that_it_left_only_once_its_slice_is_deleted() -> None:
    bench = Bench()
    await bench.publisher.step()
    bench.leave()
    assert bench.reason is SliceReason.STARTING
    await bench.publisher.step()
    assert (bench.api.own, bench.reason) == (None, SliceReason.WITHDRAWN)
    bench.ledger.publishes = True
    await bench.publisher.step()
    bench.leave()
    assert bench.reason is SliceReason.STARTING, "it has published since"


async def test_an_agent_that_starts_on_a_node_that_leaves_deletes_what_the_one_before_has_published() -> None:
    bench = Bench()
    await bench.publisher.step()
    bench.leave()
    bench.start()
    assert bench.reason is SliceReason.STARTING
    await bench.publisher.step()
    assert (bench.api.own, bench.reason) == (None, SliceReason.WITHDRAWN)


async def test_a_node_of_another_pool_has_no_slice_and_no_condition_about_one() -> None:
    bench = Bench()
    await bench.publisher.step()
    bench.ledger.of_scheduler = bench.ledger.publishes = False
    bench.start()
    await bench.publisher.step()
    assert (bench.api.own, bench.reason) == (None, None)
    bench.start()
    bench.api.forbidden = True
    await bench.publisher.step()
    assert bench.reason is None, "where agents have no such right, there is none"


async def test_before_the_ledger_is_known_what_is_published_stays() -> None:
    bench = Bench()
    await bench.publisher.step()
    bench.start()
    bench.ledger.uid, bench.ledger.of_scheduler, bench.ledger.publishes = None, False, False
    await bench.publisher.step()
    assert len(bench.devices()) == 2


@pytest.mark.promise("operator-scheduler-pool-gate")
async def test_without_the_feature_gate_nothing_is_published_and_the_condition_says_which() -> None:
    bench = Bench()
    bench.api.gate = False
    await bench.publisher.step()
    assert bench.api.own is None
    assert bench.reason is SliceReason.NO_SHARES
    assert bench.publisher.verdict is not None
    assert "DRAConsumableCapacity" in bench.publisher.verdict.message


@pytest.mark.promise("operator-scheduler-pool-gate")
async def test_nor_once_a_node_takes_tenants_that_took_none_before() -> None:
    bench = Bench()
    bench.api.gate, bench.unfit = False, "not ready"
    await bench.publisher.step()
    bench.unfit = None
    await bench.publisher.step()
    assert (bench.devices(), bench.reason) == ([], SliceReason.NO_SHARES)


async def test_what_is_begun_before_a_node_leaves_again_counts_as_published() -> None:
    """A write of the slice may take effect after the ledger shows that the node leaves the pool, so the slice must be
    withdrawn again.
    """
    bench = Bench()
    bench.leave()
    await bench.publisher.step()
    reasons = [bench.reason]
    bench.ledger.publishes = bench.settling = True
    await bench.publisher.step()
    bench.leave()
    reasons.append(bench.reason)
    await bench.publisher.step()
    reasons.append(bench.reason)
    assert reasons == [SliceReason.WITHDRAWN, SliceReason.STARTING, SliceReason.WITHDRAWN]


async def test_an_agent_whose_token_names_no_node_publishes_nothing() -> None:
    bench = Bench()
    bench.api.node_uid = None
    await bench.publisher.step()
    assert (bench.api.own, bench.reason) == (None, SliceReason.REFUSED)


@pytest.mark.promise("operator-scheduler-pool-own-name")
async def test_where_another_nodes_slice_has_the_name_the_nodes_gpus_are_published_by_another_and_withdrawn() -> None:
    bench = Bench()
    taken = bench.api._kept(slice_body("node-b", "uid-b", slice_spec("node-b", [], 1), NAME))
    bench.api.own = copy.deepcopy(taken)
    await bench.publisher.step()
    assert bench.reason is SliceReason.PUBLISHED
    other = "scheduler.sharepod.dev.node-uid-node-a"
    assert set(bench.api.slices) == {NAME, other}
    assert (bench.api.own, bench.api.slices[other]["spec"]["nodeName"]) == (taken, NODE)
    bench.api.own = None
    bench.start()
    await bench.publisher.step()
    assert set(bench.api.slices) == {other}, "the next agent keeps it"
    bench.ledger.publishes = False
    await bench.publisher.step()
    assert (bench.api.slices, bench.reason) == ({}, SliceReason.WITHDRAWN)


@pytest.mark.promise("operator-scheduler-pool-own-name")
async def test_a_name_that_is_taken_while_the_slice_was_deleted_is_left() -> None:
    bench = Bench()
    await bench.publisher.step()
    bench.api.own = bench.api._kept(slice_body("node-b", "uid-b", slice_spec("node-b", [], 1), NAME))
    bench.publisher._take(bench.api.own)
    await bench.publisher.step()
    assert bench.reason is SliceReason.PUBLISHED
    assert len(bench.api.slices) == 2
