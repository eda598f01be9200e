"""SharePods that cannot be meant, with the field that each refusal has to name and the mend that it has to offer."""

from __future__ import annotations

from .malformed_annotations import ANNOTATIONS, LONG
from .malformed_case import CONTAINER, SHARE, UUID, Case, nested

BLOCKS: tuple[Case, ...] = (
    Case("more than one GPU", "spec.gpu.request", "count: 2 with request 0.7", {"request": 1.4}),
    Case("percent", "spec.gpu.request", "write 0 to 1", {"request": 40}),
    Case("negative request", "spec.gpu.request", "write a fraction of a GPU, 0 to 1", {"request": -0.1}),
    Case("finer than a thousandth", "spec.gpu.request", "such as 0.333", {"request": 0.3333}),
    Case("fraction as text", "spec.gpu.request", "must be of type number", {"request": "0.4"}),
    Case("limit over one", "spec.gpu.limit", "count: 2 with limit 0.75", {"request": 0.5, "limit": 1.5}),
    Case(
        "limit under request",
        "spec.gpu.limit",
        "0.3 is less than the request 0.5; write that or more",
        {"request": 0.5, "limit": 0.3},
    ),
    Case("limit of nothing", "spec.gpu.limit", "write at least 0.001", {"request": 0, "limit": 0, "memory": "1Gi"}),
    Case("no request", "spec.gpu.request", "such as 0.4, or use mode: Exclusive", {"memory": "4Gi"}),
    Case("best effort without memory", "spec.gpu.memory", "write a size such as 4Gi", {"request": 0}),
    Case(
        "exclusive with request",
        "spec.gpu.request",
        "leave request out or use mode: Shared",
        {"mode": "Exclusive", "request": 0.5},
    ),
    Case(
        "exclusive with limit",
        "spec.gpu.limit",
        "leave limit out or use mode: Shared",
        {"mode": "Exclusive", "limit": 0.5},
    ),
    Case(
        "exclusive with memory",
        "spec.gpu.memory",
        "leave memory out or use mode: Shared",
        {"mode": "Exclusive", "memory": "4Gi"},
    ),
    Case(
        "memory of no unit known",
        "spec.gpu.memory",
        "4Gi, 512Mi or a number of bytes",
        {"request": 0.4, "memory": "4GB"},
    ),
    Case("memory without its unit", "spec.gpu.memory", "with its unit, such as 4Gi", {"request": 0.4, "memory": 4}),
    Case("negative memory", "spec.gpu.memory", "such as 4Gi", {"request": 0.4, "memory": "-4Gi"}),
    Case("memory beyond all GPUs", "spec.gpu.memory", "such as 4Gi", {"request": 0.4, "memory": "2Ei"}),
    Case("no GPU at all", "spec.gpu.count", "greater than or equal to 1", {"request": 0.4, "count": 0}),
    Case("too many GPUs", "spec.gpu.count", "less than or equal to 16", {"request": 0.4, "count": 17}),
    Case("unknown mode", "spec.gpu.mode", '"Shared", "Exclusive"', {"request": 0.4, "mode": "shared"}),
    Case(
        "unknown isolation",
        "spec.gpu.memoryIsolation",
        '"Enforced", "None"',
        {"request": 0.4, "memoryIsolation": "Soft"},
    ),
    Case("unknown latency", "spec.gpu.latency", '"Normal", "Interactive"', {"request": 0.4, "latency": "Low"}),
    Case("movable that is no boolean", "spec.gpu.movable", "boolean", {"request": 0.4, "movable": "yes"}),
    Case(
        "exclusive and interactive",
        "spec.gpu.latency",
        "leave latency out or use mode: Shared",
        {"mode": "Exclusive", "latency": "Interactive"},
    ),
    Case(
        "best effort and interactive",
        "spec.gpu.latency",
        "write a request such as 0.3",
        {"request": 0, "memory": "4Gi", "latency": "Interactive"},
    ),
    Case("unknown placement", "spec.gpu.placement", '"Binpack", "Spread"', {"request": 0.4, "placement": "Pack"}),
    Case("affinity that is no label", "spec.gpu.affinity", "letters, digits", {"request": 0.4, "affinity": "a b"}),
    Case(
        "anti-affinity that is no label",
        "spec.gpu.antiAffinity",
        "letters, digits",
        {"request": 0.4, "antiAffinity": "-a"},
    ),
    Case(
        "exclusion that is too long",
        "spec.gpu.exclusion",
        "than 63",
        {"request": 0.4, "exclusion": "x" * 64},
    ),
    Case("index as UUID", "spec.gpu.uuids[0]", "nvidia-smi -L", {"request": 0.4, "uuids": ["0"]}),
    Case(
        "fewer UUIDs than GPUs",
        "spec.gpu.uuids",
        "name at least 2, or none",
        {"request": 0.4, "count": 2, "uuids": [UUID]},
    ),
    Case("misspelt field", "spec.gpu.requst", "unknown field", {"requst": 0.4}),
    Case("memory of many digits", "spec.gpu.memory", "than 64", {"request": 0.4, "memory": "1" * 100_000}),
)

PODS: tuple[Case, ...] = (
    Case("neither block nor annotations", "spec.gpu", "such as {request: 0.4}"),
    Case(
        "a whole GPU of the device plugin",
        "spec.containers[main].resources.limits[nvidia.com/gpu]",
        "write spec.gpu.count",
        SHARE,
        container={"resources": {"limits": {"nvidia.com/gpu": 1}}},
    ),
    *(
        Case(
            f"the line of a plain Pod among {kind}",
            f"spec.containers[main].resources.{kind}[sharepod.dev/gpu-milli]",
            "spec.gpu of the SharePod says the share",
            SHARE,
            container={"resources": {kind: {"sharepod.dev/gpu-milli": "400"}}},
        )
        for kind in ("limits", "requests")
    ),
    Case(
        "a MIG slice",
        "resources.requests[nvidia.com/mig-1g.5gb]",
        "write spec.gpu.count",
        SHARE,
        container={"resources": {"requests": {"nvidia.com/mig-1g.5gb": 1}}},
    ),
    Case(
        "a GPU of NVIDIA's DRA driver by its class's resource",
        "resources.limits[deviceclass.resource.kubernetes.io/gpu.nvidia.com]",
        "write spec.gpu.count",
        SHARE,
        container={"resources": {"limits": {"deviceclass.resource.kubernetes.io/gpu.nvidia.com": 1}}},
    ),
    Case(
        "a MIG slice of NVIDIA's DRA driver by its class's resource",
        "resources.requests[deviceclass.resource.kubernetes.io/mig.nvidia.com]",
        "write spec.gpu.count",
        SHARE,
        container={"resources": {"requests": {"deviceclass.resource.kubernetes.io/mig.nvidia.com": 1}}},
    ),
    Case(
        "a device of CRI-O by annotation",
        "metadata.annotations[io.kubernetes.cri-o.Devices]",
        "remove it",
        SHARE,
        annotations={"io.kubernetes.cri-o.Devices": "/dev/nvidia0"},
    ),
    Case(
        "a node by name", "spec.nodeName", "nodeSelector on kubernetes.io/hostname", SHARE, pod={"nodeName": "node-0"}
    ),
    Case(
        "our volume's name",
        "spec.volumes",
        "choose another",
        SHARE,
        pod={"volumes": [{"name": "sharepod-gpu", "emptyDir": {}}]},
    ),
    Case(
        "our claim's name",
        "spec.resourceClaims",
        "choose another",
        SHARE,
        pod={"resourceClaims": [{"name": "sharepod-gpu", "resourceClaimName": "mine"}]},
    ),
    Case(
        "our volume's driver",
        "spec.volumes[mine]",
        "remove this volume",
        SHARE,
        pod={"volumes": [{"name": "mine", "csi": {"driver": "gpu.sharepod.dev"}}]},
    ),
    Case(
        "our mount path",
        "spec.containers[main].volumeMounts",
        "mount this volume elsewhere",
        SHARE,
        container={"volumeMounts": [{"name": "x", "mountPath": "/etc/ld.so.preload"}]},
    ),
    Case(
        "our mount path with other slashes",
        "spec.containers[main].volumeMounts",
        "mount this volume elsewhere",
        SHARE,
        container={"volumeMounts": [{"name": "x", "mountPath": "/run/./sharepod"}]},
    ),
    Case(
        "below our mount path",
        "spec.containers[main].volumeMounts",
        "mount this volume elsewhere",
        SHARE,
        container={"volumeMounts": [{"name": "x", "mountPath": "/var/run/sharepod/limits"}]},
    ),
    Case(
        "a device by annotation",
        "metadata.annotations[cdi.k8s.io/x]",
        "remove it",
        SHARE,
        annotations={"cdi.k8s.io/x": "nvidia.com/gpu=all"},
    ),
    Case(
        "debug container in a new pod",
        "spec.ephemeralContainers",
        "kubectl debug",
        SHARE,
        pod={"ephemeralContainers": [{"name": "debug", "image": "busybox"}]},
    ),
    Case("no containers", "spec.containers", "Required value", SHARE, pod={"containers": None}),
    Case("a field of a Deployment", "spec.template", "unknown field", SHARE, pod={"template": {}}),
    Case("more than one pod", "spec.replicas", "create as many SharePods as you need", SHARE, pod={"replicas": 2}),
    Case(
        "a misspelt field of a container",
        "spec.containers[0].cmd",
        "unknown field",
        SHARE,
        container={"cmd": ["sleep", "1"]},
    ),
    Case("nested maps", "spec.future", "unknown field", SHARE, pod={"future": nested(300)}),
    Case(
        "maps for a quantity",
        "spec.containers[0].resources.limits.memory",
        "must have at most 0 items",
        SHARE,
        container={"resources": {"limits": {"memory": nested(300)}}},
    ),
    Case(
        "a quantity of many digits",
        "spec.containers[0].resources.limits.memory",
        "than 64",
        SHARE,
        container={"resources": {"limits": {"memory": "1" * 100_000}}},
    ),
    Case(
        "no quantity of a pod",
        "spec.containers[0].resources.limits.memory",
        "should match",
        SHARE,
        container={"resources": {"limits": {"memory": "4GB"}}},
    ),
    Case(
        "many containers",
        "spec.containers",
        "must have at most 64 items",
        SHARE,
        pod={"containers": [{**CONTAINER, "name": f"c{number}"} for number in range(2_000)]},
    ),
    Case(
        "many tolerations",
        "spec.tolerations",
        "must have at most 64 items",
        SHARE,
        pod={"tolerations": [{"key": f"k{number}", "operator": "Exists"} for number in range(2_000)]},
    ),
)

CASES = BLOCKS + PODS + ANNOTATIONS + LONG
