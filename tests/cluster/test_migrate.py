"""docs/migrate.md: the API server accepts each manifest, with the share that the page states."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import yaml
from cluster.operator_world import World
from cluster.plain_world import MEMORY, MILLI, a_world_of_lines
from cluster.shared_cluster import SharedCluster
from harness.api import Object
from harness.installation import MANIFESTS

PAGE = MANIFESTS.parent / "docs" / "migrate.md"
NAMESPACE = "migrate"


@pytest.fixture(scope="module")
def world(shared_cluster: SharedCluster) -> Iterator[World]:
    with a_world_of_lines(shared_cluster) as running:
        running.cluster.namespace(NAMESPACE)
        running.cluster.await_service_account(NAMESPACE, "default")
        yield running


def manifests() -> list[tuple[str, Object]]:
    """Return (heading, object) of each manifest on the page."""
    sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    return [
        (section.partition("\n")[0], yaml.safe_load(block))
        for section in sections
        for block in re.findall(r"^```yaml\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    ]


def pod_of(manifest: Object) -> Object:
    """Return the Pod of a manifest: the manifest itself, or its Pod template."""
    template = manifest if manifest["kind"] == "Pod" else manifest["spec"]["template"]
    meta = {**template["metadata"], "name": manifest["metadata"]["name"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": template["spec"]}


def limits(pod: Object) -> Object:
    found: Object = pod["spec"]["containers"][0].get("resources", {}).get("limits", {})
    return found


@pytest.mark.promise("install-migrate")
def test_each_manifest_is_taken_and_those_with_a_line_have_its_claim(world: World) -> None:
    shares: list[tuple[str, str, str | None]] = []
    for heading, manifest in manifests():
        kinds = {"Pod": "/api/v1", "Deployment": "/apis/apps/v1"}
        path = f"{kinds[manifest['kind']]}/namespaces/{NAMESPACE}"
        world.api.create(f"{path}/{manifest['kind'].lower()}s", manifest, dryRun="All", fieldValidation="Strict")
        pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
        made = world.api.create(pods, pod_of(manifest), dryRun="All", fieldValidation="Strict")
        line = limits(pod_of(manifest))
        assert bool(made["spec"].get("resourceClaims")) == (MILLI in line), heading
        if MILLI in line:
            shares.append((heading, line[MILLI], line.get(MEMORY)))
    assert shares == [
        ("`nvidia.com/gpu: 1`", "500", None),
        ("Time-slicing replicas", "250", None),
        ("MPS replicas", "250", "10240"),
        ("HAMi", "300", "3000"),
        ("KAI fractions", "500", None),
    ]
