"""The API server double behaves as the API server's documentation states, seen by the operator's own client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from doubles.apiserver.errors import Refused, already_exists
from doubles.apiserver.kinds import Kind
from doubles.apiserver.patches import apply, json_patch, merge_patch
from doubles.apiserver.server import ApiServer, api_server
from kubernetes.aio.client import Configuration
from sharepod.controller.apiserver.client import EVENTS, GPUNODES, PODS, SHAREPODS, Client
from sharepod.kube import (
    AlreadyExistsError,
    ApiError,
    ConflictError,
    GoneError,
    InvalidError,
    Json,
    NotFoundError,
    UnavailableError,
)

GPUNODE: Json = {"metadata": {"name": "node-a"}, "spec": {"pool": "dedicated"}}
SHAREPOD: Json = {
    "metadata": {"name": "one"},
    "spec": {"gpu": {"request": 0.4}, "containers": [{"name": "main", "image": "test"}]},
}


def pod(name: str = "one", *, labels: Json | None = None, node: str | None = None) -> Json:
    spec: Json = {"containers": [{"name": "main"}], **({"nodeName": node} if node else {})}
    return {"metadata": {"name": name, "labels": labels or {}}, "spec": spec}


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with api_server() as double:
        yield double


@pytest.fixture
async def client(server: ApiServer) -> AsyncIterator[Client]:
    made = Client(Configuration(host=server.url), read_timeout=10, write_timeout=10, page_size=10)
    yield made
    await made.close()


def version(item: Json) -> int:
    return int(item["metadata"]["resourceVersion"])


async def test_a_write_gets_the_next_version_and_one_that_changes_nothing_none(client: Client) -> None:
    made = await client.create(GPUNODES, GPUNODE)
    other = await client.create(PODS, pod(), "n")
    assert version(other) == version(made) + 1
    same = await client.patch_json(GPUNODES, "node-a", [{"op": "replace", "path": "/spec/pool", "value": "dedicated"}])
    assert same == made


async def test_generation_counts_changes_of_the_spec_alone(client: Client) -> None:
    made = await client.create(GPUNODES, GPUNODE)
    body = {"status": {"agentVersion": "1"}}
    shown = await client.patch_status(GPUNODES, "node-a", body)
    marked = await client.patch_json(
        GPUNODES, "node-a", [{"op": "add", "path": "/metadata/labels", "value": {"a": "b"}}]
    )
    moved = await client.patch_json(
        GPUNODES, "node-a", [{"op": "replace", "path": "/spec/pool", "value": "device-plugin"}]
    )
    assert [item["metadata"]["generation"] for item in (made, shown, marked, moved)] == [1, 1, 1, 2]


async def test_object_and_status_are_written_apart(client: Client) -> None:
    made = await client.create(SHAREPODS, SHAREPOD | {"status": {"phase": "Running"}}, "n")
    assert "status" not in made
    shown = await client.patch_status(
        SHAREPODS, "one", {"spec": {"gpu": {"request": 1}}, "status": {"phase": "Placed"}}, "n"
    )
    assert (shown["spec"], shown["status"]) == (made["spec"], {"phase": "Placed"})
    kept = await client.replace(SHAREPODS, "one", shown | {"status": {"phase": "Failed"}}, "n")
    assert kept["status"] == {"phase": "Placed"}


async def test_names_are_taken_once(client: Client) -> None:
    await client.create(PODS, pod(), "n")
    with pytest.raises(AlreadyExistsError):
        await client.create(PODS, pod(), "n")
    await client.create(PODS, pod(), "m")


async def test_a_schema_of_the_crds_refuses_and_prunes(client: Client) -> None:
    with pytest.raises(InvalidError, match=r"spec\.pool"):
        await client.create(GPUNODES, {"metadata": {"name": "x"}, "spec": {"pool": "swimming"}})
    made = await client.create(GPUNODES, {"metadata": {"name": "x"}, "spec": {"pool": "dedicated", "novel": 1}})
    assert made["spec"] == {"pool": "dedicated"}


@pytest.mark.parametrize("precondition", [{"uid": "another"}, {"resourceVersion": "1"}])
async def test_a_precondition_that_does_not_hold_changes_nothing(client: Client, precondition: Json) -> None:
    made = await client.create(SHAREPODS, SHAREPOD, "n")
    with pytest.raises(ConflictError):
        await client.patch_status(SHAREPODS, "one", {"metadata": precondition, "status": {"phase": "Placed"}}, "n")
    with pytest.raises(ConflictError):
        await client.replace(SHAREPODS, "one", made | {"metadata": made["metadata"] | precondition}, "n")
    uid = precondition.get("uid", made["metadata"]["uid"])
    with pytest.raises(ConflictError):
        await client.delete(SHAREPODS, "one", "n", uid=uid, resource_version=precondition.get("resourceVersion"))
    assert await client.get(SHAREPODS, "one", "n") == made


@pytest.mark.promise("operator-no-stale-write")
async def test_a_json_patch_is_applied_whole_or_not_at_all(client: Client) -> None:
    made = await client.create(GPUNODES, GPUNODE)
    test = {"op": "test", "path": "/metadata/generation", "value": 7}
    with pytest.raises(InvalidError):
        await client.patch_json(GPUNODES, "node-a", [{"op": "replace", "path": "/spec/pool", "value": "x"}, test])
    assert await client.get(GPUNODES, "node-a") == made


@pytest.mark.parametrize(
    ("operations", "result"),
    [
        ([{"op": "add", "path": "/l/-", "value": 3}], {"l": [1, 2, 3], "a/b": 0}),
        ([{"op": "add", "path": "/l/0", "value": 3}], {"l": [3, 1, 2], "a/b": 0}),
        ([{"op": "remove", "path": "/l/0"}], {"l": [2], "a/b": 0}),
        ([{"op": "replace", "path": "/a~1b", "value": 5}], {"l": [1, 2], "a/b": 5}),
        ([{"op": "copy", "from": "/a~1b", "path": "/c"}], {"l": [1, 2], "a/b": 0, "c": 0}),
        ([{"op": "move", "from": "/l/1", "path": "/c"}], {"l": [1], "a/b": 0, "c": 2}),
        ([{"op": "test", "path": "/l", "value": [1, 2]}], {"l": [1, 2], "a/b": 0}),
    ],
)
def test_json_patch_is_rfc_6902(operations: list[Json], result: Json) -> None:
    assert json_patch({"l": [1, 2], "a/b": 0}, operations) == result


@pytest.mark.parametrize(
    "operation",
    [
        {"op": "remove", "path": "/missing"},
        {"op": "replace", "path": "/missing", "value": 1},
        {"op": "add", "path": "/l/9", "value": 1},
        {"op": "test", "path": "/l/0", "value": 2},
        {"op": "test", "path": "/missing", "value": 2},
        {"op": "add", "path": "/missing/deep", "value": 2},
    ],
)
def test_a_json_patch_that_does_not_fit_is_refused(operation: Json) -> None:
    with pytest.raises(Refused, match="422"):
        json_patch({"l": [1]}, [operation])


def test_merge_patch_is_rfc_7386() -> None:
    assert merge_patch({"a": {"b": 1, "c": 2}, "l": [1]}, {"a": {"b": None, "d": 3}, "l": [2]}) == {
        "a": {"c": 2, "d": 3},
        "l": [2],
    }


def test_apply_leaves_the_fields_of_others_and_takes_back_its_own() -> None:
    owners: dict[Any, str] = {}
    one = apply({}, {"conditions": [{"type": "A", "status": "True", "note": "x"}]}, owners, "one", force=False)
    both = apply(one, {"conditions": [{"type": "B", "status": "True"}], "n": 1}, owners, "two", force=False)
    assert [item["type"] for item in both["conditions"]] == ["A", "B"]
    again = apply(both, {"conditions": [{"type": "A", "status": "False"}]}, owners, "one", force=False)
    assert again["conditions"] == [{"type": "A", "status": "False"}, {"type": "B", "status": "True"}]
    assert again["n"] == 1
    without = apply(again, {}, owners, "one", force=False)
    assert without["conditions"] == [{"type": "B", "status": "True"}]


def test_apply_takes_a_field_of_another_by_force_alone() -> None:
    owners: dict[Any, str] = {}
    one = apply({}, {"n": 1}, owners, "one", force=False)
    with pytest.raises(Refused, match="409"):
        apply(one, {"n": 2}, owners, "two", force=False)
    assert apply(one, {"n": 2}, owners, "two", force=True) == {"n": 2}
    assert owners == {("n",): "two"}


async def test_apply_of_a_status_keeps_what_another_manager_wrote(client: Client, server: ApiServer) -> None:
    made = await client.create(GPUNODES, GPUNODE)
    kind = server.kind("gpunodes")
    gpus = [{"uuid": "GPU-0", "index": 0, "model": "T", "memory": 1, "health": "Healthy", "shareable": True}]
    server.storage.apply(kind, "", "node-a", {"status": {"gpus": gpus}}, "agent", force=True, status=True)
    body = {"metadata": {"uid": made["metadata"]["uid"]}, "status": {"conditions": [condition("AgentAlive")]}}
    shown = await client.apply_status(GPUNODES, "node-a", body)
    assert shown["status"] == {"gpus": gpus, "conditions": [condition("AgentAlive")]}
    with pytest.raises(ConflictError):
        await client.apply_status(GPUNODES, "node-a", {"metadata": {"uid": "another"}, "status": {}})


def condition(kind: str) -> Json:
    return {
        "type": kind,
        "status": "True",
        "reason": "Fine",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }


async def test_a_bound_pod_is_marked_until_the_kubelet_has_ended_it(client: Client, server: ApiServer) -> None:
    for name, node in (("a", "x"), ("b", None)):
        await client.create(PODS, pod(name, node=node), "n")
    for name in ("a", "b"):
        known = await client.get(PODS, name, "n")
        await client.delete(PODS, name, "n", uid=known["metadata"]["uid"])
    assert (await client.get(PODS, "a", "n"))["metadata"]["deletionTimestamp"]
    with pytest.raises(NotFoundError):
        await client.get(PODS, "b", "n")
    server.storage.finish_deletion(server.kind("pods"), "n", "a")
    with pytest.raises(NotFoundError):
        await client.get(PODS, "a", "n")


async def test_an_object_with_finalizers_goes_with_the_last_of_them(client: Client) -> None:
    held = {**SHAREPOD, "metadata": {"name": "one", "finalizers": ["x.dev/y"]}}
    made = await client.create(SHAREPODS, held, "n")
    await client.delete(SHAREPODS, "one", "n", uid=made["metadata"]["uid"])
    assert (await client.get(SHAREPODS, "one", "n"))["metadata"]["deletionTimestamp"]
    await client.patch_json(SHAREPODS, "one", [{"op": "remove", "path": "/metadata/finalizers"}], "n")
    with pytest.raises(NotFoundError):
        await client.get(SHAREPODS, "one", "n")


async def test_an_eviction_marks_the_pod_and_a_budget_forbids_it(client: Client, server: ApiServer) -> None:
    made = await client.create(PODS, pod(node="x"), "n")
    uid = made["metadata"]["uid"]
    server.disrupted.add(("n", "one"))
    with pytest.raises(ApiError) as refused:
        await client.evict("one", "n", uid=uid)
    assert refused.value.status == 429
    server.disrupted.clear()
    with pytest.raises(ConflictError):
        await client.evict("one", "n", uid="another")
    await client.evict("one", "n", uid=uid)
    evicted = await client.get(PODS, "one", "n")
    assert evicted["metadata"]["deletionTimestamp"]
    assert evicted["status"]["conditions"][0]["type"] == "DisruptionTarget"


def unread(*_: object) -> None:
    raise AssertionError("an object that cannot be read")


async def list_all(client: Client, *, labels: str = "", fields: str = "") -> tuple[list[Json], str]:
    """Return (all pods, read page by page; the version of the list)."""
    items: list[Json] = []
    token = ""
    while True:
        page = await client.page(PODS, token=token, take=items.append, unreadable=unread, labels=labels, fields=fields)
        if not (token := page.get("continue", "")):
            return items, page["resourceVersion"]


async def test_pages_make_one_list_and_their_token_expires(client: Client, server: ApiServer) -> None:
    for number in range(25):
        await client.create(PODS, pod(f"p{number:02}", labels={"odd": str(number % 2)}), "n")
    items, since = await list_all(client)
    assert [item["metadata"]["name"] for item in items] == [f"p{number:02}" for number in range(25)]
    assert since == items[-1]["metadata"]["resourceVersion"]
    assert len(server.made("list", "pods")) == 3
    odd, _ = await list_all(client, labels="odd=1")
    assert len(odd) == 12
    second = server.made("list", "pods")[1]
    server.storage.delete(server.kind("pods"), "n", "p00")
    server.storage.compact()
    with pytest.raises(Refused, match="410"):
        server._list(second)


@pytest.mark.parametrize(
    ("labels", "fields", "found"),
    [
        ("a", "", ["x"]),
        ("!a", "", ["y"]),
        ("a=1", "", ["x"]),
        ("a!=1", "", ["y"]),
        ("a in (1, 2)", "", ["x"]),
        ("a notin (1,2),b", "", ["y"]),
        ("", "spec.nodeName=", ["y"]),
        ("", "spec.nodeName!=,metadata.name=x", ["x"]),
    ],
)
async def test_selectors(client: Client, labels: str, fields: str, found: list[str]) -> None:
    await client.create(PODS, pod("x", labels={"a": "1"}, node="node-a"), "n")
    await client.create(PODS, pod("y", labels={"b": "1"}), "n")
    items, _ = await list_all(client, labels=labels, fields=fields)
    assert [item["metadata"]["name"] for item in items] == found


async def watched(client: Client, since: str, count: int, labels: str = "", fields: str = "") -> list[tuple[str, str]]:
    events: list[tuple[str, str]] = []
    async for event in client.watch(
        PODS, since=since, heard=lambda: None, unreadable=unread, labels=labels, fields=fields
    ):
        if event["type"] != "BOOKMARK":
            events.append((event["type"], event["object"]["metadata"]["name"]))
        if len(events) == count:
            break
    return events


async def test_a_watch_shows_each_change_after_its_version_in_order(client: Client, server: ApiServer) -> None:
    first = await client.create(PODS, pod("a", labels={"l": "1"}), "n")
    since = first["metadata"]["resourceVersion"]
    watching = asyncio.create_task(watched(client, since, 3, labels="l"))
    await client.create(PODS, pod("b", labels={"l": "1"}), "n")
    await client.create(PODS, pod("c"), "n")
    for name in ("a", "b"):
        patch = [{"op": "replace", "path": "/metadata/labels", "value": {}}]
        await client.patch_json(PODS, name, patch, "n")
    assert await asyncio.wait_for(watching, 2) == [("ADDED", "b"), ("DELETED", "a"), ("DELETED", "b")]


async def test_a_watch_that_begins_behind_misses_nothing_whatever_else_changes_meanwhile(server: ApiServer) -> None:
    storage, pods = server.storage, server.kind("pods")
    since = storage.version
    storage.create(pods, "n", pod("a"))
    call = server.parse("GET", "/api/v1/pods", {"watch": "true", "resourceVersion": str(since)}, "", b"")
    assert call is not None
    events = server.watch(call)
    assert await anext(events) == b"", "the head of the answer"
    storage.create(server.kind("nodes"), "", {"metadata": {"name": "other"}})
    assert b'"name":"a"' in await anext(events)
    storage.create(server.kind("nodes"), "", {"metadata": {"name": "another"}})
    storage.create(pods, "n", pod("b"))
    assert b'"name":"b"' in await anext(events)


async def test_a_watch_from_a_compacted_version_is_answered_with_410(client: Client, server: ApiServer) -> None:
    await client.create(PODS, pod(), "n")
    server.storage.compact()
    with pytest.raises(GoneError):
        await watched(client, "1", 1)


async def test_a_watch_ends_when_the_server_cuts_it(client: Client, server: ApiServer) -> None:
    made = await client.create(PODS, pod(), "n")
    watching = asyncio.create_task(watched(client, made["metadata"]["resourceVersion"], 1))
    while not server.made("watch", "pods") or not server._watches:  # noqa: ASYNC110 - as the server sees it
        await asyncio.sleep(0)
    server.cut_watches()
    assert await asyncio.wait_for(watching, 2) == []


async def test_a_lost_answer_leaves_the_write_done(client: Client, server: ApiServer) -> None:
    server.fail("create", "pods", lose_answer=True)
    with pytest.raises(UnavailableError):
        await client.create(PODS, pod(), "n")
    assert await client.get(PODS, "one", "n")


async def test_a_refusal_or_a_held_call_has_no_effect_before_its_time(client: Client, server: ApiServer) -> None:
    server.fail("create", "events", refusal=already_exists("events", "x"))
    with pytest.raises(AlreadyExistsError):
        await client.create(EVENTS, {"metadata": {"name": "x"}}, "n")
    held = server.fail("create", "pods", hold=asyncio.Event())
    creating = asyncio.create_task(client.create(PODS, pod(), "n"))
    while held.times:  # noqa: ASYNC110 - as the server sees it
        await asyncio.sleep(0)
    with pytest.raises(NotFoundError):
        await client.get(PODS, "one", "n")
    assert held.hold is not None
    held.hold.set()
    await creating
    assert await client.get(PODS, "one", "n")


def test_an_admission_hook_may_refuse(server: ApiServer) -> None:
    def refuse(kind: Kind, before: Json | None, after: Json) -> None:
        raise Refused(403, "Forbidden", "exceeded quota")

    server.storage.admit = refuse
    with pytest.raises(Refused, match="403"):
        server.storage.create(server.kind("pods"), "n", pod())
    assert server.storage.select(server.kind("pods"), "n") == []


async def test_unknown_paths_types_and_methods_are_refused(client: Client, server: ApiServer) -> None:
    await client.create(PODS, pod(), "n")
    with pytest.raises(NotFoundError):
        await client.patch_status(EVENTS, "x", {}, "n")
    with pytest.raises(InvalidError):
        await client._call("PATCH", PODS.path("one", "n"), {}, content="application/strategic-merge-patch+json")
    with pytest.raises(NotFoundError):
        await client._call("GET", "/apis/nowhere/v1/things")
    with pytest.raises(UnavailableError):
        await client._call("POST", PODS.path("one", "n", "eviction") + "s", {})
