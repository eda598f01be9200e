"""All settings of the operator in one typed object, checked once, at start.

Values come, first match wins, from the environment (`SHAREPOD_` and the field's name in capitals) and from one YAML
file (the ConfigMap's), named by `SHAREPOD_SETTINGS`. A key that does not exist, a value of a wrong type and values
that contradict each other end the start with a message that names the field.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, YamlConfigSettingsSource

FILE_VARIABLE = "SHAREPOD_SETTINGS"

Seconds = Annotated[float, Field(gt=0)]
Port = Annotated[int, Field(ge=0, le=65535)]


class SettingsError(ValueError):
    """The settings cannot be used. The message names the field, what was given, and where settings come from."""


class PodToleration(BaseModel):
    """A toleration, as in a PodSpec."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str | None = None
    operator: Literal["Exists", "Equal"] = "Equal"
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None

    def manifest(self) -> dict[str, str]:
        """As it is written into a Pod."""
        return {key: str(value) for key, value in self.model_dump(exclude_none=True).items()}


class OperatorSettings(BaseSettings):
    """OperatorSettings of the operator. Times are in seconds."""

    model_config = SettingsConfigDict(env_prefix="SHAREPOD_", frozen=True, extra="forbid")

    kubeconfig: Path | None = None
    """Kubeconfig to reach the API server with; without it, the ServiceAccount of the operator's own pod."""

    namespace: str = "sharepod-system"
    """Namespace of the operator's Lease and of the agents' Leases."""

    identity: Annotated[str, Field(min_length=1)] = Field(default_factory=socket.gethostname)
    """Name of this process in the Lease; distinct for each of several operators. In a pod: its name."""

    runtime_class: str | None = "nvidia"
    """`runtimeClassName` of the Pods that are made; null where NVIDIA's runtime is the default one of the nodes."""

    tolerations: tuple[PodToleration, ...] = (PodToleration(key="nvidia.com/gpu", operator="Exists"),)
    """Added to every Pod that is made, and counted when a node is chosen."""

    bind_timeout: Seconds = 60
    """A Pod that kube-scheduler refuses for so long is taken back and placed again; so is the share of a
    SharePod whose Pod the API server forbids (a quota) for so long.
    """

    keep_after: Seconds = 600
    """The oldest waiting SharePod of the highest priority has GPUs of one node kept for it once it has waited so long:
    nobody else is placed on them. Counted anew when the operator restarts.
    """

    resync_interval: Seconds = 120
    """Everything is listed anew this often, and what vanished unseen is swept."""

    usage_interval: Seconds = 30
    """`status.usage` is written at most this often for one SharePod."""

    unenforced_policy: Literal["Report", "Evict"] = "Report"
    """What becomes of a Pod of which a process uses a GPU without the hook: `Report` shows it (condition `Enforced`,
    Event, metric), `Evict` also ends the Pod.
    """

    unenforced_grace: Seconds = 30
    """With `Evict`: for how long an agent must have been saying so."""

    evictions_per_minute: Annotated[float, Field(gt=0, le=600)] = 6
    """With `Evict`: at most so many Pods in the whole cluster, one at a time."""

    eviction_patience: Annotated[float, Field(ge=0)] = 120
    """With `Evict`: a PodDisruptionBudget may refuse the eviction for so long; then the Pod is deleted."""

    lease_duration: Seconds = 15
    """Another operator takes over when the Lease was not renewed for so long."""

    renew_deadline: Seconds = 10
    """A leader that could not renew its Lease for so long stops acting. Less than `lease_duration` by at least
    `write_timeout`.
    """

    retry_period: Seconds = 2
    """The Lease is renewed, or tried for, this often."""

    agent_duration: Seconds = 20
    """A node is not used when the Lease of its agent did not change for so long."""

    read_timeout: Seconds = 30
    """Of one GET, or one page of a list."""

    write_timeout: Seconds = 5
    """Of one create, patch or delete."""

    page_size: Annotated[int, Field(ge=10, le=5000)] = 500
    """Objects in one page of a list."""

    writers: Annotated[int, Field(ge=1, le=256)] = 32
    """How many tenants, and how many nodes, are worked on at a time."""

    bind_address: str = "0.0.0.0"  # noqa: S104  in a pod: the kubelet probes it
    """Address that health and metrics listen on."""

    health_port: Port = 8080
    """`/healthz`: the event loop and the watches run. 0 turns it off."""

    metrics_port: Port = 9090
    """`/metrics` (Prometheus) and `/readyz` (everything was listed once). 0 turns it off."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """`debug`, `info`, `warning` or `error`."""

    log_format: Literal["json", "console"] = "json"
    """`json` (one object per line) or `console`."""

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
    """The settings of this process. Raises `SettingsError`."""
    path = os.environ.get(FILE_VARIABLE)
    if path and not Path(path).is_file():
        raise SettingsError(f"{FILE_VARIABLE}={path}: no such file; mount the ConfigMap there or unset the variable")
    try:
        return OperatorSettings()
    except ValidationError as error:
        found = "; ".join(
            f"{'.'.join(str(part) for part in item['loc']) or 'settings'}: {item['msg']} (given: {item['input']!r})"
            if item["loc"]
            else item["msg"]
            for item in error.errors()
        )
        raise SettingsError(
            f"{found}. OperatorSettings come from {path or 'no file'} and from SHAREPOD_... in the environment"
        ) from None
    except Exception as error:
        raise SettingsError(f"{path}: cannot be read as settings: {error}") from None
