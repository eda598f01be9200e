"""`doctor` on a cluster in memory: each fault of an installation is a line, and a sound cluster has none."""

from __future__ import annotations

from typing import Any

import pytest
from kubectl_sharepod.doctor import doctor
from kubectl_sharepod.kubectl import Json
from kubectl_sharepod.views import now

from .fleet import Memory, cluster, gpunode, rollout, row, sharepod
from .test_commands import printed

GROUP = "/apis/sharepod.dev/v1alpha1"
DEPLOYMENTS, DAEMONSETS = "/apis/apps/v1/deployments", "/apis/apps/v1/daemonsets"
EVENTS = "/api/v1/namespaces/sharepod-system/events"
LONG_AGO = "2026-01-01T00:00:00Z"


def sound(**lists: list[Json]) -> Memory:
    """Return a cluster without a fault. `lists`: other objects, by the last part of their path."""
    kubectl = cluster()
    kubectl.objects[f"{GROUP}/gpunodes"] = {"items": [gpunode("node-a", {0: 0}, [])]}
    for kind, items in lists.items():
        (where,) = [one for one in kubectl.objects if one.endswith(f"/{kind}") and "/namespaces/team/" not in one]
        kubectl.objects[where] = {"items": items}
    return kubectl


def problems(kubectl: Memory) -> list[str]:
    page = doctor(kubectl)
    assert page.status == bool(page.rows)
    return [" ".join(line).strip() for line in page.rows]


def labelled(**labels: str) -> list[Json]:
    return [{"metadata": {"name": "node-a", "labels": {f"sharepod.dev/{key}": value for key, value in labels.items()}}}]


def forbidden(name: str, **more: Any) -> Json:
    reason = {"type": "PodReady", "status": "False", "reason": "PodForbidden", "message": "no class nvidia"}
    found = sharepod(name, 0.5)
    found["status"]["conditions"].append(reason)
    return found | more


def test_a_sound_cluster_has_no_problem() -> None:
    assert problems(sound()) == []
    assert "1 GPU: no problem found" in printed(doctor(sound()))


def test_a_missing_runtime_class_is_named() -> None:
    (line,) = problems(sound(runtimeclasses=[]))
    assert line.startswith("no RuntimeClass nvidia: ")
    agent = rollout("agent")
    del agent["spec"]["template"]["spec"]["runtimeClassName"]
    assert problems(sound(runtimeclasses=[], daemonsets=[agent])) == []


@pytest.mark.parametrize(
    ("nodes", "advice"),
    [
        (labelled(pool="dedicted"), "label sharepod.dev/pool=dedicted names no pool; did you mean dedicated?"),
        (labelled(pool="Scheduler"), "label sharepod.dev/pool=Scheduler names no pool; did you mean scheduler?"),
        (labelled(pol="dedicated"), "sharepod.dev/pol is unknown and has no effect; did you mean sharepod.dev/pool?"),
        (labelled(Pool="dedicated"), "sharepod.dev/Pool is unknown and has no effect; did you mean sharepod.dev/pool?"),
        (labelled(**{"max-held-gpu": "1"}), "did you mean sharepod.dev/max-held-gpus?"),
    ],
)
def test_an_unknown_label_or_pool_of_a_node_is_reported_with_the_nearest_known_one(
    nodes: list[Json], advice: str
) -> None:
    (line,) = problems(sound(nodes=nodes))
    assert line.startswith("node-a label ")
    assert advice in line
    assert problems(sound(nodes=labelled(**{"pool": "device-plugin", "max-held-gpus": "2"}))) == []


def test_a_stuck_roll_out_is_reported_with_the_last_failure_to_create_a_pod() -> None:
    events = [
        {"involvedObject": {"name": name}, "message": message, "lastTimestamp": f"2026-01-01T00:00:0{second}Z"}
        for name, message, second in (
            ("sharepod-operator-5d", "exceeded quota", 2),
            ("sharepod-operator-5d", "older", 1),
            ("other", "another's", 3),
        )
    ]
    old = rollout("operator", readyReplicas=2, updatedReplicas=1)
    assert problems(sound(deployments=[old], events=events)) == [
        (
            "Deployment sharepod-system/sharepod-operator: of 2 Pods, 2 ready and 1 of the newest version; "
            "FailedCreate: exceeded quota"
        )
    ]
    away = rollout("agent", desiredNumberScheduled=3, numberReady=1, updatedNumberScheduled=3)
    assert problems(sound(daemonsets=[away], events=events)) == [
        (
            "DaemonSet sharepod-system/sharepod-agent: of 3 Pods, 1 ready and 3 of the newest version; if this lasts, "
            "read kubectl describe and logs of its Pods"
        )
    ]
    condition = {"type": "ReplicaFailure", "status": "True", "message": "pods is forbidden: exceeded quota"}
    (line,) = problems(sound(deployments=[rollout("operator", conditions=[condition])]))
    assert "0 ready" in line
    assert line.endswith("pods is forbidden: exceeded quota")


def test_a_missing_operator_or_agent_is_reported_unless_it_cannot_be_read() -> None:
    assert [line.partition(":")[0] for line in problems(sound(deployments=[], daemonsets=[]))] == [
        "no DaemonSet sharepod-agent",
        "no Deployment sharepod-operator",
    ]
    kubectl = Memory(objects=sound().objects, denied=("/apis/apps", "/api/v1/nodes"))
    assert problems(kubectl) == []
    assert doctor(kubectl).notes == ["You may not list Nodes, Deployments, DaemonSets, so they are not checked."]


def test_refused_and_slowly_released_sharepods_are_counted_with_an_example() -> None:
    ended: Json = {"endTime": LONG_AGO}
    done = forbidden("over")
    done["status"] |= ended
    assert problems(sound(sharepods=[forbidden("b"), forbidden("a"), done])) == [
        "2 SharePods, such as team/a: PodForbidden: no class nvidia"
    ]
    held = [gpunode("node-a", {0: 0}, [row("ended", (0,), 100, 1, state="Releasing"), row("runs", (0,), 100, 1)])]
    deleted, between, fresh = sharepod("deleted", 0.5), sharepod("between", 0.5), sharepod("fresh", 0.5)
    deleted["metadata"]["deletionTimestamp"] = LONG_AGO
    waits = {"type": "Placed", "status": "False", "reason": "Releasing"}
    between["status"]["conditions"] = [waits | {"lastTransitionTime": LONG_AGO}]
    fresh["status"]["conditions"] = [waits | {"lastTransitionTime": now().isoformat()}]
    slow = [deleted, between, fresh, sharepod("ended", 0.5, **ended), sharepod("past", 0.5, **ended)]
    assert problems(sound(gpunodes=held, sharepods=[*slow, sharepod("runs", 0.5)])) == [
        "3 shares, such as team/between: Releasing for more than 2 minutes; see its Pod, and the node's agent"
    ]


@pytest.mark.parametrize(("written", "reported"), [(LONG_AGO, True), ("", False)])
def test_a_release_without_its_sharepod_is_at_least_as_old_as_the_last_write_of_its_ledger(
    written: str, reported: bool
) -> None:
    node = gpunode("node-a", {0: 0}, [row("deleted", (0,), 100, 1, state="Releasing")])
    writes = [
        ("f:spec", written or now().isoformat()),
        ("f:status", now().isoformat()),
        ("f:spec", "2025-01-01T00:00:00Z"),
    ]
    node["metadata"]["managedFields"] = [{"fieldsV1": {part: {}}, "time": time} for part, time in writes]
    assert [line.partition(":")[0] for line in problems(sound(gpunodes=[node]))] == (
        ["1 share, such as team/deleted"] if reported else []
    )
