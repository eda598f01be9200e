"""Settings of the operator: one typed object, which is checked once, at the start.

Values come from the environment (`SHAREPOD_` and the field's name in capitals) and from one YAML file (the
ConfigMap's), whose path is in `SHAREPOD_SETTINGS`. The environment has precedence.

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
"""Seconds with which other times are computed, so infinity is refused."""
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
    """Tolerations that the operator adds to each Pod it creates, and uses to choose the node."""

    annotations: tuple[Annotated[str, Field(pattern=ANNOTATION_PATTERN)], ...] = DEFAULT_ANNOTATIONS
    """Annotations that a SharePod's Pod gets from the SharePod: names, `prefix/*`, `*.prefix/*`, or `*` for all that no
    policy refuses. The default covers common monitoring, meshes, queues, autoscalers and networks, and nothing that
    container runtimes read. Other annotations stay on the SharePod, and an Event names them."""

    bind_timeout: Seconds = 60
    """A Pod that kube-scheduler refuses for this long is withdrawn and placed again. So is a Pod with another
    `schedulerName` that is not bound for this long, because that scheduler may not exist. `start_timeout` applies
    while kube-scheduler is away."""

    start_timeout: Seconds = 1800
    """A Pod whose containers have not started for this long loses its share. Set it longer than the pull of a large
    image takes."""

    keep_after: Seconds = 600
    """Head-of-queue reservation: once the oldest waiting SharePod of the highest priority has waited this long, GPUs of
    one node are reserved for it. SharePods of the same or lower priority are not placed on them. The wait counts from
    the moment when the leading operator first saw the SharePod wait."""

    keep_for: Seconds = 57600
    """Longest head-of-queue reservation. After it the GPUs are free for others for as long. The default
    suffices where tenants end within 16 hours."""

    keep_idle_ratio: Annotated[float, Field(gt=0, le=1)] = 0.02
    """Largest part of the cluster's GPU time that head-of-queue reservations may leave idle while another SharePod that
    fits there waits. The next reservation starts later in proportion to the idle time, a day at most. In a cluster of
    few nodes a higher ratio shortens the waits for whole nodes. 1 turns the bound off."""

    fair_wait: Seconds = 86400
    """A SharePod that has waited this long is next for the head-of-queue reservation within its priority, oldest first,
    however much GPU time its team has used. So a team with high usage waits a day longer at most."""

    usage_half_life: FiniteSeconds = 604800
    """Half-life of the GPU time that orders the queue among teams with budgets. One week: use of today delays a team,
    use of last month does not. Budgets' amounts are not affected."""

    prices: Prices = Prices()
    """Prices for the cost that `kubectl get gpustatements` shows, with the fields of the bill's `--prices` file. A
    changed price shows once the statement's usage grows."""

    interactive_per_gpu: Annotated[int, Field(ge=1, le=64)] = 1
    """Most SharePods of `latency: Interactive` on one GPU. With more than one, they wait for each other."""

    max_excluded_gpus: Annotated[int, Field(ge=0)] | None = 4
    """Most GPUs that one namespace may keep from others by `exclusion` labels with less than half of their time
    requested. Beyond that, a SharePod with such a label and a request below 0.5 waits, unless a GPU with its label has
    room. Quotas do not count this capacity. The default is half of a usual server; null: any number."""

    holder_image: str = "registry.k8s.io/pause:3.10"
    """Image of holders, the Pods that take GPUs from NVIDIA's device plugin in pool `device-plugin`: any program that
    waits."""

    holder_priority_class: str = "sharepod-holder"
    """PriorityClass of holders. It must have `preemptionPolicy: Never`, or admission refuses them. The manifests' own
    class has a high value, so that no Pod preempts a holder."""

    holder_pending: Seconds = 30
    """A holder without a GPU for this long is withdrawn, and its tenant is placed elsewhere."""

    holder_idle: Annotated[float, Field(ge=0)] = 60
    """A holder whose GPU has had no tenant for this long is returned to NVIDIA's device plugin."""

    placeholders: Annotated[int, Field(ge=0, le=1000)] = 0
    """Most placeholders at a time. A placeholder is a Pod of the operator's namespace that makes a cluster autoscaler
    add a node for a share without room. The default, 0, turns them off, because nodes cost money."""

    placeholders_per_namespace: Annotated[int, Field(ge=1, le=1000)] = 4
    """Most placeholders at a time for the shares of one namespace."""

    placeholder_after: Annotated[float, Field(ge=0)] = 30
    """A share gets a placeholder once it has been without room for this long, because ending or preempted tenants often
    free capacity sooner."""

    placeholder_for: Seconds = 900
    """Life of a placeholder. The pause before the share's next one doubles each time, up to sixteen times this long. A
    node that has reported no GPUs for this long does not count as starting. Set it longer than a node takes to
    start."""

    placeholder_priority_class: str = "sharepod-placeholder"
    """PriorityClass of placeholders. It must have `preemptionPolicy: Never`, or admission refuses them, and at least
    the value of Cluster Autoscaler's `--expendable-pods-priority-cutoff`."""

    resync_interval: Seconds = 600
    """Period at which every tenant and node is checked again, from the cache."""

    usage_interval: Seconds = 30
    """Least time between two writes of `status.usage` of one SharePod. Usage that moves by less than five points is not
    written.
    """

    unenforced_policy: Literal["Report", "Evict"] = "Report"
    """Policy for a Pod with an offence: a process on a GPU without the hook or with another hook, or time or memory
    beyond its share. `Report` shows it (condition, Event, metric), `Evict` also evicts the Pod. The agent's setting of
    the same name kills only the process, at once."""

    unenforced_grace: Seconds = 30
    """With `Evict`: how long an agent must have reported an offence before the Pod is evicted."""

    evictions_per_minute: Annotated[float, Field(gt=0, le=600)] = 6
    """With `Evict`: most Pods evicted per minute in the whole cluster."""

    eviction_patience: Annotated[float, Field(ge=0)] = 120
    """With `Evict`: how long a PodDisruptionBudget may refuse the eviction before the Pod is deleted."""

    preemptions_per_minute: Annotated[float, Field(ge=0, le=6000)] = 60
    """Most tenants of lower priority that are evicted or lowered per minute in the whole cluster. 0 turns preemption
    off: requests without room wait. A Pod with `preemptionPolicy: Never` waits in any case."""

    moves_per_minute: Annotated[float, Field(ge=0, le=600)] = 6
    """Most tenants that are moved (restarted on other GPUs to make room) per minute in the whole cluster. Only
    SharePods with `movable: true` move, and best effort tenants instead of their eviction. 0 turns moving off."""

    move_after: Annotated[float, Field(ge=0)] = 600
    """A tenant is moved only once it has run for this long, so that moves do not repeat."""

    lease_duration: FiniteSeconds = 15
    """Another operator takes over when the Lease was not renewed for this long."""

    renew_deadline: Seconds = 10
    """A leader that could not renew its Lease for this long stops acting. At least `write_timeout` less than
    `lease_duration`.
    """

    retry_period: Seconds = 2
    """Period at which the Lease is renewed or tried for."""

    agent_duration: Seconds = 20
    """Placement skips a node whose agent has not renewed its Lease for this long."""

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
    """Port of the kubelet's probes. `/healthz`: the event loop runs, and watches receive while the API server answers.
    `/readyz`: every kind is listed. 0 turns it off."""

    metrics_port: Port = 9090
    """Port of `/metrics` (Prometheus). 0 turns it off."""

    metrics_access: MetricsAccess = MetricsAccess.TOKEN
    """Readers of `/metrics`: `Token` (clients with a token that may `get` that path, by the ClusterRole
    `sharepod-metrics-reader`) or `Open` (every client that reaches the port)."""

    webhook_port: Port = 0
    """Port (TLS) of the webhook that adds claims or volumes to Pods with a resource line, where the API server serves
    no MutatingAdmissionPolicy or no claims. `manifests/line-webhook` sets it. 0 turns it off."""

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
        """Return the sources of settings: the environment, then the file. Neither dotenv nor secret files are read."""
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
