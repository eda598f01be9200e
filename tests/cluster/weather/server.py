"""Faults of the API server as a whole. Each function plays one and returns the operator's delay, in seconds;
AssertionError if the operator does not recover."""

from __future__ import annotations

import time
from pathlib import Path

from cluster.operator_world import wait
from harness.installation import await_in_force
from harness.proxy import Call, LoseAnswer, Record, Refuse, Reset, Rule

from .world import WHOLE_NODE, Weather

OUTAGE_S = 60.0
RETRY_AFTER_S = 4
_CRDS = Path(__file__).resolve().parents[3] / "crds"
_KINDS = ("sharepods.sharepod.dev", "gpunodes.sharepod.dev")
_REPLACEMENTS, _AT_ONCE = 3, 5
"""Number of replacements of the CRDs, and number of SharePods created before each replacement and after the last."""
_CHURN = 300
"""Number of writes after the backup, whose resource versions the restore loses."""


def outage(weather: Weather) -> float:
    """Every call is answered with 503 for a minute; a SharePod that is created in that time starts after it."""
    namespace, _ = weather.place("outage")
    with weather.proxy.weather(Rule(Refuse(503, "ServiceUnavailable"))):
        weather.proxy.cut()
        weather.world.apply(namespace, "one", {"request": 0.5}, on="outage")
        weather.outlast(OUTAGE_S)
    return weather.running(namespace, "one", limit=45, since=time.monotonic())


def too_many_requests(weather: Weather) -> float:
    """A create and a watch are answered 429 with Retry-After. Return by how many seconds the later retry exceeds the
    requested pause."""
    namespace, _ = weather.place("too-many")

    def creates(call: Call) -> bool:
        return call.verb == "create" and call.resource == "pods" and call.namespace == namespace

    def reads(call: Call) -> bool:
        return call.verb in ("list", "watch") and call.resource == "sharepods"

    throttled = Refuse(429, "TooManyRequests", retry_after=RETRY_AFTER_S)
    with weather.proxy.weather(Rule(throttled, times=1, where=creates), Rule(throttled, times=1, where=reads)):
        before = len(weather.proxy.seen(reads))
        weather.proxy.cut(reads)
        wait(lambda: len(_answered(weather.proxy.seen(reads)[before:])) >= 2, what="a new watch", timeout=60)
        weather.world.apply(namespace, "one", {"request": 0.5}, on="too-many")
        weather.running(namespace, "one", limit=60, since=time.monotonic())
    pauses = [_pause(weather.proxy.seen(reads)[before:]), _pause(weather.proxy.seen(creates))]
    assert min(pauses) >= RETRY_AFTER_S, f"tried again after {pauses} s, Retry-After is {RETRY_AFTER_S} s"
    return max(pauses) - RETRY_AFTER_S


def _answered(records: list[Record]) -> list[Record]:
    return [record for record in records if record.status is not None]


def _pause(records: list[Record]) -> float:
    """Return the seconds between the answer 429 and the next call."""
    refused = next(number for number, record in enumerate(records) if record.status == 429)
    ended = records[refused].ended
    assert ended is not None
    return records[refused + 1].began - ended


def lost_answers(weather: Weather) -> float:
    """The answer to the first write of each kind is lost, so the write takes effect unseen. The connections of some
    later writes are reset."""
    world, (namespace, (node,)) = weather.world, weather.place("lost")
    lost = [Rule(LoseAnswer(), verbs=("create",), resources=("pods",), times=1)]
    lost += [
        Rule(LoseAnswer(), verbs=("patch", "update"), resources=(kind,), times=1)
        for kind in ("gpunodes", "sharepods", "pods")
    ]
    reset = [Rule(Reset(), verbs=("patch", "update"), resources=(kind,), times=1) for kind in ("gpunodes", "sharepods")]
    with weather.proxy.weather(*lost, *reset):
        began = time.monotonic()
        made = world.apply(namespace, "one", {"request": 0.5}, on="lost")
        seconds = weather.running(namespace, "one", limit=45, since=began)
    assert [row["id"] for row in world.rows(node)] == [made["metadata"]["uid"]]
    assert len(world.cluster.pods(namespace)) == 1
    return seconds


def unauthorized(weather: Weather) -> float:
    """Every call is permanently answered with 401: the operator logs this and ends, to start with fresh credentials."""
    operator = weather.world.operator
    assert operator is not None
    with weather.proxy.weather(Rule(Refuse(401, "Unauthorized", "Unauthorized"))):
        weather.proxy.cut()
        began = time.monotonic()
        wait(lambda: not operator.running(), what="the operator's end", timeout=150, interval=0.5)
    assert "Unauthorized" in operator.log.read_text()
    return time.monotonic() - began


def late_crds(weather: Weather) -> float:
    """The kinds of SharePod are served only after the operator has started. `weather`: its operator is not started
    yet."""
    world = weather.world
    world.cluster.kubectl("delete", "crd", *_KINDS, "--wait", timeout=60)
    world.start_operator()
    wait(lambda: weather.runs() and weather.watched("nodes"), what="an operator that has begun", timeout=60)
    (node,) = world.cluster.add_fake_nodes(1, labels={"sharepod.dev/pool": "dedicated", "test": "late"}, prefix="late")
    world.agents.start(node)
    world.cluster.kubectl("apply", "--server-side", "-k", str(_CRDS), timeout=60)
    await_in_force(world.cluster)
    began = time.monotonic()
    namespace = world.cluster.namespace("late")
    world.apply(namespace, "one", {"request": 0.5}, on="late")
    return weather.running(namespace, "one", limit=60, since=began)


def crds_gone_and_back(weather: Weather) -> float:
    """The kinds are deleted with all their objects, and applied again. Return seconds until the operator is ready."""
    world = weather.world
    world.cluster.kubectl("delete", "crd", *_KINDS, "--wait", timeout=60)
    wait(lambda: weather.runs() and not world.ready("operator"), what="an operator that is not ready", timeout=60)
    world.cluster.kubectl("apply", "--server-side", "-k", str(_CRDS), timeout=60)
    began = time.monotonic()
    wait(lambda: weather.runs() and world.ready("operator"), what="a ready operator", timeout=60)
    seconds = time.monotonic() - began
    await_in_force(world.cluster)
    namespace, _ = weather.place("back")
    world.apply(namespace, "one", {"request": 0.5}, on="back")
    weather.running(namespace, "one", limit=60, since=began)
    return seconds


def replaced_crds(weather: Weather) -> float:
    """The kinds are replaced in place, as by an upgrade, while SharePods arrive. Return the seconds until all run."""
    world, (namespace, _) = weather.world, weather.place("replaced", 3)
    opened = {kind: _watches(weather, kind) for kind in ("sharepods", "gpunodes")}
    began = time.monotonic()
    for turn in range(_REPLACEMENTS + 1):
        for number in range(_AT_ONCE):
            world.apply(namespace, f"p{turn}-{number}", {"request": 0.25}, on="replaced")
        if turn < _REPLACEMENTS:
            for name in _KINDS:
                _describe(weather, name, f"As replaced for the {turn + 1}. time.")
    for turn in range(_REPLACEMENTS + 1):
        for number in range(_AT_ONCE):
            weather.running(namespace, f"p{turn}-{number}", limit=60, since=began)
    seconds = time.monotonic() - began
    wait(lambda: all(_watches(weather, kind) > count for kind, count in opened.items()), what="new watches", timeout=60)
    world.apply(namespace, "last", {"request": 0.25}, on="replaced")
    weather.running(namespace, "last", limit=60, since=began)
    return seconds


def _watches(weather: Weather, kind: str) -> int:
    return len(weather.proxy.seen(lambda call: call.verb == "watch" and call.resource == kind))


def _describe(weather: Weather, name: str, text: str) -> None:
    """Change the schema of a CRD, whose watches then end."""
    api, path = weather.world.api, f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"
    versions = api.get(path)["spec"]["versions"]
    versions[0]["schema"]["openAPIV3Schema"]["description"] = text
    api.patch(path, {"spec": {"versions": versions}})


def restored_backup(weather: Weather) -> float:
    """etcd is restored to an older backup: resource versions go back, objects are forgotten.

    `weather`: on a cluster of its own. Return the seconds until a SharePod runs that needs the GPUs of a forgotten
    SharePod.
    """
    world, (namespace, (kept, freed)) = weather.world, weather.place("backup", 2)
    before = world.apply(namespace, "before", WHOLE_NODE, on="backup")
    world.phase(namespace, "before", "Running")
    backup = world.cluster.back_up()
    wait(weather.acts, what="an operator that acts again", timeout=60)
    forgotten = world.apply(namespace, "forgotten", WHOLE_NODE, on="backup")
    world.phase(namespace, "forgotten", "Running", timeout=60)
    for number in range(_CHURN):
        world.api.patch(f"/api/v1/namespaces/{namespace}", {"metadata": {"annotations": {"churn": str(number)}}})
    world.cluster.restore(backup)
    began = time.monotonic()
    after = world.apply(namespace, "after", WHOLE_NODE, on="backup")
    seconds = weather.running(namespace, "after", limit=60, since=began)
    tenants = [row["id"] for node in (kept, freed) for row in world.rows(node)]
    assert sorted(tenants) == sorted(item["metadata"]["uid"] for item in (before, after))
    assert forgotten["metadata"]["uid"] not in tenants
    assert world.sharepod(namespace, "before")["status"]["phase"] == "Running"
    return seconds
