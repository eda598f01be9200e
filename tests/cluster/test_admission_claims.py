"""Claims as users apply them: the examples, and the API server's refusals of claims of class `sharepod.dev`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.claims_world import CLAIMS, claim_path, claim_spec, serves_claims
from harness.api import MERGE, Api, ApiError, Object
from harness.cluster import Cluster, wait_until
from harness.installation import MANIFESTS, NAMESPACE
from sharepod.agent.cluster.device_slice import slice_body, slice_name, slice_names, slice_spec
from sharepod.api.claims.claims import lower
from sharepod.api.claims.scheduled_claims import fault, is_scheduled
from sharepod.api.sharepod import SpecError

EXAMPLES = sorted((MANIFESTS.parent / "examples" / "claims").glob("*.yaml"))
DEVICE = 'device.attributes["gpu.sharepod.dev"]'
UUID = "GPU-5a9e0001-0000-4000-8000-000000000001"


@pytest.fixture(scope="module")
def api(server: Cluster) -> Api:
    if not serves_claims(server.api):
        pytest.skip("the API server does not serve resource.k8s.io/v1")
    for _ in range(2):  # twice, because applying the same object again must change nothing
        server.kubectl("apply", "--server-side", "-k", str(MANIFESTS / "claims"), timeout=60)
    wait_until(
        lambda: "metadata.annotations" in answer(server.api, claim(annotations={"sharepod.dev/gpu-mode": "Half"})),
        what="the policy is enforced",
        timeout=30,
    )
    wait_until(lambda: "only allocator" in published(server.api), what="the policy on slices is enforced", timeout=30)
    wait_until(
        lambda: changed_class(server.api, {"selectors": []})[0] != "",
        what="the policy on classes is enforced",
        timeout=30,
    )
    return server.api


def claim(annotations: dict[str, str] | None = None, spec: Object | None = None) -> Object:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "probe", "annotations": annotations or {}},
        "spec": spec or claim_spec(),
    }


def answer(api: Api, body: Object) -> str:
    """Return the API server's refusal of a claim. Empty if the API server accepts the claim."""
    try:
        api.create(claim_path("default"), body, dryRun="All")
    except ApiError as error:
        return error.message
    return ""


def published(api: Api) -> str:
    """Return the API server's refusal of a ResourceSlice with the driver's devices. Empty if the API server accepts the
    slice."""
    pool = {"name": "n", "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": "gpu.sharepod.dev", "nodeName": "n", "pool": pool}
    body = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": "foreign"}, "spec": spec}
    try:
        api.create(f"{CLAIMS}/resourceslices", body, dryRun="All")
    except ApiError as error:
        return error.message
    return ""


def changed_class(api: Api, change: Object) -> tuple[str, Object]:
    """Change the class of pool `scheduler` in a dry run. Return the API server's refusal, which may be empty, and the
    spec."""
    path = f"{CLAIMS}/deviceclasses/scheduler.sharepod.dev"
    try:
        made = api.request("PATCH", path, {"spec": change}, query={"dryRun": "All"}, content_type=MERGE)
    except ApiError as error:
        return error.message, {}
    return "", made["spec"]


def of_template(body: Object) -> Object:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": "probe"},
        "spec": {"metadata": {"annotations": body["metadata"]["annotations"]}, "spec": body["spec"]},
    }


def asking(**exactly: Any) -> Object:
    return claim(spec=claim_spec(**exactly))


def amounts(**given: str | None) -> Object:
    """Return a claim of 0.4 and 1Gi in which these capacities replace the usual ones."""
    spec = claim_spec()
    asked = spec["devices"]["requests"][0]["exactly"]["capacity"]["requests"]
    for name, value in given.items():
        asked[name] = value
        if value is None:
            del asked[name]
    return claim(spec=spec)


def selecting(expression: str) -> Object:
    return asking(selectors=[{"cel": {"expression": expression}}])


def devices(**fields: Any) -> Object:
    spec = claim_spec()
    spec["devices"] |= fields
    return claim(spec=spec)


def without_capacity(annotations: dict[str, str] | None = None) -> Object:
    spec = claim_spec()
    del spec["devices"]["requests"][0]["exactly"]["capacity"]
    return claim(annotations, spec)


def of_a_line(**exactly: Any) -> Object:
    """Return an Exclusive claim whose request has the name that claims of lines use."""
    body = without_capacity({"sharepod.dev/gpu-mode": "Exclusive"})
    (request,) = body["spec"]["devices"]["requests"]
    request["name"] = "line"
    request["exactly"] |= exactly
    return body


TAKEN = {
    "plain": claim(),
    "all capacities": amounts(limitMilli="900"),
    "whole GPU by time": amounts(timeMilli="1000"),
    "best effort": amounts(timeMilli="0"),
    "exclusive": without_capacity({"sharepod.dev/gpu-mode": "Exclusive"}),
    "labels": claim({"sharepod.dev/gpu-affinity": "a", "sharepod.dev/gpu-latency": "Interactive", "x/gpu": "1"}),
    "uuid": selecting(f'{DEVICE}.uuid == "{UUID}"'),
    "models": selecting(f'{DEVICE}.model in ["A", "B"] && {DEVICE}.uuid in ["{UUID}"]'),
    "several": asking(count=4),
}
REFUSED = {
    "no capacity": without_capacity(),
    "too much time": amounts(timeMilli="1001"),
    "fraction": amounts(timeMilli="0.4"),
    "no time": amounts(timeMilli=None),
    "limit below time": amounts(limitMilli="300"),
    "limit 0": amounts(limitMilli="0", timeMilli="0"),
    "memory without unit": amounts(memory="4"),
    "more memory than any": amounts(memory="2Ei"),
    "best effort without memory": amounts(timeMilli="0", memory=None),
    "unknown capacity": amounts(bandwidth="1"),
    "exclusive with capacity": claim({"sharepod.dev/gpu-mode": "Exclusive"}),
    "exclusive by the name of a line's request": of_a_line(count=2),
    "exclusive by the name of a line's request with selectors": of_a_line(
        selectors=[{"cel": {"expression": f'{DEVICE}.model == "A"'}}]
    ),
    "all devices": asking(allocationMode="All"),
    "17 GPUs": asking(count=17),
    "constraints": devices(constraints=[{"requests": ["gpu"], "matchAttribute": "gpu.sharepod.dev/model"}]),
    "config": devices(config=[{"opaque": {"driver": "gpu.sharepod.dev", "parameters": {"a": 1}}}]),
    "alternatives": claim(
        spec={
            "devices": {
                "requests": [
                    {"name": "gpu", "firstAvailable": [{"name": "a", "deviceClassName": "sharepod.dev"}]},
                ]
            }
        }
    ),
    "another class next to ours": devices(
        requests=[*claim_spec()["devices"]["requests"], {"name": "nic", "exactly": {"deviceClassName": "nic.example"}}]
    ),
    "annotation of another dialect": claim({"gemini/gpu_request": "0.4"}),
    "annotation for a field of the spec": claim({"sharepod.dev/gpu-memory": "4Gi"}),
    "annotation without such a value": claim({"sharepod.dev/gpu-placement": "Anywhere"}),
    "no label": claim({"sharepod.dev/gpu-affinity": "a b"}),
    "no fraction": claim({"sharepod.dev/gpu-request": "half"}),
    "a request above the time": claim({"sharepod.dev/gpu-request": "0.9"}),
    **{
        f"selector {expression}": selecting(expression)
        for expression in (
            "true",
            f'{DEVICE}.model != "A"',
            f'{DEVICE}.model == "A" || true',
            f'{DEVICE}.model.startsWith("A")',
            f'{DEVICE}.memory == "A"',
            'device.driver == "gpu.sharepod.dev"',
        )
    },
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_claim_that_python_reads_is_taken(api: Api, name: str) -> None:
    body = TAKEN[name]
    lower(body)
    assert answer(api, body) == ""
    api.create(f"{CLAIMS}/namespaces/default/resourceclaimtemplates", of_template(body), dryRun="All")


@pytest.mark.promise("operator-claim-at-apply")
@pytest.mark.parametrize("name", REFUSED)
def test_what_python_refuses_the_api_server_refuses_at_apply(api: Api, name: str) -> None:
    body = REFUSED[name]
    with pytest.raises(SpecError) as caught:
        lower(body)
    message = answer(api, body)
    assert message
    field = caught.value.field.rpartition(".exactly.")[2].partition("[0].cel")[0].rpartition("devices.")[2]
    assert field.removeprefix("requests[0].").partition("[1]")[0] in message, (message, caught.value.field)
    with pytest.raises(ApiError):
        api.create(f"{CLAIMS}/namespaces/default/resourceclaimtemplates", of_template(body), dryRun="All")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (amounts(timeMilli="0.4"), "timeMilli: 0.4 is not a whole number of thousandths of one GPU (400 is 0.4 of it)"),
        (amounts(timeMilli="1.5"), "timeMilli: 1.5 is not a whole number"),
        (amounts(timeMilli="-1"), "timeMilli: -1 is not a whole number"),
        (amounts(timeMilli="5k"), "timeMilli: 5000 is not a whole number"),
        (amounts(limitMilli="0"), "limitMilli: 0 is not a whole number"),
        (amounts(limitMilli="300"), "limitMilli: 300 is less than the timeMilli 400; write that or more"),
        (amounts(memory="2Ei"), "memory: 2Ei is no size that a GPU has; write a size with its unit, such as 4Gi"),
        (asking(count=17), "count: 17 is more GPUs than a node has"),
        (asking(allocationMode="All"), 'allocationMode: "All" is not supported'),
        (REFUSED["another class next to ours"], 'deviceClassName: "nic.example" is another class'),
        (claim({"sharepod.dev/gpu-request": "0.9"}), "gpu-request]: 0.9 is more than timeMilli 400; write less, or"),
    ],
)
def test_a_refusal_quotes_the_value(api: Api, body: Object, message: str) -> None:
    assert message in answer(api, body)


@pytest.mark.parametrize(
    ("capacity", "message"),
    [
        ({"timeMilli": "0.4", "memory": "4Gi"}, "timeMilli: 0.4 is not a whole number of thousandths"),
        ({"timeMilli": "400", "limitMilli": "1.5", "memory": "4Gi"}, "limitMilli: 1.5 is not a whole number"),
        ({"timeMilli": "400", "limitMilli": "300", "memory": "4Gi"}, "limitMilli: 300 is less than timeMilli"),
    ],
)
def test_a_refusal_of_the_schedulers_class_quotes_the_value(api: Api, capacity: Object, message: str) -> None:
    exactly = {"deviceClassName": "scheduler.sharepod.dev", "capacity": {"requests": capacity}}
    assert message in answer(api, claim(spec={"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}))


def test_a_template_whose_claims_would_be_refused_is_refused_itself(api: Api) -> None:
    exclusive = {"annotations": {"sharepod.dev/gpu-mode": "Exclusive"}}

    def template(name: str) -> Object:
        request = {"name": name, "exactly": {"deviceClassName": "sharepod.dev"}}
        return {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaimTemplate",
            "metadata": {"name": "whole"},
            "spec": {"metadata": exclusive, "spec": {"devices": {"requests": [request]}}},
        }

    templates = f"{CLAIMS}/namespaces/default/resourceclaimtemplates"
    api.create(templates, template("gpu"), dryRun="All")
    with pytest.raises(ApiError, match="sharepod without capacity is of a claim that the operator makes"):
        api.create(templates, template("sharepod"), dryRun="All")


@pytest.mark.promise("operator-claim-at-apply")
def test_an_admins_access_past_every_share_is_refused_where_kubernetes_allows_it(api: Api, server: Cluster) -> None:
    namespace = server.namespace("admins", labels={"resource.kubernetes.io/admin-access": "true"})
    body, asked = asking(adminAccess=True), "adminAccess: goes past every share"
    with pytest.raises(ApiError, match=asked):
        api.create(f"{CLAIMS}/namespaces/{namespace}/resourceclaims", body, dryRun="All")
    with pytest.raises(ApiError, match=asked):
        api.create(f"{CLAIMS}/namespaces/{namespace}/resourceclaimtemplates", of_template(body), dryRun="All")


def test_a_claim_of_another_class_is_left_alone(api: Api) -> None:
    spec = {"devices": {"requests": [{"name": "nic", "exactly": {"deviceClassName": "nic.example"}}]}}
    assert answer(api, claim({"sharepod.dev/gpu-mode": "Half"}, spec)) == ""


def test_a_claim_of_no_device_at_all_is_left_alone(api: Api) -> None:
    """For a claim without requests, the API server gives policies `requests: null`."""
    body = claim(spec={"devices": {}})
    assert answer(api, body) == ""
    api.create(f"{CLAIMS}/namespaces/default/resourceclaimtemplates", of_template(body), dryRun="All")


def test_an_invalid_annotation_is_refused_on_a_claim_that_exists(api: Api) -> None:
    body = copy.deepcopy(claim())
    body["metadata"]["name"] = "existing"
    api.create(claim_path("default"), body)
    with pytest.raises(ApiError, match="gpu-request"):
        api.patch(claim_path("default", "existing"), {"metadata": {"annotations": {"sharepod.dev/gpu-request": "no"}}})
    api.patch(claim_path("default", "existing"), {"metadata": {"annotations": {"sharepod.dev/gpu-request": "0.2"}}})
    api.delete(claim_path("default", "existing"))


@pytest.mark.promise("operator-claim-class-resource")
@pytest.mark.parametrize("kind", ["containers", "initContainers"])
def test_the_class_by_the_name_of_an_extended_resource_is_refused(api: Api, kind: str) -> None:
    asks = {
        "name": "asks",
        "image": "x",
        "resources": {"limits": {"deviceclass.resource.kubernetes.io/sharepod.dev": "1"}},
    }
    spec: Object = {"containers": [{"name": "main", "image": "x"}]}
    body: Object = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "extended"}, "spec": {**spec, kind: [asks]}}
    with pytest.raises(ApiError, match=r"whole devices, and SharePod publishes none; write sharepod\.dev/gpu-milli"):
        api.create("/api/v1/namespaces/default/pods", body, dryRun="All")
    other = {**asks, "resources": {"limits": {"deviceclass.resource.kubernetes.io/another": "1"}}}
    api.create("/api/v1/namespaces/default/pods", {**body, "spec": {"containers": [other]}}, dryRun="All")


@pytest.mark.promise("operator-scheduler-pool-agents-alone")
def test_an_agent_publishes_devices_of_its_own_node_alone(server: Cluster, api: Api) -> None:
    """An administrator cannot publish devices. An agent cannot publish devices of another driver, node or pool."""
    first, second = server.add_fake_nodes(2, prefix="slices")
    uid = api.get(f"/api/v1/nodes/{first}")["metadata"]["uid"]
    body = slice_body(first, uid, slice_spec(first, [], 1))
    with pytest.raises(ApiError, match="published by SharePod's agents alone"):
        api.create(f"{CLAIMS}/resourceslices", body)
    agents = {
        node: server.api_for(server.service_account_token(NAMESPACE, "sharepod-agent", bound_node=node))
        for node in (first, second)
    }
    with pytest.raises(ApiError, match="denied request"):  # two policies
        agents[first].create(f"{CLAIMS}/resourceslices", {**body, "spec": {**body["spec"], "driver": "gpu.example"}})
    for changes in (
        {"nodeName": second},
        {"pool": {**body["spec"]["pool"], "name": second}},
    ):
        with pytest.raises(ApiError, match=r"driver scheduler.sharepod.dev, of node and pool slices-0 only"):
            agents[first].create(f"{CLAIMS}/resourceslices", {**body, "spec": {**body["spec"], **changes}})
    for name in (slice_name(second), f"{slice_name(first)}-1", f"scheduler.sharepod.dev.{uid}-{second}", "mine"):
        with pytest.raises(ApiError, match=r"may name its ResourceSlice scheduler\.sharepod\.dev-slices-0"):
            agents[first].create(f"{CLAIMS}/resourceslices", {**body, "metadata": {"name": name}})
    agents[first].create(f"{CLAIMS}/resourceslices", slice_body(first, uid, body["spec"], slice_names(first, uid)[1]))
    agents[first].delete(f"{CLAIMS}/resourceslices/{slice_names(first, uid)[1]}")
    path = f"{CLAIMS}/resourceslices/{slice_name(first)}"
    made = agents[first].create(f"{CLAIMS}/resourceslices", body)
    with pytest.raises(ApiError, match="of node and pool slices-1 only"):
        agents[second].delete(path)
    with pytest.raises(ApiError, match="of node and pool slices-1 only"):
        agents[second].request("PUT", path, made)
    agents[first].delete(path)


def test_no_other_driver_takes_the_name_of_a_nodes_slice(api: Api) -> None:
    """A kubelet may publish slices of its own node, and also registers future nodes."""
    spec = {**slice_spec("n", [], 1), "driver": "gpu.example"}
    for name in (slice_name("n"), "scheduler.sharepod.dev.uid-n"):
        with pytest.raises(ApiError, match="is for slices of agents of SharePod"):
            api.create(f"{CLAIMS}/resourceslices", slice_body("n", "uid", spec, name), dryRun="All")
    api.create(f"{CLAIMS}/resourceslices", slice_body("n", "uid", spec, "gpu.example-n"), dryRun="All")


@pytest.mark.promise("operator-claim-class")
def test_the_class_of_pool_scheduler_selects_devices_of_its_driver_and_is_no_extended_resource(api: Api) -> None:
    assert "spec.selectors: must have the expression" in changed_class(api, {"selectors": []})[0]
    refused, kept = changed_class(api, {"extendedResourceName": "example.com/gpu"})
    if not refused:  # an API server without DRAExtendedResource drops the field
        assert "extendedResourceName" not in kept
    else:
        assert "spec.extendedResourceName: counts whole devices" in refused


@pytest.mark.promise("operator-claim-no-slices")
def test_nobody_publishes_devices_of_the_driver(api: Api) -> None:
    assert "only allocator" in published(api)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_applies_and_says_what_is_read(api: Api, server: Cluster, path: Path) -> None:
    assert path.read_text().startswith("# ")
    server.kubectl("apply", "--server-side", "-f", str(path))
    for document in yaml.safe_load_all(path.read_text()):
        metadata = document["metadata"]
        place = f"{CLAIMS}/namespaces/{metadata.get('namespace', 'default')}"
        if document["kind"] == "ResourceClaim":
            lower(api.get(f"{place}/resourceclaims/{metadata['name']}"))
        if document["kind"] == "ResourceClaimTemplate":
            body = api.get(f"{place}/resourceclaimtemplates/{metadata['name']}")["spec"]
            if is_scheduled(body):
                assert fault(body) is None
            else:
                lower(body)
