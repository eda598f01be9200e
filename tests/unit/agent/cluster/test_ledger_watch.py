"""The agent's ledger equals its GPUNode's, whatever the API server does."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from sharepod.agent.cluster import ledger_watch as ledger
from sharepod.agent.cluster.ledger_watch import LedgerWatch
from sharepod.agent.tenants.registry import UntakenRowsError
from sharepod.api.gpunode import Pool, Tenant
from sharepod.kube import Connection, connection
from unit.scripted_server import Scripted


def gpunode(version: int, *tenants: str, generation: int | None = None, uid: str = "u") -> dict[str, Any]:
    rows = [
        {
            "id": tenant,
            "namespace": "n",
            "podName": tenant,
            "gpus": ["GPU-0"],
            "requestMilli": 1,
            "limitMilli": 1,
            "memory": 1,
        }
        for tenant in tenants
    ]
    metadata = {"uid": uid, "name": "node-1", "generation": generation or version, "resourceVersion": str(version)}
    return {"metadata": metadata, "spec": {"tenants": rows}}


class Follower:
    """LedgerWatch that reads from a scripted server."""

    def __init__(self, api: Connection, folder: Path) -> None:
        self.applied: list[list[str]] = []
        self.failures = 0
        self.holders_seen: list[tuple[Pool, list[str]]] = []
        self.ledger = LedgerWatch(
            api,
            node="node-1",
            apply=self.apply,
            checkpoint=folder / "ledger.json",
            on_change=lambda: None,
            on_ledger=lambda pool, holders: self.holders_seen.append((pool, [each.id for each in holders])),
        )

    async def apply(self, rows: Any) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError(28, "No space left on device")
        self.applied.append([row.id for row in rows])

    async def until(self, holds: Callable[[], bool]) -> None:
        tasks = [asyncio.create_task(self.ledger.follow()), asyncio.create_task(self.ledger.enforce())]
        try:
            async with asyncio.timeout(15):
                while not holds():
                    # poll too: the awaited condition may become true without a change of the ledger
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self.ledger.changed(), 0.05)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def plays(
    script: Scripted,
    lists: list[dict[str, Any]],
    watches: list[list[dict[str, Any]]],
    cue: asyncio.Event | None = None,
) -> None:
    """Answer each list request with the next of `lists` (the last one repeatedly), and each watch with the next of
    `watches`. Watches wait for the cue; the last one stays open."""

    async def respond(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            return web.json_response(lists.pop(0) if len(lists) > 1 else lists[0])
        stream = web.StreamResponse()
        await stream.prepare(request)
        if cue is not None:
            await cue.wait()
        for event in watches.pop(0) if watches else []:
            await stream.write(json.dumps(event).encode() + b"\n")
        if not watches:
            await asyncio.sleep(30)
        return stream

    script.respond = respond


def listing(version: int, *items: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"resourceVersion": str(version)}, "items": list(items)}


async def test_after_a_410_the_ledger_is_listed_again(scripted: Scripted, api: Connection, tmp_path: Path) -> None:
    expired = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}}
    plays(
        scripted,
        [listing(5, gpunode(5, "a")), listing(9, gpunode(9, "a", "c"))],
        [[{"type": "MODIFIED", "object": gpunode(6, "a", "b")}, expired], []],
    )
    follower = Follower(api, tmp_path)
    await follower.until(lambda: follower.ledger.generation == 9)
    assert follower.applied[-1] == ["a", "c"]


async def test_a_watch_continues_where_the_last_one_ended(scripted: Scripted, api: Connection, tmp_path: Path) -> None:
    bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "40"}}}
    plays(
        scripted,
        [listing(5, gpunode(5, "a"))],
        [[bookmark], [{"type": "MODIFIED", "object": gpunode(41, "b")}], []],
    )
    follower = Follower(api, tmp_path)
    await follower.until(lambda: follower.ledger.generation == 41)
    watched = [request.query for request in scripted.asked if "watch" in request.query]
    assert [query["resourceVersion"] for query in watched[:2]] == ["5", "40"]
    assert {query["fieldSelector"] for query in watched} == {"metadata.name=node-1"}
    assert all(20 <= int(query["timeoutSeconds"]) <= 25 for query in watched)
    assert len([request for request in scripted.asked if "watch" not in request.query]) == 1


async def test_a_watch_that_fell_silent_is_given_up(
    scripted: Scripted, api: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "WATCH_S", (0, 0))
    monkeypatch.setattr(connection, "WATCH_GRACE_S", 0.1)
    silent = asyncio.Event()
    versions = iter([5, 6, 7, 8, 9])

    async def respond(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            version = next(versions)
            return web.json_response(listing(version, gpunode(version, "a")))
        stream = web.StreamResponse()
        await stream.prepare(request)
        await silent.wait()
        return stream

    scripted.respond = respond
    follower = Follower(api, tmp_path)
    await follower.until(lambda: (follower.ledger.generation or 0) >= 6)
    silent.set()


async def test_a_ledger_that_cannot_be_put_in_force_is_tried_again_and_not_called_observed(
    scripted: Scripted, api: Connection, tmp_path: Path
) -> None:
    plays(scripted, [listing(5, gpunode(5, "a"))], [[]])
    follower = Follower(api, tmp_path)
    follower.failures = 2
    problems: list[str | None] = []

    def holds() -> bool:
        problems.append(follower.ledger.problem)
        assert follower.ledger.generation is None or follower.applied
        return follower.ledger.generation == 5

    await follower.until(holds)
    assert any("No space left on device" in (problem or "") for problem in problems)
    assert follower.ledger.problem is None


async def test_the_ledger_from_before_a_restart_is_served_but_entitles_no_new_tenant(
    scripted: Scripted, api: Connection, tmp_path: Path
) -> None:
    plays(scripted, [listing(5, gpunode(5, "a", "b"))], [[]])
    first = Follower(api, tmp_path)
    await first.until(lambda: first.ledger.generation == 5 and (tmp_path / "ledger.json").exists())
    second = Follower(api, tmp_path)
    await second.ledger.restore()
    assert second.applied == [["a", "b"]]
    assert second.ledger.rows == ()
    assert second.ledger.absent is not None
    assert (second.ledger.uid, second.ledger.generation) == (None, None)
    (tmp_path / "ledger.json").write_text("{ torn")
    third = Follower(api, tmp_path)
    await third.ledger.restore()
    assert third.applied == []


@pytest.mark.promise("node-held-first")
async def test_pool_and_holders_come_before_the_rows_from_the_disk_too(
    scripted: Scripted, api: Connection, tmp_path: Path
) -> None:
    ledger_of_5 = gpunode(5, "a")
    holders = [{"id": "h1", "podName": "holder-1", "state": "Held", "uuid": "GPU-0"}, {"id": "h2", "state": "Newer"}]
    ledger_of_5["spec"] |= {"pool": "device-plugin", "holders": holders}
    plays(scripted, [listing(5, ledger_of_5)], [[]])
    first, second = Follower(api, tmp_path), Follower(api, tmp_path)
    await first.until(lambda: first.ledger.generation == 5 and (tmp_path / "ledger.json").exists())
    assert first.holders_seen == [(Pool.DEVICE_PLUGIN, ["h1"])], (
        "a state that this version does not know counts for nothing"
    )
    second.failures = 1
    await second.ledger.restore()
    assert (second.holders_seen, second.applied) == (first.holders_seen, [])


@pytest.mark.promise("node-full-disk")
async def test_a_ledger_of_before_that_the_disk_does_not_take_is_a_problem_and_ends_nothing(
    scripted: Scripted, api: Connection, tmp_path: Path
) -> None:
    plays(scripted, [listing(5, gpunode(5, "a")), listing(5, gpunode(5, "a"))], [[]])
    first = Follower(api, tmp_path)
    await first.until(lambda: first.ledger.generation == 5 and (tmp_path / "ledger.json").exists())
    second = Follower(api, tmp_path)
    second.failures = 1
    await second.ledger.restore()
    assert "No space left on device" in (second.ledger.problem or "")
    await second.until(lambda: second.ledger.generation == 5)
    assert second.ledger.problem is None
    assert second.applied == [["a"]]


@pytest.mark.promise("node-full-disk")
async def test_rows_that_the_disk_does_not_take_hold_back_no_other_row_of_the_ledger(
    scripted: Scripted, api: Connection, tmp_path: Path
) -> None:
    """The generation must be reported as applied for the other rows, because a released tenant counts as drained only
    then.
    """
    follower = Follower(api, tmp_path)
    ledgers: list[tuple[int | None, str | None]] = []

    async def apply(rows: Any) -> None:
        ledgers.append((follower.ledger.generation, follower.ledger.problem))
        if len(ledgers) < 3:
            raise UntakenRowsError(30, "Read-only file system")

    follower.ledger = LedgerWatch(
        api, node="node-1", apply=apply, checkpoint=tmp_path / "ledger.json", on_change=lambda: None
    )
    plays(scripted, [listing(5, gpunode(5, "a"))], [[]])
    await follower.until(lambda: len(ledgers) == 3 and follower.ledger.problem is None)
    assert ledgers[0] == (None, None)
    for generation, problem in ledgers[1:]:
        assert generation == 5
        assert "Read-only file system" in (problem or "")


async def test_a_row_stops_entitling_before_anything_else_is_done_about_it(
    scripted: Scripted, api: Connection, tmp_path: Path
) -> None:
    follower = Follower(api, tmp_path)
    seen: list[list[str]] = []

    async def apply(rows: Any) -> None:
        seen.append([row.id for row in follower.ledger.rows])

    follower.ledger = LedgerWatch(
        api, node="node-1", apply=apply, checkpoint=tmp_path / "ledger.json", on_change=lambda: None
    )
    releasing = gpunode(6, "a", "b")
    releasing["spec"]["tenants"][0]["state"] = "Releasing"
    plays(scripted, [listing(5, gpunode(5, "a", "b"))], [[{"type": "MODIFIED", "object": releasing}], []])
    await follower.until(lambda: follower.ledger.generation == 6)
    assert seen in ([[], ["b"]], [[]])  # the second ledger may arrive before the first is applied


async def test_a_deleted_gpunode_publishes_nothing_new_and_disturbs_no_running_tenant(
    scripted: Scripted, api: Connection, tmp_path: Path
) -> None:
    in_force = asyncio.Event()
    deleted = {"type": "DELETED", "object": gpunode(6, "a")}
    plays(scripted, [listing(5, gpunode(5, "a"))], [[deleted], []], cue=in_force)
    follower = Follower(api, tmp_path)

    def went_on_after_the_deletion() -> bool:
        if follower.ledger.generation == 5 and not in_force.is_set():
            assert follower.ledger.absent is None
            in_force.set()
        return any(request.query.get("resourceVersion") == "6" for request in scripted.asked)

    await follower.until(went_on_after_the_deletion)
    assert follower.ledger.absent is not None, "no volume is published while there is a reason"
    assert "does not exist (deleted)" in follower.ledger.absent
    assert follower.ledger.object is None, "there is no status to write to"
    assert [row.id for row in follower.ledger.in_force] == ["a"]
    assert follower.applied == [["a"]], "only a ledger removes a tenant"


async def test_a_recreated_gpunode_of_the_same_generation_is_put_in_force(
    scripted: Scripted, api: Connection, tmp_path: Path
) -> None:
    recreated = gpunode(7, "b", generation=1, uid="another")
    in_force = asyncio.Event()
    events = [
        {"type": "DELETED", "object": gpunode(6, "a", generation=1)},
        {"type": "ADDED", "object": recreated},
    ]
    plays(scripted, [listing(5, gpunode(5, "a", generation=1))], [events, []], cue=in_force)
    follower = Follower(api, tmp_path)

    def found_again() -> bool:
        if follower.ledger.generation == 1:
            in_force.set()
        return follower.ledger.object == recreated and follower.ledger.absent is None

    await follower.until(found_again)
    assert follower.applied == [["a"], ["b"]]
    assert (follower.ledger.uid, follower.ledger.generation) == ("another", 1)
    assert [row.id for row in follower.ledger.rows] == ["b"]


async def test_an_older_state_of_the_ledger_changes_nothing(api: Connection, tmp_path: Path) -> None:
    ledger_watch = Follower(api, tmp_path).ledger
    ledger_watch.note(gpunode(6, "a"))
    ledger_watch.note(gpunode(5, "a", "b"))
    assert ledger_watch.object == gpunode(6, "a")
    of_another = gpunode(1, "c", uid="another")
    ledger_watch.note(of_another)
    assert ledger_watch.object == of_another, "another object of that name counts its versions itself"


async def test_a_ledger_of_a_restored_backup_replaces_a_newer_one(
    scripted: Scripted, api: Connection, tmp_path: Path
) -> None:
    lost = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}}
    plays(
        scripted,
        [listing(90, gpunode(90, "a", generation=7)), listing(42, gpunode(40, "b", generation=6))],
        [[lost], [{"type": "MODIFIED", "object": gpunode(43, "b", "c", generation=7)}], []],
    )
    follower = Follower(api, tmp_path)
    await follower.until(lambda: [row.id for row in follower.ledger.in_force] == ["b", "c"])
    assert follower.ledger.object == gpunode(43, "b", "c", generation=7)


async def test_a_list_that_a_write_of_the_agent_has_overtaken_changes_nothing(
    scripted: Scripted, api: Connection, tmp_path: Path
) -> None:
    ledger_watch = Follower(api, tmp_path).ledger
    listed = asyncio.Event()

    async def respond(request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            listed.set()
            await asyncio.sleep(30)
        ledger_watch.note(gpunode(6, "a"))
        return web.json_response(listing(5, gpunode(5, "b")))

    scripted.respond = respond
    following = asyncio.create_task(ledger_watch.follow())
    async with asyncio.timeout(15):
        await listed.wait()
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert ledger_watch.object == gpunode(6, "a")


async def test_another_ledger_of_the_same_generation_is_put_in_force(api: Connection, tmp_path: Path) -> None:
    follower = Follower(api, tmp_path)
    enforcing = asyncio.create_task(follower.ledger.enforce())
    for version, tenant in ((5, "a"), (6, "b")):
        follower.ledger.note(gpunode(version, tenant, generation=1))
        async with asyncio.timeout(15):
            while [row.id for row in follower.ledger.rows] != [tenant]:
                await follower.ledger.changed()
    enforcing.cancel()
    await asyncio.gather(enforcing, return_exceptions=True)
    assert follower.applied == [["a"], ["b"]]


def test_an_unreadable_row_stays_as_it_is_in_force_and_unknown_fields_are_skipped() -> None:
    rows = gpunode(1, "a", "b", "c")["spec"]["tenants"]
    in_force, unreadable = ledger.read_rows(rows, ())
    assert [row.id for row in in_force] == ["a", "b", "c"]
    assert not unreadable
    newer = [
        {**rows[0], "requestMilli": 500, "limitMilli": 600, "sinceVersion2": {"x": 1}},
        {**rows[1], "gpus": []},
        {**rows[2], "mode": "Sliced"},
        {"id": "d", "podName": 7},
        "nonsense",
    ]
    read, unreadable = ledger.read_rows(newer, in_force)
    assert [(row.id, row.request_milli) for row in read] == [("a", 500), ("b", 1), ("c", 1)]
    assert len(unreadable) == 4
    assert unreadable[0].startswith("tenant b: gpus: ")
    assert isinstance(read[0], Tenant)


def test_a_row_of_a_claim_is_read_with_the_claims_name_and_uid() -> None:
    row = {**gpunode(1, "a")["spec"]["tenants"][0], "claim": {"name": "share", "uid": "a"}}
    (read,), unreadable = ledger.read_rows([row], ())
    assert not unreadable
    assert read.claim is not None
    assert (read.claim.name, read.claim.uid) == ("share", "a")


async def test_a_gpunode_deleted_while_its_ledger_is_put_in_force_stays_absent(tmp_path: Path) -> None:
    applying, go_on = asyncio.Event(), asyncio.Event()
    moves: asyncio.Queue[None] = asyncio.Queue()

    async def apply(rows: Sequence[Tenant]) -> None:
        applying.set()
        await go_on.wait()

    watch = LedgerWatch(
        None,  # type: ignore[arg-type]  # nothing is asked of the API server
        node="node-1",
        apply=apply,
        checkpoint=tmp_path / "ledger.json",
        on_change=lambda: moves.put_nowait(None),
    )
    enforcing = asyncio.create_task(watch.enforce())
    watch.note(gpunode(5, "a"))
    await applying.wait()
    watch._take_event({"type": "DELETED", "object": gpunode(6, "a")})
    while not moves.empty():
        moves.get_nowait()
    go_on.set()
    async with asyncio.timeout(20):
        await moves.get()
    assert [row.id for row in watch.rows] == ["a"], "tenants that run are still served"
    assert watch.absent is not None
    assert "does not exist" in watch.absent
    enforcing.cancel()
    await asyncio.gather(enforcing, return_exceptions=True)
