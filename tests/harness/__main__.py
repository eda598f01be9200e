"""python -m harness: a test cluster by hand.

    build [--oldest | --minor M] build the programs and print their folder; --oldest: of the oldest Kubernetes
    build --all                 also build Helm and, where a real node can run, its containerd and device plugin
    build --tool helm           build Helm (or actionlint, or prometheus), and print its path
    up [--fake-nodes N] [--node] start a cluster that stays; prints the line to `eval`
    env                         print that line again
    status                      print the running processes
    down                        end the cluster

Guarantees: `up` leaves one cluster per name; `down` ends exactly the processes that `up` started (distinguished by
their start time from later ones with the same pid) and removes all files.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from harness import build, releases
from harness.cache import cache_dir, exclusive
from harness.cluster import Cluster, wait_until
from harness.errors import HarnessError
from harness.fakes import FakeKubelets
from harness.node import Node
from harness.node_packages import why_no_node
from harness.process import alive, start_time
from harness.services import Services

_PACKAGES = Path(__file__).parent.parent


@dataclass(frozen=True)
class Standing:
    """Record of a cluster that `up` started, so that `down` can end it."""

    name: str
    state: str
    kubeconfig: str
    server: str
    bin: str
    supervisors: list[tuple[int, int]]  # process id and start time, in the order in which to end them

    @staticmethod
    def _file(name: str) -> Path:
        return cache_dir() / f"cluster-{name}.json"

    @classmethod
    def find(cls, name: str) -> Standing | None:
        try:
            return cls(**json.loads(cls._file(name).read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write(self) -> None:
        self._file(self.name).write_text(json.dumps(asdict(self)))

    def forget(self) -> None:
        self._file(self.name).unlink(missing_ok=True)

    def runs(self) -> bool:
        return any(alive(pid, started) for pid, started in self.supervisors)

    def exports(self) -> str:
        return f'export KUBECONFIG={shlex.quote(self.kubeconfig)}\nexport PATH={shlex.quote(self.bin)}:"$PATH"'


def _identity(services: Services) -> tuple[int, int]:
    started = start_time(services.pid)
    if started is None:
        raise HarnessError("the supervisor ended right after its start")
    return services.pid, started


def _up(name: str, fake_nodes: int, with_node: bool) -> int:
    with exclusive(cache_dir() / "up.lock", what="starting a cluster that stays", timeout=600.0):
        if (standing := Standing.find(name)) and standing.runs():
            print(f"{name} runs already; `down` ends it", file=sys.stderr)
            print(standing.exports())
            return 0
        cluster = Cluster(detached=True)
        node: Node | None = None
        try:
            if fake_nodes:
                cluster.add_fake_nodes(fake_nodes)
                command = [sys.executable, "-m", "harness", "play", cluster.server, str(cluster.ca)]
                environment = dict(os.environ) | {"PYTHONPATH": str(_PACKAGES), "TOKEN": cluster.admin_token}
                cluster.services.start("fake-kubelets", command, env=environment)
            if with_node:
                node = Node(cluster, detached=True)
                cluster.runtime_class()
            running = [services for services in (node and node.services, cluster.services) if services]
            standing = Standing(
                name=name,
                state=str(cluster.state),
                kubeconfig=str(cluster.kubeconfig),
                server=cluster.server,
                bin=str(cluster.bin),
                supervisors=[_identity(services) for services in running],
            )
            standing.write()
        except BaseException:
            if node is not None:
                node.stop()
            cluster.stop()
            raise
    print(f"{name} runs at {standing.server}, state and logs in {standing.state}", file=sys.stderr)
    print(standing.exports())
    return 0


def _down(name: str) -> int:
    standing = Standing.find(name)
    if standing is None or not standing.runs():
        print(f"{name} does not run", file=sys.stderr)
    else:
        for pid, started in standing.supervisors:
            if alive(pid, started):
                os.kill(pid, signal.SIGTERM)
                _await_end(pid, started)
    if standing is not None:
        standing.forget()
    return 0


def _await_end(pid: int, started: int) -> None:
    wait_until(lambda: not alive(pid, started), what=f"end of process {pid}", timeout=60.0)


def _status(name: str) -> int:
    standing = Standing.find(name)
    if standing is None or not standing.runs():
        print(f"{name} does not run")
        return 1
    print(f"{name} runs at {standing.server}: state and logs in {standing.state}")
    return 0


def _env(name: str) -> int:
    standing = Standing.find(name)
    if standing is None or not standing.runs():
        raise HarnessError(f"{name} does not run; start it with `up`")
    print(standing.exports())
    return 0


def _play(server: str, ca: Path) -> int:
    """Play the fake nodes' kubelets until this process is ended. The environment variable TOKEN has the admin's
    token."""
    from harness.api import Api

    with FakeKubelets(Api(server, ca, os.environ.pop("TOKEN"))):
        while True:
            time.sleep(3600)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m harness", description="A test cluster by hand.")
    commands = parser.add_subparsers(dest="command", required=True)
    builds = commands.add_parser("build", help="build the programs (minutes, once) and print where they are")
    which = builds.add_mutually_exclusive_group()
    which.add_argument("--oldest", action="store_true", help=f"binaries of Kubernetes {releases.OLDEST.version}")
    minors = sorted(releases.OF_CLAIMS)
    which.add_argument("--minor", choices=minors, help="binaries of a Kubernetes with ResourceClaims")
    which.add_argument("--all", action="store_true", help="programs of all tests that this machine can run")
    which.add_argument("--tool", choices=sorted(releases.TOOLS), help="programs that only some tests need")
    for command, text in (
        ("up", "start a cluster that stays"),
        ("env", "print the line to eval"),
        ("status", "print the running processes"),
        ("down", "end it"),
    ):
        added = commands.add_parser(command, help=text)
        added.add_argument("--name", default="default", help="for several clusters at once")
        if command == "up":
            added.add_argument("--fake-nodes", type=int, default=0, metavar="N", help="with N nodes and their players")
            added.add_argument("--node", action="store_true", help="with a real node (needs root)")
    play = commands.add_parser("play")
    play.add_argument("server")
    play.add_argument("ca", type=Path)
    arguments = parser.parse_args()
    try:
        match arguments.command:
            case "build" if arguments.tool:
                print(build.own_programs(releases.TOOLS[arguments.tool]))
                return 0
            case "build" if arguments.all:
                cluster = (releases.CURRENT,) if build.to_build(os.environ) else ()
                node = (releases.CONTAINERD, releases.DEVICE_PLUGIN) if why_no_node() is None else ()
                build.build_missing(*cluster, *node, releases.HELM)
                print(build.programs().bin)
                return 0
            case "build":
                if arguments.minor:
                    print(build.own_programs(releases.OF_CLAIMS[arguments.minor]))
                else:
                    print(build.own_programs(releases.OLDEST) if arguments.oldest else build.programs().bin)
                return 0
            case "up":
                return _up(arguments.name, arguments.fake_nodes, arguments.node)
            case "down":
                return _down(arguments.name)
            case "status":
                return _status(arguments.name)
            case "env":
                return _env(arguments.name)
            case _:
                return _play(arguments.server, arguments.ca)
    except HarnessError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
