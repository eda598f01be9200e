"""Settings of the agent: one typed object, checked once at start.

Values come, first match wins, from arguments, from the environment (`SHAREPOD_AGENT_<FIELD>`), and from the YAML file
named by `SHAREPOD_AGENT_CONFIG` (keys in snake_case, as here). An unknown key in the file is an error. The text below
each field is the field's entry in `docs/settings.md` (`make docs`).
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, YamlConfigSettingsSource

from sharepod.agent.devices.inventory import XIDS_TOLERATED
from sharepod.agent.findings.rules import FindingThresholds
from sharepod.agent.state.early_sockets import DEFAULT_STATE_DIR
from sharepod.timeshare import Parameters, Sharing
from sharepod.web.metrics_access import MetricsAccess

ENV_PREFIX = "SHAREPOD_AGENT_"
"""Prefix of every setting's environment variable."""
PACKAGED_HOOK = Path(__file__).parent / "hook" / "libsharepod.so"
"""The hook that was built into this package."""


def _absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError(f"{path} is relative; give a path that begins with /")
    return path


AbsolutePath = Annotated[Path, AfterValidator(_absolute)]


class AgentMode(StrEnum):
    """Source of the agent's tenants."""

    CLUSTER = "cluster"
    """Tenants come from this node's GPUNode; pods get their volumes through CSI."""
    STANDALONE = "standalone"
    """No Kubernetes: tenants come from `tenants_file`."""


class UnenforcedPolicy(StrEnum):
    """Action on processes that have more than their tenant's share, or can take it."""

    REPORT = "Report"
    """The finding is shown."""
    KILL = "Kill"
    """The process is ended, too."""


class EnvInjection(StrEnum):
    """Treatment of a node whose default runtime gives GPUs to every container that asks by NVIDIA_VISIBLE_DEVICES."""

    REFUSE = "Refuse"
    """The node takes no tenants."""
    ACCEPT = "Accept"
    """It does."""


class SharingMode(StrEnum):
    """How tenants of one GPU take turns."""

    EXCLUSIVE = "Exclusive"
    """One tenant runs at a time."""
    CONCURRENT = "Concurrent"
    """Other tenants run in the gaps of the tenant whose turn it is."""


class AgentSettings(BaseSettings):
    """Settings of one agent."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid")

    node_name: str = "localhost"
    """Name of the Node that the agent runs on, and of its GPUNode. The DaemonSet sets it from `spec.nodeName`."""

    mode: AgentMode = AgentMode.CLUSTER
    """`cluster` (tenants come from the GPUNode) or `standalone` (tenants come from `tenants_file`)."""

    state_dir: AbsolutePath = Path(DEFAULT_STATE_DIR)
    """Directory for the hook and the tenants' directories. It has to be the same path in the agent's container as on
    the host."""

    kubelet_root: AbsolutePath = Path("/var/lib/kubelet")
    """The kubelet's root directory (`--root-dir`). The agent uses `plugins`, `plugins_registry` and `pods` in it."""

    cdi_dirs: Annotated[tuple[AbsolutePath, ...], Field(min_length=1)] = (Path("/etc/cdi"), Path("/var/run/cdi"))
    """CDI directories of the node's container runtime, the one that goes before others last. The GPUs' CDI devices are
    looked up in all of them; those of the tenants are written to the last one. Each has to be the same path in the
    agent's container as on the node."""

    cdi_generate: bool = True
    """Let the agent run the node's `nvidia-ctk cdi generate` where a GPU has no CDI device."""

    kubeconfig: AbsolutePath | None = None
    """Kubeconfig file for the API server. Unset: the pod's ServiceAccount."""

    namespace: str = "sharepod-system"
    """Namespace of the agent's Lease."""

    inventory_file: AbsolutePath | None = None
    """YAML file of simulated GPUs, for tests and demonstrations; log and status say that the inventory is simulated.
    Unset: the GPUs are read through NVML."""

    inventory_interval_s: Annotated[float, Field(ge=0.05, le=60)] = 1.0
    """Seconds between two readings of the GPUs and the processes on them."""

    nvml_timeout_s: Annotated[float, Field(ge=0.1, le=120)] = 10.0
    """Seconds that one reading through NVML may take before the GPUs count as unhealthy."""

    xids_tolerated: tuple[int, ...] = tuple(sorted(XIDS_TOLERATED))
    """Xids after which a GPU still counts as healthy. Any other Xid makes the GPU unhealthy until the node is
    restarted, or until `xids.json` is removed from the state directory and the agent restarted."""

    unhooked_after_s: Annotated[float, Field(ge=0, le=600)] = 3.0
    """Seconds for which a process may be on a GPU before its hook has connected. After that, its tenant's share counts
    as not enforced."""

    busy_tolerance: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Part of 10 s for which a tenant's processes may keep a GPU busy while the tenant does not hold it. Above it, the
    tenant is reported."""

    memory_gap_mib: Annotated[int, Field(ge=1, le=1 << 20)] = 512
    """MiB that the driver may count for a tenant's processes on a GPU beyond their allocations. Above it, the tenant is
    reported."""

    unenforced_policy: UnenforcedPolicy = UnenforcedPolicy.REPORT
    """Policy for processes to which a finding is put down: without the hook, with another hook, busy beyond what their
    tenant held, with memory beyond its limit. `Report` shows the finding, `Kill` also ends the process at once."""

    env_injection: EnvInjection = EnvInjection.REFUSE
    """Treatment of a node whose default runtime is NVIDIA's, so that each image with `NVIDIA_VISIBLE_DEVICES` gets its
    GPUs past every share. `Refuse`: the node takes no tenants. `Accept`: it does, where all who may run pods are
    trusted."""

    tenants_file: AbsolutePath | None = None
    """Mode `standalone`: YAML file `tenants: [...]` with rows as in GPUNode `spec.tenants`. It is read again when it
    changes."""

    hook_file: AbsolutePath = PACKAGED_HOOK
    """Hook library that is preloaded in tenants' containers. Default: the hook that was built into this package."""

    target_latency_ms: Annotated[int, Field(ge=20, le=10_000)] = 300
    """Milliseconds within which every tenant that waits for a GPU should have had a turn. A tenant's quantum is its
    part of this time, by its request."""

    quantum_min_ms: Annotated[int, Field(ge=2, le=1000)] = 10
    """What a holder keeps of its quantum when a tenant wakes with credit, in milliseconds. Shorter costs throughput
    (each hand-off drains the GPU), longer costs latency."""

    quantum_max_ms: Annotated[int, Field(ge=2, le=1000)] = 100
    """Longest quantum while other tenants wait, in milliseconds."""

    grace_ms: Annotated[int, Field(ge=10, le=60_000)] = 1000
    """Milliseconds after the end of its quantum for which a tenant may still drain. After that the next tenant is
    granted, and this one counts as overtaken."""

    assured_burst_ms: Annotated[int, Field(ge=10, le=10_000)] = 1000
    """Unused guaranteed time that a tenant may save up: as much as it is guaranteed in this many milliseconds."""

    ceiling_burst_ms: Annotated[int, Field(ge=10, le=1000)] = 100
    """Unused time under the limit that a tenant may save up: as much as its limit allows in this many milliseconds."""

    sharing: SharingMode = SharingMode.CONCURRENT
    """How tenants of one GPU take turns. `Exclusive`: one tenant runs at a time. `Concurrent`: while a tenant leaves
    gaps on the GPU, other tenants run in them, as long as together they get more done than in turns. Both enforce
    requests and limits."""

    sharing_by_gpu: dict[str, SharingMode] = {}
    """`sharing` of single GPUs, by UUID or by model as the GPUNode names it; a UUID has precedence. In the environment:
    a JSON object such as `{"NVIDIA A100-SXM4-80GB": "Exclusive"}`."""

    recall_ms: Annotated[int, Field(ge=1, le=1000)] = 250
    """Milliseconds for which an allocation over the limit waits for the tenant's other processes to give back device
    memory that they do not use."""

    connections_max: Annotated[int, Field(ge=1, le=65_536)] = 512
    """Processes of one tenant that may be connected at once. One more process waits, and launches nothing until another
    one ends."""

    frames_per_s: Annotated[int, Field(ge=100, le=1_000_000)] = 10_000
    """Frames of one tenant's processes that the agent handles in a second; a frame that takes more than 25 us counts as
    several. Frames above the limit wait. A process that stays above it is disconnected. All tenants above their limit
    share one tenant's allowance."""

    connects_per_s: Annotated[int, Field(ge=1, le=100_000)] = 100
    """Connections a second that one tenant's processes may make, after `connections_max` at once. Further ones wait."""

    fail_open: bool = False
    """True: a program whose tenant's directory lacks the file `limits` runs with no share and no memory limit, after
    waiting 30 s for the file. False: its CUDA calls fail with CUDA_ERROR_SYSTEM_NOT_READY. The setting reaches the hook
    as a file in the tenant's read-only volume; nothing in a container can switch it on."""

    niceness: Annotated[int, Field(ge=-20, le=19)] = -10
    """Nice value that the agent gives itself, if it may. It counts beside what runs in the same cgroup: between pods of
    a busy node the CPU request of the agent's pod decides how soon it runs."""

    http_bind: str = "0.0.0.0"  # noqa: S104 - Prometheus and the kubelet come from outside the pod
    """Address on which `/metrics` and `/healthz` are served."""

    health_port: Annotated[int | None, Field(ge=0, le=65_535)] = None
    """Port of `/healthz`, which the kubelet probes; 0: any free port. Default: the one after `http_port`, 9438."""

    http_port: Annotated[int, Field(ge=0, le=65_535)] = 9437
    """Port of `/metrics`; 0: any free port."""

    metrics_access: MetricsAccess = MetricsAccess.TOKEN
    """Readers of `/metrics` and `/trace`: `Token` (who sends a token that may `get` that path, by the ClusterRole
    `sharepod-metrics-reader`) or `Open` (whoever reaches the port). In mode `standalone`, which has no API server, it
    is open."""

    log_level: str = "info"
    """Lowest level that is logged: `debug`, `info`, `warning` or `error`."""

    log_format: Annotated[str, Field(pattern="^(json|console)$")] = "json"
    """`json` (one object per line) or `console` (for people)."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.quantum_min_ms > self.quantum_max_ms:
            raise ValueError(
                f"quantum_min_ms {self.quantum_min_ms} is more than quantum_max_ms {self.quantum_max_ms}; lower it"
            )
        if self.mode is AgentMode.STANDALONE and self.tenants_file is None:
            raise ValueError("mode standalone has no cluster to learn its tenants from; set tenants_file")
        return self

    def listens_for_probes(self) -> int:
        """Return the port of `/healthz`; 0: any free one."""
        if self.health_port is not None:
            return self.health_port
        return min(self.http_port + 1, 65_535) if self.http_port else 0

    def timeshare(self) -> Parameters:
        """Return the parameters of the token scheduler."""
        ms = 1_000_000
        return Parameters(
            target_latency_ns=self.target_latency_ms * ms,
            quantum_min_ns=self.quantum_min_ms * ms,
            quantum_max_ns=self.quantum_max_ms * ms,
            grace_ns=self.grace_ms * ms,
            assured_burst_ns=self.assured_burst_ms * ms,
            ceiling_burst_ns=self.ceiling_burst_ms * ms,
            sharing=Sharing[self.sharing.name],
        )

    def sharing_of(self, uuid: str, model: str) -> Sharing:
        """Return how tenants of this GPU take turns."""
        by_gpu = self.sharing_by_gpu
        return Sharing[by_gpu.get(uuid, by_gpu.get(model, self.sharing)).name]

    def thresholds(self) -> FindingThresholds:
        """Return the thresholds of the findings."""
        return FindingThresholds(
            unhooked_after_s=self.unhooked_after_s,
            busy_tolerance=self.busy_tolerance,
            gap_tolerance=self.memory_gap_mib << 20,
            kill=self.unenforced_policy is UnenforcedPolicy.KILL,
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
        """Return the sources in order: arguments, environment, the file that `SHAREPOD_AGENT_CONFIG` names."""
        config = _ConfigFile().config
        if config is None:
            return (init_settings, env_settings)
        return (init_settings, env_settings, YamlConfigSettingsSource(settings_cls, yaml_file=config))


class _ConfigFile(BaseSettings):
    """Path of the YAML file, from the environment."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="ignore")

    config: Annotated[Path, AfterValidator(lambda path: _readable(path))] | None = None


def _readable(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"{ENV_PREFIX}CONFIG names {path}, which is not a file")
    return path
