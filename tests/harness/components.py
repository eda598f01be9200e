"""The command lines of a control plane's components, with reasons for unusual flags.

Pure: takes paths and addresses, returns argument lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.certs import KeyPair

LOOPBACK = "127.0.0.1"
SERVICE_ADDRESS = "10.96.0.1"
_SERVICE_RANGE = "10.96.0.0/16"
_BINDS_TO_NODES = (1, 31)
"""First Kubernetes version that by default can bind tokens to Nodes, as the tests' agents need."""


@dataclass(frozen=True)
class Layout:
    """Programs, files and ports of one control plane. `client`: the certificate that the API server uses as a
    client."""

    bin: Path
    state: Path
    ca: Path
    etcd_port: int
    peer_port: int
    port: int
    etcd_tls: KeyPair
    serving_tls: KeyPair
    client: KeyPair

    @property
    def server(self) -> str:
        return f"https://{LOOPBACK}:{self.port}"

    @property
    def etcd(self) -> str:
        return f"https://{LOOPBACK}:{self.etcd_port}"

    @property
    def etcd_data(self) -> Path:
        return self.state / "etcd"

    @property
    def service_account_key(self) -> Path:
        return self.state / "pki" / "sa.key"

    @property
    def tokens(self) -> Path:
        return self.state / "tokens.csv"


def etcd(layout: Layout) -> list[str]:
    peer = f"https://{LOOPBACK}:{layout.peer_port}"
    files = (
        ("cert-file", layout.etcd_tls.certificate),
        ("key-file", layout.etcd_tls.key),
        ("trusted-ca-file", layout.ca),
    )
    return [
        str(layout.bin / "etcd"),
        f"--data-dir={layout.etcd_data}",
        "--unsafe-no-fsync",  # etcd's data is temporary
        f"--listen-client-urls={layout.etcd}",
        f"--advertise-client-urls={layout.etcd}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--client-cert-auth",
        "--peer-client-cert-auth",
        "--log-level=warn",
        *(f"--{prefix}{flag}={file}" for prefix in ("", "peer-") for flag, file in files),
    ]


def apiserver(layout: Layout, version: tuple[int, int], further: Sequence[str] = ()) -> list[str]:
    return [
        str(layout.bin / "kube-apiserver"),
        f"--etcd-servers={layout.etcd}",
        f"--etcd-cafile={layout.ca}",
        f"--etcd-certfile={layout.client.certificate}",
        f"--etcd-keyfile={layout.client.key}",
        f"--bind-address={LOOPBACK}",
        f"--secure-port={layout.port}",
        # The address is never used. It only must not be a loopback address, and it needs no route.
        "--advertise-address=192.0.2.1",
        "--endpoint-reconciler-type=none",
        f"--tls-cert-file={layout.serving_tls.certificate}",
        f"--tls-private-key-file={layout.serving_tls.key}",
        f"--client-ca-file={layout.ca}",
        f"--token-auth-file={layout.tokens}",
        "--anonymous-auth=false",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        f"--kubelet-client-certificate={layout.client.certificate}",
        f"--kubelet-client-key={layout.client.key}",
        f"--kubelet-certificate-authority={layout.ca}",
        "--kubelet-preferred-address-types=InternalIP",
        f"--service-account-key-file={layout.service_account_key}",
        f"--service-account-signing-key-file={layout.service_account_key}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-cluster-ip-range={_SERVICE_RANGE}",
        "--profiling=false",
        *(["--feature-gates=ServiceAccountTokenNodeBinding=true"] if version < _BINDS_TO_NODES else []),
        *further,
    ]


def scheduler(layout: Layout, config: Path, *, emulated: str | None = None, further: Sequence[str] = ()) -> list[str]:
    return [
        str(layout.bin / "kube-scheduler"),
        *_as_user(config),
        *_emulating(emulated),
        "--kube-api-qps=500",
        "--kube-api-burst=1000",
        *further,
    ]


def controller_manager(
    layout: Layout, config: Path, *, node_lifecycle: bool, emulated: str | None = None, further: Sequence[str] = ()
) -> list[str]:
    return [
        str(layout.bin / "kube-controller-manager"),
        *_as_user(config),
        *_emulating(emulated),
        f"--controllers={'*' if node_lifecycle else '*,-node-lifecycle-controller'}",
        f"--service-account-private-key-file={layout.service_account_key}",
        f"--root-ca-file={layout.ca}",
        "--use-service-account-credentials=true",
        "--kube-api-qps=200",
        "--kube-api-burst=400",
        *further,
    ]


def _emulating(version: str | None) -> list[str]:
    """Return flags by which a component uses only the APIs of an older API server. Otherwise it would wait indefinitely
    for a missing API."""
    return [] if version is None else [f"--emulated-version={version}"]


def _as_user(config: Path) -> list[str]:
    return [
        f"--kubeconfig={config}",
        f"--authentication-kubeconfig={config}",
        f"--authorization-kubeconfig={config}",
        "--leader-elect=false",
        "--secure-port=0",
        "--profiling=false",
    ]
