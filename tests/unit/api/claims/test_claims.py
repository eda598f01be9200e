"""ResourceClaims read as requests for shares, and refusals of claims with advice."""

from __future__ import annotations

from typing import Any

import pytest
from sharepod.api.claims.claims import GATE_HINT, ClaimRequest, is_ours, lower
from sharepod.api.gpunode import CoRunningPolicy, Latency, MemoryIsolation, Mode
from sharepod.api.sharepod import PlacementPolicy, SpecError

GIB = 1 << 30
UUID, OTHER = "GPU-5a9e0001-0000-4000-8000-000000000001", "GPU-5a9e0002-0000-4000-8000-000000000002"
CAPACITY = {"timeMilli": "400", "memory": "4Gi"}
EXCLUSIVE = {"sharepod.dev/gpu-mode": "Exclusive"}


def claim(*requests: dict[str, Any], annotations: dict[str, str] | None = None, **devices: Any) -> dict[str, Any]:
    """Return a claim with these requests. Without any, it has one for 0.4 and 4 GiB."""
    listed = list(requests) or [request()]
    metadata = {"name": "share", "annotations": annotations or {}}
    return {"metadata": metadata, "spec": {"devices": {"requests": listed, **devices}}}


def request(name: str = "gpu", capacity: dict[str, Any] | None = CAPACITY, **exactly: Any) -> dict[str, Any]:
    capacities = {} if capacity is None else {"capacity": {"requests": capacity}}
    return {"name": name, "exactly": {"deviceClassName": "sharepod.dev", **capacities, **exactly}}


def selected(*expressions: str) -> ClaimRequest:
    return lower(claim(request(selectors=[{"cel": {"expression": expression}} for expression in expressions])))


def refusal(raw: dict[str, Any]) -> SpecError:
    with pytest.raises(SpecError) as caught:
        lower(raw)
    return caught.value


def test_capacity_is_time_limit_and_memory_of_each_gpu() -> None:
    read = lower(claim(request(capacity={"timeMilli": "400", "limitMilli": "700", "memory": "4Gi"}, count=2)))
    gpu = read.gpu
    assert (gpu.request_milli, gpu.limit_milli, gpu.memory, gpu.count) == (400, 700, 4 * GIB, 2)
    assert read.devices == (("gpu", 2),)
    assert (gpu.mode, gpu.memory_isolation, gpu.latency) == (Mode.SHARED, MemoryIsolation.ENFORCED, Latency.NORMAL)


def test_a_claim_without_limit_may_use_all_idle_time_and_without_memory_gets_its_fraction() -> None:
    gpu = lower(claim(request(capacity={"timeMilli": "250"}))).gpu
    assert (gpu.limit_milli, gpu.memory) == (1000, None)
    assert gpu.memory_on(16 * GIB) == 4 * GIB


@pytest.mark.parametrize("written", ["1k", "1000", 1000, "1e3", "1000.0", "1000000m"])
def test_a_number_means_the_same_however_the_api_server_writes_it(written: object) -> None:
    assert lower(claim(request(capacity={"timeMilli": written}))).gpu.request_milli == 1000


def test_annotations_say_what_a_claims_spec_has_no_place_for() -> None:
    annotations = {
        "sharepod.dev/gpu-memory-isolation": "None",
        "sharepod.dev/gpu-latency": "Interactive",
        "sharepod.dev/gpu-co-running": "Deny",
        "sharepod.dev/gpu-group": "train",
        "sharepod.dev/gpu-affinity": "a",
        "sharepod.dev/gpu-anti-affinity": "b",
        "sharepod.dev/gpu-exclusion": "c",
        "sharepod.dev/gpu-placement": "Spread",
        "sharepod.dev/gpu-models": "A100, H100",
        "team.example/gpu-request": "not ours",
    }
    gpu = lower(claim(annotations=annotations)).gpu
    assert (gpu.labels.affinity, gpu.labels.anti_affinity, gpu.labels.exclusion) == ("a", "b", "c")
    assert (gpu.memory_isolation, gpu.latency) == (MemoryIsolation.NONE, Latency.INTERACTIVE)
    assert (gpu.co_running, gpu.group) == (CoRunningPolicy.DENY, "train")
    assert (gpu.placement, gpu.models) == (PlacementPolicy.SPREAD, ("A100", "H100"))


def test_an_exclusive_claim_has_whole_gpus_and_says_no_capacity() -> None:
    exclusive = {"sharepod.dev/gpu-mode": "Exclusive"}
    gpu = lower(claim(request(capacity=None, count=2), annotations=exclusive)).gpu
    assert (gpu.mode, gpu.request_milli, gpu.count) == (Mode.EXCLUSIVE, 1000, 2)
    assert refusal(claim(annotations=exclusive)).field == "spec.devices.requests[0].exactly.capacity"


@pytest.mark.promise("operator-claim-gate")
@pytest.mark.parametrize("dropped", [None, {}])
def test_a_claim_without_capacity_gets_no_default_and_an_event_about_the_gate(dropped: dict[str, Any] | None) -> None:
    error = refusal(claim(request(capacity=dropped)))
    assert error.message == GATE_HINT
    assert "DRAConsumableCapacity" in error.message


def test_best_effort_names_its_memory() -> None:
    assert lower(claim(request(capacity={"timeMilli": "0", "memory": "1Gi"}))).gpu.request_milli == 0
    assert refusal(claim(request(capacity={"timeMilli": "0"}))).field.endswith("capacity.requests.memory")


def test_requests_of_equal_shape_are_one_share_on_several_gpus() -> None:
    read = lower(claim(request("a"), request("b", count=2)))
    assert read.gpu.count == 3
    assert read.devices == (("a", 1), ("b", 2))
    error = refusal(claim(request("a"), request("b", capacity={"timeMilli": "500"})))
    assert error.field == "spec.devices.requests[1].exactly"


DEVICE = 'device.attributes["gpu.sharepod.dev"]'


@pytest.mark.parametrize(
    ("expressions", "uuids", "models"),
    [
        ([f'{DEVICE}.uuid == "{UUID}"'], (UUID,), ()),
        (["device . attributes[ 'gpu.sharepod.dev' ].model=='A100'"], (), ("A100",)),
        ([f'{DEVICE}.model in ["A100", "H100"]'], (), ("A100", "H100")),
        ([f'{DEVICE}.model in ["A100", "H100"] && {DEVICE}.uuid in ["{UUID}"]'], (UUID,), ("A100", "H100")),
        ([f'{DEVICE}.model in ["A100", "H100"]', f'{DEVICE}.model == "H100"'], (), ("H100",)),
    ],
)
def test_selectors_name_uuids_and_models(expressions: list[str], uuids: object, models: object) -> None:
    gpu = selected(*expressions).gpu
    assert (gpu.uuids, gpu.models) == (uuids, models)


@pytest.mark.promise("operator-claim-selectors")
@pytest.mark.parametrize(
    "expression",
    [
        "true",
        "",
        " ",
        f"{DEVICE}.uuid",
        f'{DEVICE}.uuid == "{UUID}" || true',
        f'{DEVICE}.uuid != "{UUID}"',
        f'!({DEVICE}.uuid == "{UUID}")',
        f'{DEVICE}.uuid == "{UUID}" &&',
        f"{DEVICE}.uuid == {DEVICE}.uuid",
        f'{DEVICE}.name == "x"',
        f"{DEVICE}.model in []",
        f'{DEVICE}.model in ["A100",]',
        f'{DEVICE}.model in ["A100"',
        f'{DEVICE}.model.startsWith("A")',
        f'{DEVICE}["model"] == "A100"',
        'device.attributes["other.example"].model == "A100"',
        'device.attributes[gpu].model == "A100"',
        'device.capacity["gpu.sharepod.dev"].memory == "1"',
        f"{DEVICE}.model == 'it\\'s'",
        f'{DEVICE}.model == "a" "b"',
        f'{DEVICE}.model == "a"; true',
        '"device"."attributes"["gpu.sharepod.dev"].model == "A100"',
    ],
)
def test_any_other_expression_is_refused_with_an_example(expression: str) -> None:
    with pytest.raises(SpecError) as caught:
        selected(expression)
    assert caught.value.field == "spec.devices.requests[0].exactly.selectors[0].cel.expression"
    assert "only == and in on uuid and model" in caught.value.message


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        (f"{DEVICE}.model in [" + ", ".join(['"T4"'] * 65) + "]", "has a list of more than 64 texts; write at most 64"),
        (" && ".join([f'{DEVICE}.model == "T4"'] * 65), "has more than 64 comparisons; write at most 64"),
    ],
    ids=["a list", "comparisons"],
)
def test_selectors_that_name_too_many_say_so(expression: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        selected(expression)


def test_selectors_that_leave_nothing_or_too_few_are_refused() -> None:
    with pytest.raises(SpecError, match="leaves no uuid"):
        selected(f'{DEVICE}.uuid == "{UUID}"', f'{DEVICE}.uuid == "{OTHER}"')
    with pytest.raises(SpecError, match="is not the UUID of a GPU"):
        selected(f'{DEVICE}.uuid == "gpu-1"')
    pinned = [{"cel": {"expression": f'{DEVICE}.uuid == "{UUID}"'}}]
    assert "names 1 GPUs but count is 2" in refusal(claim(request(selectors=pinned, count=2))).message
    twice = [{"cel": {"expression": f'{DEVICE}.uuid in ["{UUID}", "{UUID}"]'}}]
    assert "names 1 GPUs but count is 2" in refusal(claim(request(selectors=twice, count=2))).message
    both = claim(request(selectors=pinned), annotations={"sharepod.dev/gpu-uuids": OTHER})
    assert refusal(both).field == "metadata.annotations[sharepod.dev/gpu-uuids]"


@pytest.mark.parametrize(
    ("raw", "field", "advice"),
    [
        (claim(request(capacity={"timeMilli": "1001"})), "capacity.requests.timeMilli", "count"),
        (claim(request(capacity={"timeMilli": "0.4"})), "capacity.requests.timeMilli", "whole number"),
        (claim(request(capacity={"timeMilli": "-1"})), "capacity.requests.timeMilli", "whole number"),
        (claim(request(capacity={"memory": "4Gi"})), "capacity.requests.timeMilli", "is required"),
        (claim(request(capacity={**CAPACITY, "limitMilli": "399"})), "capacity.requests.limitMilli", "400 or more"),
        (claim(request(capacity={**CAPACITY, "limitMilli": "0"})), "capacity.requests.limitMilli", "at least 1"),
        (claim(request(capacity={**CAPACITY, "memory": "4"})), "capacity.requests.memory", "4Gi"),
        (claim(request(capacity={**CAPACITY, "memory": "2Ei"})), "capacity.requests.memory", "4Gi"),
        (claim(request(capacity={**CAPACITY, "bandwidth": "1"})), "capacity.requests.bandwidth", "remove it"),
        (claim(request(count=17)), ".count", "1 to 16"),
        (claim(request("a", count=9), request("b", count=8)), ".count", "at most 16"),
        (claim(request(allocationMode="All")), ".allocationMode", "ExactCount"),
        (claim(request(adminAccess=True)), ".adminAccess", "leave it out"),
        (claim(request(), request("nic", deviceClassName="nic.example")), ".deviceClassName", "claim of its own"),
        (claim({"name": "gpu", "firstAvailable": [{"deviceClassName": "sharepod.dev"}]}), "firstAvailable", "exactly"),
        (claim(constraints=[{"matchAttribute": "a/b"}]), "spec.devices.constraints", "leave it out"),
        (claim(config=[{"opaque": {"driver": "gpu.sharepod.dev"}}]), "spec.devices.config", "leave it out"),
        (claim(request("line", None, count=2), annotations=EXCLUSIVE), ".name", "use another name"),
        (claim(request("a", None), request("line", {}), annotations=EXCLUSIVE), "[1].name", "use another name"),
        (claim(annotations={"sharepod.dev/gpu-memory": "4Gi"}), "gpu-memory]", "remove it"),
        (claim(annotations={"kubeshare/gpu_request": "0.4"}), "gpu_request]", "remove it"),
        (claim(annotations={"sharepod.dev/gpu-latency": "Soon"}), "gpu-latency]", "Normal or Interactive"),
        (claim(annotations={"sharepod.dev/gpu-co-running": "no"}), "gpu-co-running]", "Allow or Deny"),
        (claim(annotations={"sharepod.dev/gpu-group": "other/train"}), "gpu-group]", "is not a label"),
    ],
)
def test_an_unsupported_field_is_refused_with_name_and_remedy(raw: dict[str, Any], field: str, advice: str) -> None:
    error = refusal(raw)
    assert error.field.endswith(field)
    assert advice in error.message


@pytest.mark.promise("operator-claim-resize-bound")
def test_the_annotation_lowers_a_share_and_never_raises_it_above_the_spec() -> None:
    read = lower(claim(annotations={"sharepod.dev/gpu-request": "0.2"}))
    assert (read.gpu.request_milli, read.most_milli) == (200, 400)
    assert lower(claim(annotations={"sharepod.dev/gpu-request": "0.4"})).gpu.request_milli == 400
    error = refusal(claim(annotations={"sharepod.dev/gpu-request": "0.401"}))
    assert error.field == "metadata.annotations[sharepod.dev/gpu-request]"
    assert "400" in error.message


def test_a_claim_is_ours_by_its_class_alone() -> None:
    assert is_ours(claim())
    assert is_ours(claim(request("nic", deviceClassName="nic.example"), request()))
    assert is_ours(claim({"name": "gpu", "firstAvailable": [{"deviceClassName": "sharepod.dev"}]}))
    assert not is_ours(claim(request("nic", deviceClassName="nic.example")))
    assert not is_ours({"metadata": {}, "spec": {"devices": {}}})
