"""A real kubelet mounts tenants' volumes through the agent: into `restricted` namespaces, read-only, for the lifetime
of the pod.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.api import Object
from harness.cluster import Cluster, suppress_reason, wait_until
from harness.images import image_with_program
from harness.node import Gpu, Node
from harness.services import Service
from node.claim_node import RESTRICTED
from sharepod.api.objects import GPUS_ANNOTATION
from sharepod.api.pods.pod import PodSettings, build_pod, require_node

ROOT = Path(__file__).parents[2]
GPUNODES = "/apis/sharepod.dev/v1alpha1/gpunodes"
GPU = "GPU-11111111-1111-1111-1111-111111111111"
IMAGE = "sharepod.test/looks:1"
SLEEPS = "sharepod.test/sleeps:1"

_HOOK = "int answer(void) { return 42; }"
# Program that prints the contents of the volume as user 65534 from a read-only mount, then waits for SIGTERM.
_PROGRAM = r"""
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
__attribute__((weak)) int answer(void);
static int by_name(const struct dirent **a, const struct dirent **b) { return strcmp((*a)->d_name, (*b)->d_name); }
static int no_dots(const struct dirent *entry) { return entry->d_name[0] != '.'; }
static void end(int number) { (void)number; _exit(0); }
int main(void) {
    signal(SIGTERM, end);
    printf("hook %d\n", answer ? answer() : 0);
    struct dirent **entries;
    int count = scandir("/run/sharepod", &entries, no_dots, by_name);
    for (int i = 0; i < count; i++) printf("file %s\n", entries[i]->d_name);
    char line[256];
    FILE *limits = fopen("/run/sharepod/limits", "r");
    while (limits && fgets(line, sizeof line, limits)) printf("limits %s", line);
    int written = open("/run/sharepod/new", O_CREAT | O_WRONLY, 0600);
    printf("write %s\n", written < 0 ? strerror(errno) : "allowed");
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = "/run/sharepod/agent.sock"};
    int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    printf("connect %s\n", connect(fd, (struct sockaddr *)&address, sizeof address) ? strerror(errno) : "done");
    printf("user %d\n", (int)getuid());
    fflush(stdout);
    for (;;) pause();
}
"""


class Bench:
    """Node with its GPUNode and its agent. The test plays the operator: it writes rows and creates pods."""

    def __init__(self, cluster: Cluster, node: Node, files: Path) -> None:
        self.cluster = cluster
        self.node = node
        self.gpunode = f"{GPUNODES}/{node.name}"
        self._token = cluster.service_account_token("sharepod-system", "sharepod-agent", bound_node=node.name)
        self._files = files
        self._starts = 0
        self.agent: Service | None = None

    def start_agent(self) -> Service:
        self._starts += 1
        settings = {
            "NODE_NAME": self.node.name,
            "KUBECONFIG": self.cluster.kubeconfig_for(self._token),
            "INVENTORY_FILE": self._files / "inventory.yaml",
            "INVENTORY_INTERVAL_S": "0.1",
            "HOOK_FILE": self._files / "libsharepod.so",
            "HTTP_BIND": "127.0.0.1",
            "HTTP_PORT": "0",
        }
        environment = {f"SHAREPOD_AGENT_{key}": str(value) for key, value in settings.items()}
        command = [sys.executable, "-m", "sharepod.agent.main", "--apart"]
        self.agent = self.node.start(f"agent-{self._starts}", command, env={**os.environ, **environment})
        return self.agent

    def reserve(self, *rows: Object) -> int:
        generation: int = self.cluster.api.patch(self.gpunode, {"spec": {"tenants": list(rows)}})["metadata"][
            "generation"
        ]
        return generation

    def make_sharepod(self, namespace: str, name: str) -> tuple[Object, Object]:
        """Return a SharePod and its row for the ledger."""
        spec = {
            "gpu": {"request": 0.4, "memory": "1Gi"},
            "restartPolicy": "Never",
            "containers": [{"name": "main", "image": IMAGE, "securityContext": RESTRICTED}],
        }
        body: Object = {
            "apiVersion": "sharepod.dev/v1alpha1",
            "kind": "SharePod",
            "metadata": {"name": name},
            "spec": spec,
        }
        made = self.cluster.api.create(f"/apis/sharepod.dev/v1alpha1/namespaces/{namespace}/sharepods", body)
        row = {
            "id": made["metadata"]["uid"],
            "namespace": namespace,
            "podName": name,
            "state": "Reserved",
            "gpus": [GPU],
            "requestMilli": 400,
            "limitMilli": 1000,
            "memory": 1 << 30,
            "memoryIsolation": "Enforced",
            "mode": "Shared",
            "labels": {},
        }
        return made, row

    def make_pod(self, sharepod: Object, row: Object | None = None) -> str:
        """Create the pod that the operator would create for a SharePod; return its path. `row`: becomes the row of that
        pod."""
        pod = build_pod(sharepod, PodSettings())
        del pod["spec"]["schedulingGates"]
        require_node(pod["spec"], self.node.name)
        pod["metadata"]["annotations"][GPUS_ANNOTATION] = GPU
        namespace, name = sharepod["metadata"]["namespace"], sharepod["metadata"]["name"]
        made = self.cluster.api.create(f"/api/v1/namespaces/{namespace}/pods", pod)
        if row is not None:
            row["podUID"] = made["metadata"]["uid"]
            self.reserve(row)
        return f"/api/v1/namespaces/{namespace}/pods/{name}"

    def await_phase(self, pod: str, phase: str) -> Object:
        found = self.cluster.wait_for(
            pod, lambda seen: seen and seen["status"]["phase"] == phase, what=f"pod {phase}", timeout=90
        )
        assert found is not None
        return found

    def await_gone(self, pod: str) -> None:
        self.cluster.wait_for(pod, lambda seen: seen is None, what="the pod removed", timeout=60)

    def await_message(self, namespace: str, words: str) -> None:
        """Wait until `kubectl describe pod` would show an Event with this text."""

        def reported() -> bool:
            events = self.cluster.api.get(f"/api/v1/namespaces/{namespace}/events")["items"]
            return any(words in str(event.get("message")) for event in events)

        wait_until(reported, what=f"an Event with {words!r}", timeout=60)

    def await_tenant(self, tenant_id: str, **fields: Any) -> Object:
        def holds(seen: Object | None) -> bool:
            tenants = ((seen or {}).get("status") or {}).get("tenants", [])
            return any(each["id"] == tenant_id and fields.items() <= each.items() for each in tenants)

        found = self.cluster.wait_for(self.gpunode, holds, what=f"tenant {tenant_id} with {fields}", timeout=30)
        assert found is not None
        return found

    def tenant(self, tenant_id: str) -> Object:
        tenants = self.cluster.api.get(self.gpunode)["status"]["tenants"]
        found: Object = next(each for each in tenants if each["id"] == tenant_id)
        return found

    def mounts(self) -> str:
        return self.node.run("cat", "/proc/self/mountinfo").stdout


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a hook that gives a recognisable answer, a program that lists its surroundings, and an
    inventory."""
    folder = tmp_path_factory.mktemp("csi")
    (folder / "hook.c").write_text(_HOOK)
    (folder / "looks.c").write_text(_PROGRAM)
    for flags, source, target in (("-shared -fPIC", "hook.c", "libsharepod.so"), ("-fPIC -pie", "looks.c", "looks")):
        subprocess.run(["cc", *flags.split(), "-o", folder / target, folder / source], check=True, timeout=60)
    gpus = [{"uuid": GPU, "index": 0, "model": "Fake A100", "memory": "40Gi"}]
    (folder / "inventory.yaml").write_text(yaml.safe_dump({"gpus": gpus}))
    return folder


@pytest.fixture(scope="module")
def installed(cluster: Cluster, node: Node, files: Path) -> None:
    cluster.namespace("sharepod-system")
    cluster.kubectl("apply", "--server-side", "-f", ROOT / "crds/gpunodes.yaml", "-f", ROOT / "crds/sharepods.yaml")
    cluster.kubectl("apply", "-n", "sharepod-system", "-f", ROOT / "manifests/rbac/agent.yaml")
    cluster.kubectl(
        "apply", "-f", ROOT / "manifests/policies/agent-own-node.yaml", "-f", ROOT / "manifests/csidriver.yaml"
    )
    for crd in ("gpunodes", "sharepods"):
        cluster.kubectl("wait", "--for=condition=Established", f"crd/{crd}.sharepod.dev", "--timeout=30s")
    cluster.await_service_account("sharepod-system", "sharepod-agent")
    node.load_image(image_with_program(IMAGE, files / "looks", directory=files))
    node.load_image(image_with_program(SLEEPS, Path("/usr/bin/sleep"), directory=files))
    node.set_gpus([Gpu(GPU, "Fake A100")])


@pytest.fixture
def bench(cluster: Cluster, node: Node, files: Path, installed: None) -> Iterator[Bench]:
    bench = Bench(cluster, node, files)
    spec = {"pool": "dedicated", "tenants": []}
    body: Object = {
        "apiVersion": "sharepod.dev/v1alpha1",
        "kind": "GPUNode",
        "metadata": {"name": node.name},
        "spec": spec,
    }
    cluster.api.create(GPUNODES, body)
    yield bench
    with suppress_reason("NotFound"):
        cluster.api.delete(bench.gpunode)
    if bench.agent is not None and bench.agent.running():
        assert bench.agent.stop() == 0


@pytest.fixture
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> str:
    name = request.node.name.removeprefix("test_").replace("_", "-")[:50].rstrip("-")
    return cluster.namespace(name, labels={"pod-security.kubernetes.io/enforce": "restricted"})


@pytest.mark.promise("security-rights", "install-unprivileged", "install-restricted")
def test_a_restricted_pod_starts_with_its_agent_and_finds_socket_limits_and_hook(
    bench: Bench, cluster: Cluster, namespace: str
) -> None:
    sharepod, row = bench.make_sharepod(namespace, "train")
    pod = bench.make_pod(sharepod, row)
    bench.await_message(namespace, "gpu.sharepod.dev not found in the list of registered CSI drivers")
    assert cluster.api.get(pod)["status"]["phase"] == "Pending"
    bench.start_agent()
    bench.await_phase(pod, "Running")
    printed = ""

    def complete() -> bool:
        nonlocal printed
        printed = cluster.kubectl("logs", "-n", namespace, "train").stdout
        return "user" in printed

    wait_until(complete, what="the program's output", timeout=10)
    assert printed.splitlines() == [
        "hook 42",
        "file agent.sock",
        "file ld.so.preload",
        "file libsharepod.so",
        "file limits",
        f"limits gpu {GPU} request 400 limit 1000 memory {1 << 30} enforced 1",
        "write Read-only file system",
        "connect done",
        "user 65534",
    ]
    status = bench.cluster.api.get(bench.gpunode)["status"]
    assert [each["status"] for each in status["conditions"] if each["type"] == "AgentReady"] == ["True"]
    # The pod and its volume can be removed although the row is Releasing.
    generation = bench.reserve({**row, "state": "Releasing"})
    assert bench.tenant(row["id"])["drained"] is False
    cluster.api.delete(pod, grace=1)
    bench.await_gone(pod)
    found = bench.await_tenant(row["id"], drained=True)
    assert found["status"]["observedGeneration"] >= generation
    assert row["id"] not in bench.mounts()
    bench.reserve()
    directory = bench.node.path(f"/var/lib/sharepod/tenants/{row['id']}")
    wait_until(lambda: not directory.exists(), what="the tenant's directory removed", timeout=10)


def test_a_pod_without_reservation_gets_a_message_with_the_remedy(
    bench: Bench, cluster: Cluster, namespace: str
) -> None:
    bench.start_agent()
    sharepod, _ = bench.make_sharepod(namespace, "stray")
    pod = bench.make_pod(sharepod)
    bench.await_message(namespace, f"no share of a GPU is reserved on node {bench.node.name} for pod {namespace}/stray")
    assert cluster.api.get(pod)["status"]["phase"] == "Pending"
    cluster.api.delete(pod, grace=0)
    bench.await_gone(pod)


def test_pods_outlive_their_agent_and_are_unmounted_when_it_returns(
    bench: Bench, cluster: Cluster, namespace: str
) -> None:
    sharepod, row = bench.make_sharepod(namespace, "train")
    first = bench.start_agent()
    pod = bench.make_pod(sharepod, row)
    bench.await_phase(pod, "Running")
    first.signal(signal.SIGKILL)
    first.wait(10)
    assert cluster.api.get(pod)["status"]["phase"] == "Running"
    assert row["id"] in bench.mounts()
    cluster.api.delete(f"/apis/sharepod.dev/v1alpha1/namespaces/{namespace}/sharepods/train")
    cluster.api.delete(pod, grace=1)
    bench.await_message(namespace, "Stopping container main")
    bench.reserve({**row, "state": "Releasing"})
    bench.start_agent()
    bench.await_gone(pod)
    bench.await_tenant(row["id"], drained=True)
    assert row["id"] not in bench.mounts()


def test_a_process_that_outlives_its_pod_keeps_the_share_reserved(
    bench: Bench, cluster: Cluster, namespace: str
) -> None:
    sharepod, row = bench.make_sharepod(namespace, "train")
    bench.start_agent()
    pod = bench.make_pod(sharepod, row)
    uid = bench.await_phase(pod, "Running")["metadata"]["uid"]
    # The program runs in a cgroup that has the name of a pod's cgroup and that no kubelet removes.
    script = (
        "for root in /sys/fs/cgroup/pids /sys/fs/cgroup/unified /sys/fs/cgroup; "
        f"do mkdir -p $root/outlives/pod{uid} && break; done; "
        f"echo $$ >$root/outlives/pod{uid}/cgroup.procs && echo ready && exec sleep 600"
    )
    message = "1 process of its pod still runs"
    left = bench.node.start("outlives", ["sh", "-c", script])
    try:
        wait_until(lambda: "ready" in left.log.read_text(), what="the process in its cgroup", timeout=10)
        bench.reserve({**row, "state": "Releasing"})
        cluster.api.delete(pod, grace=1)
        bench.await_gone(pod)
        first = bench.agent
        assert first is not None
        wait_until(lambda: message in first.log.read_text(), what="the agent seeing it", timeout=15)
        assert bench.tenant(row["id"])["drained"] is False
        # The agent's record of a pod must survive the agent's restart.
        first.signal(signal.SIGKILL)
        first.wait(10)
        second = bench.start_agent()
        wait_until(lambda: message in second.log.read_text(), what="the next agent seeing it", timeout=15)
        assert bench.tenant(row["id"])["drained"] is False
    finally:
        left.stop(0)
    bench.await_tenant(row["id"], drained=True)
    bench.node.run("sh", "-c", "find /sys/fs/cgroup -depth -type d -path '*/outlives*' -exec rmdir {} +", check=False)


def self_test_pod(name: str, node: str, **spec: Any) -> Object:
    """Return a Pod as the DaemonSet of the self-test creates it, with another image."""
    account, daemonset = yaml.safe_load_all((ROOT / "manifests/agent/self-test.yaml").read_text())
    template = daemonset["spec"]["template"]["spec"]
    assert template["serviceAccountName"] == account["metadata"]["name"]
    made = {**template, "nodeName": node, **spec}
    made.pop("affinity")
    made["containers"] = [{**template["containers"][0], "image": SLEEPS}]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": made}


@pytest.mark.promise("node-hook-loads", "node-env-injection")
def test_a_nodes_self_test_shows_whether_containers_load_the_hook_and_get_unrequested_gpus(
    bench: Bench, cluster: Cluster
) -> None:
    cluster.kubectl("create", "serviceaccount", "sharepod-self-test", "-n", "sharepod-system")
    pods = "/api/v1/namespaces/sharepod-system/pods"

    def await_verdict(hook_loads: str, env_injection: str) -> None:
        def holds(seen: Object | None) -> bool:
            conditions = ((seen or {}).get("status") or {}).get("conditions") or []
            reasons = {each["type"]: each["reason"] for each in conditions}
            return (reasons.get("HookLoads"), reasons.get("EnvInjection")) == (hook_loads, env_injection)

        cluster.wait_for(bench.gpunode, holds, what=f"{hook_loads} and {env_injection}", timeout=60)

    bench.start_agent()
    await_verdict("NoSelfTest", "NoSelfTest")
    cluster.api.create(pods, self_test_pod("sound", bench.node.name))
    await_verdict("Loaded", "NotInjected")
    cluster.api.delete(f"{pods}/sound", grace=0)
    bench.await_gone(f"{pods}/sound")
    # Two faults: the linker cannot read ld.so.preload, so it loads no hook; and the Pod runs as if the node's default
    # runtime were NVIDIA's.
    preload = bench.node.path("/var/lib/sharepod/self-test/ld.so.preload")
    preload.chmod(0)
    cluster.api.create(pods, self_test_pod("unsound", bench.node.name, runtimeClassName="nvidia"))
    await_verdict("NotLoaded", "DefaultRuntimeInjects")
    cluster.api.delete(f"{pods}/unsound", grace=0)
    bench.await_gone(f"{pods}/unsound")
    preload.chmod(0o644)
