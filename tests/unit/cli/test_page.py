"""The page of the fleet: its content, made from a cluster in memory, and its server, without a browser."""

from __future__ import annotations

import http.client
import itertools
import json
import re
import socket
import struct
import threading
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
from kubectl_sharepod import commands
from kubectl_sharepod.kubectl import Json, KubectlError
from kubectl_sharepod.page.content import History
from kubectl_sharepod.page.server import Reading, policy, scope_of, serve, served
from kubectl_sharepod.program import port_of
from kubectl_sharepod.reading import Scope, workloads
from kubectl_sharepod.views import Share, Workload

from .fleet import Memory, cluster, waiting_cluster

NODES, PODS = "/apis/sharepod.dev/v1alpha1/gpunodes", "/apis/sharepod.dev/v1alpha1/sharepods"
TIMEOUT_S = 10


def read(kubectl: Memory, namespace: str | None = None) -> Json:
    reading = Reading(Scope(kubectl, namespace))
    reading.read()
    return dict(json.loads(reading.body))


@contextmanager
def page() -> Iterator[tuple[str, str]]:
    """Serve a page. Yield (the server's host, the path of the page)."""
    reading = Reading(Scope(cluster(), None))
    reading.read()
    with served(lambda: reading.body) as url:
        yield urlsplit(url).netloc, urlsplit(url).path


def asked(netloc: str, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(netloc, timeout=TIMEOUT_S)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    answer.body = answer.read()  # type: ignore[attr-defined]
    connection.close()
    return answer


def test_page_and_tables_show_the_same_figures() -> None:
    found = read(cluster())
    table = commands.all_gpus(Scope(cluster(), None))
    shown = [
        [gpu["node"], str(gpu["index"]), gpu["model"], gpu["pool"], str(len(gpu["tenants"])), gpu["free"],
         gpu["memory"], gpu["freeMemory"], gpu["uuid"], gpu["why"]]
        for gpu in found["gpus"]
    ]  # fmt: skip
    assert shown == [list(row) for row in table.rows]
    place = found["columns"].index("LAST-HOUR")
    for gpu in found["gpus"]:
        cells = [[*one["cells"][:place], *one["cells"][place + 1 :]] for one in gpu["tenants"]]
        assert cells == [list(row) for row in commands.who(Scope(cluster(), None), gpu["uuid"]).rows]
    assert found["summary"] == list(commands.top(Scope(cluster(), None)).before)
    (waits,) = found["waiting"]
    assert (waits["who"], waits["asks"], waits["why"]) == ("team/large", "0.9", "no GPU has 0.9 of its time free")


def test_the_page_lists_waiting_workloads_of_every_door() -> None:
    found = read(waiting_cluster())
    assert {one["who"]: one["asks"] for one in found["waiting"]} == {
        "team/large": "0.9",
        "team/pod/web": "0.4",
        "team/pod/late": "1",
        "team/claim/job-gpu": "0.25",
    }
    assert found["curve"]["points"][-1][3] == 4
    hidden = read(waiting_cluster(denied=(NODES, "/api/v1/namespaces/team/pods")), "team")
    assert [note.partition(",")[0] for note in hidden["notes"]] == [
        "You may not list GPUNodes",
        "You may not list Pods",
    ]


def test_a_reader_of_one_namespace_gets_nothing_of_others() -> None:
    kubectl = cluster(denied=(NODES, PODS))
    scope, note = scope_of(kubectl, None, every=False)
    assert scope.namespace == "team"
    assert "Only SharePods of namespace team" in note
    found = read(kubectl, scope.namespace)
    assert (found["gpus"], found["hidden"]) == ([], True)
    assert [one["name"] for one in found["workloads"]] == ["train"]
    assert "sharepod-gpunode-view" in found["notes"][0]
    assert scope_of(cluster(), None, every=False) == (Scope(cluster(), None), "")
    assert scope_of(cluster(), "team", every=False)[0].namespace == "team"


def one(**changes: object) -> Workload:
    return replace(Workload("SharePod", "team", "train", Share(500), uid="u", gpus=("a",)), **changes)  # type: ignore[arg-type]


def test_the_last_hour_is_that_of_the_counter_or_of_what_the_page_has_read() -> None:
    history, hour = History(5), 3600.0
    old = one(held_s=9000, counted_since="1970-01-01T00:00:00.000Z")
    history.add(2 * hour, [old], None)
    assert history.share(old, 2 * hour) == "-", "nothing is known of the hour before the first read"
    history.add(2 * hour + 600, [replace(old, held_s=9300)], None)
    assert history.share(replace(old, held_s=9300), 2 * hour + 600) == "0.5 (10m)"
    young = one(held_s=900, counted_since="1970-01-01T02:00:00.000Z")
    assert history.share(young, 2 * hour + 1800) == "0.5 (30m)", "its counter began within the hour"
    assert history.share(replace(young, gpus=("a", "b")), 2 * hour + 1800) == "0.25 (30m)"
    assert history.share(replace(old, held_s=8000), 2 * hour + 1200) == "-", "a counter that began again"
    assert history.share(one(), 2 * hour) == "-"
    later = 3 * hour + 300
    history.add(later, [replace(old, held_s=9600)], None)
    assert history.share(replace(old, held_s=9600), later) == "0.091 (55m)", "reads older than an hour are dropped"
    assert [point[0] for point in history.curve()["points"]] == [2 * hour + 600, later]


def test_the_curve_has_all_tenants_each_gpu_counted() -> None:
    seen = workloads(Scope(cluster(), "team"))
    found, fleet = seen.found, seen.fleet
    history = History(5)
    history.add(0, found, fleet)
    assert history.curve() == {"points": [[0, 1300, 660, 1]], "mean": "0.66"}
    for second in range(0, 7300, 5):
        history.add(second, found, fleet)
    assert len(history.curve()["points"]) <= 361


def test_ended_sharepods_count_as_neither_tenants_nor_waiting() -> None:
    kubectl = cluster(denied=(NODES,))
    train = kubectl.objects["/apis/sharepod.dev/v1alpha1/namespaces/team/sharepods"]["items"][0]
    assert [one["name"] for one in read(kubectl, "team")["workloads"]] == ["train"]
    train["status"]["endTime"] = "2026-01-01T00:00:00Z"
    ended = read(kubectl, "team")
    assert (ended["workloads"], [one["who"] for one in ended["waiting"]]) == ([], ["team/large"])
    assert ended["curve"]["points"][-1][1:] == [0, 0, 1]


@pytest.mark.promise("operator-page-own")
def test_only_the_token_and_the_own_address_are_answered() -> None:
    with page() as (netloc, path):
        assert asked(netloc, path).status == 200
        assert asked(netloc, path, Host=netloc.replace("127.0.0.1", "localhost")).status == 200
        content = asked(netloc, path + "fleet.json")
        assert json.loads(content.body)["gpus"]  # type: ignore[attr-defined]
        for host in ("evil.example", "127.0.0.1", "127.0.0.1:1", f"evil.example:{netloc.partition(':')[2]}"):
            refused = asked(netloc, path + "fleet.json", Host=host)
            assert (refused.status, b"GPU-" in refused.body) == (403, False)  # type: ignore[attr-defined]
        for other in (
            "/",
            "/fleet.json",
            path[:-2] + "/",
            path[:-1],
            path + "../fleet.json",
            path + "other",
            "//",
            "/%00",
        ):
            assert asked(netloc, other).status == 404, other
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
            assert asked(netloc, path, method).status == 501
    with page() as (_, again):
        assert again != path
        assert len(again) > 30


def test_a_browser_that_resets_its_connection_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with page() as (netloc, path):
        host, _, port = netloc.partition(":")
        browser = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
        browser.sendall(b"GET /")
        browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        browser.close()
        assert asked(netloc, path).status == 200
        for thread in threading.enumerate():
            if "process_request_thread" in thread.name:
                thread.join(TIMEOUT_S)
    assert capsys.readouterr().err == ""


@pytest.mark.promise("operator-page-own")
def test_the_page_may_load_nothing_from_elsewhere() -> None:
    with page() as (netloc, path):
        answer = asked(netloc, path)
    html = answer.body  # type: ignore[attr-defined]
    rules = dict(rule.split(" ", 1) for rule in answer.headers["Content-Security-Policy"].split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert re.fullmatch(r"'sha256-[\w+/=]{44}'", rules["script-src"])
    assert re.fullmatch(r"'sha256-[\w+/=]{44}'", rules["style-src"])
    assert policy(html.replace(b"refresh", b"renew")) != policy(html)
    assert not re.search(
        rb"https?:|//[a-z]|innerHTML|outerHTML|insertAdjacent|document\.write|eval\(| style=| on\w+=", html
    )
    fixed = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}
    assert {name: answer.headers[name] for name in fixed} == fixed


def test_a_failed_read_is_shown_with_the_last_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl = cluster()
    reading = Reading(Scope(kubectl, None))
    reading.read()
    del kubectl.objects[PODS]

    monkeypatch.setattr(time, "sleep", interrupted_at(2))
    with pytest.raises(KeyboardInterrupt):
        reading.run()
    found = json.loads(reading.body)
    assert "SharePod is not installed" in found["problem"]
    assert len(found["gpus"]) == 3


@pytest.mark.parametrize("at_once", [True, False])
def test_ctrl_c_closes_the_page(monkeypatch: pytest.MonkeyPatch, *, at_once: bool) -> None:
    urls: list[str] = []

    def announce(url: str) -> None:
        urls.append(url)
        if at_once:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupted_at(1))
    serve(Scope(cluster(), None), "", 0, announce)
    host, port = urlsplit(urls[0]).hostname, urlsplit(urls[0]).port
    assert host == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port or 0), timeout=TIMEOUT_S)


def interrupted_at(last: int) -> Callable[[float], None]:
    """Return a replacement of `time.sleep` that returns at once, and raises KeyboardInterrupt at its `last` call."""
    calls = itertools.count(1)

    def sleep(_seconds: float) -> None:
        if next(calls) == last:
            raise KeyboardInterrupt

    return sleep


def test_a_port_in_use_or_out_of_range_is_an_error() -> None:
    with page() as (netloc, _), pytest.raises(KubectlError, match="name another --port"):
        serve(Scope(cluster(), None), "", int(netloc.partition(":")[2]), print)
    for wrong in ("-1", "65536", "http"):
        with pytest.raises(ArgumentTypeError, match=wrong):
            port_of(wrong)
