"""Storage migration against an API server that says what the test wants: conflicts, deletions, refusals, old lists."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web
from sharepod.controller import migrate as migration
from sharepod.controller.migrate import CRDS, migrate
from sharepod.kube import Connection
from unit.scripted_server import Scripted

Json = dict[str, Any]

CRD = f"{CRDS}/sharepods.sharepod.dev"
ITEMS = "/apis/sharepod.dev/v1test/sharepods"


class Stored:
    """API server with SharePods in two pages. `refusals`: answers to the next writes of an object, by its name."""

    def __init__(self, script: Scripted) -> None:
        self.names = ["a", "b", "c"]
        self.versions = ["v1alpha1", "v1test"]
        self.generation = 1
        self.refusals: dict[str, list[int]] = {}
        self.old_lists = 0
        self.crd_conflicts = 0
        self.circle = False
        self.lists = 0
        self.written: list[str] = []
        self.lines: list[str] = []
        script.respond = self.respond

    def crd(self) -> Json:
        entries = [
            {"name": "v1alpha1", "served": True, "storage": False},
            {"name": "v1test", "served": True, "storage": True},
        ]
        return {
            "metadata": {"name": "sharepods.sharepod.dev", "generation": self.generation, "resourceVersion": "7"},
            "spec": {"versions": entries},
            "status": {"storedVersions": self.versions},
        }

    async def respond(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if path == CRD:
            return web.json_response(self.crd())
        if path == f"{CRD}/status":
            if self.crd_conflicts:
                self.crd_conflicts -= 1
                return _refused(409, "Conflict")
            patched = await request.json()
            assert patched["metadata"]["resourceVersion"] == "7"
            self.versions = patched["status"]["storedVersions"]
            return web.json_response(self.crd())
        if path == ITEMS:
            if "continue" in request.query and self.old_lists:
                self.old_lists -= 1
                return _refused(410, "Expired")
            page = self.names[2:] if "continue" in request.query else self.names[:2]
            items = [{"metadata": {"name": name, "namespace": "team"}} for name in page]
            metadata = {} if "continue" in request.query and not self.circle else {"continue": "more"}
            self.lists += 1
            assert self.lists < 10, "it is read for ever"
            return web.json_response({"kind": "SharePodList", "metadata": metadata, "items": items})
        name = path.rpartition("/")[2]
        assert (request.method, json.loads(await request.text())) == ("PATCH", {})
        if refusals := self.refusals.get(name):
            status = refusals.pop(0)
            return _refused(status, {409: "Conflict", 404: "NotFound", 422: "Invalid"}.get(status, ""))
        self.written.append(name)
        return web.json_response({})

    async def migrate(self, api: Connection, *, again: bool = False) -> bool:
        return await migrate(api, ["sharepods"], self.lines.append, again=again, settle_s=0.0)


def _refused(status: int, reason: str) -> web.Response:
    return web.json_response({"kind": "Status", "reason": reason, "message": f"{reason}: no"}, status=status)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_pause(_attempt: int) -> None:
        return None

    monkeypatch.setattr(migration, "backoff", no_pause)


async def test_every_object_is_written_and_the_former_version_leaves_the_crd(
    scripted: Scripted, api: Connection
) -> None:
    stored = Stored(scripted)
    assert await stored.migrate(api)
    assert stored.written == ["a", "b", "c"]
    assert stored.versions == ["v1test"]
    assert stored.lines[-1] == "sharepods.sharepod.dev: all stored as v1test"
    assert await stored.migrate(api)
    assert stored.written == ["a", "b", "c"]
    assert stored.lines[-1].endswith("nothing to do")
    assert await stored.migrate(api, again=True)
    assert len(stored.written) == 6


async def test_a_conflict_is_tried_again_and_a_deleted_object_is_no_failure(
    scripted: Scripted, api: Connection
) -> None:
    stored = Stored(scripted)
    stored.refusals = {"a": [409, 409, 503], "b": [404]}
    stored.crd_conflicts = 2
    assert await stored.migrate(api)
    assert sorted(stored.written) == ["a", "c"]
    assert "sharepods.sharepod.dev: 2 written, 1 deleted meanwhile" in stored.lines


@pytest.mark.promise("install-migration-complete")
@pytest.mark.parametrize("refusals", [[422], [403], [409] * 100])
async def test_an_object_that_cannot_be_written_is_named_and_keeps_the_former_version_listed(
    scripted: Scripted, api: Connection, refusals: list[int]
) -> None:
    stored = Stored(scripted)
    stored.refusals = {"b": list(refusals)}
    assert not await stored.migrate(api)
    assert sorted(stored.written) == ["a", "c"]
    assert stored.versions == ["v1alpha1", "v1test"]
    assert any("/namespaces/team/sharepods/b" in line for line in stored.lines)
    stored.refusals = {}
    assert await stored.migrate(api)
    assert stored.versions == ["v1test"]


async def test_a_list_that_has_become_too_old_is_begun_again(scripted: Scripted, api: Connection) -> None:
    stored = Stored(scripted)
    stored.old_lists = 2
    assert await stored.migrate(api)
    assert set(stored.written) == {"a", "b", "c"}
    assert stored.versions == ["v1test"]


async def test_a_list_whose_pages_come_round_again_is_a_failure(scripted: Scripted, api: Connection) -> None:
    stored = Stored(scripted)
    stored.circle = True
    assert not await stored.migrate(api)
    assert stored.versions == ["v1alpha1", "v1test"]
    assert "continues where an earlier one did" in stored.lines[-1]


@pytest.mark.promise("install-migration-complete")
async def test_a_crd_that_is_changed_meanwhile_keeps_its_versions(scripted: Scripted, api: Connection) -> None:
    stored = Stored(scripted)
    answering = stored.respond

    async def respond(request: web.Request) -> web.StreamResponse:
        if request.path == ITEMS:
            stored.generation = 2
        return await answering(request)

    scripted.respond = respond
    assert not await stored.migrate(api)
    assert stored.versions == ["v1alpha1", "v1test"]
    assert stored.lines[-1].endswith("was changed meanwhile; run it again")


async def test_without_rights_it_says_so(scripted: Scripted, api: Connection) -> None:
    scripted.answers({"kind": "Status", "reason": "Forbidden", "message": "may not get"}, 403)
    lines: list[str] = []
    assert not await migrate(api, ["sharepods", "gpunodes"], lines.append, again=False, settle_s=0.0)
    assert len(lines) == 2
    assert "may not get" in lines[0]
