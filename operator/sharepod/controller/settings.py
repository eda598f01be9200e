"""Settings of the operator: one typed object, checked once, at start.

Values come, first match wins, from the environment (`SHAREPOD_` and the field's name in capitals) and from one YAML
file (the ConfigMap's), named by `SHAREPOD_SETTINGS`.

Guarantees:
- An unknown key, a value of a wrong type, and values that contradict each other end the start with a message that names
  the field.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, YamlConfigSettingsSource

from sharepod.api.claims.share_claims import Attach
from sharepod.api.pods.copied_annotations import ANNOTATION_PATTERN, DEFAULT_ANNOTATIONS
from sharepod.api.pods.pod import PodSettings
from sharepod.budgets.charges import Prices
from sharepod.setting_faults import explain
from sharepod.web.metrics_access import MetricsAccess

FILE_VARIABLE = "SHAREPOD_SETTINGS"
"""Environment variable with the path of the settings file."""

Seconds = Annotated[float, Field(gt=0)]
FiniteSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""Seconds that are counted with, so that infinity has no meaning."""
Port = Annotated[int, Field(ge=0, le=65535)]


class SettingsError(ValueError):
    """Invalid settings. The message names the field, the given value, and the source of settings."""


class PodToleration(BaseModel):
    """Toleration, as in a PodSpec."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str | None = None
    operator: Literal["Exists", "Equal"] = "Equal"
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None

    def manifest(self) -> dict[str, str]:
        """Return the toleration as it is written into a Pod."""
        return {key: str(value) for key, value in self.model_dump(exclude_none=True).items()}


class OperatorSettings(BaseSettings):
    """Settings of the operator. Times are in seconds."""

    model_config = SettingsConfigDict(env_prefix="SHAREPOD_", frozen=True, extra="forbid")

    kubeconfig: Path | None = None
    """Kubeconfig of the API server. Without it, the ServiceAccount of the operator's own pod is used."""

    namespace: str = "sharepod-system"
    """Namespace of the operator's Lease and of the agents' Leases."""

    identity: Annotated[str, Field(min_length=1)] = Field(default_factory=socket.gethostname)
    """Name of this process in the Lease; each of several operators needs its own. In a pod: the pod's name."""

    runtime_class: str | None = "nvidia"
    """`runtimeClassName` of the Pods that are created; null if NVIDIA's runtime is the default one of the nodes."""

    attach: Attach = Attach.CSI
    """Attachment of GPUs to the Pods of SharePods: `csi` (`runtime_class` and a CSI volume), `claims` (a ResourceClaim
    for each Pod, attached as CDI devices; needs Kubernetes 1.34 or newer and `manifests/claims`) or `auto` (claims if
    every node of the pool can attach them, else CSI). The condition `SharePodsByClaims` of each GPUNode gives the
    choice and its reason. Existing Pods stay as they are."""

    tolerations: tuple[PodToleration, ...] = (PodToleration(key="nvidia.com/gpu", operator="Exists"),)
    """Added to every Pod that is created, and taken into account when a node is chosen."""

    annotations: tuple[Annotated[str, Field(pattern=ANNOTATION_PATTERN)], ...] = DEFAULT_ANNOTATIONS
    """Annotations that a SharePod's Pod gets from the SharePod: names, `prefix/*`, `*.prefix/*`, or `*` for all that no
    policy refuses. The default has those of common monitoring, meshes, queues, autoscalers and networks; container
    runtimes and their plugins read none of these. An annotation that is not in the list stays on the SharePod, and an
    Event names it."""

    bind_timeout: Seconds = 60
    """A Pod that kube-scheduler refuses for this long is withdrawn and placed again. So is a Pod with another
    `schedulerName` that is not bound for this long: a scheduler that does not exist must not hold a share. For a Pod
    that kube-scheduler has not handled, `start_timeout` counts instead: kube-scheduler is away, and binds the Pod once
    it is back."""

    start_timeout: Seconds = 1800
    """A Pod whose containers have not started for this long loses its share, such as with an image that cannot be
    pulled. Longer than the pull of a large image takes.
    """

    keep_after: Seconds = 600
    """Head-of-queue reservation: once the oldest waiting SharePod of the highest priority has waited this long, GPUs of
    one node are reserved for it. No SharePod of the same or lower priority is placed on them. The wait counts from when
    the leading operator first saw the SharePod wait."""

    keep_for: Seconds = 57600
    """Longest time for which GPUs are reserved for a SharePod at the head of the queue. Then they are free for others
    for as long. 16 hours is enough for tenants that run that long: GPUs do not stay idle for as long as a SharePod
    exists."""

    keep_idle_ratio: Annotated[float, Field(gt=0, le=1)] = 0.02
    """Most of the cluster's GPU time that may be idle, in the long run, on GPUs reserved for the head of the queue. It
    counts while another SharePod that fits there waits. After each reservation the next begins later in proportion, one
    day later at most. In a cluster of a few nodes a higher ratio shortens the waits for whole nodes. 1 turns it off."""

    fair_wait: Seconds = 86400
    """A SharePod that has waited this long is next for the head-of-queue reservation within its priority, the oldest
    first, however much its team has used. One day: a team that has used too much waits that much longer at most, and
    gains one place at a time by waiting."""

    usage_half_life: FiniteSeconds = 604800
    """Time after which GPU time that was charged to a budget counts half in the order of the queue. One week: heavy use
    last month no longer delays a team, and heavy use today does. The amount of a budget is not affected."""

    prices: Prices = Prices()
    """Prices of the cost that `kubectl get gpustatements` shows, with the fields of the bill's `--prices` file. A
    statement has the cost at the prices of its last growth."""

    interactive_per_gpu: Annotated[int, Field(ge=1, le=64)] = 1
    """Most SharePods of `latency: Interactive` on one GPU. With more than one, they wait for each other."""

    max_excluded_gpus: Annotated[int, Field(ge=0)] | None = 4
    """Most GPUs that one namespace keeps from all others by `exclusion` labels while less than half of their time is
    requested. Beyond that, a SharePod with such a label and a request below 0.5 waits, unless a GPU with its label
    fits. The default is half of a usual server: enough for a few small services on GPUs of their own. It bounds the
    capacity that a namespace blocks without quota. Use null for any number."""

    holder_image: str = "registry.k8s.io/pause:3.10"
    """Image of holders, Pods that take GPUs from NVIDIA's device plugin on nodes of pool `device-plugin`: any program
    that waits. A holder has its GPU before the image is pulled."""

    holder_priority_class: str = "sharepod-holder"
    """PriorityClass of holders. It must have `preemptionPolicy: Never`, or admission refuses them. The manifests' own
    class has a high value, so that no Pod preempts a holder."""

    holder_pending: Seconds = 30
    """A holder that the kubelet has given no GPU for this long is withdrawn, and its tenant placed elsewhere."""

    holder_idle: Annotated[float, Field(ge=0)] = 60
    """A holder whose GPU has had no tenant for this long is returned to NVIDIA's device plugin."""

    placeholders: Annotated[int, Field(ge=0, le=1000)] = 0
    """Most placeholders at a time: Pods of the operator's namespace by which shares without room on any node request
    nodes from a cluster autoscaler. 0 turns them off, because nodes cost money."""

    placeholders_per_namespace: Annotated[int, Field(ge=1, le=1000)] = 4
    """Most placeholders at a time for the shares of one namespace."""

    placeholder_after: Annotated[float, Field(ge=0)] = 30
    """A share requests a node once it has been without room for this long. Tenants that end or are preempted in this
    time free capacity sooner than a new node."""

    placeholder_for: Seconds = 900
    """A share requests a node for this long. The pause before its next turn doubles each time, up to sixteen times this
    long. A node of the pool that has reported no GPUs for this long no longer counts as starting. Longer than a node
    takes to start."""

    placeholder_priority_class: str = "sharepod-placeholder"
    """PriorityClass of placeholders. It has to have `preemptionPolicy: Never`, or admission refuses them, and a value
    of at least Cluster Autoscaler's `--expendable-pods-priority-cutoff`."""

    resync_interval: Seconds = 600
    """Period at which every tenant and node is reconsidered, from memory: it lists nothing."""

    usage_interval: Seconds = 30
    """Least time between two writes of `status.usage` of one SharePod. Usage that moves by less than five points is not
    written.
    """

    unenforced_policy: Literal["Report", "Evict"] = "Report"
    """Policy for a Pod with an offence. Offences are a process on a GPU without the hook or with another hook, and time
    or memory beyond its share. `Report` shows it (condition, Event, metric), `Evict` also evicts the Pod. The agent's
    setting of the same name kills only the process, at once."""

    unenforced_grace: Seconds = 30
    """With `Evict`: how long an agent must have reported an offence before the Pod is evicted."""

    evictions_per_minute: Annotated[float, Field(gt=0, le=600)] = 6
    """With `Evict`: most Pods evicted per minute in the whole cluster."""

    eviction_patience: Annotated[float, Field(ge=0)] = 120
    """With `Evict`: how long a PodDisruptionBudget may refuse the eviction before the Pod is deleted."""

    preemptions_per_minute: Annotated[float, Field(ge=0, le=6000)] = 60
    """Preemption: most tenants of lower priority that are evicted or lowered per minute in the whole cluster. With 0
    there is no preemption: requests without room wait. A Pod with `preemptionPolicy: Never` waits in any case."""

    moves_per_minute: Annotated[float, Field(ge=0, le=600)] = 6
    """Moving: most tenants that are restarted on other GPUs in favour of others per minute in the whole cluster. Few,
    because each is a restart. Not 0, because only SharePods with `movable: true` move, and best effort tenants instead
    of their eviction. 0 turns moving off."""

    move_after: Annotated[float, Field(ge=0)] = 600
    """A tenant is moved only once it has run for this long, so that moves do not repeat. Ten minutes: a run of this
    length resets the count of short runs."""

    lease_duration: FiniteSeconds = 15
    """Another operator takes over when the Lease was not renewed for this long."""

    renew_deadline: Seconds = 10
    """A leader that could not renew its Lease for this long stops acting. At least `write_timeout` less than
    `lease_duration`.
    """

    retry_period: Seconds = 2
    """Period at which the Lease is renewed or tried for."""

    agent_duration: Seconds = 20
    """A node is skipped by placement when its agent has not renewed its Lease for this long."""

    read_timeout: Seconds = 30
    """Timeout of one GET or of one page of a list."""

    write_timeout: Seconds = 5
    """Timeout of one create, patch or delete."""

    page_size: Annotated[int, Field(ge=10, le=5000)] = 500
    """Objects in one page of a list."""

    writers: Annotated[int, Field(ge=1, le=256)] = 32
    """Most tenants, and most nodes, worked on at the same time."""

    bind_address: str = "0.0.0.0"  # noqa: S104  in a pod: the kubelet probes it
    """Address that health and metrics listen on."""

    health_port: Port = 8080
    """Port of `/healthz` (the event loop runs, and no watch is blind while the API server answers) and `/readyz` (every
    kind is listed), which the kubelet probes. 0 turns it off."""

    metrics_port: Port = 9090
    """Port of `/metrics` (Prometheus). 0 turns it off."""

    metrics_access: MetricsAccess = MetricsAccess.TOKEN
    """Readers of `/metrics`: `Token` (clients with a token that may `get` that path, by the ClusterRole
    `sharepod-metrics-reader`) or `Open` (every client that reaches the port)."""

    webhook_port: Port = 0
    """Port (TLS) of the webhook that adds claims or volumes to Pods with a resource line, where API servers serve no
    MutatingAdmissionPolicy or the cluster has no claims: `manifests/line-webhook` sets it. 0 turns it off."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged: `debug`, `info`, `warning` or `error`."""

    log_format: Literal["json", "console"] = "json"
    """Form of the log: `json` (one object per line) or `console`."""

    @model_validator(mode="after")
    def _check_lease(self) -> Self:
        if self.renew_deadline + self.write_timeout > self.lease_duration:
            raise ValueError(
                f"renew_deadline {self.renew_deadline:g} + write_timeout {self.write_timeout:g} is more than "
                f"lease_duration {self.lease_duration:g}: a write begun just before the deadline could land after "
                "another operator took over"
            )
        if self.retry_period * 2 > self.renew_deadline:
            raise ValueError(
                f"retry_period {self.retry_period:g} leaves less than two tries within "
                f"renew_deadline {self.renew_deadline:g}"
            )
        return self

    def pods(self) -> PodSettings:
        """Return the settings that apply to every Pod of a SharePod."""
        tolerations = tuple(toleration.manifest() for toleration in self.tolerations)
        return PodSettings(
            runtime_class=self.runtime_class or "", tolerations=tolerations, annotations=self.annotations
        )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Environment before file; neither dotenv nor secret files are read."""
        path = os.environ.get(FILE_VARIABLE)
        file = (YamlConfigSettingsSource(settings_cls, yaml_file=path),) if path else ()
        return (init_settings, env_settings, *file)


def load() -> OperatorSettings:
    """Read the settings of this process. Raises `SettingsError`."""
    path = os.environ.get(FILE_VARIABLE)
    if path and not Path(path).is_file():
        raise SettingsError(f"{FILE_VARIABLE}={path}: no such file; mount the ConfigMap there or unset the variable")
    try:
        return OperatorSettings()
    except ValidationError as error:
        found = explain(error, OperatorSettings.model_fields)
        raise SettingsError(
            f"{found}. Settings come from {path or 'no file'} and from SHAREPOD_... in the environment"
        ) from None
    except Exception as error:
        raise SettingsError(f"{path}: cannot be read as settings: {error}") from None
