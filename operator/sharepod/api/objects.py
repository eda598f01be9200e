"""Parts that all objects of the group share: names of labels, annotations and drivers, limits, the base class of
models, conditions."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from .bounds import shown

GROUP = "sharepod.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

POOL_LABEL = f"{GROUP}/pool"
"""Node label: `dedicated`, `device-plugin` or `scheduler`. SharePod ignores a node without it."""

MAX_HELD_LABEL = f"{GROUP}/max-held-gpus"
"""Label of a node in pool `device-plugin`: most GPUs that holders may take on the node at a time. Without it: all."""

FORCE_RELEASE_ANNOTATION = f"{GROUP}/force-release"
"""Annotation of a GPUNode: comma-separated tenant ids whose rows an admin releases without an agent's confirmation that
the tenants are drained."""

CORDONED_ANNOTATION = f"{GROUP}/cordoned"
"""Annotation of a GPUNode: comma-separated UUIDs or indexes of GPUs that take no new tenants. Users who may change
GPUNodes set it, usually by `kubectl sharepod cordon`; operator and agents never write it."""

FREE_SHARES = "sharepod-free"
"""Name of the ConfigMap, in the operator's namespace, with the free shares by model and pool. Every user may read
it."""

TENANT_LABEL = f"{GROUP}/tenant"
"""Label of a Pod that the operator created: the id of its tenant. Admission lets only the operator set it, and no user
change it, so it identifies the tenant. A Pod whose controller is another object is no such Pod. See `LINE_TENANT` for
plain Pods."""

LINE_TENANT = "line"
"""Value of `TENANT_LABEL` on a plain Pod with a resource line whose share is attached by a CSI volume. Such a Pod is
its own tenant. Admission lets all users write this value, on Pods as `line_volume` makes them."""

HOLDER_PREFIX = f"{GROUP.partition('.')[0]}-holder-"
"""Beginning of the name of each holder: a Pod of the operator's namespace that takes a GPU from the device plugin."""

HOLDER_LABEL = f"{GROUP}/holder"
"""Label of each holder. Admission lets only the operator create Pods with it, and no other user delete them."""
HOLDER_FOR_ANNOTATION = f"{GROUP}/holder-for"
"""Annotation of a holder: id of the tenant that waits for it."""

PLACEHOLDER_PREFIX = f"{GROUP.partition('.')[0]}-placeholder-"
"""Beginning of the name of each placeholder: a Pod of the operator's namespace that requests a node from an
autoscaler."""

PLACEHOLDER_LABEL = f"{GROUP}/placeholder"
"""Label of each placeholder: id of the tenant that has no room. Admission lets only the operator create Pods with
it."""
PLACEHOLDER_FOR_ANNOTATION = f"{GROUP}/placeholder-for"
"""Annotation of a placeholder: namespace and name of the pending request."""
PLACEHOLDER_SPEC_ANNOTATION = f"{GROUP}/placeholder-spec"
"""Annotation of a placeholder: hash of the requests at its creation."""
PLACEHOLDER_SCHEDULER = f"{GROUP.partition('.')[0]}-placeholder"
"""`schedulerName` of placeholders. No such scheduler exists, so a placeholder stays pending."""

LINE_LABEL = f"{GROUP}/line"
"""Label of plain Pods with a resource line. Placeholders have anti-affinity to it."""

SHARE_GATE = f"{GROUP}/share"
"""Scheduling gate of a Pod that waits for its share. Admission lets only the operator remove it."""

TAKEN_BACK = f"{GROUP}/taken-back"
"""Finalizer of an unbound Pod that the operator withdraws. It keeps the deleted Pod, which is never bound, until the
withdrawal is recorded."""
JOB_TRACKING = "batch.kubernetes.io/job-tracking"
"""Kubernetes' finalizer on each Pod of a Job, which counts a Pod deleted with it as a failed attempt."""

GPUS_ANNOTATION = f"{GROUP}/gpus"
"""Annotation of a Pod that the operator created: the UUIDs of its GPUs, comma-separated; `NO_GPUS` until it has a
share. The kubelet copies it into each container's environment. Admission lets only the operator change it."""

NO_GPUS = "void"
"""Value of NVIDIA_VISIBLE_DEVICES with which NVIDIA's container runtime attaches no GPU."""

CSI_DRIVER = f"gpu.{GROUP}"
DEVICE_CLASS = GROUP
"""DeviceClass of claims for a share of a GPU."""
CLAIM_DRIVER = f"gpu.{GROUP}"
"""Driver of the devices that claims of `DEVICE_CLASS` get. The name of a device's pool is the name of its node."""
SCHEDULER_DRIVER = f"scheduler.{GROUP}"
"""Driver of the devices that agents publish on nodes of pool `scheduler`; kube-scheduler allocates them."""
SCHEDULER_CLASS = f"scheduler.{GROUP}"
"""DeviceClass of claims for devices of `SCHEDULER_DRIVER`."""
SELF_TEST_CLASS = f"self-test.{GROUP}"
"""DeviceClass of the claims of the nodes' self-tests."""
SELF_TEST_CLAIM = "sharepod-self-test-claim"
"""Name of the DaemonSet whose Pods test `SELF_TEST_CLASS`, and of their claim template. The claims' names begin with
it."""
SELF_TEST_POOL = "self-test"
"""Pool of the device that is allocated to a claim of `SELF_TEST_CLASS`. No node may have this name."""
LINE_CLAIM = GROUP.partition(".")[0]
"""Name of the claim template for Pods with a resource line. The Pod refers to its claim by the same name."""
PLAIN_PODS_POLICY = "sharepod-plain-pods"
"""Name of the policies, and of their bindings, that give Pods with a resource line their claims and refuse invalid
lines."""
LINE_REQUEST = "line"
"""Name of the request of a claim whose size is in its Pod's resource line."""
VOLUME_NAME = "sharepod-gpu"
SHARE_CLAIM = "sharepod-gpu"
"""Name by which the Pod of a SharePod refers to the claim that attaches its GPUs."""
SHARE_REQUEST = "sharepod"
"""Name of the single request of a claim that the operator created for a SharePod's Pod. Admission lets no other user
create a claim with this name."""
SHARE_CLAIMS_POLICY = "sharepod-share-claims"
"""Name of the policy on claims with `SHARE_REQUEST`, and of its binding."""
CLAIM_FINALIZER = "resource.kubernetes.io/delete-protection"
"""Finalizer of an allocated claim. kube-controller-manager removes it when it ends the allocation."""
VOLUME_MOUNT_PATH = "/run/sharepod"
HOOK_FILE = "libsharepod.so"
PRELOAD_FILE = "ld.so.preload"
PRELOAD_PATH = "/etc/ld.so.preload"

MAX_TENANTS = 256
"""Most rows in the ledger of one node: bounds the size of a GPUNode, far below etcd's 1.5 MiB."""

MAX_GPUS = 16
"""Most GPUs of one node: the largest common servers have 16."""


def only_request(claim: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the single request of a claim whose content is not checked before. None if the claim does not have exactly
    one."""
    spec = claim.get("spec")
    devices = spec.get("devices") if isinstance(spec, Mapping) else None
    requests = devices.get("requests") if isinstance(devices, Mapping) else None
    if not isinstance(requests, list) or len(requests) != 1 or not isinstance(requests[0], Mapping):
        return None
    return requests[0]


def device_name(uuid: str) -> str:
    """Return the name of a GPU's device in ResourceSlices and claims: its UUID in lower case, which is a valid DNS
    label."""
    return uuid.lower()


Text = Annotated[str, AfterValidator(shown)]
"""Text from an agent or kubelet for users, sanitized because a compromised node could write it."""


class Model(BaseModel):
    """Base of all models: camelCase in YAML, snake_case here, frozen, unknown fields refused."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True, extra="forbid")

    def dump(self) -> dict[str, object]:
        """Return the object as the API server takes it: camelCase, without fields that are None."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


ConditionStatus: TypeAlias = Literal["True", "False", "Unknown"]


class ConditionReason(StrEnum):
    """Reason of a condition. A member is defined by its text and the status that the condition then has."""

    status: ConditionStatus

    def __new__(cls, reason: str, status: ConditionStatus) -> Self:
        member = str.__new__(cls, reason)
        member._value_ = reason
        member.status = status
        return member


class Condition(Model):
    """One entry of `status.conditions`, as `metav1.Condition`."""

    type: str
    """Kind of condition."""
    status: ConditionStatus
    """True, False or Unknown."""
    reason: Annotated[str, Field(pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$", max_length=1024)]
    """Reason of the status, in one word for programs."""
    message: Annotated[Text, Field(max_length=32768)] = ""
    """Explanation of the reason, and the remedy."""
    last_transition_time: str | None = None
    """Time at which `status` last changed."""
    observed_generation: int | None = None
    """Generation of the spec that the condition describes."""
