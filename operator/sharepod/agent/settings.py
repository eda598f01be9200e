"""What an administrator can set for the agent: one typed object, checked once at start.

Values come, first match wins, from arguments, from the environment (`SHAREPOD_AGENT_<FIELD>`), and from the YAML file
named by `SHAREPOD_AGENT_CONFIG` (keys in snake_case, as here). An unknown key in the file is an error.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, YamlConfigSettingsSource

from sharepod.agent.devices.inventory import XIDS_TOLERATED
from sharepod.agent.findings.rules import FindingThresholds
from sharepod.timeshare import Parameters

ENV_PREFIX = "SHAREPOD_AGENT_"
PACKAGED_HOOK = Path(__file__).parent / "hook" / "libsharepod.so"


def _absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError(f"{path} is relative; give a path that begins with /")
    return path


AbsolutePath = Annotated[Path, AfterValidator(_absolute)]


class AgentMode(StrEnum):
    CLUSTER = "cluster"
    """Tenants come from this node's GPUNode; pods get their volumes through CSI."""
    STANDALONE = "standalone"
    """No Kubernetes: tenants come from `tenants_file`."""


class AgentSettings(BaseSettings):
    """Settings of one agent."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid")

    node_name: str = "localhost"
    """Name of the Node this agent runs on, and of its GPUNode. The DaemonSet sets it from `spec.nodeName`."""

    mode: AgentMode = AgentMode.CLUSTER
    """`cluster` or `standalone`."""

    state_dir: AbsolutePath = Path("/var/lib/sharepod")
    """Where hooks and tenants' directories lie. It has to be the same path inside the agent's container as on the
    host."""

    kubelet_root: AbsolutePath = Path("/var/lib/kubelet")
    """The kubelet's root directory (`--root-dir`): its `plugins`, `plugins_registry` and `pods` are used."""

    kubeconfig: AbsolutePath | None = None
    """A kubeconfig file to reach the API server with. Unset: the pod's ServiceAccount."""

    namespace: str = "sharepod-system"
    """Namespace of the agent's Lease."""

    inventory_file: AbsolutePath | None = None
    """A YAML file of simulated GPUs. Unset: NVML. For tests and demonstrations; log and status say that it is
    simulated."""

    inventory_interval_s: Annotated[float, Field(ge=0.05, le=60)] = 1.0
    """How often GPUs and the processes on them are read."""

    nvml_timeout_s: Annotated[float, Field(ge=0.1, le=120)] = 10.0
    """How long one reading of NVML may take before the GPUs count as unhealthy."""

    xids_tolerated: tuple[int, ...] = tuple(sorted(XIDS_TOLERATED))
    """Xids after which a GPU still counts as healthy. Any other one makes it unhealthy until the node is
    restarted, or `xids.json` is removed from the state directory and the agent restarted."""

    unhooked_after_s: Annotated[float, Field(ge=0, le=600)] = 3.0
    """A process that has been on a GPU for so long without having connected makes its tenant's share not enforced."""

    busy_tolerance: Annotated[float, Field(gt=0, le=1)] = 0.25
    """A tenant whose processes keep a GPU busy, over 10 s, for more than it held it, is reported once that is more than
    this part of the time."""

    memory_gap_mib: Annotated[int, Field(ge=1, le=1 << 20)] = 512
    """A tenant of whose processes the driver counts so much more memory on a GPU than their allocations explain is
    reported."""

    tenants_file: AbsolutePath | None = None
    """Mode `standalone`: a YAML file `tenants: [...]` with rows as in GPUNode `spec.tenants`; read again when it
    changes."""

    hook_file: AbsolutePath = PACKAGED_HOOK
    """The hook that is preloaded in tenants' containers. Default: the one that was built into this package."""

    target_latency_ms: Annotated[int, Field(ge=20, le=10_000)] = 300
    """Within this time everyone who waits for a GPU should have had a turn: the quantum is this over the number of
    runnable."""

    quantum_min_ms: Annotated[int, Field(ge=2, le=1000)] = 10
    """No quantum is shorter. Shorter costs throughput (each hand-off drains the GPU), longer costs latency."""

    quantum_max_ms: Annotated[int, Field(ge=2, le=1000)] = 100
    """No quantum is longer while others wait."""

    grace_ms: Annotated[int, Field(ge=10, le=60_000)] = 1000
    """A holder that has not drained this long after its quantum is overtaken."""

    assured_burst_ms: Annotated[int, Field(ge=10, le=10_000)] = 1000
    """How much unused guaranteed time a tenant may save up, in milliseconds of its rate."""

    ceiling_burst_ms: Annotated[int, Field(ge=10, le=1000)] = 100
    """How much unused time under the limit a tenant may save up, in milliseconds of its rate."""

    recall_ms: Annotated[int, Field(ge=1, le=1000)] = 250
    """How long an allocation over the limit waits for sibling processes to give back device memory that they do not
    use."""

    connections_max: Annotated[int, Field(ge=1, le=65_536)] = 512
    """Processes that one tenant may have connected at once. One more waits, and launches nothing until another ends."""

    frames_per_s: Annotated[int, Field(ge=100, le=1_000_000)] = 10_000
    """How many frames of one tenant's processes are handled in a second; one that takes the agent more than 25 us
    counts as several. What comes beyond it waits; a process that keeps on sending too much is disconnected. Tenants
    that send too much at the same time share what one may send."""

    connects_per_s: Annotated[int, Field(ge=1, le=100_000)] = 100
    """How often one tenant's processes may connect in a second, beyond `connections_max` at once. The rest waits."""

    fail_open: bool = False
    """Whether a program whose tenant's directory lacks the file `limits` goes on with no share and no memory limit
    (it has waited 30 s for it). False: its CUDA calls fail with CUDA_ERROR_SYSTEM_NOT_READY. Reaches the hook as a file
    in the tenant's read-only volume; nothing in a container can switch it on."""

    niceness: Annotated[int, Field(ge=-20, le=19)] = -10
    """The agent's own priority, where it may set it: on a busy node each hand-off of a GPU waits for the agent to
    run."""

    http_bind: str = "0.0.0.0"  # noqa: S104 - Prometheus and the kubelet come from outside the pod
    """Address that `/metrics` and `/healthz` are served on."""

    http_port: Annotated[int, Field(ge=0, le=65_535)] = 9437
    """Port of `/metrics` and `/healthz`; 0 takes any free one."""

    log_level: str = "info"
    """`debug`, `info`, `warning` or `error`."""

    log_format: Annotated[str, Field(pattern="^(json|console)$")] = "json"
    """`json` (one object per line) or `console`."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.quantum_min_ms > self.quantum_max_ms:
            raise ValueError(
                f"quantum_min_ms {self.quantum_min_ms} is more than quantum_max_ms {self.quantum_max_ms}; lower it"
            )
        if self.mode is AgentMode.STANDALONE and self.tenants_file is None:
            raise ValueError("mode standalone has no cluster to learn its tenants from; set tenants_file")
        return self

    def timeshare(self) -> Parameters:
        """What the token scheduler is set to."""
        ms = 1_000_000
        return Parameters(
            target_latency_ns=self.target_latency_ms * ms,
            quantum_min_ns=self.quantum_min_ms * ms,
            quantum_max_ns=self.quantum_max_ms * ms,
            grace_ns=self.grace_ms * ms,
            assured_burst_ns=self.assured_burst_ms * ms,
            ceiling_burst_ns=self.ceiling_burst_ms * ms,
        )

    def watch(self) -> FindingThresholds:
        """What a tenant is found out by."""
        return FindingThresholds(
            unhooked_after_s=self.unhooked_after_s,
            busy_tolerance=self.busy_tolerance,
            gap_tolerance=self.memory_gap_mib << 20,
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
        """Arguments, then environment, then the file that `SHAREPOD_AGENT_CONFIG` names."""
        config = _ConfigFile().config
        if config is None:
            return (init_settings, env_settings)
        return (init_settings, env_settings, YamlConfigSettingsSource(settings_cls, yaml_file=config))


class _ConfigFile(BaseSettings):
    """Where the YAML file is."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="ignore")

    config: Annotated[Path, AfterValidator(lambda path: _readable(path))] | None = None


def _readable(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"{ENV_PREFIX}CONFIG names {path}, which is not a file")
    return path
