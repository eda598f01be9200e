"""Reading an object with reuse of an earlier result equals reading the object without it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.controller.state.facts.node_facts import gpunode_facts
from sharepod.controller.state.facts.sharepod_facts import sharepod_facts
from unit.controller.objects import PODS, row, sharepod_object

Json = dict[str, Any]
Read = Callable[[Json, Any], Any]
Path = tuple[str | int, ...]

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, 1.0, -0.0, -1, 0.4, 10**19, 1e19, 18446744073709552000, 1.8446744073709552e19,
    float("inf"),
    "", "1", "True", "GPU-1", "é", "\ud800", "x" * 3000, [], {}, [{}], [1, True], {"a": 1}, {"a": True},
)  # fmt: skip
"""Values of every JSON type. Some are equal for Python, such as 1 and True."""
IDENTITY = ("uid", "name", "namespace")

_CONDITION = {"type": "Ready", "status": "True", "reason": "R", "message": "m", "observedGeneration": 1}
_SHAREPOD = sharepod_object(
    spec={
        "gpu": {"request": 0.4, "count": 1, "memory": 1, "limit": 1},
        "hostIPC": True,
        "ttlSecondsAfterFinished": 1,
        "tolerations": [{"key": "a", "tolerationSeconds": 1}],
        "containers": [{"name": "m", "image": "i", "resources": {"requests": {"cpu": 1, "memory": "1Gi"}}}],
    },
    metadata={"annotations": {"a": "1"}},
    status={
        "phase": "Running",
        "podUID": "p",
        "gpus": [{"uuid": "GPU-1", "index": 0, "model": "T"}],
        "granted": {"requestMilli": 400, "limitMilli": 1000, "memory": 1},
        "lastEnd": {"podUID": "q", "attempts": 1, "restarts": 1},
        "conditions": [_CONDITION],
    },
)
_GPUNODE = {
    "metadata": {"name": "n", "uid": "g", "resourceVersion": "1", "generation": 1},
    "spec": {"pool": "dedicated", "tenants": [row(tenant="t1").dump(), row(tenant="t2").dump()]},
    "status": {
        "gpus": [{"uuid": "GPU-1", "index": 1, "model": "T", "memory": 1 << 40, "health": "Healthy"}],
        "tenants": [{"id": "t1", "heldMilli": 1, "memory": 1, "connected": True}],
        "conditions": [_CONDITION],
        "observedGeneration": 1,
    },
}
OBJECTS: dict[str, tuple[Json, Read]] = {
    "sharepod": (_SHAREPOD, lambda raw, before: sharepod_facts(raw, PODS, before)),
    "gpunode": (_GPUNODE, gpunode_facts),
}


def paths(value: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the path of each value in an object, except its identity."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        if path != ("metadata",) or key not in IDENTITY:
            yield (*path, key)
            yield from paths(item, (*path, key))


def changed(raw: Json, path: Path, value: Any) -> Json:
    """Return the object with this value at the path. Return it unchanged if it has no such path."""
    result = copy.deepcopy(raw)
    inner: Any = result
    for step in path[:-1]:
        if not isinstance(inner, dict | list) or (isinstance(inner, list) and step not in range(len(inner))):
            return result
        inner = inner.get(step) if isinstance(inner, dict) else inner[int(step)]
    if isinstance(inner, dict):
        inner[path[-1]] = value
    elif isinstance(inner, list) and path[-1] in range(len(inner)):
        inner[int(path[-1])] = value
    return result


@pytest.mark.promise("operator-one-object-one-owner")
@pytest.mark.parametrize("kind", OBJECTS)
@given(chance=st.data())
def test_values_reused_from_a_former_version_equal_a_new_reading(kind: str, chance: st.DataObject) -> None:
    raw, read = OBJECTS[kind]
    places = [path for path in paths(raw) if path != ("metadata",)]
    before = read(raw, None)
    for path, value in chance.draw(st.lists(st.tuples(st.sampled_from(places), st.sampled_from(VALUES)), max_size=4)):
        raw = changed(raw, path, value)
        again = read(raw, before)
        assert repr(again) == repr(read(raw, None))
        before = again
