"""The webhook for plain Pods with a resource line on a test cluster. The API server calls it by its address, because
Services are not routed there.
"""

from __future__ import annotations

import json

from cluster.operator_world import World, wait
from cluster.plain_world import answer, line_pod
from harness.cluster import Cluster, free_ports
from harness.installation import rendered


def install_webhook(cluster: Cluster, component: str) -> dict[str, str]:
    """Apply a component of the manifests, except the Deployment. Return the settings of an operator that serves the
    webhook."""
    (port,) = free_ports(1)
    before = rendered(cluster.bin / "kubectl")
    for one in rendered(cluster.bin / "kubectl", component):
        if one in before or one["kind"] in ("Deployment", "Service", "NetworkPolicy"):
            continue
        if one["kind"] == "MutatingWebhookConfiguration":
            client = one["webhooks"][0]["clientConfig"]
            one["webhooks"][0]["clientConfig"] = {"url": f"https://127.0.0.1:{port}{client['service']['path']}"}
        cluster.kubectl("apply", "--server-side", "-f", "-", input=json.dumps(one))
    return {"SHAREPOD_WEBHOOK_PORT": str(port)}


def start_with_webhook(world: World, component: str) -> None:
    """Install the webhook, and start an operator that serves it."""
    world.times = {**world.times, **install_webhook(world.cluster, component)}
    world.start_operator()
    await_answers(world.cluster)


def await_answers(cluster: Cluster) -> None:
    """Wait until the webhook answers the API server about a Pod with a line."""
    wait(lambda: answer(cluster.api, line_pod()) == "", what="answers about a Pod with a line")
