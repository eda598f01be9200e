"""Volumes that admission adds to plain Pods with a line: nothing else changes, and a second call changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.api.pods.line_volume import with_volume
from sharepod.api.pods.pod import PodSettings, build_pod
from unit.api.claims.test_line_claim import merged

LINE = {"limits": {"sharepod.dev/gpu-milli": "400"}}


def patched(pod: dict[str, Any]) -> dict[str, Any]:
    return merged(pod, with_volume(pod, "nvidia"))


@pytest.mark.promise("operator-line-volume")
@pytest.mark.promise("operator-line-volume-others")
def test_a_container_with_a_line_has_what_one_of_a_sharepod_has_and_the_others_see_no_gpu() -> None:
    main = {"name": "main", "image": "i", "env": [{"name": "A", "value": "b"}]}
    sidecar = {"name": "sidecar", "image": "i"}
    spec = {"containers": [{**main, "resources": LINE}, sidecar], "volumes": [{"name": "own", "emptyDir": {}}]}
    found = patched({"metadata": {"name": "p", "labels": {"app": "x"}}, "spec": spec})
    sharepod = {
        "metadata": {"name": "p", "namespace": "n", "uid": "u"},
        "spec": {"gpu": {"request": 0.4}, "containers": [main], "volumes": spec["volumes"]},
    }
    like = build_pod(sharepod, PodSettings(tolerations=()))["spec"]
    made, other = found["spec"]["containers"]
    (expected,) = like["containers"]
    assert made["volumeMounts"] == expected["volumeMounts"]
    assert sorted(made["env"], key=str) == sorted(expected["env"], key=str)
    assert made["env"][0] == main["env"][0], "nothing of a list moves"
    assert other["env"] == [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]
    assert "volumeMounts" not in other
    for field in ("volumes", "schedulingGates", "runtimeClassName"):
        assert found["spec"][field] == like[field]
    assert found["metadata"]["labels"] == {"app": "x", "sharepod.dev/line": "true", "sharepod.dev/tenant": "line"}
    assert found["metadata"]["annotations"] == {"sharepod.dev/gpus": "void"}
    assert with_volume(found, "nvidia") == {}, "asked again"


@pytest.mark.promise("operator-line-volume")
def test_an_exclusive_pod_does_not_preload_the_hook() -> None:
    pod = {
        "metadata": {"annotations": {"sharepod.dev/gpu-mode": "Exclusive"}},
        "spec": {"containers": [{"name": "main", "resources": LINE}]},
    }
    (main,) = patched(pod)["spec"]["containers"]
    assert [mount["mountPath"] for mount in main["volumeMounts"]] == ["/run/sharepod"]


def test_a_pod_without_a_line_is_left_alone() -> None:
    assert with_volume({"spec": {"containers": [{"name": "main"}]}}, "nvidia") == {}


@given(st.recursive(st.none() | st.integers() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=3) | inner))
def test_no_pod_makes_it_raise(value: Any) -> None:
    line = {"resources": LINE}
    with_volume({"metadata": value, "spec": value}, "nvidia")
    with_volume({"metadata": {"labels": value, "annotations": value}, "spec": {"containers": [line, value]}}, "nvidia")
    with_volume({"spec": {"containers": [line | {"env": value, "volumeMounts": value}], "volumes": value}}, "")
    with_volume({"spec": {"containers": [line], "schedulingGates": value, "initContainers": value}}, "nvidia")
