"""`make develop`: `kopf run` of the operator on a test cluster with simulated nodes, kubelets, agents and GPUs.

    python -m cluster.develop [--nodes N]

The operator runs in this terminal, under its own ServiceAccount and with the log of `kopf run`. Ctrl-C ends it; Enter
runs it again with the present code; Ctrl-D also ends the cluster.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from cluster.fake_agents import FakeAgents, wait
from cluster.operator_world import GPUNODES, World
from harness.cluster import Cluster, free_ports
from harness.fakes import FakeKubelets
from harness.installation import NAMESPACE

KOPF = [str(Path(sys.executable).with_name("kopf")), "run", "-m", "sharepod.controller.handlers", "-A", "--standalone"]


def main() -> int:
    """Start the cluster, and run the operator as often as requested."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2, metavar="N", help="nodes with two simulated GPUs each (2)")
    nodes = parser.parse_args().nodes
    print("starting a test cluster", flush=True)
    with (
        Cluster() as cluster,
        FakeKubelets(cluster.api) as kubelets,
        FakeAgents(cluster.api) as agents,
    ):
        world = World(cluster, kubelets, agents)
        cluster.add_fake_nodes(nodes, labels={"sharepod.dev/pool": "dedicated"}, prefix="gpu-node")
        print(f"in another terminal: export KUBECONFIG={cluster.kubeconfig} PATH={cluster.bin}:$PATH")
        print("                     kubectl apply -f examples/01-share.yaml && kubectl get sharepods -w", flush=True)
        with _nothing_done_on_interrupt():
            _run(world)
            while _asked_for_more():
                _run(world)
    return 0


def _run(world: World) -> None:
    """Run the operator once, and start the agents of nodes that have a GPUNode."""
    operator = subprocess.Popen(KOPF, env=_settings(world))
    names = {item["metadata"]["name"] for item in world.api.get("/api/v1/nodes")["items"]}
    wait(lambda: names <= _gpunodes(world) or operator.poll() is not None, what="GPUNodes")
    world.agents.start(*names & _gpunodes(world))
    operator.wait()


def _settings(world: World) -> dict[str, str]:
    """Return the environment of the operator: its ServiceAccount's kubeconfig, and free ports."""
    token = world.cluster.service_account_token(NAMESPACE, "sharepod-operator")
    (metrics,) = free_ports(1)
    print(f"metrics: http://127.0.0.1:{metrics}/metrics", flush=True)
    return {
        **os.environ,
        "SHAREPOD_KUBECONFIG": str(world.cluster.kubeconfig_for(token, name="developer")),
        "SHAREPOD_BIND_ADDRESS": "127.0.0.1",
        "SHAREPOD_METRICS_PORT": str(metrics),
        "SHAREPOD_METRICS_ACCESS": "Open",
    }


def _gpunodes(world: World) -> set[str]:
    return {item["metadata"]["name"] for item in world.api.get(GPUNODES)["items"]}


def _asked_for_more() -> bool:
    try:
        input("the operator has ended; Enter: run it again, Ctrl-D: end the cluster ")
    except EOFError:
        print()
        return False
    return True


@contextlib.contextmanager
def _nothing_done_on_interrupt() -> Iterator[None]:
    """Ignore Ctrl-C in this process. The terminal also sends it to the operator, which ends."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    sys.exit(main())
