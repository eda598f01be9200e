"""Rights of operator and agent as the manifests install them: read on the node and queried from the API server.

Guarantee: the processes and their tokens belong to the installed Pods.
"""

from __future__ import annotations

import pytest
from harness.api import Api, ApiError, Object
from harness.cluster import Cluster, suppress_reason
from harness.installation import GROUP, NAMESPACE
from harness.machines import RealNode
from sharepod.agent.cluster.device_slice import slice_body, slice_spec

_TOKEN = "/run/secrets/kubernetes.io/serviceaccount/token"
_STATUS = ("Uid", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp")
_NONE = "0" * 16
_EVERYWHERE = ("/proc", "/dev", "/sys", "/tmp", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf")
_OF_POD = (*_EVERYWHERE, "/etc/sharepod", "/var/run/secrets/kubernetes.io", "/run/secrets/kubernetes.io")
_OF_NODE = (
    *("/var/lib/sharepod", "/etc/cdi", "/var/run/cdi", "/run/cdi"),
    *(f"/var/lib/kubelet/{folder}" for folder in ("pods", "plugins", "plugins_registry", "pod-resources")),
)
_PROGRAM = ("/usr", "/lib", "/lib64", "/bin", "/opt", "/etc/ld.so.cache")
"""Paths of the worker's program and its libraries, which it sees read-only."""
_OF_RUNTIME = ("/usr", "/run/fake-cuda-state")
"""Paths at which NVIDIA's runtime, here its double, mounts the driver."""


def expect_rights(cluster: Cluster, machine: RealNode) -> None:
    """Expect that operator and worker have no rights on the node, the agent reaches only its own node, and no token
    exceeds the ClusterRoles."""
    operator = _processes(cluster, machine, "sharepod-operator")
    for pid in operator:
        assert _status(machine, pid) == {
            "Uid": "65532",
            "CapEff": _NONE,
            "CapBnd": _NONE,
            "NoNewPrivs": "1",
            "Seccomp": "2",
        }
        assert _mounts(machine, pid)["/"].startswith("ro")
        _expect_mounts(machine, pid, _OF_POD)
    agent = _processes(cluster, machine, "sharepod-agent")
    of_user = {pid: _status(machine, pid) for pid in agent}
    workers = [pid for pid, status in of_user.items() if status["Uid"] != "0"]
    privileged = [pid for pid in agent if pid not in workers]
    assert workers, of_user
    assert privileged, of_user
    for pid in workers:
        status = of_user[pid]
        assert (status["CapEff"], status["CapBnd"], status["NoNewPrivs"], status["Seccomp"]) == (_NONE, _NONE, "1", "2")
        mounts = _mounts(machine, pid)
        _expect_mounts(machine, pid, ("/proc", *_PROGRAM))
        writable = [point for point in mounts if not mounts[point].startswith("ro") and point != "/proc"]
        assert not writable, writable
    for pid in privileged:
        mounts = _mounts(machine, pid)
        assert mounts["/"].startswith("ro")
        _expect_mounts(machine, pid, _OF_POD + _OF_NODE + _OF_RUNTIME)
        assert {"/var/lib/kubelet/pods", "/var/lib/sharepod"} <= mounts.keys()
        assert mounts["/var/lib/kubelet/pod-resources"].startswith("ro")
    _agents_token(cluster, _api(cluster, machine, privileged[0]), machine.node)
    _operators_token(_api(cluster, machine, operator[0]))


def _agents_token(cluster: Cluster, api: Api, node: str) -> None:
    own, elsewhere = f"{GROUP}/gpunodes/{node}", f"{GROUP}/gpunodes/elsewhere"
    version = api.get(own)["status"]["agentVersion"]
    api.patch(f"{own}/status", {"status": {"agentVersion": version}})
    gpunode = {"apiVersion": "sharepod.dev/v1alpha1", "kind": "GPUNode", "metadata": {"name": "elsewhere"}}
    cluster.api.create(f"{GROUP}/gpunodes", {**gpunode, "spec": {"pool": "dedicated"}})
    with pytest.raises(ApiError, match="elsewhere"):
        api.patch(f"{elsewhere}/status", {"status": {"agentVersion": version}})
    # the operator may have deleted the GPUNode already, because no Node has this name
    with suppress_reason("NotFound"):
        cluster.api.delete(elsewhere)
    with pytest.raises(ApiError) as refused:
        api.patch(own, {"spec": {"tenants": []}})
    assert refused.value.code == 403
    foreign = slice_body("elsewhere", "uid", slice_spec("elsewhere", [], 1))
    with pytest.raises(ApiError, match="denied request: the agent of node"):
        api.create("/apis/resource.k8s.io/v1/resourceslices", foreign, dryRun="All")
    for path in (
        "/api/v1/pods",
        "/api/v1/secrets",
        "/api/v1/nodes",
        f"/api/v1/namespaces/{NAMESPACE}/configmaps",
        "/apis/resource.k8s.io/v1/resourceclaims",
        f"{GROUP}/sharepods",
    ):
        assert _refused(api, path) == 403, path


def _operators_token(api: Api) -> None:
    assert _refused(api, "/api/v1/secrets") == 403
    body: Object = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}}
    body["spec"] = {"containers": [{"name": "x", "image": "x"}]}
    for namespace in ("default", "kube-system"):
        with pytest.raises(ApiError) as refused:
            api.create(f"/api/v1/namespaces/{namespace}/pods", body, dryRun="All")
        assert "sharepod" in refused.value.message


def _refused(api: Api, path: str) -> int:
    """Read a collection. Return the HTTP status of the refusal; 0 if the read is allowed."""
    try:
        api.get(path)
    except ApiError as error:
        return int(error.code)
    return 0


def _api(cluster: Cluster, machine: RealNode, pid: str) -> Api:
    return cluster.api_for(machine.real.run("cat", f"/proc/{pid}/root{_TOKEN}").stdout.strip())


def _processes(cluster: Cluster, machine: RealNode, name: str) -> list[str]:
    """Return the pids, on the node, of a workload's Pods that are not being deleted."""
    selector = {"labelSelector": f"app.kubernetes.io/name={name}"}
    pods = cluster.api.get(f"/api/v1/namespaces/{NAMESPACE}/pods", **selector)["items"]
    uids = [pod["metadata"]["uid"] for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    pattern = "|".join(each for uid in uids for each in (uid, uid.replace("-", "_")))
    script = f"grep -lE '{pattern}' /proc/[0-9]*/cgroup 2>/dev/null"
    found = machine.real.run("sh", "-c", script, check=False).stdout.split()
    pids = [path.split("/")[2] for path in found]
    command = {pid: machine.real.run("cat", f"/proc/{pid}/cmdline", check=False).stdout for pid in pids}
    return [pid for pid in pids if "sharepod" in command[pid]]


def _status(machine: RealNode, pid: str) -> dict[str, str]:
    lines = machine.real.run("cat", f"/proc/{pid}/status").stdout.splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    values = {name: fields[name].split() for name in _STATUS}
    # the second value of a field, if there is one, is the effective user's
    return {name: value[min(1, len(value) - 1)] for name, value in values.items()}


def _mounts(machine: RealNode, pid: str) -> dict[str, str]:
    """Return the options of each mount that a process sees, by mount point."""
    lines = machine.real.run("cat", f"/proc/{pid}/mountinfo").stdout.splitlines()
    return {line.split()[4]: line.split()[5] for line in lines}


def _expect_mounts(machine: RealNode, pid: str, allowed: tuple[str, ...]) -> None:
    """Assert that each mount of a process is its root, or is at or below one of these paths."""
    below = tuple(f"{point}/" for point in allowed)
    points = _mounts(machine, pid).keys() - {"/", *allowed}
    elsewhere = sorted(point for point in points if not point.startswith(below))
    assert not elsewhere, elsewhere
