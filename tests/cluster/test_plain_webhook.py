"""Plain Pods with a resource line where the API server does not serve MutatingAdmissionPolicy. It calls the webhook of
`manifests/plain-webhook`. Kopf answers the calls, with certificates that the operator creates.

Services are not routed on the test cluster, so the API server calls the webhook by its address.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml
from cluster.claims_world import claim_made_for, row_of, runs, serves_claims
from cluster.fake_agents import FakeAgents
from cluster.operator_world import AGENT_LEASE, GIB, TIMES, World, wait
from cluster.plain_webhook_world import await_answers, start_with_webhook
from cluster.plain_world import answer, container, line_pod, serves_mutating_policies
from harness.build import programs
from harness.cluster import Cluster
from harness.fakes import FakeKubelets
from harness.installation import NAMESPACE, rendered

WEBHOOKS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
SECRET = f"/api/v1/namespaces/{NAMESPACE}/secrets/sharepod-webhook"
_KINDS = ("mutatingadmissionpolicies", "mutatingadmissionpolicybindings")
WITHOUT_POLICIES = (
    "--runtime-config=" + ",".join(f"admissionregistration.k8s.io/v1/{kind}=false" for kind in _KINDS),
    "--disable-admission-plugins=MutatingAdmissionPolicy",
)
"""Flags of an API server that serves no MutatingAdmissionPolicy, like that of Kubernetes 1.35."""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    _, minor = programs().server
    if minor < 34:
        pytest.skip(f"Kubernetes 1.{minor} has no claims of resource.k8s.io/v1")
    with (
        Cluster(apiserver_args=WITHOUT_POLICIES if minor >= 36 else ()) as cluster,
        FakeKubelets(cluster.api) as kubelets,
        FakeAgents(cluster.api, duration=AGENT_LEASE, renew=0.5) as agents,
    ):
        assert serves_claims(cluster.api)
        assert not serves_mutating_policies(cluster.api)
        world = World(cluster, kubelets, agents, {**TIMES})
        install_webhook(world)
        yield world
        assert not kubelets.failures, kubelets.failures[:3]
        assert not agents.failures


def install_webhook(world: World) -> None:
    """Apply `manifests/claims` and the component, except the Deployment. Start an operator that serves the webhook."""
    world.installation.install_claims()
    start_with_webhook(world, "plain-webhook")


@pytest.mark.promise("operator-line-webhook")
def test_a_line_becomes_a_claim_and_gets_its_share(world: World) -> None:
    (node,) = world.nodes("hook")
    namespace = world.cluster.namespace("hook")
    path = f"/api/v1/namespaces/{namespace}/pods"
    sidecar = {"name": "sidecar", "image": "test"}
    body = line_pod(container(milli="400", mib="4096"), sidecar, name="one", nodeSelector={"test": "hook"})
    made = world.api.create(path, body)
    assert made["metadata"]["labels"]["sharepod.dev/line"] == "true"
    assert made["spec"]["resourceClaims"] == [{"name": "sharepod", "resourceClaimTemplateName": "sharepod"}]
    claims = [one["resources"].get("claims") for one in made["spec"]["containers"]]
    assert claims == [[{"name": "sharepod"}], None]
    runs(world, namespace, "one")
    claim = claim_made_for(world, namespace, "one")
    assert claim is not None
    row = row_of(world, node, claim["metadata"]["name"])
    assert row is not None
    assert (row["requestMilli"], row["memory"]) == (400, 4 * GIB)


@pytest.mark.promise("operator-line-webhook-away")
def test_while_no_operator_answers_pods_with_a_line_are_refused_and_no_others(world: World) -> None:
    left_out = world.cluster.namespace("left-out", labels={"sharepod.dev/plain-pods": "disabled"})
    assert world.operator is not None
    world.operator.stop(grace=0)
    assert "failed calling webhook" in answer(world.api, line_pod())
    bare = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "bare"}}
    world.api.create(
        "/api/v1/namespaces/default/pods",
        bare | {"spec": {"containers": [{"name": "main", "image": "x"}]}},
        dryRun="All",
    )
    assert "failed calling webhook" not in answer(world.api, line_pod(), left_out), "refused by the policy alone"
    world.start_operator("next")
    await_answers(world.cluster)


@pytest.mark.promise("operator-line-webhook-certificates")
def test_certificates_are_made_again_and_nothing_is_refused_meanwhile(world: World) -> None:
    before = world.api.get(SECRET)["data"]["tls.crt"]
    world.api.patch(SECRET, {"data": {"tls.crt": None, "tls.key": None}})
    refused: list[str] = []

    def another() -> bool:
        refused.extend(filter(None, [answer(world.api, line_pod())]))
        return world.api.get(SECRET).get("data", {}).get("tls.crt") not in (None, before)

    wait(another, what="another certificate")
    wait(lambda: "next.crt" not in world.api.get(SECRET)["data"], what="the renewal's end")
    for _ in range(20):
        refused += filter(None, [answer(world.api, line_pod())])
    assert refused == []
    client = world.api.get(f"{WEBHOOKS}/sharepod-plain-pods")["webhooks"][0]["clientConfig"]
    assert client["caBundle"]


def test_the_component_of_the_manifests_adds_port_service_secret_and_rights(world: World) -> None:
    overlay = rendered(world.cluster.bin / "kubectl", "plain-webhook")
    apply = ("apply", "--server-side", "--force-conflicts", "--dry-run=server", "-f", "-")
    world.cluster.kubectl(*apply, input=yaml.safe_dump_all(overlay), timeout=60)
    documents = {(one["kind"], one["metadata"]["name"]): one for one in overlay}
    (webhook,) = documents["MutatingWebhookConfiguration", "sharepod-plain-pods"]["webhooks"]
    assert webhook["failurePolicy"] == "Fail"
    assert {one["name"] for one in webhook["matchConditions"]} >= {"has-a-line", "of-no-sharepod"}
    service = webhook["clientConfig"]["service"]
    assert documents["Service", service["name"]]["metadata"]["namespace"] == service["namespace"] == NAMESPACE
    (operator,) = documents["Deployment", "sharepod-operator"]["spec"]["template"]["spec"]["containers"]
    assert {port["name"] for port in operator["ports"]} == {"health", "metrics", "webhook"}


@pytest.mark.promise("operator-line-refused")
def test_what_cannot_be_meant_is_refused_as_ever(world: World) -> None:
    assert "1500 is neither" in answer(world.api, line_pod(container(milli="1500")))
    forged = line_pod(resourceClaims=[{"name": "sharepod", "resourceClaimName": "of-another"}])
    assert "spec.resourceClaims" in answer(world.api, forged)
