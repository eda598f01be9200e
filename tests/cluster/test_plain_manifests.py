"""The three folders of manifests for plain Pods with a resource line, as kubectl renders them: one base and patches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness.build import programs
from harness.installation import MANIFESTS, rendered
from sharepod.api.admission.line_policies import plain_pod_mutation, refusing_policies
from sharepod.api.admission.line_volume_policies import refusing_policy
from sharepod.api.admission.line_webhook import plain_pod_webhook, plain_volume_webhook
from sharepod.api.admission.quota_policies import quota_policies
from sharepod.api.admission.template_warnings import template_policies

OF_CLAIMS = "sharepod-quota-claims"
MADE: dict[str, list[dict[str, Any]]] = {
    "plain": [*plain_pod_mutation(), *refusing_policies(), *quota_policies(), *template_policies()],
    "plain-webhook": [plain_pod_webhook(), *refusing_policies(), *quota_policies(), *template_policies()],
    "plain-volume": [
        plain_volume_webhook(),
        *refusing_policy(),
        *(one for one in quota_policies() if one["metadata"]["name"] != OF_CLAIMS),
        *template_policies(),
    ],
}
"""For each folder: its objects, as the Python models generate them."""


def by_name(objects: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(one["kind"], one["metadata"]["name"]): one for one in objects}


@pytest.fixture(scope="module")
def kubectl() -> Path:
    return programs().bin / "kubectl"


@pytest.fixture(scope="module")
def base(kubectl: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the objects of manifests/ without any component, by kind and name."""
    return by_name(rendered(kubectl))


@pytest.mark.parametrize("component", ["plain-webhook", "plain-volume"])
def test_a_component_adds_the_policies_of_its_model_and_patches_no_other(
    kubectl: Path, base: dict[tuple[str, str], dict[str, Any]], component: str
) -> None:
    overlay = by_name(rendered(kubectl, component))
    made = by_name(MADE[component])
    kinds = {kind for kind, _name in made}
    assert {key: one for key, one in overlay.items() if key[0] in kinds and key not in base} == made
    assert {key for key in base if overlay.get(key) != base[key]} == {("Deployment", "sharepod-operator")}


def test_the_folder_plain_has_the_policies_of_its_model(kubectl: Path) -> None:
    objects = rendered(kubectl, manifests=MANIFESTS / "plain")
    for one in objects:
        assert one["metadata"].pop("labels") == {"app.kubernetes.io/part-of": "sharepod"}
    assert by_name(objects) == by_name(MADE["plain"])
