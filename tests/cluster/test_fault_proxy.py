"""Tests of the fault-injecting proxy: each fault, as a plain client of a real API server sees it."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from harness.api import Api, ApiError, Watch
from harness.cluster import Cluster
from harness.proxy import (
    ErrorEvent,
    FaultProxy,
    Hold,
    LoseAnswer,
    Mute,
    Refuse,
    Reset,
    Rule,
    Slow,
    expired,
)
from harness.proxy.calls import call_of

MAPS = "/api/v1/namespaces/default/configmaps"
BROKEN = (ConnectionError, http.client.HTTPException, OSError)


@pytest.fixture(scope="module")
def proxy(cluster: Cluster) -> Iterator[FaultProxy]:
    with FaultProxy(cluster) as running:
        yield running


@pytest.fixture
def api(cluster: Cluster, proxy: FaultProxy) -> Iterator[Api]:
    """Yield a client that reaches the API server through the proxy; clear all faults afterwards."""
    yield Api(proxy.server, cluster.ca, cluster.admin_token)
    proxy.clear()


def config_map(name: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}}


def first_event(watch: Watch) -> dict[str, Any]:
    return next(iter(watch))


@pytest.mark.parametrize(
    ("method", "path", "query", "call"),
    [
        ("GET", "/api/v1/pods", {"watch": "true"}, ("watch", "pods", "", "", "")),
        ("GET", "/api/v1/namespaces/a/pods", {}, ("list", "pods", "a", "", "")),
        ("GET", "/api/v1/namespaces/a", {}, ("get", "namespaces", "", "a", "")),
        ("PUT", "/api/v1/namespaces/a/finalize", {}, ("update", "namespaces", "", "a", "finalize")),
        ("POST", "/api/v1/namespaces/a/pods/b/binding", {}, ("create", "pods", "a", "b", "binding")),
        ("PATCH", "/apis/x.dev/v1/gpunodes/n/status", {}, ("patch", "gpunodes", "", "n", "status")),
        ("DELETE", "/apis/x.dev/v1/namespaces/a/sharepods/s", {}, ("delete", "sharepods", "a", "s", "")),
        ("DELETE", "/apis/x.dev/v1/namespaces/a/sharepods", {}, ("deletecollection", "sharepods", "a", "", "")),
        ("GET", "/readyz", {}, ("list", "", "", "", "")),
    ],
)
def test_a_request_is_the_call_that_the_api_server_takes_it_for(
    method: str, path: str, query: dict[str, str], call: tuple[str, ...]
) -> None:
    seen = call_of(method, path, query)
    assert (seen.verb, seen.resource, seen.namespace, seen.name, seen.subresource) == call


def test_without_a_rule_calls_and_watches_pass(cluster: Cluster, proxy: FaultProxy, api: Api) -> None:
    before = api.get(MAPS)
    assert before == cluster.api.get(MAPS) | {"metadata": before["metadata"]}
    with pytest.raises(ApiError) as refused:
        api.get(f"{MAPS}/none")
    assert (refused.value.code, refused.value.reason) == (404, "NotFound")
    watch = api.watch(MAPS, resourceVersion=before["metadata"]["resourceVersion"])
    passed = proxy.expect('"ADDED"', "passes")
    cluster.api.create(MAPS, config_map("passes"))
    assert first_event(watch)["object"]["metadata"]["name"] == "passes"
    assert passed.wait(10)
    watch.close()
    assert [record.status for record in proxy.seen(lambda call: call.name == "none")] == [404]


def test_a_rule_counts_and_the_first_that_matches_applies(proxy: FaultProxy, api: Api) -> None:
    once = Rule(Refuse(429, "TooManyRequests", retry_after=7), verbs=("list",), resources=("configmaps",), times=1)
    with proxy.weather(once, Rule(Refuse(503), resources=("configmaps",), times=2)):
        codes = []
        for _ in range(4):
            try:
                api.get(MAPS)
                codes.append(200)
            except ApiError as refused:
                codes.append(refused.code)
        api.get("/api/v1/nodes")
    assert codes == [429, 503, 503, 200]
    assert once.met == 1


def test_a_lost_answer_is_a_write_that_happened(cluster: Cluster, proxy: FaultProxy, api: Api) -> None:
    with proxy.weather(Rule(LoseAnswer(), verbs=("create",))), pytest.raises(BROKEN):
        api.create(MAPS, config_map("lost"))
    assert cluster.api.get(f"{MAPS}/lost")["metadata"]["name"] == "lost"
    with proxy.weather(Rule(Reset(), verbs=("create",))), pytest.raises(BROKEN):
        api.create(MAPS, config_map("never"))
    with pytest.raises(ApiError, match="NotFound"):
        cluster.api.get(f"{MAPS}/never")


def test_an_answer_that_is_held_back_is_as_old_as_its_call(cluster: Cluster, proxy: FaultProxy, api: Api) -> None:
    cluster.api.create(MAPS, config_map("old"))
    hold = Hold()
    got: list[Any] = []
    with proxy.weather(Rule(hold, verbs=("get",), times=1)):
        asking = threading.Thread(target=lambda: got.append(api.get(f"{MAPS}/old")))
        asking.start()
        assert hold.held.wait(10)
        cluster.api.delete(f"{MAPS}/old")
        assert got == []
        hold.release()
        asking.join(10)
    assert got[0]["metadata"]["name"] == "old"


def test_a_watch_falls_silent_with_its_connection_open(cluster: Cluster, proxy: FaultProxy, api: Api) -> None:
    version = api.get(MAPS)["metadata"]["resourceVersion"]
    silent, lively = (api.watch(MAPS, timeout=300, resourceVersion=version) for _ in range(2))
    first: list[dict[str, Any]] = []
    assert proxy.watches() == 2
    assert proxy.silence() == 2
    fresh = api.watch(MAPS, timeout=300, resourceVersion=version)
    passed = proxy.expect('"ADDED"', "unseen")
    cluster.api.create(MAPS, config_map("unseen"))
    assert passed.wait(10)  # the new watch has a new connection, which is not silent
    assert first_event(fresh)["object"]["metadata"]["name"] == "unseen"
    reader = threading.Thread(target=lambda: first.extend(silent))
    reader.start()
    reader.join(1)
    assert reader.is_alive()  # the client got neither an event nor an end of the watch
    assert first == []
    for watch in (silent, lively, fresh):
        watch.close()
    reader.join(10)


def test_a_watch_is_told_an_error_or_cut(proxy: FaultProxy, api: Api) -> None:
    version = api.get(MAPS)["metadata"]["resourceVersion"]
    events_of = api.watch(MAPS, resourceVersion=version)
    assert proxy.send(expired()) == 1
    events = list(events_of)
    assert [(event["type"], event["object"]["code"]) for event in events] == [("ERROR", 410)]
    events_of.close()
    with proxy.weather(Rule(ErrorEvent(500, "InternalError"), verbs=("watch",), times=1)):
        events_of = api.watch(MAPS, resourceVersion=version)
        assert [event["object"]["code"] for event in events_of] == [500]
        events_of.close()
    cut = api.watch(MAPS, resourceVersion=version)
    assert proxy.cut(lambda call: call.resource == "pods") == 0
    assert proxy.cut() == 1
    assert list(cut) == []
    cut.close()


def test_a_mute_connection_gives_nothing_and_a_slow_one_everything(proxy: FaultProxy, api: Api) -> None:
    with proxy.weather(Rule(Mute(), verbs=("list",), times=1)), pytest.raises(TimeoutError):
        api.request("GET", MAPS, timeout=0.5)
    with proxy.weather(Rule(Slow(4000), verbs=("list",))):
        assert api.get(MAPS)["kind"] == "ConfigMapList"


def test_the_proxy_ends_with_what_it_holds_back(cluster: Cluster) -> None:
    hold = Hold()
    failures: list[BaseException] = []

    def ask(api: Api) -> None:
        try:
            api.get(MAPS)
        except BROKEN as error:
            failures.append(error)

    with FaultProxy(cluster) as ending:
        api = Api(ending.server, cluster.ca, cluster.admin_token)
        with ending.weather(Rule(hold, verbs=("list",))):
            asking = threading.Thread(target=ask, args=(api,))
            asking.start()
            assert hold.held.wait(10)
    asking.join(10)
    assert len(failures) == 1
