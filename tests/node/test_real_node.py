"""A container on the real node loads the libraries that its `/etc/ld.so.preload` names."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from harness.api import Object
from harness.cluster import Cluster
from harness.images import image_with_program
from harness.node import Node
from node.whole_system import RESTRICTED


def _pod(name: str, *, image: str, **spec: object) -> Object:
    """Return a pod that Pod Security `restricted` admits."""
    container: Object = {"name": "main", "image": image, "securityContext": RESTRICTED}
    body = {"containers": [container], "restartPolicy": "Never", "terminationGracePeriodSeconds": 0, **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": body}


@pytest.fixture
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> str:
    name = re.sub("[^a-z0-9]+", "-", request.node.name.removeprefix("test_"))[:50].strip("-")
    return cluster.namespace(name, labels={"pod-security.kubernetes.io/enforce": "restricted"})


def _output(cluster: Cluster, namespace: str, pod: Object) -> str:
    """Create the pod. Return its output once it has succeeded."""
    cluster.api.create(f"/api/v1/namespaces/{namespace}/pods", pod)
    path = f"/api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}"
    cluster.wait_for(path, lambda found: found and found["status"]["phase"] == "Succeeded", what="pod Succeeded")
    return cluster.kubectl("logs", "-n", namespace, pod["metadata"]["name"]).stdout


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
