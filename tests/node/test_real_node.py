"""The real node of the tests behaves like any node: pods run within their limits, and get GPUs by NVIDIA's runtime."""

from __future__ import annotations

import re
import ssl
import subprocess
import urllib.request
from pathlib import Path
from urllib.error import HTTPError

import pytest
from harness.api import Object
from harness.cluster import Cluster, wait_until
from harness.images import image_with_program
from harness.node import BASE_IMAGE, CUDA_IMAGE, Gpu, Node
from node.whole_system import RESTRICTED

_GPUS = [
    Gpu("GPU-11111111-1111-1111-1111-111111111111", "Fake A100"),
    Gpu("GPU-22222222-2222-2222-2222-222222222222", "Fake A100"),
]


def _pod(name: str, *command: str, image: str = BASE_IMAGE, visible: str | None = None, **spec: object) -> Object:
    """Return a pod that Pod Security `restricted` admits. `visible`: value of NVIDIA_VISIBLE_DEVICES, with the runtime
    class `nvidia`."""
    container: Object = {"name": "main", "image": image, "securityContext": RESTRICTED}
    if command:
        container["command"] = list(command)
    if visible is not None:
        container["env"] = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": visible}]
        spec["runtimeClassName"] = "nvidia"
    body = {"containers": [container], "restartPolicy": "Never", "terminationGracePeriodSeconds": 0, **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": body}


@pytest.fixture
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> str:
    name = re.sub("[^a-z0-9]+", "-", request.node.name.removeprefix("test_"))[:50].strip("-")
    return cluster.namespace(name, labels={"pod-security.kubernetes.io/enforce": "restricted"})


def _run(cluster: Cluster, namespace: str, pod: Object, *, phase: str) -> Object:
    """Create the pod and wait until it has this phase."""
    cluster.api.create(f"/api/v1/namespaces/{namespace}/pods", pod)
    path = f"/api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}"
    seen = cluster.wait_for(path, lambda found: found and found["status"]["phase"] == phase, what=f"pod {phase}")
    assert seen is not None
    return seen


def _output(cluster: Cluster, namespace: str, pod: Object) -> str:
    """Return the pod's output once it has succeeded."""
    _run(cluster, namespace, pod, phase="Succeeded")
    return cluster.kubectl("logs", "-n", namespace, pod["metadata"]["name"]).stdout


def test_a_pod_has_an_address_of_its_own_that_the_test_reaches(cluster: Cluster, node: Node, namespace: str) -> None:
    served = "mkdir /tmp/w && echo hello >/tmp/w/index.html && exec httpd -f -p 8080 -h /tmp/w"
    pod = _run(cluster, namespace, _pod("serves", "sh", "-c", served), phase="Running")
    address = pod["status"]["podIP"]
    assert address not in (node.address, "127.0.0.1")
    answers: list[bytes] = []

    def answered() -> bool:
        try:
            with urllib.request.urlopen(f"http://{address}:8080/", timeout=5) as response:
                answers.append(response.read())
        except OSError:
            return False
        return True

    wait_until(answered, what="an answer of the pod", timeout=10)
    assert answers == [b"hello\n"]
    assert cluster.kubectl("exec", "-n", namespace, "serves", "--", "id", "-u").stdout == "65534\n"


def test_the_kubelet_answers_no_unauthenticated_client(node: Node, cluster: Cluster) -> None:
    endpoint = cluster.api.get(f"/api/v1/nodes/{node.name}")["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"]
    tls = ssl.create_default_context(cafile=str(cluster.ca))
    with pytest.raises(HTTPError) as refused:
        urllib.request.urlopen(f"https://{node.address}:{endpoint}/pods", context=tls, timeout=10)
    assert refused.value.code == 401


def test_the_runtime_gives_a_container_the_gpus_that_it_asks_for(
    cluster: Cluster, node: Node, namespace: str, tmp_path: Path
) -> None:
    libcuda, state = tmp_path / "libcuda", tmp_path / "state"
    libcuda.write_text("the fake driver")
    state.write_text("before")
    state.chmod(0o666)
    node.set_gpus(_GPUS, libcuda=libcuda, state=state)
    listed = _pod("lists", "nvidia-smi", "-L", image=CUDA_IMAGE, visible=_GPUS[1].uuid)
    assert _output(cluster, namespace, listed) == f"GPU 0: Fake A100 (UUID: {_GPUS[1].uuid})\n"
    script = (
        "cat /usr/lib/*/libcuda.so.1; echo; cat $FAKE_CUDA_STATE;"
        'echo " $FAKE_CUDA_VISIBLE $FAKE_CUDA_LABEL"; echo after >$FAKE_CUDA_STATE'
    )
    printed = _output(cluster, namespace, _pod("looks", "sh", "-c", script, visible="all"))
    both = ",".join(gpu.uuid for gpu in _GPUS)
    assert printed == f"the fake driver\nbefore {both} {namespace}/looks/main\n"
    assert state.read_text() == "after\n"


@pytest.mark.parametrize("visible", ["void", ""])
def test_a_pod_without_a_gpu_request_gets_a_plain_container(
    cluster: Cluster, node: Node, namespace: str, visible: str
) -> None:
    node.set_gpus(_GPUS)
    script = "ls /usr/bin/nvidia-smi; env | grep FAKE; true"
    printed = _output(cluster, namespace, _pod("plain" + visible, "sh", "-c", script, visible=visible))
    assert printed == "ls: /usr/bin/nvidia-smi: No such file or directory\n"


def test_an_unknown_gpu_is_refused_with_the_reason(cluster: Cluster, node: Node, namespace: str) -> None:
    node.set_gpus(_GPUS)
    cluster.api.create(f"/api/v1/namespaces/{namespace}/pods", _pod("asks", "nvidia-smi", "-L", visible="GPU-none"))

    def refused(pod: Object | None) -> bool:
        return "GPU-none: unknown device" in str(pod and pod["status"])

    cluster.wait_for(f"/api/v1/namespaces/{namespace}/pods/asks", refused, what="the reason in the pod's status")


def test_a_dynamic_program_gets_what_ld_so_preload_names(
    cluster: Cluster, node: Node, namespace: str, tmp_path: Path
) -> None:
    library, program = tmp_path / "libpreloaded.so", tmp_path / "program"
    (tmp_path / "library.c").write_text("int answer(void) { return 42; }")
    (tmp_path / "program.c").write_text(
        "#include <stdio.h>\n__attribute__((weak)) int answer(void);\n"
        'int main(void) { printf("%d\\n", answer ? answer() : 0); }'
    )
    for flags, source, target in (("-shared -fPIC", "library.c", library), ("-fPIC -pie", "program.c", program)):
        command = ["cc", *flags.split(), "-o", str(target), str(tmp_path / source)]
        subprocess.run(command, check=True, timeout=60)
    image = "sharepod.test/preload:1"
    archive = image_with_program(image, program, directory=tmp_path, files={"/opt/libpreloaded.so": library})
    node.load_image(archive)
    preload: Object = {"metadata": {"name": "preload"}, "data": {"ld.so.preload": "/opt/libpreloaded.so\n"}}
    cluster.api.create(f"/api/v1/namespaces/{namespace}/configmaps", preload)
    pod = _pod("preloads", image=image, volumes=[{"name": "preload", "configMap": {"name": "preload"}}])
    assert _output(cluster, namespace, _pod("without", image=image)) == "0\n"
    pod["spec"]["containers"][0]["volumeMounts"] = [
        {"name": "preload", "mountPath": "/etc/ld.so.preload", "subPath": "ld.so.preload", "readOnly": True}
    ]
    assert _output(cluster, namespace, pod) == "42\n"


def test_a_mount_made_in_a_pod_reaches_the_node_only(cluster: Cluster, node: Node) -> None:
    space = cluster.namespace("mounts")
    pod = _pod("mounts", "sh", "-c", "mkdir /here/m && mount -t tmpfs mark /here/m && exec sleep 1000")
    container = pod["spec"]["containers"][0]
    container["securityContext"] = {"privileged": True}
    container["volumeMounts"] = [{"name": "here", "mountPath": "/here", "mountPropagation": "Bidirectional"}]
    shared = "/var/lib/sharepod/mounts"
    pod["spec"]["volumes"] = [{"name": "here", "hostPath": {"path": shared, "type": "DirectoryOrCreate"}}]
    _run(cluster, space, pod, phase="Running")
    wait_until(
        lambda: f"{shared}/m" in node.run("cat", "/proc/mounts").stdout, what="the mount on the node", timeout=10
    )
    assert shared not in Path("/proc/mounts").read_text()


def test_a_process_started_on_the_node_sees_the_node(node: Node) -> None:
    node.run("sh", "-c", "echo seen >/var/lib/sharepod/mark")
    assert node.path("/var/lib/sharepod/mark").read_text() == "seen\n"
    assert not Path("/var/lib/sharepod/mark").exists()
    script = "trap 'echo ending; exit 7' TERM; cat /var/lib/sharepod/mark; while :; do sleep 0.1; done"
    service = node.start("looks", ["sh", "-c", script])
    wait_until(lambda: "seen" in service.log.read_text(), what="its output", timeout=10)
    assert str(service.pid) in node.run("ls", "/proc").stdout.split()
    assert service.stop() == 7
    assert service.log.read_text() == "seen\nending\n"
