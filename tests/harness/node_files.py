"""Configuration files of a real node: containerd's, the network's and the kubelet's.

Pure: takes paths and addresses, returns texts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from harness.certs import KeyPair
from harness.components import SERVICE_ADDRESS

PAUSE_IMAGE = "sharepod.test/pause:1"
CDI_DIRECTORIES = ["/etc/cdi", "/run/cdi"]
"""Directories of CDI specifications. If both define a device, the later directory has precedence. /var/run is a link to
/run."""


@dataclass(frozen=True)
class NodeLayout:
    """Files, programs and addresses of one node, from which its configuration is made."""

    name: str
    state: Path
    bridge: str
    subnet: IPv4Network
    cni_plugins: Path
    cgroup: str
    snapshotter: str
    nvidia_runtime: Path
    kubelet_port: int

    @property
    def address(self) -> str:
        """Return the bridge's own address, which is the node's address. It is visible only on this machine."""
        return str(self.subnet[1])

    @property
    def containerd_socket(self) -> Path:
        return self.state / "containerd" / "c.sock"

    @property
    def cni(self) -> Path:
        return self.state / "cni"


def cni_config(layout: NodeLayout) -> str:
    bridge = {
        "type": "bridge",
        "bridge": layout.bridge,
        "isGateway": True,
        "ipMasq": False,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": str(layout.subnet)}]],
            "routes": [{"dst": f"{SERVICE_ADDRESS}/32"}],
            "dataDir": str(layout.state / "cni-addresses"),
        },
    }
    return json.dumps({"cniVersion": "0.4.0", "name": "test", "plugins": [bridge, {"type": "loopback"}]})


def containerd_config(layout: NodeLayout) -> str:
    # TOML's basic strings have the quoting of JSON
    def quoted(value: object) -> str:
        return json.dumps(str(value))

    return f"""\
version = 3
root = {quoted(layout.state / "containerd" / "root")}
state = {quoted(layout.state / "containerd" / "run")}
disabled_plugins = ["io.containerd.internal.v1.opt"]  # would make /opt/containerd

[grpc]
  address = {quoted(layout.containerd_socket)}

[plugins."io.containerd.cri.v1.images"]
  snapshotter = {quoted(layout.snapshotter)}
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = {quoted(PAUSE_IMAGE)}

[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  cdi_spec_dirs = {json.dumps(CDI_DIRECTORIES)}

  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = [{quoted(layout.cni_plugins)}]
    conf_dir = {quoted(layout.cni)}

  [plugins."io.containerd.cri.v1.runtime".containerd]
    default_runtime_name = "runc"

    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"

    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.nvidia]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.nvidia.options]
        BinaryName = {quoted(layout.nvidia_runtime)}
"""


def kubelet_config(layout: NodeLayout, *, ca: Path, serving: KeyPair, settings: Mapping[str, Any]) -> str:
    """Return the kubelet's configuration. `settings`: further fields of KubeletConfiguration, which have precedence."""
    config = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": layout.address,
        "port": layout.kubelet_port,
        "healthzPort": 0,
        "readOnlyPort": 0,
        "tlsCertFile": str(serving.certificate),
        "tlsPrivateKeyFile": str(serving.key),
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(ca)},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": f"unix://{layout.containerd_socket}",
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{layout.cgroup}",
        "enforceNodeAllocatable": ["pods"],
        "failSwapOn": False,
        "resolvConf": str(layout.state / "resolv.conf"),
        "makeIPTablesUtilChains": False,
        "evictionHard": {"memory.available": "1Mi"},  # so that a full disk of the machine does not end the test's Pods
        "imageGCHighThresholdPercent": 100,  # so that no image is removed, because none can be pulled again
        "nodeStatusUpdateFrequency": "1s",
        "serializeImagePulls": False,
        "volumePluginDir": "/var/lib/kubelet/volumeplugins",  # the default is outside of the node's own directories
        **settings,
    }
    return json.dumps(config, indent=1)  # JSON is YAML
