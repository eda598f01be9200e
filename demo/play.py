"""`make play`: SharePod on a cluster of your own, with two simulated GPUs, until Ctrl-C.

It prints two kubeconfigs, of an admin and of a user with role `edit` in two namespaces, and five things to try. It
needs root on a Debian-like machine, and leaves nothing running and no file.
"""

from __future__ import annotations

import shlex
import shutil
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from harness.build import programs
from harness.cluster import Cluster, wait_until
from harness.errors import HarnessError
from harness.machines import Machine
from playground import HERE, NAMESPACE, RESTRICTED, as_pods, await_gpus, delivered, make_images
from screen import DemoError, Phase, Screen

ROOT = HERE.parent
NAMESPACES = (NAMESPACE, "team-b")
USER = "dana"
DOORS = Phase("installing claims and the resource line: kubectl apply -k manifests/claims, manifests/plain", 6)
OPEN = Phase("two kubeconfigs and kubectl sharepod", 1)
CLOSE = Phase("Ctrl-C: deleting the cluster", 4)

TRY = f"""
In another terminal, in this folder:

    {{path}}
    export KUBECONFIG={{user}}    # {USER}, role edit in {" and ".join(NAMESPACES)}
    export KUBECONFIG={{admin}}   # the cluster's admin

As {USER}, try:

  1. apply     kubectl apply -f demo/alpha.yaml -f demo/beta.yaml
  2. watch     kubectl get sharepods --watch
  3. why       kubectl apply -f demo/gamma.yaml && kubectl sharepod why gamma
  4. resize    kubectl sharepod resize alpha --request 0.2
  5. too much  kubectl apply -f demo/greedy.yaml
               kubectl wait sharepod greedy --for=jsonpath={{{{.status.phase}}}}=Succeeded && kubectl logs greedy

By the resource line: kubectl apply -f demo/line.yaml. As the admin: kubectl sharepod top --watch --all-namespaces.
The node has the image sharepod.test/launchloop:1 (a program that launches kernels), and no registry.

Ctrl-C here deletes all of it.
"""


def open_doors(screen: Screen, cluster: Cluster, machine: Machine) -> None:
    """Install claims and the resource line, and create the user's namespaces with the rights of role `edit`."""
    screen.begin(DOORS)
    for folder in ("claims", "plain"):
        cluster.kubectl("apply", "--server-side", "-k", ROOT / "manifests" / folder, timeout=60)
    await_gpus(screen, cluster, machine)
    wait_until(lambda: _advertised(cluster, machine), what="the node's resource of the line", timeout=60)
    for namespace in NAMESPACES:
        cluster.namespace(namespace, labels=RESTRICTED)
        binding = ("create", "rolebinding", USER, "--clusterrole=edit", f"--user={USER}", "-n", namespace)
        cluster.kubectl(*binding)


def _advertised(cluster: Cluster, machine: Machine) -> bool:
    return "sharepod.dev/gpu-milli" in cluster.api.get(f"/api/v1/nodes/{machine.node}")["status"]["allocatable"]


def hand_over(cluster: Cluster, folder: Path) -> str:
    """Write kubeconfigs and programs to `folder`. Return the instructions for the user."""
    made = {"user": cluster.user_kubeconfig(USER), "admin": cluster.kubeconfig}
    configs = {}
    for name, config in made.items():
        configs[name] = Path(shutil.copy(config, folder / f"{name}.kubeconfig"))
        cluster.kubectl("config", "set-context", "--current", f"--namespace={NAMESPACE}", kubeconfig=configs[name])
    bin_ = folder / "bin"
    bin_.mkdir()
    (bin_ / "kubectl").symlink_to(cluster.bin / "kubectl")
    plugin = bin_ / "kubectl-sharepod"
    command = shlex.join([sys.executable, "-m", "kubectl_sharepod"])
    plugin.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(ROOT / "cli"))} exec {command} "$@"\n')
    plugin.chmod(0o755)
    return TRY.format(path=f"export PATH={bin_}:$PATH", **configs)


def main() -> int:
    """Run the playground until SIGINT or SIGTERM."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    screen = Screen((*as_pods(), DOORS, OPEN))
    try:
        programs()
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sharepod-play-")))
            images = make_images(screen, stack)
            if isinstance(images, str):
                raise DemoError(f"{images}; `make demo` and `make taste` run without")
            cluster, machine = delivered(screen, stack, images)
            open_doors(screen, cluster, machine)
            screen.begin(OPEN)
            text = hand_over(cluster, folder)
            screen.end()
            screen.write(text)
            try:
                while True:
                    signal.pause()
            except KeyboardInterrupt:
                screen.write(f"\n{CLOSE.title}")
    except (DemoError, HarnessError) as error:
        print(f"\nmake play: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; everything is stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
