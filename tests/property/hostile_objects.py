"""Hostile objects: too large, too deep, with wrong types, or with invalid numbers.

`sharepods`, `pods`, `nodes` and `gpunodes` yield them by name. For built-in kinds, an API server stores most of these.
For SharePods it stores only the objects that pass the schema. All other objects represent a CRD that is older or newer
than the operator.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]

UID = "b4f9b6a4-0000-4000-8000-000000000001"
MANY = 20_000
LONG = "x" * 1_000_000
DIGITS = "1" * 500_000

NUMBERS: tuple[Any, ...] = (
    DIGITS, "9" * 1_000_000, "1e999", "1e-999", "1e99999999", "-1e999999", "." * 64, "+", "-0", "-0.0", "0x10", "NaN",
    "Infinity",
    "١٢٣", "4Gi\n", " 4Gi", "4\x00Gi", "1_000", "٤Gi", "1" * 65, "9" * 64, "9223372036854775807", "9223372036854775808",
    float("inf"), float("-inf"), float("nan"), 1e308, -1e308, 5e-324, -0.0, 10**19, 10**400, -1, True, None, [], {},
)  # fmt: skip
"""Extreme numbers and quantities, and invalid values for fields that require a number."""

WRONG: tuple[Any, ...] = (
    None, True, 0, -1, 1e308, "", "text", LONG, [], {}, [None], [[]], ["text"], [{}, None, 7], {"": None},
    {"a": {"b": []}},
    "\ud7ff\u0000\u202e", "👩‍👩‍👧‍👦" * 100,
)  # fmt: skip
"""A value of every JSON type, to put in place of another value."""


def nested(levels: int, *, lists: bool = False) -> Any:
    """Return this number of nested maps, or of nested lists."""
    value: Any = "deep"
    for _ in range(levels):
        value = [value] if lists else {"a": value}
    return value


def sharepod(**spec: Any) -> Json:
    """Return a SharePod as the API server returns it."""
    return {
        "apiVersion": "sharepod.dev/v1alpha1",
        "kind": "SharePod",
        "metadata": {
            "name": "bad",
            "namespace": "team",
            "uid": UID,
            "resourceVersion": "7",
            "generation": 1,
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {"gpu": {"request": 0.4}, "containers": [{"name": "main", "image": "x"}], **spec},
    }


def container(**fields: Any) -> Json:
    """Return a container of a Pod with these fields."""
    return {"name": "main", "image": "x", **fields}


def asking(resource: str, amount: Any, name: str = "main") -> Json:
    """Return a container that requests this amount of a resource."""
    return container(name=name, resources={"requests": {resource: amount}, "limits": {resource: amount}})


def replaced(raw: Json, path: tuple[str | int, ...], value: Any) -> Json:
    """Return a copy of the object with this value at the path."""
    changed = copy.deepcopy(raw)
    inner: Any = changed
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return changed


def paths(value: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of every value inside an object."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in entries:
        yield (*at, key)
        yield from paths(item, (*at, key))


def annotated(**annotations: Any) -> Json:
    """Return a SharePod that requests by annotations instead of the block `spec.gpu`."""
    raw = sharepod()
    del raw["spec"]["gpu"]
    raw["metadata"]["annotations"] = annotations
    return raw


def with_metadata(**fields: Any) -> Json:
    """Return a SharePod with these fields in its metadata."""
    raw = sharepod()
    raw["metadata"] |= fields
    return raw


def with_status(status: Any) -> Json:
    return {**sharepod(), "status": status}


def _pod(labels: dict[str, str], *, spec: Json | None = None, **status: Any) -> Json:
    raw = sharepod()
    del raw["spec"]["gpu"]
    raw["metadata"]["labels"] = dict(labels)
    raw["spec"] |= {"nodeName": "node-a", **(spec or {})}
    return raw | {"apiVersion": "v1", "kind": "Pod", "status": {"phase": "Running", **status}}


def _node(status: Json | None = None, **spec: Any) -> Json:
    raw = with_metadata(name="node-a", namespace="", uid="node", labels={"sharepod.dev/pool": "dedicated"})
    allocatable = {"cpu": "8", "memory": "64Gi", "pods": "110"}
    ready = [{"type": "Ready", "status": "True"}]
    shown = {"allocatable": allocatable, "conditions": ready, **(status or {})}
    return raw | {"kind": "Node", "spec": spec, "status": shown}


def well(kind: str) -> Json:
    """Return a valid object of the kind, with nearly all fields that the operator reads."""
    return _WELL[kind]()


def _well_sharepod() -> Json:
    placed = {"type": "Placed", "status": "True", "reason": "R"}
    raw = with_status({"phase": "Running", "podUID": "p", "conditions": [placed]})
    owners = [{"uid": "u", "controller": True}]
    raw["metadata"] |= {"labels": {"a": "b"}, "annotations": {"a": "b"}, "ownerReferences": owners}
    mounting = container(resources={"requests": {"cpu": 1}}, volumeMounts=[{"name": "v", "mountPath": "/m"}])
    terms = [{"matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}]}]
    raw["spec"] |= {
        "volumes": [{"name": "v", "csi": {"driver": "d"}}],
        "initContainers": [asking("cpu", 1)],
        "containers": [mounting],
        "tolerations": [{"key": "k", "operator": "Exists"}],
        "nodeSelector": {"a": "b"},
        "affinity": {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}},
        },
        "overhead": {"cpu": "1m"},
        "resources": {"requests": {"cpu": 2}},
    }
    return raw


def _well_pod() -> Json:
    terms = [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node-a"]}]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    raw = _pod(
        {"sharepod.dev/tenant": UID},
        conditions=[{"type": "Ready", "status": "True"}],
        containerStatuses=[{"name": "c", "state": {"terminated": {"exitCode": 1}}}],
        spec={"affinity": {"nodeAffinity": required}, "containers": [asking("cpu", 1)], "restartPolicy": "Never"},
    )
    raw["metadata"]["ownerReferences"] = [{"uid": UID, "controller": True}]
    return raw


def _well_node() -> Json:
    return _node(taints=[{"key": "k", "value": "v", "effect": "NoSchedule"}])


def _well_gpunode() -> Json:
    raw = with_metadata(name="node-a", namespace="", annotations={"sharepod.dev/force-release": "a,b"})
    row = {"id": "t", "namespace": "n", "podName": "p", "gpus": ["GPU-9"], "requestMilli": 400, "limitMilli": 1000}
    gpu = {"uuid": "GPU-9", "index": 0, "model": "T", "memory": 1 << 34}
    status = {
        "gpus": [gpu],
        "tenants": [{"id": "t"}],
        "conditions": [{"type": "AgentReady", "status": "True", "reason": "R"}],
    }
    spec = {"pool": "dedicated", "tenants": [row | {"memory": 1 << 30}]}
    return raw | {"kind": "GPUNode", "spec": spec, "status": status}


_WELL = {"sharepod": _well_sharepod, "pod": _well_pod, "node": _well_node, "gpunode": _well_gpunode}


def sharepods() -> Iterator[tuple[str, Json]]:
    """Yield hostile SharePods, each with a name for the test's report."""
    for levels in (1_500, 9_000):
        yield f"{levels} nested maps", sharepod(future=nested(levels))
        yield f"{levels} nested lists", sharepod(future=nested(levels, lists=True))
        yield f"{levels} nested maps for a quantity", sharepod(containers=[asking("memory", nested(levels))])
    for number, value in enumerate(NUMBERS):
        yield f"number {number} for memory", sharepod(gpu={"request": 0.4, "memory": value})
        yield f"number {number} for request", sharepod(gpu={"request": value})
        yield f"number {number} for count", sharepod(gpu={"request": 0.4, "count": value})
        yield f"number {number} asked of memory", sharepod(containers=[asking("memory", value)])
        yield f"number {number} asked of CPU", sharepod(containers=[asking("cpu", value)])
        yield f"number {number} asked of a device", sharepod(containers=[asking("rdma/hca", value)])
        yield f"number {number} in annotations", annotated(**{"sharepod.dev/gpu-request": value})
        yield (
            f"number {number} of bytes in annotations",
            annotated(**{"gemini/gpu_request": "0.5", "gemini/gpu_mem": value}),
        )
    yield "sums beyond 64 bits", sharepod(containers=[asking("memory", "5Ei"), asking("memory", "5Ei", "b")])
    yield (
        "sums of a device beyond 64 bits",
        sharepod(containers=[asking("rdma/hca", "5E"), asking("rdma/hca", "5E", "b")]),
    )
    yield "CPU beyond 64 bits", sharepod(containers=[asking("cpu", "9223372036854775", f"c{n}") for n in range(100)])
    yield "many containers", sharepod(containers=[container(name=f"c{number}") for number in range(MANY)])
    yield "many init containers", sharepod(initContainers=[container(name=f"c{number}") for number in range(MANY)])
    yield "many variables", sharepod(containers=[container(env=[{"name": f"V{number}"} for number in range(MANY)])])
    mounts = [{"name": "v", "mountPath": f"/run/sharepo{number}"} for number in range(MANY)]
    yield "many mounts", sharepod(containers=[container(volumeMounts=mounts)])
    yield (
        "many resources",
        sharepod(containers=[container(resources={"requests": {f"x/{number}": 1 for number in range(MANY)}})]),
    )
    yield "many tolerations", sharepod(tolerations=[{"key": f"k{number}"} for number in range(MANY)])
    yield "a long selector", sharepod(nodeSelector={f"k{number}": "v" for number in range(MANY)})
    hosts = {"key": "kubernetes.io/hostname", "operator": "In", "values": [f"n{number}" for number in range(MANY)]}
    for name, terms in (
        ("many values", [{"matchExpressions": [hosts]}]),
        ("many terms", [{"matchExpressions": [hosts | {"values": ["a"]}]} for _ in range(MANY)]),
        ("many requirements", [{"matchExpressions": [hosts | {"values": ["a"]}] * MANY}]),
        ("a bound of many digits", [{"matchExpressions": [{"key": "a", "operator": "Gt", "values": [DIGITS]}]}]),
        ("a bound that only Python reads", [{"matchExpressions": [{"key": "a", "operator": "Gt", "values": ["1_0"]}]}]),
    ):
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
        yield f"affinity of {name}", sharepod(affinity={"nodeAffinity": required})
    yield "many annotations", annotated(**{f"sharepod.dev/gpu-{number}": "1" for number in range(MANY)})
    yield "many foreign annotations", with_metadata(annotations={f"a/{number}": "1" for number in range(MANY)})
    yield "many labels", with_metadata(labels={f"a/{number}": "1" for number in range(MANY)})
    yield "many owners", with_metadata(ownerReferences=[{"uid": str(number)} for number in range(MANY)])
    for key in ("gpu-memory", "gpu-models", "gpu-uuids", "gpu-affinity", "gpu-mode", "gpu-count", "gpu-limit"):
        for name, text in (("long", LONG[:250_000]), ("of commas", "," * 250_000), ("of digits", DIGITS[:250_000])):
            yield (
                f"annotation {key}, {name}",
                annotated(**{"sharepod.dev/gpu-request": "0.4", f"sharepod.dev/{key}": text}),
            )
    yield "a long key in the block", sharepod(gpu={LONG: 1})
    yield "many keys in the block", sharepod(gpu={f"k{number}": 1 for number in range(MANY)})
    yield "a long selector value", sharepod(nodeSelector={"a": LONG})
    yield "a long resource", sharepod(containers=[asking(LONG, 1)])
    yield "a long argument", sharepod(containers=[container(args=[LONG])])
    yield (
        "a long path",
        sharepod(containers=[container(volumeMounts=[{"name": "v", "mountPath": "/run/sharepod" * 70_000}])]),
    )
    yield "a long model", sharepod(gpu={"request": 0.4, "models": [LONG]})
    yield "a long UUID", sharepod(gpu={"request": 0.4, "uuids": [LONG]})
    yield (
        "a status of many conditions",
        with_status(
            {
                "phase": "Running",
                "podUID": "p",
                "conditions": [{"type": f"T{n}", "status": "True", "reason": "R"} for n in range(MANY)],
            }
        ),
    )
    yield "a deep status", with_status({"phase": "Running", "podUID": "p", "future": nested(9_000)})
    yield from _wrong(well("sharepod"))


def pods() -> Iterator[tuple[str, Json]]:
    """Yield hostile Pods by name, with and without the tenant label."""
    for labels in ({}, {"sharepod.dev/tenant": UID}):
        yield from ((f"{name}{', tenant' if labels else ''}", raw) for name, raw in _pods(labels))


def _pods(labels: dict[str, str]) -> Iterator[tuple[str, Json]]:
    def pod(**fields: Any) -> Json:
        return _pod(labels, **fields)

    for number, value in enumerate(NUMBERS):
        yield f"number {number} asked of memory", pod(spec={"containers": [asking("memory", value)]})
        yield f"number {number} asked of CPU", pod(spec={"containers": [asking("cpu", value)]})
    yield "many containers", pod(spec={"containers": [asking("cpu", "1m") for _ in range(MANY)]})
    many = {f"x/{number}": 1 for number in range(MANY)}
    yield "many resources", pod(spec={"containers": [container(resources={"requests": many})]})
    each = [asking(f"x/{number}", 1) for number in range(128)]
    yield "many resources, one in each container", pod(spec={"containers": each})
    yield "sums beyond 64 bits", pod(spec={"containers": [asking("memory", "9223372036854775807")] * 100})
    yield "many conditions", pod(conditions=[{"type": f"T{number}", "status": "True"} for number in range(MANY)])
    states = [{"name": f"c{number}", "state": {"waiting": {}}} for number in range(MANY)]
    yield "many container statuses", pod(containerStatuses=states)
    waiting = {"waiting": {"reason": "ErrImagePull", "message": LONG}}
    yield "long messages", pod(containerStatuses=[{"name": "main", "state": waiting}], message=LONG, reason=LONG)
    yield "a long refusal", pod(conditions=[{"type": "PodScheduled", "status": "False", "message": LONG}])
    terms = [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"] * 10}]} for _ in range(MANY)]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    yield "affinity of many terms", pod(spec={"affinity": {"nodeAffinity": required}})
    yield from _wrong(well("pod"))


def nodes() -> Iterator[tuple[str, Json]]:
    """Yield hostile Nodes of the pool by name."""

    for number, value in enumerate(NUMBERS):
        for name in ("cpu", "memory", "pods", "x/y"):
            yield f"number {number} allocatable of {name}", _node({"allocatable": {name: value}})
    yield "many taints", _node(taints=[{"key": f"k{number}", "effect": "NoSchedule"} for number in range(MANY)])
    yield "a long taint", _node(taints=[{"key": LONG, "effect": "NoSchedule"}])
    yield "many resources", _node({"allocatable": {f"x/{number}": 1 for number in range(MANY)}})
    yield "many labels", replaced(_node(), ("metadata", "labels"), {f"a/{number}": "b" for number in range(MANY)})
    yield from _wrong(well("node"))


def gpunodes() -> Iterator[tuple[str, Json]]:
    """Yield hostile GPUNodes by name."""

    full = well("gpunode")
    for number, value in enumerate(NUMBERS):
        for path in (("status", "gpus", 0, "memory"), ("status", "gpus", 0, "index"), ("spec", "tenants", 0, "memory")):
            yield f"number {number} at {path}", replaced(full, path, value)
    rows = [dict(full["spec"]["tenants"][0], id=f"t{number}") for number in range(MANY)]
    yield "many rows", replaced(full, ("spec", "tenants"), rows)
    yield (
        "many rows that cannot be read",
        replaced(full, ("spec", "tenants"), [{"id": str(number)} for number in range(MANY)]),
    )
    gpus = [dict(full["status"]["gpus"][0], uuid=f"GPU-{number}") for number in range(MANY)]
    yield "many GPUs", replaced(full, ("status", "gpus"), gpus)
    yield "many tenants", replaced(full, ("status", "tenants"), [{"id": str(number)} for number in range(MANY)])
    yield "many conditions", replaced(full, ("status", "conditions"), full["status"]["conditions"] * MANY)
    yield "a long reason", replaced(full, ("status", "gpus", 0, "reason"), LONG)
    forced = {"sharepod.dev/force-release": "a," * 100_000}
    yield "many forced releases", replaced(full, ("metadata", "annotations"), forced)
    yield (
        "rows that add up beyond 64 bits",
        replaced(
            full,
            ("spec", "tenants"),
            [dict(full["spec"]["tenants"][0], id=f"t{number}", memory=1 << 60) for number in range(200)],
        ),
    )
    yield from _wrong(full)


def _wrong(full: Json) -> Iterator[tuple[str, Json]]:
    """Yield copies of the object by name: each has a value of another type at one place, never at its uid or name."""
    for path in paths(full):
        if path[:1] == ("metadata",) and path[1:] in ((), ("uid",), ("name",), ("namespace",), ("resourceVersion",)):
            continue
        for number, value in enumerate(WRONG):
            yield f"value {number} at {'.'.join(map(str, path))}", replaced(full, path, value)
