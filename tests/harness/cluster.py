"""Kubernetes control plane for tests: etcd, API server, scheduler and controller manager on loopback.

Guarantees:
- Several run at the same time: ports are free ones, and each has its own state directory.
- Every connection uses checked TLS, no client is anonymous, RBAC and the Node authorizer are enforced.
- All processes end and all files are removed with the `with` block, or with the process that holds it, however that
  ends.
- A component that does not start is reported with the tail of its log.
"""

from __future__ import annotations

import base64
import json
import os
import random
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from harness import build, components
from harness.api import Api, ApiError, Object
from harness.certs import Authority, write_private, write_signing_key
from harness.commands import command
from harness.components import LOOPBACK, SERVICE_ADDRESS, Layout
from harness.errors import HarnessError, StartError
from harness.fakes import fake_node
from harness.services import Service, Services

_START_TIMEOUT = 60.0
# Below the operating system's range for outgoing connections, so that no connection takes a port before its server
# binds it.
_PORTS = range(20_000, 30_000)


def free_ports(count: int) -> list[int]:
    """Return `count` distinct unused TCP ports on loopback. They are drawn by the system: a seeded order of tests seeds
    `random` alike in all test workers.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe, suppress(OSError):
            probe.bind((LOOPBACK, port))
            found.append(port)
        if len(found) == count:
            return found
    raise HarnessError(f"no {count} free TCP ports in {_PORTS}")


def wait_until(condition: Callable[[], bool], *, what: str, timeout: float, interval: float = 0.05) -> None:
    """Poll until `condition` holds; raise HarnessError "WHAT: not within TIMEOUT s" if it does not."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise HarnessError(f"{what}: not within {timeout:.0f} s")
        time.sleep(interval)


FEATURE_GATES = "FEATURE_GATES"
"""Environment variable with feature gates for all components."""


class Cluster:
    """Running control plane; use it as a context manager, or `stop` it.

    `scheduler`, `controller_manager`: whether to run them. `node_lifecycle`: whether the controller that marks nodes
    without heartbeat runs; off, so that fake nodes stay ready. `apiserver_args`, `controller_manager_args`: further
    flags. `keep_logs`: leave `logs` when stopping. `detached`: outlive this process. All components get FEATURE_GATES
    of the environment, such as `DRAConsumableCapacity=true`.

    Errors: BuildError, StartError.
    """

    def __init__(
        self,
        *,
        scheduler: bool = True,
        controller_manager: bool = True,
        node_lifecycle: bool = False,
        apiserver_args: Sequence[str] = (),
        controller_manager_args: Sequence[str] = (),
        keep_logs: bool = False,
        detached: bool = False,
    ) -> None:
        self._programs = build.programs()
        self.bin = self._programs.bin
        self.node_lifecycle = node_lifecycle
        self.keep_logs = keep_logs
        gates = [f"--feature-gates={gates_set}"] if (gates_set := os.environ.get(FEATURE_GATES)) else []
        own = any(argument.startswith("--feature-gates") for argument in apiserver_args)
        self._apiserver_args = [*([] if own else gates), *apiserver_args]
        self._scheduler_args = gates
        self._controller_manager_args = [*gates, *controller_manager_args]
        self.state = Path(tempfile.mkdtemp(prefix="shp-"))
        self.services = Services(self.state, detached=detached)
        self.logs = self.services.logs
        try:
            self._start(scheduler, controller_manager)
        except StartError as error:
            self.stop(keep_logs=True)
            error.logs = self.logs
            raise
        except BaseException:
            self.stop()
            raise

    def _start(self, scheduler: bool, controller_manager: bool) -> None:
        etcd_port, peer_port, port = free_ports(3)
        self.authority = Authority(self.state / "pki")
        self.ca = self.authority.certificate
        names = [LOOPBACK, "localhost", SERVICE_ADDRESS, "kubernetes.default.svc", "kubernetes.default"]
        self._layout = Layout(
            bin=self.bin,
            state=self.state,
            ca=self.ca,
            etcd_port=etcd_port,
            peer_port=peer_port,
            port=port,
            etcd_tls=self.authority.issue("etcd", "etcd", addresses=[LOOPBACK]),
            serving_tls=self.authority.issue("serving", "kube-apiserver", addresses=names),
            client=self.authority.issue("kube-apiserver", "kube-apiserver", groups=["system:masters"]),
        )
        self.server = self._layout.server
        write_signing_key(self._layout.service_account_key)
        self.admin_token = secrets.token_hex(16)
        write_private(self._layout.tokens, f"{self.admin_token},admin,1,system:masters\n".encode())
        self.api = Api(self.server, self.ca, self.admin_token)
        self.kubeconfig = self.kubeconfig_for(self.admin_token, name="admin")
        # By component name: command lines of scheduler and controller manager, which end and start with the API server.
        self._clients: dict[str, list[str]] = {}
        if scheduler:
            config = self.user_kubeconfig("system:kube-scheduler")
            self._clients["kube-scheduler"] = components.scheduler(
                self._layout, config, emulated=self._programs.emulated, further=self._scheduler_args
            )
        if controller_manager:
            config = self.user_kubeconfig("system:kube-controller-manager")
            self._clients["kube-controller-manager"] = components.controller_manager(
                self._layout,
                config,
                node_lifecycle=self.node_lifecycle,
                emulated=self._programs.emulated,
                further=self._controller_manager_args,
            )
        self._start_all()
        if controller_manager:
            self.await_service_account("default", "default")

    def _start_all(self) -> None:
        etcd = self.services.start("etcd", components.etcd(self._layout))
        self._await_ready(etcd, self._start_apiserver())
        for name, command_line in self._clients.items():
            self.services.start(name, command_line)

    def _stop_all(self) -> None:
        for name in (*self._clients, "kube-apiserver"):
            self.services.ask(do="stop", name=name, grace=0.0)
        self.services.ask(do="stop", name="etcd", grace=10.0)

    def _start_apiserver(self) -> Service:
        return self.services.start(
            "kube-apiserver", components.apiserver(self._layout, self._programs.server, self._apiserver_args)
        )

    def _await_ready(self, *services: Service) -> None:
        deadline = time.monotonic() + _START_TIMEOUT
        while not self.api.ready():
            for service in services:
                if (status := service.status()) is not None:
                    raise StartError(f"{service.name} ended with status {status}\n{service.log_tail()}")
            if time.monotonic() > deadline:
                tails = "\n".join(service.log_tail() for service in services)
                raise StartError(f"{services[-1].name} is not ready after {_START_TIMEOUT:.0f} s\n{tails}")
            time.sleep(0.05)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self, *, keep_logs: bool | None = None) -> None:
        """End all processes, the API server before etcd. Remove the state directory, with `keep_logs` except logs/."""
        self.services.end(keep_logs=self.keep_logs if keep_logs is None else keep_logs)

    def stop_apiserver(self) -> None:
        """Stop the API server: every watch ends and every connection is refused until `start_apiserver`."""
        self.services.ask(do="stop", name="kube-apiserver", grace=0.0)

    def start_apiserver(self) -> None:
        """Start the API server again at the same address. Return when it is ready."""
        self._await_ready(self._start_apiserver())

    def restart_apiserver(self, *, down: float = 0.0) -> None:
        """Stop the API server, leave it down for `down` seconds, start it again."""
        self.stop_apiserver()
        time.sleep(down)
        self.start_apiserver()

    def back_up(self) -> Path:
        """Return a copy of etcd's data, for `restore`. The control plane stops for it and starts again."""
        self._stop_all()
        copy = Path(tempfile.mkdtemp(prefix="backup-", dir=self.state))
        shutil.copytree(self._layout.etcd_data, copy, dirs_exist_ok=True)
        self._start_all()
        return copy

    def restore(self, backup: Path) -> None:
        """Replace etcd's data by a copy, so that resource versions go back.

        Scheduler and controllers are restarted too, as Kubernetes' documentation of backups requires.
        """
        self._stop_all()
        shutil.rmtree(self._layout.etcd_data)
        shutil.copytree(backup, self._layout.etcd_data)
        self._start_all()

    # Credentials

    def _write_kubeconfig(self, path: Path, user: Mapping[str, str], server: str | None = None) -> Path:
        authority = base64.b64encode(self.ca.read_bytes()).decode()
        cluster = {"server": server or self.server, "certificate-authority-data": authority}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": user}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "c",
        }
        path.parent.mkdir(exist_ok=True)
        write_private(path, json.dumps(config).encode())  # JSON is YAML
        return path

    def kubeconfig_for(self, token: str, *, name: str | None = None, server: str | None = None) -> Path:
        """Write a kubeconfig file for the holder of `token` into the state directory; return its path. `server`:
        address; None: the API server.
        """
        path = self.state / "kubeconfigs" / (name or secrets.token_hex(6))
        return self._write_kubeconfig(path, {"token": token}, server)

    def user_kubeconfig(self, user: str, *, groups: Sequence[str] = ()) -> Path:
        """Write a kubeconfig file for `user` in `groups`, with a client certificate; return its path."""
        name = user.replace(":", "-").replace("/", "-")
        pair = self.authority.issue(name, user, groups=groups)
        encoded = {
            "client-certificate-data": base64.b64encode(pair.certificate_pem).decode(),
            "client-key-data": base64.b64encode(pair.key_pem).decode(),
        }
        return self._write_kubeconfig(self.state / "kubeconfigs" / name, encoded)

    def service_account_token(
        self,
        namespace: str,
        name: str,
        *,
        bound_pod: str | None = None,
        bound_node: str | None = None,
        expiration: int = 3600,
    ) -> str:
        """Return a token of a ServiceAccount, bound to a Pod of its namespace or to a Node. `expiration`: validity in
        seconds, at least 600."""
        spec: Object = {"audiences": None, "expirationSeconds": expiration}
        if bound_pod is not None:
            uid = self.api.get(f"/api/v1/namespaces/{namespace}/pods/{bound_pod}")["metadata"]["uid"]
            spec["boundObjectRef"] = {"apiVersion": "v1", "kind": "Pod", "name": bound_pod, "uid": uid}
        elif bound_node is not None:
            uid = self.api.get(f"/api/v1/nodes/{bound_node}")["metadata"]["uid"]
            spec["boundObjectRef"] = {"apiVersion": "v1", "kind": "Node", "name": bound_node, "uid": uid}
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        answer = self.api.create(f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token", request)
        return str(answer["status"]["token"])

    def api_for(self, token: str) -> Api:
        """Return a client of this API server that sends `token`."""
        return Api(self.server, self.ca, token)

    # Objects

    def kubectl(
        self,
        *args: str | Path,
        input: str | None = None,  # noqa: A002  as subprocess.run calls it
        check: bool = True,
        timeout: float = 75.0,
        kubeconfig: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl of the cluster's version, as admin unless `kubeconfig` names another user.

        Raises CommandError with the output if kubectl fails (with `check`), or after `timeout` seconds: by default more
        than the 60 s that an API server gives a request.
        """
        environment = dict(os.environ) | {
            "KUBECONFIG": str(kubeconfig or self.kubeconfig),
            "KUBECACHEDIR": str(self.state / "kubectl-cache"),
            "PATH": f"{self.bin}:{os.environ.get('PATH', '')}",
        }
        argv = [self.bin / "kubectl", *args]
        return command(*argv, input=input, check=check, timeout=timeout, env=environment)

    def namespace(self, name: str, *, labels: Mapping[str, str] | None = None) -> str:
        """Create a namespace unless it exists, and wait until pods can be created in it. Return its name."""
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": dict(labels or {})}}
        with suppress_reason("AlreadyExists"):
            self.api.create("/api/v1/namespaces", body)
        self.await_service_account(name, "default")
        return name

    def runtime_class(self, name: str = "nvidia") -> None:
        """Create the RuntimeClass for the container runtime of the same name."""
        body: Object = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": name}}
        self.api.apply(f"/apis/node.k8s.io/v1/runtimeclasses/{name}", body | {"handler": name})

    def await_service_account(self, namespace: str, name: str, *, timeout: float = 30.0) -> None:
        """Wait until the ServiceAccount exists, which pods of that namespace need."""

        def exists() -> bool:
            with suppress_reason("NotFound"):
                self.api.get(f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}")
                return True
            return False

        wait_until(exists, what=f"ServiceAccount {namespace}/{name}", timeout=timeout)

    def add_fake_nodes(
        self,
        count: int,
        *,
        cpu: str = "64",
        memory: str = "256Gi",
        pods: int = 110,
        labels: Mapping[str, str] | None = None,
        prefix: str = "node",
    ) -> list[str]:
        """Create `count` ready Nodes, named PREFIX-0 and so on, without a machine behind them. Return their names."""
        names = [f"{prefix}-{index}" for index in range(count)]
        for name in names:
            body = fake_node(name, cpu=cpu, memory=memory, pods=pods, labels=labels or {})
            self.api.create("/api/v1/nodes", body)
            # Admission taints every new Node as not ready; the controller that would remove the taint does not run.
            self.api.patch(f"/api/v1/nodes/{name}", {"spec": {"taints": None}})
        return names

    def pods(self, namespace: str, *, selector: str = "") -> list[Object]:
        """Return the Pods of a namespace that match a label selector."""
        items: list[Object] = self.api.get(f"/api/v1/namespaces/{namespace}/pods", labelSelector=selector)["items"]
        return items

    def wait_for(
        self, path: str, condition: Callable[[Object | None], Any], *, what: str, timeout: float = 30.0
    ) -> Object | None:
        """Poll the object at `path` until `condition` is true of it; return it. `condition` gets None if the object
        does not exist."""
        seen: Object | None = None

        def holds() -> bool:
            nonlocal seen
            seen = None
            with suppress_reason("NotFound"):
                seen = self.api.get(path)
            return bool(condition(seen))

        try:
            wait_until(holds, what=what, timeout=timeout)
        except HarnessError as error:
            raise HarnessError(f"{error}; last seen: {json.dumps(seen)[:4000]}") from None
        return seen


class suppress_reason:  # noqa: N801  reads as contextlib.suppress does
    """Context manager that suppresses an ApiError with one of these reasons."""

    def __init__(self, *reasons: str) -> None:
        self._reasons: Iterable[str] = reasons

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return isinstance(error, ApiError) and error.reason in self._reasons
