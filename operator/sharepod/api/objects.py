"""Common parts of the objects of the group: names, limits, the base of all models, conditions."""

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
"""Node label: `dedicated`, `device-plugin` or `scheduler`. A node without it is not ours."""

MAX_HELD_LABEL = f"{GROUP}/max-held-gpus"
"""Node label of pool `device-plugin`: most GPUs that holders have there at a time, for SharePods. Without it: all."""

FORCE_RELEASE_ANNOTATION = f"{GROUP}/force-release"
"""Annotation of a GPUNode: comma-separated tenant ids whose rows an admin releases although no agent has confirmed that
the tenants are gone."""

CORDONED_ANNOTATION = f"{GROUP}/cordoned"
"""Annotation of a GPUNode: comma-separated UUIDs or indexes of GPUs that take no new tenants. Users who may change
GPUNodes set it, `kubectl sharepod cordon` for them; neither operator nor agents write it."""

TENANT_LABEL = f"{GROUP}/tenant"
"""Label of a Pod that the operator created: the id of its tenant. Admission lets nobody else set it and nobody change
it, so it identifies the tenant, unless the Pod's controller is another object. See `LINE_TENANT` for plain Pods."""

LINE_TENANT = "line"
"""Value of that label on a plain Pod with a resource line whose share is attached by a CSI volume: such a Pod is its
own tenant. Admission takes it of everybody whose Pod is made as `line_volume` makes it."""

HOLDER_PREFIX = f"{GROUP.partition('.')[0]}-holder-"
"""Beginning of the name of each holder: a Pod of the operator's namespace that takes a GPU from the device plugin."""

HOLDER_LABEL = f"{GROUP}/holder"
"""Label of each holder. Admission lets only the operator create Pods with it, and nobody else delete them."""
HOLDER_FOR_ANNOTATION = f"{GROUP}/holder-for"
"""Annotation of a holder: id of the tenant that waits for it."""

PLACEHOLDER_PREFIX = f"{GROUP.partition('.')[0]}-placeholder-"
"""Beginning of the name of each placeholder: a Pod of the operator's namespace that asks an autoscaler for a node."""

PLACEHOLDER_LABEL = f"{GROUP}/placeholder"
"""Label of each placeholder: id of the tenant that has no room. Admission lets only the operator make Pods with it."""
PLACEHOLDER_FOR_ANNOTATION = f"{GROUP}/placeholder-for"
"""Annotation of a placeholder: namespace and name of what waits."""
PLACEHOLDER_SPEC_ANNOTATION = f"{GROUP}/placeholder-spec"
"""Annotation of a placeholder: hash of what it asks for, as the operator made it."""
PLACEHOLDER_SCHEDULER = f"{GROUP.partition('.')[0]}-placeholder"
"""Name of the scheduler of placeholders. There is none of that name: nobody binds them."""

LINE_LABEL = f"{GROUP}/line"
"""Label that admission puts on each plain Pod with a resource line. Placeholders keep away from such Pods."""

SHARE_GATE = f"{GROUP}/share"
"""Scheduling gate of a Pod that waits for its share. Admission lets only the operator remove it."""

TAKEN_BACK = f"{GROUP}/taken-back"
"""Finalizer of a Pod that the operator takes back before it was bound: the Pod stays, never to be bound, until that is
on record."""
JOB_TRACKING = "batch.kubernetes.io/job-tracking"
"""Finalizer of Kubernetes on each Pod of a Job: one that is deleted with it counts as a try that failed."""

GPUS_ANNOTATION = f"{GROUP}/gpus"
"""Annotation of a Pod that the operator created: the UUIDs of its GPUs, comma-separated; `NO_GPUS` until it has a
share. The kubelet copies it into each container's environment. Admission lets only the operator change it."""

NO_GPUS = "void"
"""Value by which NVIDIA's container runtime attaches no GPU."""

CSI_DRIVER = f"gpu.{GROUP}"
DEVICE_CLASS = GROUP
"""DeviceClass of claims for shares of GPUs."""
CLAIM_DRIVER = f"gpu.{GROUP}"
"""Driver of the devices that such claims get; a device's pool is its node's name."""
SCHEDULER_DRIVER = f"scheduler.{GROUP}"
"""Driver of the devices that agents publish on nodes of pool `scheduler`; kube-scheduler allocates them."""
SCHEDULER_CLASS = f"scheduler.{GROUP}"
"""DeviceClass of claims for such devices."""
SELF_TEST_CLASS = f"self-test.{GROUP}"
"""DeviceClass of the claims by which nodes test themselves."""
SELF_TEST_CLAIM = "sharepod-self-test-claim"
"""Name of the DaemonSet whose Pods have such a claim, of their template, and beginning of the claims' names."""
SELF_TEST_POOL = "self-test"
"""Pool of the device that such a claim is allocated; no node's."""
LINE_CLAIM = GROUP.partition(".")[0]
"""Name of the template that each Pod with a resource line gets its claim from, and the Pod's own name for the claim."""
PLAIN_PODS_POLICY = "sharepod-plain-pods"
"""Name of the policies, and of their bindings, that give Pods with a resource line their claims and refuse others."""
LINE_REQUEST = "line"
"""Name of the one request of a claim that says no size: the resource line of its Pod does."""
VOLUME_NAME = "sharepod-gpu"
SHARE_CLAIM = "sharepod-gpu"
"""Name that the Pod of a SharePod gives the claim by which its GPUs are attached."""
SHARE_REQUEST = "sharepod"
"""Name of the one request of a claim that the operator made for a SharePod's Pod. Admission lets nobody else make such
a claim."""
SHARE_CLAIMS_POLICY = "sharepod-share-claims"
"""Name of the policy on such claims, and of its binding."""
CLAIM_FINALIZER = "resource.kubernetes.io/delete-protection"
"""Finalizer of an allocated claim: kube-controller-manager removes it with the allocation."""
VOLUME_MOUNT_PATH = "/run/sharepod"
HOOK_FILE = "libsharepod.so"
PRELOAD_FILE = "ld.so.preload"
PRELOAD_PATH = "/etc/ld.so.preload"

MAX_TENANTS = 256
"""Rows in the ledger of one node: bounds the size of a GPUNode, far below etcd's 1.5 MiB."""

MAX_GPUS = 16
"""GPUs of one node: the largest common servers have 16."""


def only_request(claim: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the request of a claim, whatever it holds; None if there is not exactly one."""
    spec = claim.get("spec")
    devices = spec.get("devices") if isinstance(spec, Mapping) else None
    requests = devices.get("requests") if isinstance(devices, Mapping) else None
    if not isinstance(requests, list) or len(requests) != 1 or not isinstance(requests[0], Mapping):
        return None
    return requests[0]


def device_name(uuid: str) -> str:
    """Return the name of a GPU as a device of a claim: its UUID as a DNS label."""
    return uuid.lower()


Text = Annotated[str, AfterValidator(shown)]
"""Text of an agent or a kubelet for people: a compromised one writes it for users of other namespaces."""


class Model(BaseModel):
    """Base of all models: camelCase in YAML, snake_case here, frozen, unknown fields refused."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True, extra="forbid")

    def dump(self) -> dict[str, object]:
        """Return the object as it is written to the API: camelCase, without fields that are None."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


ConditionStatus: TypeAlias = Literal["True", "False", "Unknown"]


class ConditionReason(StrEnum):
    """Reason of a condition. A member is written as the reason and the status of a condition that has it."""

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
    """Why it is so, in one word for programs."""
    message: Annotated[Text, Field(max_length=32768)] = ""
    """Why it is so and what would help, in words for people."""
    last_transition_time: str | None = None
    """When `status` last changed."""
    observed_generation: int | None = None
    """Generation of the spec that the condition is about."""
