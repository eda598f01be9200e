"""Resource lines of plain Pods as requests, and their refusals with advice."""

from __future__ import annotations

from typing import Any

import pytest
from sharepod.api.claims.claims import ClaimRequest
from sharepod.api.gpunode import CoRunningPolicy, Latency, Mode
from sharepod.api.pods.plain_pods import asks, lower
from sharepod.api.resource_line import MEMORY, MILLI
from sharepod.api.sharepod import PlacementPolicy, SpecError

GIB = 1 << 30
UUID = "GPU-5a9e0001-0000-4000-8000-000000000001"


def container(milli: Any = None, mib: Any = None, name: str = "main", **fields: Any) -> dict[str, Any]:
    """Return a container with a line, as the API server returns it: requests equal limits."""
    limits = {key: value for key, value in ((MILLI, milli), (MEMORY, mib)) if value is not None}
    return {"name": name, "resources": {"limits": limits, "requests": dict(limits)}, **fields}


def pod(
    *containers: dict[str, Any], init: tuple[dict[str, Any], ...] = (), annotations: dict[str, str] | None = None
) -> dict[str, Any]:
    return {
        "metadata": {"name": "plain", "annotations": annotations or {}},
        "spec": {"containers": list(containers), "initContainers": list(init)},
    }


def line(milli: int | str, mib: int | str | None = None, **annotations: str) -> ClaimRequest:
    """Return the request of a Pod with one container with this line. Annotations are given by key, with `_` for `-`."""
    annotated = {f"sharepod.dev/{key.replace('_', '-')}": value for key, value in annotations.items()}
    return lower(pod(container(milli, mib), annotations=annotated))


def refusal(raw: dict[str, Any]) -> SpecError:
    with pytest.raises(SpecError) as caught:
        lower(raw)
    return caught.value


@pytest.mark.promise("operator-line-meaning")
@pytest.mark.parametrize(
    ("milli", "mib", "count", "each", "bytes_each"),
    [
        ("400", "4096", 1, 400, 4 * GIB),
        ("1", None, 1, 1, None),
        ("1k", None, 1, 1000, None),
        ("2k", "8Ki", 2, 1000, 4 * GIB),
        ("16000", None, 16, 1000, None),
    ],
)
def test_up_to_1000_is_a_share_and_multiples_are_whole_gpus(
    milli: str, mib: str | None, count: int, each: int, bytes_each: int | None
) -> None:
    read = line(milli, mib)
    assert (read.gpu.count, read.gpu.request_milli, read.gpu.memory) == (count, each, bytes_each)
    assert (read.most_milli, read.devices) == (each, (("line", count),))
    assert (read.gpu.mode, read.gpu.limit_milli) == (Mode.SHARED, 1000)


@pytest.mark.promise("operator-line-count")
def test_the_count_annotation_divides_the_line_among_gpus() -> None:
    gpu = line("800", "8192", gpu_count="2").gpu
    assert (gpu.count, gpu.request_milli, gpu.memory) == (2, 400, 4 * GIB)
    error = refusal(pod(container("1500")))
    assert error.field == f"spec.containers[main].resources.limits[{MILLI}]"
    assert "sharepod.dev/gpu-count" in error.message


def test_annotations_refine_the_line() -> None:
    gpu = line(
        "300",
        gpu_limit="0.8",
        gpu_affinity="a",
        gpu_anti_affinity="b",
        gpu_exclusion="c",
        gpu_placement="Spread",
        gpu_models="A100, H100",
        gpu_latency="Interactive",
        gpu_co_running="Deny",
        gpu_group="train",
        gpu_uuids=UUID,
    ).gpu
    assert (gpu.limit_milli, gpu.placement, gpu.models) == (800, PlacementPolicy.SPREAD, ("A100", "H100"))
    assert (gpu.labels.affinity, gpu.labels.anti_affinity, gpu.labels.exclusion) == ("a", "b", "c")
    assert (gpu.latency, gpu.co_running, gpu.uuids) == (Latency.INTERACTIVE, CoRunningPolicy.DENY, (UUID,))
    assert gpu.group == "train"


@pytest.mark.parametrize(
    "annotations",
    [
        {"kubeshare/gpu_limit": "0.5", "kubeshare/GPUID": "team", "kubeshare/sched_exclusion": "me"},
        {"gemini/gpu_limit": "0.5", "gemini/sched_affinity": "team", "gemini/sched_exclusion": "me"},
    ],
)
def test_the_dialects_of_kubeshare_and_gemini_refine_it_too(annotations: dict[str, str]) -> None:
    gpu = lower(pod(container("300"), annotations=annotations)).gpu
    assert (gpu.limit_milli, gpu.labels.affinity, gpu.labels.exclusion) == (500, "team", "me")


@pytest.mark.promise("operator-line-exclusive")
def test_exclusive_is_said_by_the_mode_alone_and_has_whole_gpus() -> None:
    gpu = line("2000", gpu_mode="Exclusive").gpu
    assert (gpu.mode, gpu.count, gpu.request_milli, gpu.memory) == (Mode.EXCLUSIVE, 2, 1000, None)
    assert line("1000").gpu.mode is Mode.SHARED


@pytest.mark.promise("operator-line-effective")
def test_several_containers_have_one_share_of_kubernetes_effective_size() -> None:
    both = pod(container("400", "1024", name="a"), container("200", "1024", name="b"), container(name="silent"))
    gpu = lower(both).gpu
    assert (gpu.request_milli, gpu.memory) == (600, 2 * GIB)
    first = container("800", "512", name="first")
    sidecar = container("100", "512", name="side", restartPolicy="Always")
    assert lower(pod(container("400", "1024"), init=(first,))).gpu.request_milli == 800
    assert lower(pod(container("400", "1024"), init=(sidecar, first))).gpu.request_milli == 900
    assert lower(pod(container("400", "1024"), init=(first, sidecar))).gpu.request_milli == 800
    assert lower(pod(container("400", "1024"), init=(first, sidecar))).gpu.memory == 3 * GIB // 2


@pytest.mark.promise("operator-line-resize-bound")
def test_the_request_annotation_lowers_a_share_and_never_raises_it_above_the_line() -> None:
    read = line("400", gpu_request="0.1")
    assert (read.gpu.request_milli, read.most_milli) == (100, 400)
    assert line("800", gpu_count="2", gpu_request="0.4").gpu.request_milli == 400
    raised = refusal(pod(container("400"), annotations={"sharepod.dev/gpu-request": "0.5"}))
    assert raised.field == "metadata.annotations[sharepod.dev/gpu-request]"
    assert "write 0.4 or less" in raised.message


def test_a_misspelt_annotation_gets_the_nearest_one_that_a_line_may_have() -> None:
    nearest = {"gpu-limt": "gpu-limit", "gpu-reqest": "gpu-request", "gpu-memry": "gpu-memory-isolation"}
    for written, near in nearest.items():
        refused = refusal(pod(container("400"), annotations={f"sharepod.dev/{written}": "0.5"}))
        assert refused.message.startswith(f"is not known; use one of sharepod.dev/{near},"), refused.message
        assert "sharepod.dev/gpu-memory," not in refused.message


LIMITS = "spec.containers[main].resources.limits"
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no line": (pod(container()), "spec.containers: resources.limits", "is required"),
    "zero": (pod(container("0")), f"{LIMITS}[{MILLI}]", "0 asks for nothing"),
    "fraction": (pod(container("0.4")), f"{LIMITS}[{MILLI}]", "is not whole"),
    "negative": (pod(container("-400")), f"{LIMITS}[{MILLI}]", "is negative"),
    "no number": (pod(container("half")), f"{LIMITS}[{MILLI}]", "is not a quantity"),
    "17 GPUs": (pod(container("17000")), f"{LIMITS}[{MILLI}]", "write at most 16000"),
    "together between": (
        pod(container("700", name="a"), container("600", name="b")),
        f"spec.containers[a].resources.limits[{MILLI}]",
        "1300 is neither",
    ),
    "count does not divide": (
        pod(container("401"), annotations={"sharepod.dev/gpu-count": "2"}),
        f"{LIMITS}[{MILLI}]",
        "write a multiple of 2 up to 2000",
    ),
    "more than whole GPUs of the count": (
        pod(container("3000"), annotations={"sharepod.dev/gpu-count": "2"}),
        f"{LIMITS}[{MILLI}]",
        "up to 2000",
    ),
    "memory does not divide": (
        pod(container("2000", "4097")),
        f"{LIMITS}[{MEMORY}]",
        "write a multiple of 2",
    ),
    "zero memory": (pod(container("400", "0")), f"{LIMITS}[{MEMORY}]", "write a whole number such as 4096"),
    "memory alone": (pod(container(None, "4096")), f"{LIMITS}[{MEMORY}]", "stands without"),
    "memory of no GPU": (pod(container("400", "2G")), f"{LIMITS}[{MEMORY}]", "more memory than any node"),
    "memory of one container alone": (
        pod(container("400", "4096", name="a"), container("200", name="b")),
        f"spec.containers[b].resources.limits[{MEMORY}]",
        "in each container with a line, or in none",
    ),
    "unknown resource": (
        pod({"name": "main", "resources": {"limits": {"sharepod.dev/gpu": "1"}}}),
        f"{LIMITS}[sharepod.dev/gpu]",
        f"use {MILLI}, {MEMORY}",
    ),
    "request without limit": (
        pod({"name": "main", "resources": {"requests": {MILLI: "400"}}}),
        f"{LIMITS}[{MILLI}]",
        "write only limits",
    ),
    "request unlike limit": (
        pod({"name": "main", "resources": {"limits": {MILLI: "400"}, "requests": {MILLI: "300"}}}),
        f"{LIMITS}[{MILLI}]",
        "write only limits",
    ),
    "exclusive part": (
        pod(container("400"), annotations={"sharepod.dev/gpu-mode": "Exclusive"}),
        f"{LIMITS}[{MILLI}]",
        "write 1000 or remove",
    ),
    "exclusive with memory": (
        pod(container("1000", "4096"), annotations={"sharepod.dev/gpu-mode": "Exclusive"}),
        f"{LIMITS}[{MEMORY}]",
        "all memory",
    ),
    "exclusive with request": (
        pod(
            container("1000"),
            annotations={"sharepod.dev/gpu-mode": "Exclusive", "sharepod.dev/gpu-request": "0.5"},
        ),
        "metadata.annotations[sharepod.dev/gpu-request]",
        "leave the field out",
    ),
    "unknown annotation": (
        pod(container("400"), annotations={"sharepod.dev/gpu-share": "0.4"}),
        "metadata.annotations[sharepod.dev/gpu-share]",
        "is not known",
    ),
    "annotation out of range": (
        pod(container("400"), annotations={"sharepod.dev/gpu-limit": "1.5"}),
        "metadata.annotations[sharepod.dev/gpu-limit]",
        "more than one GPU",
    ),
    "limit below line": (
        pod(container("400"), annotations={"kubeshare/gpu_limit": "0.3"}),
        "metadata.annotations[kubeshare/gpu_limit]",
        "write 0.4 or more",
    ),
    "given twice": (
        pod(container("400"), annotations={"kubeshare/gpu_limit": "0.5", "sharepod.dev/gpu-limit": "0.5"}),
        "metadata.annotations[sharepod.dev/gpu-limit]",
        "set only one of them",
    ),
    "memory by annotation": (
        pod(container("400"), annotations={"gemini/gpu_mem": "4294967296"}),
        "metadata.annotations[gemini/gpu_mem]",
        MEMORY,
    ),
    "best effort without memory": (
        pod(container("400"), annotations={"sharepod.dev/gpu-request": "0"}),
        "metadata.annotations[sharepod.dev/gpu-request]",
        MEMORY,
    ),
    "fewer UUIDs than GPUs": (
        pod(container("2000"), annotations={"sharepod.dev/gpu-uuids": UUID}),
        "metadata.annotations[sharepod.dev/gpu-uuids]",
        "name at least 2",
    ),
}


@pytest.mark.promise("operator-line-refused")
@pytest.mark.parametrize("name", REFUSED)
def test_a_meaningless_value_is_refused_by_field_with_the_remedy(name: str) -> None:
    raw, field, words = REFUSED[name]
    error = refusal(raw)
    assert error.field.startswith(field)
    assert words in error.message


def test_a_pod_asks_by_any_resource_under_our_prefix() -> None:
    assert asks(pod(container("400")))
    assert asks(pod(container(), init=(container("1", name="init"),)))
    assert asks(pod({"name": "main", "resources": {"requests": {"sharepod.dev/gpu": "1"}}}))
    assert not asks(pod(container(), annotations={"sharepod.dev/gpu-limit": "0.5"}))
