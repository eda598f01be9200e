"""The reflector, against an API server with each fault of watches: its cache equals the server's objects."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from doubles.apiserver.errors import Refused
from doubles.apiserver.odd_words import ODD_WORDS
from doubles.apiserver.server import ApiServer, api_server
from kubernetes.aio.client import Configuration
from sharepod.backoff import Backoff
from sharepod.controller.apiserver import reflector as reflectors
from sharepod.controller.apiserver import watch_freshness
from sharepod.controller.apiserver.client import SHAREPODS, Client
from sharepod.controller.apiserver.reflector import Reflector
from sharepod.kube import Json, UnavailableError, connection
from structlog.testing import capture_logs

PATIENCE_S = 30.0
"""Longest wait in seconds for an event that a busy machine may delay. No test waits for it to pass."""
DEEP = b'{"a":' * 50_000 + b"1" + b"}" * 50_000


class Names:
    """Mirror that stores the version and generation of each object, and the error of each unreadable object."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[str, int, int]] = {}
        self.unreadable: dict[str, str] = {}
        self.poison: set[str] = set()
        self.puts = 0

    def put(self, raw: Json) -> None:
        name, uid = raw["metadata"]["name"], raw["metadata"]["uid"]
        if name in self.poison:
            raise RecursionError("maximum recursion depth exceeded")
        self.puts += 1
        version = int(raw["metadata"]["resourceVersion"])
        if version >= self.known.get(uid, ("", 0, 0))[1]:
            self.known[uid] = (name, version, raw["metadata"]["generation"])

    def put_unreadable(self, metadata: Json, why: str) -> None:
        self.unreadable[metadata["name"]] = why
        self.known[metadata["uid"]] = (metadata["name"], int(metadata["resourceVersion"]), metadata["generation"])

    def drop(self, uid: str, version: int, last: Json | None) -> None:
        self.known.pop(uid, None)

    def versions(self) -> dict[str, int]:
        return {uid: version for uid, (_, version, _) in self.known.items()}

    def invalidate(self) -> None:
        self.known = {uid: (name, 0, generation) for uid, (name, _, generation) in self.known.items()}

    def names(self) -> list[str]:
        return sorted(name for name, _, _ in self.known.values())


class World:
    """An API server, a client of it, and a running reflector of SharePods."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.client = Client(Configuration(host=server.url), read_timeout=20, write_timeout=20, page_size=10)
        self.mirror = Names()
        self.replaced = 0
        self.reflector = Reflector(self.client, SHAREPODS, self.mirror, kind="sharepods", on_replaced=self._replace)

    def _replace(self) -> None:
        self.replaced += 1

    def create(self, name: str) -> Json:
        body = {
            "metadata": {"name": name},
            "spec": {"gpu": {"request": 0.4}, "containers": [{"name": "c", "image": "i"}]},
        }
        return self.server.storage.create(self.server.kind("sharepods"), "n", body)

    def delete(self, name: str) -> None:
        self.server.storage.delete(self.server.kind("sharepods"), "n", name)

    def raise_request(self, name: str) -> None:
        def change(item: Json) -> Json:
            item["spec"]["gpu"]["request"] += 0.01
            return item

        self.server.storage.update(self.server.kind("sharepods"), "n", name, change)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():  # noqa: ASYNC110  in steps of the event loop
                await asyncio.sleep(0.005)

    async def shows(self, *names: str) -> None:
        """Wait until the mirror has exactly these objects."""
        try:
            await self.until(lambda: self.mirror.names() == sorted(names))
        except TimeoutError:
            raise AssertionError(f"{self.mirror.names()} instead of {sorted(names)}") from None

    def lists(self) -> int:
        """Return the number of lists of everything so far. The check before a watch lists only one object, and does not
        count."""
        return len([call for call in self.server.made("list", "sharepods") if call.query["limit"] != "1"])


@asynccontextmanager
async def running(world: World) -> AsyncIterator[World]:
    task = asyncio.create_task(world.reflector.run())
    try:
        yield world
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await world.client.close()


@pytest.fixture
async def idle(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """Yield a world whose reflector does not run yet. Pauses are short."""
    monkeypatch.setattr(reflectors, "_BACKOFF", Backoff(0.01, 0.05))
    monkeypatch.setattr(reflectors, "_NOT_SERVED_S", 0.05)
    async with api_server() as server:
        yield World(server)
        server.silent.clear()


@pytest.fixture
async def world(idle: World) -> AsyncIterator[World]:
    """Yield a world whose reflector has listed the SharePods a and b."""
    idle.create("a")
    idle.create("b")
    async with running(idle):
        await idle.shows("a", "b")
        await idle.until(lambda: bool(idle.server.made("watch", "sharepods")))
        yield idle


async def test_many_pages_make_one_list_and_the_watch_goes_on_from_it(idle: World) -> None:
    names = [f"s{number:02}" for number in range(35)]
    for name in names:
        idle.create(name)
    async with running(idle):
        await idle.shows(*names)
        idle.create("t")
        idle.delete("s00")
        await idle.shows(*names[1:], "t")
        assert idle.lists() == 4
        assert idle.reflector.listed


@pytest.mark.promise("operator-list-ends")
async def test_a_list_whose_pages_come_round_again_fails_and_is_read_once_the_server_is_well(
    idle: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"s{number:02}" for number in range(25)]
    for name in names:
        idle.create(name)
    page, is_well = idle.client.page, False

    async def forgetful(*arguments: Any, token: str = "", **named: Any) -> Json:
        listed = await page(*arguments, token=token if is_well else "", **named)
        return listed if is_well or "continue" not in listed else {**listed, "continue": "first"}

    monkeypatch.setattr(idle.client, "page", forgetful)
    async with running(idle):
        await idle.until(lambda: "RepeatedContinue" in str(idle.reflector.freshness().failure))
        assert not idle.reflector.listed
        is_well = True
        await idle.shows(*names)
        await idle.until(lambda: idle.reflector.listed)


async def test_a_list_that_expires_on_the_way_begins_again(idle: World) -> None:
    for number in range(25):
        idle.create(f"s{number:02}")
    expired = Refused(410, "Expired", "the provided continue parameter is too old")
    fault = idle.server.fail("list", "sharepods", refusal=expired)
    fault.matches = lambda call: call.verb == "list" and "continue" in call.query
    async with running(idle):
        await idle.shows(*[f"s{number:02}" for number in range(25)])
        assert idle.lists() == 5


@pytest.mark.promise("operator-list-pages")
@pytest.mark.parametrize(("per_object_s", "sizes"), [(0.05, [10]), (3.0, [10, 2]), (12.0, [10, 2, 1])])
async def test_pages_that_do_not_arrive_in_time_are_smaller_from_there_on(
    idle: World, monkeypatch: pytest.MonkeyPatch, per_object_s: float, sizes: list[int]
) -> None:
    """An API server before 1.33 sends no byte of a page before it has encoded the whole page, here in `per_object_s`
    for each object."""
    names = [f"s{number:02}" for number in range(35)]
    for name in names:
        idle.create(name)
    asked, moment, page = list[tuple[str, int]](), 0.0, idle.client.page
    reflector = Reflector(idle.client, SHAREPODS, idle.mirror, kind="sharepods", clock=lambda: moment)

    async def slow(*arguments: Any, limit: int | None = None, token: str = "", **named: Any) -> Json:
        nonlocal moment
        asked.append((token, size := limit or idle.client.page_size))
        if token and len(asked) > 2 and size * per_object_s > idle.client.read_timeout:
            moment += idle.client.read_timeout
            raise UnavailableError("LIST", 0, "TimeoutError", "no answer in time")
        moment += size * per_object_s
        return await page(*arguments, limit=limit, token=token, **named)

    monkeypatch.setattr(idle.client, "page", slow)
    await reflector.list_all()
    assert idle.mirror.names() == names
    assert [size for size, _ in itertools.groupby(size for _, size in asked)] == sizes
    assert [token for token, _ in asked].count("") == 1, "nothing is begun again"
    await idle.client.close()


@pytest.mark.promise("operator-list-pages")
@pytest.mark.parametrize(("after_s", "sizes"), [(60.0, [10, 2]), (0.1, [10])])
async def test_a_page_whose_answer_breaks_off_after_a_while_is_asked_for_as_a_smaller_one(
    idle: World, monkeypatch: pytest.MonkeyPatch, after_s: float, sizes: list[int]
) -> None:
    """An API server ends an answer after 60 s, so the same page would break off each time."""
    names = [f"s{number:02}" for number in range(35)]
    for name in names:
        idle.create(name)
    asked, moment, page = list[int](), 0.0, idle.client.page
    reflector = Reflector(idle.client, SHAREPODS, idle.mirror, kind="sharepods", clock=lambda: moment)

    async def breaks_off(*arguments: Any, limit: int | None = None, **named: Any) -> Json:
        nonlocal moment
        asked.append(size := limit or idle.client.page_size)
        if size > 2:
            moment += after_s
            raise UnavailableError("LIST", 0, "ClientPayloadError", "Response payload is not completed")
        moment += 3.0
        return await page(*arguments, limit=limit, **named)

    monkeypatch.setattr(idle.client, "page", breaks_off)
    with contextlib.nullcontext() if len(sizes) > 1 else pytest.raises(UnavailableError):
        await reflector.list_all()
    assert idle.mirror.names() == (names if len(sizes) > 1 else [])
    assert [size for size, _ in itertools.groupby(asked)] == sizes
    await idle.client.close()


@pytest.mark.promise("operator-list-pages")
async def test_after_an_api_server_was_silent_pages_soon_have_their_size_again(
    idle: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"s{number:02}" for number in range(35)]
    for name in names:
        idle.create(name)
    asked, page = list[int](), idle.client.page

    async def silent(*arguments: Any, limit: int | None = None, **named: Any) -> Json:
        asked.append(limit or idle.client.page_size)
        if len(asked) <= 4:
            raise UnavailableError("LIST", 0, "TimeoutError", "no answer in time")
        return await page(*arguments, limit=limit, **named)

    monkeypatch.setattr(idle.client, "page", silent)
    async with running(idle):
        await idle.shows(*names)
    assert asked[:8] == [10, 2, 1, 1, 1, 4, 10, 10]


@pytest.mark.promise("operator-healthy")
async def test_a_list_that_takes_long_to_arrive_is_no_reason_to_restart_and_none_to_place(
    idle: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, moment, health, listed = idle.client.page, 0.0, list[str | None](), list[list[str]]()
    reflector = Reflector(idle.client, SHAREPODS, idle.mirror, kind="sharepods", clock=lambda: moment)

    async def slow(*arguments: Any, heard: Callable[[], None], **named: Any) -> Json:
        nonlocal moment
        for _ in range(9):
            moment += 9.0
            heard()
            health.append(watch_freshness.blind([reflector.freshness()], 1.0))
            listed.append(watch_freshness.stale([reflector.freshness()]))
        return await page(*arguments, heard=heard, **named)

    monkeypatch.setattr(idle.client, "page", slow)
    await reflector.list_all()
    await idle.client.close()
    assert health == [None] * 9
    assert listed == [["sharepods"]] * 9
    moment += watch_freshness.BLIND_S + 1
    assert watch_freshness.blind([reflector.freshness()], 1.0) == "the watch of sharepods has been silent for 61 s"


@pytest.mark.promise("operator-watch-lost")
async def test_after_410_and_with_nothing_left_to_list_everything_is_gone(world: World) -> None:
    world.server.silent.add("sharepods")
    world.delete("a")
    world.delete("b")
    world.server.silent.clear()
    world.server.storage.compact()
    world.server.cut_watches("sharepods", error=Refused(410, "Expired", "too old resource version"))
    await world.shows()
    assert world.lists() == 2


@pytest.mark.promise("operator-watch-lost")
@pytest.mark.parametrize("code", [410, 500])
async def test_an_error_event_is_followed_by_a_list(world: World, code: int) -> None:
    world.server.cut_watches("sharepods", error=Refused(code, "InternalError", "etcdserver: no leader"))
    await world.until(lambda: world.lists() == 2)
    world.create("c")
    await world.shows("a", "b", "c")


@pytest.mark.promise("operator-watch-lost")
@pytest.mark.parametrize("ends", [False, True], ids=["goes-on", "ends"])
@pytest.mark.parametrize("words", ODD_WORDS, ids=range(len(ODD_WORDS)))
async def test_whatever_a_watch_says_what_is_there_is_known(
    idle: World, monkeypatch: pytest.MonkeyPatch, words: bytes, ends: bool
) -> None:
    monkeypatch.setattr(connection, "WATCH_S", (1, 1))
    idle.create("a")
    idle.create("b")
    async with running(idle):
        await idle.until(lambda: bool(idle.server.made("watch", "sharepods")))
        idle.server.send_words("sharepods", words, ends=ends)
        idle.delete("b")
        idle.create("c")
        await idle.shows("a", "c")


@pytest.mark.promise("operator-watch-ended")
async def test_a_watch_that_breaks_off_continues_without_a_list(world: World) -> None:
    world.server.cut_watches()
    world.create("c")
    await world.shows("a", "b", "c")
    assert world.lists() == 1


@pytest.mark.promise("operator-watch-lost")
async def test_a_watch_that_fell_silent_is_followed_by_a_list(idle: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "WATCH_S", (1, 1))
    monkeypatch.setattr(connection, "WATCH_GRACE_S", 0.2)
    idle.server.silent.add("sharepods")
    async with running(idle):
        await idle.until(lambda: bool(idle.server.made("watch", "sharepods")))
        idle.create("a")
        await idle.shows("a")
        assert idle.lists() >= 2


@pytest.mark.promise("operator-restored-backup")
async def test_versions_that_go_back_are_noticed_and_everything_is_replaced(world: World) -> None:
    backup = world.server.storage.backup()
    world.raise_request("a")
    world.create("c")
    world.delete("b")
    await world.shows("a", "c")
    await world.until(lambda: max(world.mirror.versions().values()) > backup.version)
    world.server.storage.restore(backup)
    world.server.cut_watches()
    await world.shows("a", "b")
    assert world.replaced == 1
    assert all(generation == 1 for _, _, generation in world.mirror.known.values())
    world.create("d")
    await world.shows("a", "b", "d")


async def test_versions_that_go_back_within_a_watch_are_noticed_too(world: World) -> None:
    backup = world.server.storage.backup()
    for name in ("c", "d", "e"):
        world.create(name)
    await world.shows("a", "b", "c", "d", "e")
    world.server.storage.restore(backup)
    for watching in world.server._watches:
        watching.since = backup.version
    world.create("f")
    await world.shows("a", "b", "f")
    assert world.replaced == 1


async def test_json_that_is_no_list_says_nothing_of_what_is_there(world: World) -> None:
    world.server.fail("list", "sharepods", times=3, refusal=Refused(200, "", "the load balancer is well"))
    world.server.cut_watches()
    world.create("c")
    await world.shows("a", "b", "c")
    assert world.replaced == 0


@pytest.mark.promise("operator-late-kinds")
async def test_a_resource_that_is_not_served_yet_is_picked_up_once_it_is(idle: World) -> None:
    idle.server.unserved.add("sharepods")
    async with running(idle):
        await idle.until(lambda: len(idle.server.made("list", "sharepods")) >= 3)
        freshness = idle.reflector.freshness()
        assert not freshness.listed
        assert freshness.failure is not None
        assert freshness.failure.status == 404
        idle.server.unserved.clear()
        idle.create("a")
        await idle.shows("a")
        assert idle.reflector.freshness().failure is None


@pytest.mark.promise("operator-unreadable-object")
@pytest.mark.parametrize("spec", [DEEP, b'"' + b"x" * (5 << 20) + b'"'], ids=["deep", "large"])
async def test_an_object_that_cannot_be_read_costs_itself_alone_in_a_list_and_in_a_watch(
    idle: World, spec: bytes
) -> None:
    idle.create("a")
    idle.server.storage.spoil(idle.create("listed"), spec)
    idle.create("b")
    async with running(idle):
        await idle.shows("a", "b", "listed")
        idle.server.storage.spoil(idle.create("watched"), spec)
        idle.create("c")
        await idle.shows("a", "b", "c", "listed", "watched")
        assert idle.lists() == 1
        assert sorted(idle.mirror.unreadable) == ["listed", "watched"]
        idle.delete("watched")
        await idle.shows("a", "b", "c", "listed")


async def test_an_exception_in_taking_an_object_in_costs_that_object_alone(idle: World) -> None:
    idle.mirror.poison.add("bad")
    idle.create("bad")
    async with running(idle):
        idle.create("a")
        await idle.shows("a", "bad")
        assert "RecursionError" in idle.mirror.unreadable["bad"]


async def test_thousands_of_objects_that_cannot_be_read_make_few_log_lines(idle: World) -> None:
    names = [f"bad-{number}" for number in range(50)]
    idle.mirror.poison.update(names)
    for name in names:
        idle.create(name)
    with capture_logs() as logs:
        await idle.reflector.list_all()
    lines = [line for line in logs if "cannot be read" in line["event"]]
    assert [(line["kind"], line["name"] in names, line["namespace"]) for line in lines] == [("sharepods", True, "n")]
    assert len(idle.mirror.unreadable) == 50
    await idle.client.close()


async def test_what_the_server_asks_for_is_waited_and_what_fails_is_tried_again(idle: World) -> None:
    idle.create("a")
    idle.server.fail("list", "sharepods", times=3, refusal=Refused(503, "ServiceUnavailable", "not now"))
    idle.server.fail("list", "sharepods", refusal=Refused(429, "TooManyRequests", "later", retry_after=0))
    idle.server.fail("watch", "sharepods", refusal=Refused(429, "TooManyRequests", "later", retry_after=0))
    async with running(idle):
        await idle.shows("a")
        await idle.until(lambda: len(idle.server.made("watch", "sharepods")) >= 2)
        assert idle.lists() == 5


@pytest.mark.promise("operator-retry-after")
async def test_a_server_that_asks_to_be_left_alone_for_a_day_is_asked_again_soon(
    idle: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reflectors, "LONGEST_WAIT_S", 0.01)
    idle.create("a")
    idle.server.fail("list", "sharepods", refusal=Refused(503, "", "under maintenance", retry_after=86_400))
    idle.server.fail("watch", "sharepods", refusal=Refused(503, "", "under maintenance", retry_after=86_400))
    async with running(idle):
        await idle.shows("a")
        idle.create("b")
        await idle.shows("a", "b")


async def test_a_watch_is_reopened_on_request(world: World) -> None:
    opened = len(world.server.made("watch", "sharepods"))
    world.reflector.reopen()
    await world.until(lambda: len(world.server.made("watch", "sharepods")) == opened + 1)
    world.create("c")
    await world.shows("a", "b", "c")
    assert world.lists() == 1


async def test_a_sight_ages_while_nothing_is_heard(idle: World) -> None:
    now = 100.0
    reflector = Reflector(idle.client, SHAREPODS, idle.mirror, kind="sharepods", clock=lambda: now)
    now = 130.0
    assert (reflector.freshness().silent_s, reflector.freshness().listed) == (30.0, False)
    await reflector.list_all()
    assert (reflector.freshness().silent_s, reflector.freshness().listed) == (0.0, True)
    now = 140.0
    idle.server.fail("list", "sharepods", times=9, refusal=Refused(503, "ServiceUnavailable", "not now"))
    with pytest.raises(UnavailableError):
        await reflector.list_all()
    assert reflector.freshness().silent_s == 10.0
    await idle.client.close()


async def test_a_list_drops_nothing_that_is_younger_than_it(idle: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to a write may arrive while an older list is still being read."""
    idle.create("a")
    page = idle.client.page

    async def slow_page(*arguments: Any, **options: Any) -> Json:
        found = await page(*arguments, **options)
        if not idle.mirror.unreadable:
            idle.mirror.unreadable["once"] = ""
            idle.mirror.put(idle.create("made"))
        return found

    monkeypatch.setattr(idle.client, "page", slow_page)
    await idle.reflector.list_all()
    assert idle.mirror.names() == ["a", "made"]
    await idle.client.close()


@pytest.mark.promise("operator-restored-backup")
async def test_a_list_on_whose_way_another_kind_showed_that_versions_went_back_is_read_again(
    idle: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle.create("a")
    backup = idle.server.storage.backup()
    idle.create("lost")
    page = idle.client.page

    async def slow_page(*arguments: Any, **options: Any) -> Json:
        found = await page(*arguments, **options)
        if idle.server.storage.version > backup.version:
            idle.server.storage.restore(backup)
            idle.reflector.replace_all()
        return found

    monkeypatch.setattr(idle.client, "page", slow_page)
    await idle.reflector.list_all()
    assert idle.mirror.names() == ["a"]
    await idle.client.close()


@pytest.mark.promise("operator-restored-backup")
async def test_a_list_that_is_to_be_read_again_is_read_no_further_and_nothing_is_gone_by_it(
    idle: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"o{number:02d}" for number in range(25)]
    for name in names:
        idle.create(name)
    await idle.reflector.list_all()
    page, asked, removed = idle.client.page, itertools.count(), list[str]()

    async def noticed(*arguments: Any, **options: Any) -> Json:
        found = await page(*arguments, **options)
        if options.get("limit") != 1 and next(asked) == 0:
            idle.reflector.replace_all()
        return found

    monkeypatch.setattr(idle.client, "page", noticed)
    monkeypatch.setattr(idle.mirror, "drop", lambda uid, _version, _last: removed.append(uid))
    await idle.reflector.list_all()
    assert (removed, next(asked), idle.mirror.names()) == ([], 1 + 3, names)
    await idle.client.close()


async def test_others_get_a_turn_while_many_objects_that_are_gone_are_taken_out(
    idle: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reflectors, "_TURN_S", -1.0)
    for number in range(5):
        idle.mirror.known[f"uid-{number}"] = (f"old-{number}", 0, 1)
    turns, seen = itertools.count(), set[int]()
    drop = idle.mirror.drop

    def noted(uid: str, version: int, last: Json | None) -> None:
        seen.add(next(turns))
        drop(uid, version, last)

    async def another() -> None:
        while True:
            await asyncio.sleep(0)
            seen.add(-next(turns))

    monkeypatch.setattr(idle.mirror, "drop", noted)
    task = asyncio.create_task(another())
    await idle.reflector.list_all()
    task.cancel()
    assert idle.mirror.names() == []
    dropped = sorted(turn for turn in seen if turn >= 0)
    assert all(later - former > 1 for former, later in itertools.pairwise(dropped)), "with a turn of another between"
    await idle.client.close()
