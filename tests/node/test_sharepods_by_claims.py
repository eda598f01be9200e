"""SharePods whose GPUs are attached by claims on a real kubelet: no runtime class, no volume, no variable.

API server, scheduler, controllers, kubelet, containerd, operator, agent and hook are real; the GPU is simulated.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from harness.api import Object
from harness.cluster import Cluster, wait_until
from harness.node import BASE_IMAGE
from node.claim_node import RESTRICTED, container
from node.claim_system import NAMESPACE, ClaimSystem, system_with_claims

_LOOKS = "cat /etc/ld.so.preload; ls -d /run/sharepod/* | wc -l; ls /dev/nvidia* 2>/dev/null | wc -l"
"""Shell command that prints SharePod's files and variables in a container."""


@pytest.fixture(scope="module")
def whole(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClaimSystem]:
    directory = tmp_path_factory.mktemp("gpus")
    with system_with_claims(cluster, directory, {"SHAREPOD_ATTACH": "auto"}) as system:
        system.await_condition("CDIDevices", "Attachable")
        system.await_condition("SharePodsByClaims", "NodeCannot")
        system.install_self_test(directory)
        system.await_condition("SharePodsByClaims", "Claims", timeout=90)
        yield system


def _await(system: ClaimSystem, name: str, phase: str = "Running", *, timeout: float = 60.0) -> Object:
    def reached() -> bool:
        return any(pod["metadata"]["name"] == name and pod["status"]["phase"] == phase for pod in system.pods())

    wait_until(reached, what=f"{name} {phase}", timeout=timeout)
    return next(pod for pod in system.pods() if pod["metadata"]["name"] == name)


def _shares(system: ClaimSystem, name: str, request: float | None, **more: object) -> Object:
    return system.sharepod(name, request, containers=[container(claim=None)], **more)


@pytest.mark.promise("node-share-claim-attached")
@pytest.mark.alone
def test_sharepods_share_a_gpu_by_claims_are_resized_live_and_outlive_all_restarts(system: ClaimSystem) -> None:
    system.apply(_shares(system, "left", 0.4), _shares(system, "right", 0.6))
    for name in ("left", "right"):
        spec = _await(system, name)["spec"]
        assert "runtimeClassName" not in spec
        assert not any(volume["name"] == "sharepod-gpu" for volume in spec.get("volumes", ()))
        assert not any("NVIDIA" in variable["name"] for variable in spec["containers"][0]["env"])
    left, right = system.rows()
    assert left["gpus"] == right["gpus"]
    assert all(row["claim"]["uid"] != row["id"] for row in (left, right))
    system.machine.real.restart_kubelet()
    system.restart_operator()
    system.kill_agent()
    system.start_agent()
    path = f"/apis/sharepod.dev/v1alpha1/namespaces/{NAMESPACE}/sharepods"
    system.cluster.api.patch(f"{path}/right", {"spec": {"gpu": {"request": 0.3, "limit": 0.3}}})
    wait_until(
        lambda: sorted(row["requestMilli"] for row in system.rows()) == [300, 400], what="the new share", timeout=60
    )

    def connected() -> bool:
        tenants = system.cluster.api.get(system.gpunode).get("status", {}).get("tenants", [])
        return [tenant["connected"] for tenant in tenants] == [True, True]

    wait_until(connected, what="both tenants in the next agent", timeout=60)
    time.sleep(3)
    system.machine.shares().expect(left=70, right=30)
    assert system.restarts() == 0


@pytest.mark.promise("node-share-claim-containers")
def test_each_container_has_the_hook_and_an_exclusive_container_only_the_gpus(system: ClaimSystem) -> None:
    looks = {"image": BASE_IMAGE, "command": ["sh", "-c", _LOOKS], "securityContext": RESTRICTED}
    init, main = {"name": "init", **looks}, {"name": "main", **looks}
    once = {"initContainers": [init], "containers": [main], "restartPolicy": "Never"}
    system.apply(
        system.sharepod("shared", 0.2, gpu={"count": 2}, **once),
        system.sharepod("whole", None, gpu={"count": 2}, **once),
    )
    for name, preload in (("shared", ["/run/sharepod/libsharepod.so"]), ("whole", [])):
        _await(system, name, "Succeeded", timeout=90)
        for each in ("init", "main"):
            log = system.cluster.kubectl("logs", "-n", NAMESPACE, name, "-c", each).stdout.splitlines()
            assert log[: len(preload)] == preload, (name, each, log)
            assert len(log) == len(preload) + 2


@pytest.mark.promise("node-claim-drained")
def test_a_share_is_not_reassigned_under_a_pod_deleted_by_force(system: ClaimSystem) -> None:
    script = "trap '' TERM; while true; do sleep 0.1; done"
    stubborn = {"name": "main", "image": BASE_IMAGE, "command": ["sh", "-c", script], "securityContext": RESTRICTED}
    system.apply(
        system.sharepod(
            "first",
            0.9,
            gpu={"count": 2},
            containers=[stubborn],
            terminationGracePeriodSeconds=8,
            restartPolicy="Never",
        )
    )
    _await(system, "first")
    system.cluster.kubectl("delete", "pod", "first", "-n", NAMESPACE, "--force", "--grace-period=0")
    system.apply(system.sharepod("next", 0.9, gpu={"count": 2}, containers=[container(claim=None)]))
    wait_until(
        lambda: any(row["podName"] == "first" and row["state"] == "Releasing" for row in system.rows()),
        what="the first row to be released",
        timeout=40,
    )
    assert [row["podName"] for row in system.rows()] == ["first"]
    _await(system, "next", timeout=90)
    assert [row["podName"] for row in system.rows()] == ["next"]


@pytest.mark.promise("node-claims-attach", "operator-attach-tested", "operator-self-test-claims")
def test_a_self_test_finds_a_runtime_that_ignores_cdi(system: ClaimSystem) -> None:
    """The container of this Pod does not list the claim. So it gets no device of the claim, as under a runtime without
    CDI."""
    cluster, pods = system.cluster, "/api/v1/namespaces/sharepod-system/pods"
    system.await_condition("ClaimsAttach", "Attached")
    assert not system.rows(), "it has no share"
    (sound,) = (
        pod
        for pod in cluster.api.get(pods)["items"]
        if pod["metadata"]["labels"].get("app.kubernetes.io/name") == "sharepod-self-test-claim"
    )
    kept = ("serviceAccountName", "securityContext", "resourceClaims", "volumes", "tolerations")
    (one,) = sound["spec"]["containers"]
    blind = {name: part for name, part in one.items() if name in ("name", "image", "command", "securityContext")}
    mounts = [each for each in one["volumeMounts"] if each["name"] == "self-test"]
    spec = {name: part for name, part in sound["spec"].items() if name in kept}
    spec |= {"containers": [blind | {"volumeMounts": mounts}], "terminationGracePeriodSeconds": 0}
    cluster.api.create(
        pods,
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "sharepod-self-test-claim-blind"},
            "spec": spec | {"automountServiceAccountToken": False},
        },
    )
    assert "enable_cdi" in system.await_condition("ClaimsAttach", "NotAttached")["message"]
    system.await_condition("SharePodsByClaims", "NodeCannot")
    system.apply(system.claim("mine", 300), system.pod("mine", claim="mine"), _shares(system, "other", 0.3))
    assert _await(system, "other")["spec"]["runtimeClassName"] == "nvidia"

    def reported() -> bool:
        events = cluster.api.get(f"/api/v1/namespaces/{NAMESPACE}/events")["items"]
        return any("does not attach the devices of claims" in str(event.get("message")) for event in events)

    wait_until(reported, what="an Event with the reason why the claim waits", timeout=40)
    cluster.api.delete(f"{pods}/sharepod-self-test-claim-blind", grace=0)
    system.await_condition("ClaimsAttach", "Attached")
    system.await_running("mine")
    system.await_condition("SharePodsByClaims", "Claims")
