"""The end of a real node: nothing of it remains on the machine, however the node or the harness ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from harness.api import Object
from harness.cluster import Cluster, wait_until
from harness.errors import NodeUnavailableError
from harness.node import BASE_IMAGE, Node
from harness.node_packages import RECORD
from harness.node_traces import OWN_DIRECTORIES
from harness.process import as_at_a_terminal, descendants_of, start_time

_TESTS = Path(__file__).parent.parent
_SLEEPER: Object = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "sleeper"},
    "spec": {"containers": [{"name": "main", "image": BASE_IMAGE, "command": ["sleep", "1000"]}]},
}


def _traces() -> dict[str, object]:
    """Return everything on the machine that could remain of a node: network links, mounts, cgroups, directories."""
    links = json.loads(subprocess.run(["ip", "-json", "link"], capture_output=True, timeout=10, check=True).stdout)
    return {
        "links": sorted(link["ifname"] for link in links),
        "mounts": sorted(line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()),
        "cgroups": sorted(str(path) for path in Path("/sys/fs/cgroup").glob("**/shp-*")),
        "directories": [path for path in OWN_DIRECTORIES if Path(path).exists()],
        "record": RECORD.exists(),
    }


def _with_pod(cluster: Cluster) -> None:
    """Run a pod, so that there are a shim, a network namespace, mounts and cgroups."""
    cluster.api.create("/api/v1/namespaces/default/pods", _SLEEPER)
    path = "/api/v1/namespaces/default/pods/sleeper"
    cluster.wait_for(path, lambda pod: pod and pod["status"]["phase"] == "Running", what="sleeper Running")


def _gone(pids: list[int], state: Path, before: dict[str, object]) -> None:
    def ended() -> bool:
        return not any(start_time(pid) for pid in pids)

    wait_until(ended, what="all processes ended", timeout=20)
    wait_until(lambda: not state.exists(), what=f"{state} removed", timeout=20)
    with_what = "nothing left on the machine"
    try:
        wait_until(lambda: _traces() == before, what=with_what, timeout=10)
    except Exception:
        assert _traces() == before  # if the comparison fails, it shows the difference


def test_a_stopped_node_leaves_nothing_behind(cluster: Cluster) -> None:
    before = _traces()
    node = Node(cluster)
    _with_pod(cluster)
    assert _traces() != before
    pids = descendants_of(node.services.pid)
    assert len(pids) >= 5  # containerd, kubelet, a shim, the pod's sandbox, and its program
    with pytest.raises(NodeUnavailableError, match="running the machine's one real node"):
        Node(cluster, "second", wait=0)
    node.stop()
    _gone([node.services.pid, *pids], node.state, before)
    assert cluster.pods("default") == []
    assert cluster.api.get("/api/v1/nodes")["items"] == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_harness_leaves_nothing_behind(number: signal.Signals) -> None:
    before = _traces()
    script = (
        "import time; from harness.cluster import Cluster; from harness.node import Node\n"
        "c = Cluster(); n = Node(c); print(n.services.pid, n.state, c.kubeconfig, c.bin, flush=True); time.sleep(600)"
    )
    with as_at_a_terminal(script, cwd=_TESTS) as harness:
        assert harness.stdout is not None
        pid, state, kubeconfig, programs = harness.stdout.readline().split()
        subprocess.run(
            [f"{programs}/kubectl", "--kubeconfig", kubeconfig, "apply", "-f", "-"],
            input=json.dumps(_SLEEPER), text=True, timeout=30, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        wait_until(lambda: len(descendants_of(int(pid))) >= 5, what="the pod's processes", timeout=30)
        pids = [int(pid), *descendants_of(int(pid))]
        harness.send_signal(number)
        harness.wait(timeout=10)
    _gone(pids, Path(state), before)


def test_the_next_node_removes_the_remains_of_a_killed_one(cluster: Cluster) -> None:
    before = _traces()
    killed = Node(cluster, "killed")
    _with_pod(cluster)
    pids = [killed.services.pid, *descendants_of(killed.services.pid)]
    os.kill(killed.services.pid, signal.SIGKILL)
    wait_until(lambda: not any(start_time(pid) for pid in pids), what="all processes ended", timeout=20)
    assert _traces() != before
    with Node(cluster, "next") as following:
        assert not killed.state.exists()
        assert killed.state.name not in str(_traces()["cgroups"])
    _gone([following.services.pid], following.state, before)
    killed.stop()
