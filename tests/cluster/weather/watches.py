"""Faults of watches: silence, errors, expired versions. Each function plays one and returns how long the operator was
blind, in seconds; AssertionError if it stays so.
"""

from __future__ import annotations

import time

from cluster.operator_world import wait
from doubles.apiserver.odd_words import ODD_WORDS
from harness.proxy import ErrorEvent, Mute, Refuse, Rule, Words, expired

from .world import KINDS, Weather, kinds, of_tenants

BELIEF_S = 30.0
"""Seconds of silence of a watch after which the operator must place nothing."""
_SHARES = 50


def half_open(weather: Weather) -> float:
    """All watches go silent with their connections open; a SharePod is created."""
    namespace, _ = weather.place("half-open")
    assert weather.proxy.silence() >= len(KINDS)
    began = time.monotonic()
    weather.world.apply(namespace, "one", {"request": 0.5}, on="half-open")
    return weather.running(namespace, "one", limit=70, since=began)


def stale_belief(weather: Weather) -> float:
    """The watches of Nodes and of their ledgers are silent and cannot be reopened; SharePods still arrive.

    Nothing may be placed in this time. Return the seconds from the end of the fault to the SharePod's start.
    """
    world, (namespace, (node,)) = weather.world, weather.place("belief")
    away = ("gpunodes", "nodes")
    with weather.proxy.weather(Rule(Mute(), verbs=("list", "watch"), resources=away)):
        assert weather.proxy.silence(kinds(*away)) >= len(away)
        weather.outlast(BELIEF_S + 5)
        world.apply(namespace, "one", {"request": 0.5}, on="belief")
        wait(lambda: weather.sees_all() or world.row(node, "one"), what="a SharePod that the operator has seen")
        assert world.row(node, "one") is None
        weather.outlast(3)
        assert world.row(node, "one") is None
    began = time.monotonic()
    return weather.running(namespace, "one", limit=60, since=began)


def error_event(weather: Weather, kind: str) -> float:
    """The watch of one kind gets an internal error; then a SharePod is created. Return the seconds until it runs and
    the kind is watched again."""
    prefix = f"error-{kind}"
    namespace, _ = weather.place(prefix)
    assert weather.proxy.send(ErrorEvent(500, "InternalError"), kinds(kind)) >= 1
    began = time.monotonic()
    weather.world.apply(namespace, "one", {"request": 0.5}, on=prefix)
    weather.running(namespace, "one", limit=30, since=began)
    wait(lambda: weather.runs() and weather.watched(kind), what=f"a new watch of {kind}", timeout=30)
    return time.monotonic() - began


def expired_and_empty(weather: Weather) -> float:
    """The watches of SharePods and of their Pods are silent while all SharePods are deleted, and then expire. So the
    lists that follow are empty."""
    world, (namespace, nodes) = weather.world, weather.place("expired", 3)

    def chosen(call: object) -> bool:
        return kinds("sharepods")(call) or of_tenants(call)  # type: ignore[arg-type]

    weather.empty()
    for number in range(_SHARES):
        world.apply(namespace, f"p{number}", {"request": 0.1}, on="expired")
    for number in range(_SHARES):
        world.phase(namespace, f"p{number}", "Running", timeout=60)
    assert weather.proxy.silence(chosen) >= 2
    world.api.delete(world.path(namespace))
    wait(
        lambda: not world.api.get(world.path(namespace))["items"] and not world.cluster.pods(namespace),
        what="the end of SharePods and Pods",
        timeout=60,
    )
    with weather.proxy.weather(
        Rule(expired(), verbs=("watch",), resources=("sharepods",), times=1),
        Rule(expired(), verbs=("watch",), times=1, where=of_tenants),
    ):
        assert weather.proxy.cut(chosen) >= 2
        began = time.monotonic()
        wait(lambda: not any(world.rows(node) for node in nodes), what="all shares free", timeout=45)
    return time.monotonic() - began


def expired_together(weather: Weather) -> float:
    """All watches expire at once, repeatedly. In a second round lists are answered 410, too. Return the longer time of
    both rounds from its start until a SharePod that is created then runs."""
    world, (namespace, _) = weather.world, weather.place("together")
    storms = {
        "one": Rule(expired(), verbs=("watch",), times=4 * len(KINDS)),
        "two": Rule(Refuse(410, "Expired"), verbs=("list", "watch"), times=6 * len(KINDS)),
    }
    longest = 0.0
    for name, storm in storms.items():
        wait(lambda: weather.watched(*KINDS), what="a watch of each kind", timeout=30)
        with weather.proxy.weather(storm):
            assert weather.proxy.cut() >= len(KINDS)
            began = time.monotonic()
            world.apply(namespace, name, {"request": 0.2}, on="together")
            longest = max(longest, weather.running(namespace, name, limit=60, since=began))
    return longest


def odd_words(weather: Weather) -> float:
    """The watches of all kinds get a series of invalid messages that no API server sends. After each message a SharePod
    must run.

    Return the longest time until such a SharePod ran.
    """
    world, longest = weather.world, 0.0
    namespace, _ = weather.place("odd", 2)
    for number, words in enumerate(ODD_WORDS):
        wait(lambda: weather.runs() and weather.watched(*KINDS), what="watches of all kinds", timeout=30)
        assert weather.proxy.send(Words(words)) >= len(KINDS), words
        began = time.monotonic()
        world.apply(namespace, f"p{number}", {"request": 0.1}, on="odd")
        longest = max(longest, weather.running(namespace, f"p{number}", limit=45, since=began))
    for number in range(len(ODD_WORDS)):
        world.phase(namespace, f"p{number}", "Running", timeout=1)
    return longest
