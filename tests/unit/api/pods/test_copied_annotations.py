"""Annotations of a SharePod reach its Pod by a list of names."""

from __future__ import annotations

import re

import pytest
from sharepod.api.pods.copied_annotations import ANNOTATION_PATTERN, DEFAULT_ANNOTATIONS, is_copied, missed
from sharepod.api.pods.pod import PodSettings, build_pod

pytestmark = pytest.mark.promise("security-annotations")

READ_OFF_PODS = [
    "prometheus.io/scrape",
    "ad.datadoghq.com/main.logs",
    "instrumentation.opentelemetry.io/inject-python",
    "sidecar.istio.io/inject",
    "traffic.sidecar.istio.io/excludeOutboundPorts",
    "linkerd.io/inject",
    "config.linkerd.io/proxy-cpu-request",
    "vault.hashicorp.com/agent-inject",
    "kueue.x-k8s.io/podset-required-topology",
    "cluster-autoscaler.kubernetes.io/safe-to-evict",
    "karpenter.sh/do-not-disrupt",
    "controller.kubernetes.io/pod-deletion-cost",
    "kubectl.kubernetes.io/default-container",
    "k8s.v1.cni.cncf.io/networks",
    "gke-gcsfuse/volumes",
    "checksum/config",
]
TAKEN_FOR_DEVICES = [
    "io.kubernetes.cri-o.userns-mode",
    "io.katacontainers.config.hypervisor.vfio_mode",
    "dev.gvisor.spec.mount.x.source",
    "run.oci.hooks.stderr",
    "org.systemd.property.DeviceAllow",
    "devices.gpu-plugin.example.com/all",
    "anything",
]


@pytest.mark.parametrize("name", READ_OFF_PODS)
def test_what_monitoring_meshes_and_autoscalers_read_off_pods_is_copied(name: str) -> None:
    assert is_copied(name, DEFAULT_ANNOTATIONS)


@pytest.mark.parametrize("name", TAKEN_FOR_DEVICES)
def test_what_a_runtime_or_a_plugin_of_ones_own_might_take_for_devices_is_not(name: str) -> None:
    body = {
        "metadata": {"name": "a", "namespace": "n", "uid": "u", "annotations": {name: "x", "prometheus.io/port": "1"}},
        "spec": {"gpu": {"request": 0.5}, "containers": [{"name": "main", "image": "x"}]},
    }
    annotations = build_pod(body, PodSettings())["metadata"]["annotations"]
    assert annotations == {"prometheus.io/port": "1", "sharepod.dev/gpus": "void"}
    assert missed(body, DEFAULT_ANNOTATIONS) == (name,)


@pytest.mark.parametrize(
    ("pattern", "names", "others"),
    [
        ("*", ["x", "a.b/c"], []),
        ("a.b/*", ["a.b/c"], ["x.a.b/c", "a.b", "xa.b/c", "a.b.c/d"]),
        ("*.a.b/*", ["x.a.b/c", "y.x.a.b/c"], ["a.b/c", "xa.b/c"]),
        ("a.b/c", ["a.b/c"], ["a.b/cd", "a.b/C"]),
        ("plain", ["plain"], ["plain/x", "a/plain"]),
    ],
)
def test_a_pattern_names_a_prefix_as_a_whole(pattern: str, names: list[str], others: list[str]) -> None:
    assert re.fullmatch(ANNOTATION_PATTERN, pattern)
    assert all(is_copied(name, [pattern]) for name in names)
    assert not any(is_copied(name, [pattern]) for name in others)


@pytest.mark.parametrize("pattern", ["", "a*", "a.*/b", "*/*", "a/b/c", "a/b*", "*.", "[a]/b"])
def test_what_could_not_be_meant_is_no_pattern(pattern: str) -> None:
    assert not re.fullmatch(ANNOTATION_PATTERN, pattern)


def test_the_default_list_is_of_patterns() -> None:
    assert all(re.fullmatch(ANNOTATION_PATTERN, pattern) for pattern in DEFAULT_ANNOTATIONS)
    assert len(set(DEFAULT_ANNOTATIONS)) == len(DEFAULT_ANNOTATIONS)


def test_ours_and_kubectls_memory_are_copied_by_no_pattern() -> None:
    for name in ("kubectl.kubernetes.io/last-applied-configuration", "sharepod.dev/gpus", "kubeshare/gpu_mem"):
        assert not is_copied(name, ["*", name])


def test_what_tools_know_their_objects_by_is_missed_by_nobody() -> None:
    metadata = {
        "annotations": {"argocd.argoproj.io/tracking-id": "x", "meta.helm.sh/release-name": "y", "own.org/z": ""}
    }
    assert missed({"metadata": metadata}, DEFAULT_ANNOTATIONS) == ("own.org/z",)
