"""Webhook of plain Pods with a resource line, for API servers without MutatingAdmissionPolicy. Pure.

It gives such a Pod the claim of its line, or, where the cluster has no claims, the volume.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sharepod.api.objects import PLAIN_PODS_POLICY, TENANT_LABEL

from .cel import text
from .line_policies import API, NOT_OPTED_OUT, line_pods, translated_pods

WEBHOOK_SERVICE = "sharepod-webhook"
WEBHOOK_NAME = "line.plain-pods.sharepod.dev"
BY_CLAIM, BY_VOLUME = "line", "line-volume"
"""Ids of Kopf's handlers."""
HANDLERS: Final[Mapping[str, str]] = {"/line": BY_CLAIM, "/line-volume": BY_VOLUME}
"""Path of a webhook request -> id of the handler that answers it."""


def plain_pod_webhook() -> dict[str, Any]:
    """Return the webhook that gives Pods with a line their claims where MutatingAdmissionPolicy is not served. The
    leading operator writes its CA bundle."""
    return _webhook(BY_CLAIM, translated_pods())


def plain_volume_webhook() -> dict[str, Any]:
    """Return the webhook that gives Pods with a line a volume, where the cluster has no claims."""
    unlabelled = f"!({text(TENANT_LABEL)} in object.metadata.?labels.orValue({{}}))"
    return _webhook(BY_VOLUME, line_pods(unlabelled))


def _webhook(handler: str, conditions: list[dict[str, str]]) -> dict[str, Any]:
    path = next(path for path, answered_by in HANDLERS.items() if answered_by == handler)
    service = {"namespace": "sharepod-system", "name": WEBHOOK_SERVICE, "path": path, "port": 443}
    webhook = {
        "name": WEBHOOK_NAME,
        "admissionReviewVersions": ["v1"],
        "clientConfig": {"service": service},
        "failurePolicy": "Fail",
        "matchConditions": conditions,
        "namespaceSelector": NOT_OPTED_OUT,
        "reinvocationPolicy": "IfNeeded",
        "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
        "sideEffects": "None",
        "timeoutSeconds": 5,
    }
    made = {"apiVersion": API, "kind": "MutatingWebhookConfiguration", "metadata": {"name": PLAIN_PODS_POLICY}}
    return {**made, "webhooks": [webhook]}
