"""Faults of single objects. Each function plays one and returns the operator's delay, in seconds by default;
AssertionError if the operator does not recover."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from cluster.audit import Audit
from cluster.operator_world import GIB, GPUNODES, condition_of
from harness.api import Object
from harness.proxy import Call, Hold, Rule

from .world import WHOLE_NODE, Weather, message, of_tenants

BINDING: Object = {"apiVersion": "v1", "kind": "Binding"}
LARGE_PODS = 70
LARGE_BYTES = 1_400_000
"""Bytes of one string in a large Pod: just below the largest object that etcd accepts (1.5 MiB)."""
LARGE_LIMIT_MIB = 1024
"""Memory in MiB that the operator must stay below: the limit of a container that was killed in such a case."""


def foreign_pod(name: str, *, node: str | None = None, text: str = "", **requests: str) -> Object:
    """Return a Pod without a tenant; no simulated kubelet starts it."""
    container: dict[str, Any] = {"name": "main", "image": "test", "resources": {"requests": requests}}
    if text:
        container["env"] = [{"name": "TEXT", "value": text}]
    spec: Object = {"containers": [container], "terminationGracePeriodSeconds": 0}
    spec |= {"nodeName": node} if node else {"nodeSelector": {"test": "nowhere"}}
    metadata = {"name": name, "annotations": {"test.sharepod.dev/start-seconds": "never"}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def old_answer(weather: Weather) -> float:
    """The answer of a GET of a Pod arrives after the event of the Pod's deletion.

    kube-scheduler refuses the Pod, so the operator begins to withdraw it. By then the Pod is bound and runs, which its
    watch does not show in time, so that the operator reads the Pod. The answer is delayed until the Pod has ended.
    """
    world, (namespace, (node,)) = weather.world, weather.place("ghost")
    path = f"/api/v1/namespaces/{namespace}/pods/one"
    volume = {"name": "none", "persistentVolumeClaim": {"claimName": "none"}}
    world.apply(namespace, "one", {"request": 0.5}, on="ghost", volumes=[volume])
    world.cluster.wait_for(
        path, lambda pod: condition_of(pod or {}, "PodScheduled").get("reason") == "Unschedulable", what="a refusal"
    )
    hold = Hold()
    asks = Rule(hold, verbs=("get",), resources=("pods",), where=lambda call: call.namespace == namespace, times=1)

    def watches_tenants(call: Call) -> bool:
        return call.verb == "watch" and of_tenants(call)

    deletion = weather.proxy.expect('"DELETED"', f'"namespace":"{namespace}"', '"kind":"Pod"')
    with weather.proxy.weather(asks), weather.proxy.paused(watches_tenants):
        world.api.create(
            f"{path}/binding", {**BINDING, "metadata": {"name": "one"}, "target": {"kind": "Node", "name": node}}
        )
        world.cluster.wait_for(path, lambda pod: pod and pod["status"]["phase"] == "Running", what="a Pod that runs")
        assert hold.held.wait(90), "the operator never asked for the Pod"
        world.api.delete(path, grace=0)
    assert deletion.wait(30), "the Pod's end did not reach the operator"
    world.apply(namespace, "next", {"request": 0.2}, on="ghost")
    world.phase(namespace, "next", "Running")  # when this SharePod runs, the watch has recorded all earlier events
    hold.release()
    began = time.monotonic()
    world.phase(namespace, "one", "Failed", timeout=20)
    return time.monotonic() - began


def terminating_namespace(weather: Weather) -> float:
    """A SharePod waits in a namespace that is being deleted, and a second one behind it in another namespace. Then a
    node becomes free.

    Return the seconds from the release of that node to the start of the second SharePod.
    """
    world, (namespace, (node,)) = weather.world, weather.place("terminating")
    dying = world.cluster.namespace("dying")
    world.apply(namespace, "holder", WHOLE_NODE, on="terminating")
    world.phase(namespace, "holder", "Running")
    with weather.controllers_paused():
        world.apply(dying, "first", WHOLE_NODE, on="terminating")
        world.condition(dying, "first", "Placed", status="False")
        world.api.delete(f"/api/v1/namespaces/{dying}")
        world.apply(namespace, "second", WHOLE_NODE, on="terminating")
        world.condition(namespace, "second", "Placed", status="False")
        began = time.monotonic()
        world.delete(namespace, "holder")
        seconds = weather.running(namespace, "second", limit=25, since=began)
        assert [row["podName"] for row in world.rows(node)] == ["second"]
    return seconds


def deleted_node(weather: Weather) -> float:
    """The only node is deleted while a SharePod waits for it, and returns without its pool label.

    Return the seconds until both the SharePod's and the GPUNode's status show the change.
    """
    world, (namespace, (node,)) = weather.world, weather.place("unlabelled")
    world.apply(namespace, "holder", WHOLE_NODE, on="unlabelled")
    world.phase(namespace, "holder", "Running")
    world.apply(namespace, "waits", WHOLE_NODE, on="unlabelled")
    full = world.condition(namespace, "waits", "Placed", status="False")
    labels = dict(world.api.get(f"/api/v1/nodes/{node}")["metadata"]["labels"])
    began = time.monotonic()
    world.api.delete(f"/api/v1/nodes/{node}")
    world.until(
        namespace, "waits", lambda seen: message(seen, "Placed") not in ("", full), what="another reason", timeout=20
    )
    first = time.monotonic() - began
    del labels["sharepod.dev/pool"]
    began = time.monotonic()
    world.cluster.add_fake_nodes(1, labels=labels, prefix="unlabelled")
    world.cluster.wait_for(
        f"{GPUNODES}/{node}",
        lambda seen: condition_of(seen or {}, "AgentAlive").get("reason") == "PoolLabelGone",
        what="PoolLabelGone",
        timeout=20,
    )
    return max(first, time.monotonic() - began)


def taken_name(weather: Weather) -> float:
    """Another Pod has the SharePod's name. Return the seconds until the SharePod behind it runs."""
    world, (namespace, _) = weather.world, weather.place("taken")
    path = f"/api/v1/namespaces/{namespace}/pods"
    with Audit(world.api, memory=16 * GIB) as audit:
        world.api.create(path, foreign_pod("first"))
        began = time.monotonic()
        first = world.apply(namespace, "first", WHOLE_NODE, on="taken")
        world.condition(namespace, "first", "PodReady", status="False", reason="PodNameTaken")
        world.apply(namespace, "second", WHOLE_NODE, on="taken")
        seconds = weather.running(namespace, "second", limit=20, since=began)
        assert first["metadata"]["uid"] not in audit.reserved
    world.delete(namespace, "second")
    world.api.delete(f"{path}/first", grace=0)
    world.phase(namespace, "first", "Running", timeout=60)
    return seconds


def large_pods(weather: Weather) -> float:
    """The operator restarts while many Pods of the largest size that etcd accepts exist. Return its peak memory, in
    MiB."""
    world, (namespace, (node,)) = weather.world, weather.place("large", pool="dedicated")
    for number in range(LARGE_PODS):
        body = foreign_pod(f"large-{number}", node=node, text="<" * LARGE_BYTES, cpu="1m")
        world.api.create(f"/api/v1/namespaces/{namespace}/pods", body)
    assert world.operator is not None
    world.operator.stop()
    weather.start()
    world.apply(namespace, "one", {"request": 0.5}, on="large")
    world.phase(namespace, "one", "Running", timeout=60)
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{world.operator.pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024
