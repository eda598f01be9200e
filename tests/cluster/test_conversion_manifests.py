"""Component of the manifests for releases with two versions of the API: what it adds, on a real API server."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import yaml
from harness.cluster import Cluster
from harness.installation import MANIFESTS


def test_the_component_of_the_manifests_adds_port_certificate_and_service(server: Cluster) -> None:
    with tempfile.TemporaryDirectory(prefix="shp-") as at:
        manifests = os.path.relpath(MANIFESTS, Path(at).resolve())
        overlay = {"resources": [manifests], "components": [f"{manifests}/conversion"]}
        (Path(at) / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
        rendered = server.kubectl("kustomize", at).stdout
    server.kubectl(
        "apply", "--server-side", "--force-conflicts", "--dry-run=server", "-f", "-", input=rendered, timeout=60
    )
    documents = {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(rendered)}
    assert documents["Service", "sharepod-conversion"]["spec"]["publishNotReadyAddresses"]
    (operator,) = documents["Deployment", "sharepod-operator"]["spec"]["template"]["spec"]["containers"]
    assert {"SHAREPOD_CONVERSION_PORT", "SHAREPOD_SETTINGS"} <= {one["name"] for one in operator["env"]}
    assert {port["name"] for port in operator["ports"]} == {"health", "metrics", "conversion"}
