"""SharePods with invalid annotations, and with texts that are too long."""

from __future__ import annotations

from .malformed_case import SHARE, UUID, Case

ANNOTATIONS: tuple[Case, ...] = (
    Case("block and annotations", "gemini/gpu_request", "set only one of them", SHARE, {"gemini/gpu_request": "0.5"}),
    Case(
        "one field in two dialects",
        "kubeshare/gpu_request",
        "set only one of them",
        annotations={"gemini/gpu_request": "0.5", "kubeshare/gpu_request": "0.5"},
    ),
    Case(
        "affinity and GPUID",
        "kubeshare/GPUID",
        "set only one of them",
        annotations={"kubeshare/gpu_request": "0.5", "kubeshare/GPUID": "a", "kubeshare/sched_affinity": "b"},
    ),
    Case(
        "misspelt key",
        "kubeshare/gpu_requst",
        "use one of kubeshare/gpu_request",
        annotations={"kubeshare/gpu_requst": "0.5"},
    ),
    Case(
        "misspelt native key",
        "sharepod.dev/gpu-mem",
        "use one of sharepod.dev/gpu-memory, ",
        annotations={"sharepod.dev/gpu-request": "0.5", "sharepod.dev/gpu-mem": "4Gi"},
    ),
    Case("percent", "gemini/gpu_request", "is more than one GPU", annotations={"gemini/gpu_request": "150%"}),
    Case("blank", "sharepod.dev/gpu-request", '"400m" or "40%"', annotations={"sharepod.dev/gpu-request": "400 m"}),
    Case("tiny m", "sharepod.dev/gpu-request", "such as 0.001", annotations={"sharepod.dev/gpu-request": "0.4m"}),
    Case("tiny, annotated", "gemini/gpu_request", "such as 0.001", annotations={"gemini/gpu_request": "0.0001"}),
    Case("exponent", "gemini/gpu_request", 'such as "0.4"', annotations={"gemini/gpu_request": "5e-1"}),
    Case("empty request", "gemini/gpu_request", 'such as "0.4"', annotations={"gemini/gpu_request": ""}),
    Case(
        "more than one GPU, annotated",
        "gemini/gpu_request",
        "ask for several GPUs with count",
        annotations={"gemini/gpu_request": "1.5"},
    ),
    Case(
        "finer than a thousandth, annotated",
        "kubeshare/gpu_limit",
        "such as 0.667",
        annotations={"kubeshare/gpu_request": "0.5", "kubeshare/gpu_limit": "0.6667"},
    ),
    Case(
        "limit under request, annotated",
        "kubeshare/gpu_limit",
        "write 0.5 or more",
        annotations={"kubeshare/gpu_request": "0.5", "kubeshare/gpu_limit": "0.4"},
    ),
    Case(
        "limit of nothing, annotated",
        "kubeshare/gpu_limit",
        "write at least 0.001",
        annotations={"kubeshare/gpu_request": "0", "kubeshare/gpu_limit": "0.0", "kubeshare/gpu_mem": "4294967296"},
    ),
    Case(
        "bytes with a unit",
        "gemini/gpu_mem",
        "sharepod.dev/gpu-memory",
        annotations={"gemini/gpu_request": "0.5", "gemini/gpu_mem": "4Gi"},
    ),
    Case(
        "few bytes",
        "gemini/gpu_mem",
        "in bytes, such as 4294967296",
        annotations={"gemini/gpu_request": "0.5", "gemini/gpu_mem": "4096"},
    ),
    Case(
        "no quantity",
        "sharepod.dev/gpu-memory",
        "4Gi, 512Mi",
        annotations={"sharepod.dev/gpu-request": "0.5", "sharepod.dev/gpu-memory": "4 GB"},
    ),
    Case(
        "best effort without memory, foreign",
        "kubeshare/gpu_mem",
        "such as 4294967296",
        annotations={"kubeshare/gpu_request": "0"},
    ),
    Case(
        "best effort without memory, native",
        "sharepod.dev/gpu-memory",
        "such as 4Gi",
        annotations={"sharepod.dev/gpu-request": "0.0"},
    ),
    Case("no request, foreign", "gemini/gpu_request", 'such as "0.4"', annotations={"gemini/gpu_limit": "0.5"}),
    Case(
        "no request, native",
        "sharepod.dev/gpu-request",
        'such as "0.4"',
        annotations={"sharepod.dev/gpu-memory": "4Gi"},
    ),
    Case(
        "exclusive with request, annotated",
        "sharepod.dev/gpu-request",
        "mode: Shared",
        annotations={"sharepod.dev/gpu-mode": "Exclusive", "sharepod.dev/gpu-request": "0.5"},
    ),
    Case(
        "count that is no number",
        "sharepod.dev/gpu-count",
        "a whole number from 1 to 16",
        annotations={"sharepod.dev/gpu-request": "0.5", "sharepod.dev/gpu-count": "two"},
    ),
    Case(
        "count too large",
        "sharepod.dev/gpu-count",
        "a whole number from 1 to 16",
        annotations={"sharepod.dev/gpu-request": "0.5", "sharepod.dev/gpu-count": "17"},
    ),
    Case(
        "unknown mode, annotated",
        "sharepod.dev/gpu-mode",
        "Shared or Exclusive",
        annotations={"sharepod.dev/gpu-request": "0.5", "sharepod.dev/gpu-mode": "exclusive"},
    ),
    Case(
        "unknown latency, annotated",
        "sharepod.dev/gpu-latency",
        "Normal or Interactive",
        annotations={"sharepod.dev/gpu-request": "0.5", "sharepod.dev/gpu-latency": "low"},
    ),
    Case(
        "movable that is neither, annotated",
        "sharepod.dev/gpu-movable",
        "true or false",
        annotations={"sharepod.dev/gpu-request": "0.5", "sharepod.dev/gpu-movable": "yes"},
    ),
    Case(
        "exclusive and interactive, annotated",
        "sharepod.dev/gpu-latency",
        "mode: Shared",
        annotations={"sharepod.dev/gpu-mode": "Exclusive", "sharepod.dev/gpu-latency": "Interactive"},
    ),
    Case(
        "best effort and interactive, annotated",
        "sharepod.dev/gpu-latency",
        "write a request such as 0.3",
        annotations={
            "sharepod.dev/gpu-request": "0",
            "sharepod.dev/gpu-memory": "4Gi",
            "sharepod.dev/gpu-latency": "Interactive",
        },
    ),
    Case(
        "unknown isolation, annotated",
        "sharepod.dev/gpu-memory-isolation",
        "Enforced or None",
        annotations={"sharepod.dev/gpu-request": "0.5", "sharepod.dev/gpu-memory-isolation": "off"},
    ),
    Case(
        "unknown placement, annotated",
        "sharepod.dev/gpu-placement",
        "Binpack or Spread",
        annotations={"sharepod.dev/gpu-request": "0.5", "sharepod.dev/gpu-placement": "tight"},
    ),
    Case(
        "label with a blank, annotated",
        "kubeshare/sched_anti-affinity",
        "up to 63 letters, digits",
        annotations={"kubeshare/gpu_request": "0.5", "kubeshare/sched_anti-affinity": "a b"},
    ),
    Case(
        "GPUID that is no label",
        "kubeshare/GPUID",
        "up to 63 letters, digits",
        annotations={"kubeshare/gpu_request": "0.5", "kubeshare/GPUID": "a/b"},
    ),
    Case(
        "empty list of models",
        "sharepod.dev/gpu-models",
        "commas between them",
        annotations={"sharepod.dev/gpu-request": "0.5", "sharepod.dev/gpu-models": "A100,,H100"},
    ),
    Case(
        "no UUID, annotated",
        "sharepod.dev/gpu-uuids",
        "nvidia-smi -L",
        annotations={"sharepod.dev/gpu-request": "0.5", "sharepod.dev/gpu-uuids": UUID + ", 1"},
    ),
    Case(
        "fewer UUIDs than GPUs, annotated",
        "sharepod.dev/gpu-uuids",
        "name at least 2, or none",
        annotations={"sharepod.dev/gpu-request": "0.5", "sharepod.dev/gpu-count": "2", "sharepod.dev/gpu-uuids": UUID},
    ),
    Case(
        "a node by name without GPUID",
        "spec.nodeName",
        "nodeSelector on kubernetes.io/hostname",
        annotations={"kubeshare/gpu_request": "0.5"},
        pod={"nodeName": "node-0"},
    ),
)

LONG: tuple[Case, ...] = (
    Case(
        "many annotations",
        "metadata.annotations: has 150",
        "write at most 1024",
        SHARE,
        annotations={f"example.com/a{number}": "x" for number in range(1_500)},
    ),
    Case(
        "a long memory, annotated",
        "sharepod.dev/gpu-memory]: has 100000 characters",
        "write at most 64",
        annotations={"sharepod.dev/gpu-request": "0.5", "sharepod.dev/gpu-memory": "1" * 100_000},
    ),
    Case(
        "a long label, annotated",
        "gemini/sched_affinity]: has 120000 characters",
        "write at most 64",
        annotations={"gemini/gpu_request": "0.5", "gemini/sched_affinity": "x" * 120_000},
    ),
    Case(
        "a long list, annotated",
        "sharepod.dev/gpu-models]: has 120000 characters",
        "write at most 8192",
        annotations={"sharepod.dev/gpu-request": "0.5", "sharepod.dev/gpu-models": "," * 120_000},
    ),
)
