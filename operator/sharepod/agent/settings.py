"""Settings of the agent: one typed object, which is checked once at the start.

A value comes from the first source that has one: arguments, the environment (`SHAREPOD_AGENT_<FIELD>`), the YAML file
that `SHAREPOD_AGENT_CONFIG` names (keys in snake_case, as here). An unknown key in the file is an error. The docstring
of each field becomes its entry in `docs/settings.md` (`make docs`).
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
"""The hook that is part of this package (`make shim`)."""


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
    """Action on processes that use, or could use, more than their tenant's share."""

    REPORT = "Report"
    """The finding is reported."""
    KILL = "Kill"
    """The process is also killed."""


class EnvInjection(StrEnum):
    """Treatment of a node whose default runtime gives GPUs to every container with NVIDIA_VISIBLE_DEVICES."""

    REFUSE = "Refuse"
    """The node takes no tenants."""
    ACCEPT = "Accept"
    """The node takes tenants."""


class SharingMode(StrEnum):
    """How tenants of one GPU take turns."""

    EXCLUSIVE = "Exclusive"
    """One tenant runs at a time."""
    CONCURRENT = "Concurrent"
    """Other tenants run in the gaps that the lead leaves."""


class AgentSettings(BaseSettings):
    """Settings of one agent."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid")

    node_name: str = "localhost"
    """Name of the Node that the agent runs on, and of its GPUNode. The DaemonSet sets it from `spec.nodeName`."""

    mode: AgentMode = AgentMode.CLUSTER
    """`cluster` (tenants come from the GPUNode) or `standalone` (tenants come from `tenants_file`)."""

    state_dir: AbsolutePath = Path(DEFAULT_STATE_DIR)
    """Directory for the hook and the tenants' directories. The path must be the same in the agent's container as on the
    host."""

    kubelet_root: AbsolutePath = Path("/var/lib/kubelet")
    """The kubelet's root directory (`--root-dir`). The agent uses `plugins`, `plugins_registry` and `pods` in it."""

    cdi_dirs: Annotated[tuple[AbsolutePath, ...], Field(min_length=1)] = (Path("/etc/cdi"), Path("/var/run/cdi"))
    """CDI directories of the node's container runtime, in ascending precedence. The agent looks up the GPUs' CDI
    devices in all of them, and writes the tenants' devices to the last one. Each path must be the same in the agent's
    container as on the node."""

    cdi_generate: bool = True
    """Let the agent run the node's `nvidia-ctk cdi generate` where a GPU has no CDI device."""

    kubeconfig: AbsolutePath | None = None
    """Kubeconfig file for the API server. Unset: the pod's ServiceAccount."""

    namespace: str = "sharepod-system"
    """Namespace of the agent's Lease."""

    inventory_file: AbsolutePath | None = None
    """YAML file of simulated GPUs, for tests and demonstrations. Log and status then report a simulated inventory.
    Unset: the GPUs are read through NVML."""

    inventory_interval_s: Annotated[float, Field(ge=0.05, le=60)] = 1.0
    """Seconds between two readings of the GPUs and the processes on them."""

    nvml_timeout_s: Annotated[float, Field(ge=0.1, le=120)] = 10.0
    """Seconds that one reading through NVML may take before the GPUs count as unhealthy."""

    xids_tolerated: tuple[int, ...] = tuple(sorted(XIDS_TOLERATED))
    """Xids after which a GPU still counts as healthy. After any other Xid the GPU is unhealthy until the node restarts,
    or until `xids.json` is removed from the state directory and the agent restarted."""

    unhooked_after_s: Annotated[float, Field(ge=0, le=600)] = 3.0
    """Seconds for which a process may use a GPU before its hook has connected. After that, its tenant's share counts as
    not enforced."""

    busy_tolerance: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Part of 10 s for which a tenant's processes may keep a GPU busy while the tenant does not hold it. Above this
    part the agent reports a finding."""

    memory_gap_mib: Annotated[int, Field(ge=1, le=1 << 20)] = 512
    """MiB that the driver may count for a tenant's processes on a GPU beyond their allocations. Above this amount the
    agent reports a finding."""

    unenforced_policy: UnenforcedPolicy = UnenforcedPolicy.REPORT
    """Policy for a process that causes a finding: no hook, a replaced hook, a GPU kept busy outside the tenant's turns,
    or memory above the limit. `Report` reports the finding; `Kill` also kills the process at once."""

    env_injection: EnvInjection = EnvInjection.REFUSE
    """Treatment of a node whose default runtime is NVIDIA's, so that images with `NVIDIA_VISIBLE_DEVICES` get GPUs
    without a share. `Refuse`: the node takes no tenants. `Accept`: it does; use this where every user who may run pods
    is trusted."""

    tenants_file: AbsolutePath | None = None
    """YAML file `tenants: [...]` with rows as in GPUNode `spec.tenants`, for mode `standalone`. The agent reads it
    again when it changes."""

    hook_file: AbsolutePath = PACKAGED_HOOK
    """Hook library that is preloaded in tenants' containers. Default: the hook built into this package."""

    target_latency_ms: Annotated[int, Field(ge=20, le=10_000)] = 300
    """Milliseconds within which every tenant that waits for a GPU should get a turn. A tenant's quantum is its part of
    this time, in proportion to its request."""

    quantum_min_ms: Annotated[int, Field(ge=2, le=1000)] = 10
    """Milliseconds of its quantum that a holder keeps when a tenant with credit wakes. Lower values cost throughput,
    because each hand-off drains the GPU; higher values cost latency."""

    quantum_max_ms: Annotated[int, Field(ge=2, le=1000)] = 100
    """Longest quantum while other tenants wait, in milliseconds."""

    grace_ms: Annotated[int, Field(ge=10, le=60_000)] = 1000
    """Milliseconds after the end of its quantum in which a tenant must drain. After that the next tenant is granted,
    and the late one gets the finding `Overtaken`."""

    assured_burst_ms: Annotated[int, Field(ge=10, le=10_000)] = 1000
    """Most guaranteed time that a tenant can save, as milliseconds at the rate of its request."""

    ceiling_burst_ms: Annotated[int, Field(ge=10, le=1000)] = 100
    """Longest time that a tenant below its limit can save, as milliseconds at the rate of its limit."""

    sharing: SharingMode = SharingMode.CONCURRENT
    """How tenants of one GPU take turns. `Exclusive`: one tenant runs at a time. `Concurrent`: other tenants run in the
    gaps that the lead leaves, while more work is done than in turns. Both enforce requests and limits."""

    sharing_by_gpu: dict[str, SharingMode] = {}
    """`sharing` of single GPUs, by UUID or by model as the GPUNode names it; a UUID has precedence. In the environment:
    a JSON object such as `{"NVIDIA A100-SXM4-80GB": "Exclusive"}`."""

    recall_ms: Annotated[int, Field(ge=1, le=1000)] = 250
    """Milliseconds for which an allocation over the limit waits for the tenant's other processes to return unused
    device memory."""

    connections_max: Annotated[int, Field(ge=1, le=65_536)] = 512
    """Most connected processes of one tenant. One more process waits, and launches nothing, until another one exits."""

    frames_per_s: Annotated[int, Field(ge=100, le=1_000_000)] = 10_000
    """Frames of one tenant's processes that the agent handles in a second; a frame that takes more than 25 us counts as
    several. Further frames wait. A process that stays above the rate is disconnected. All tenants above their rate
    share one tenant's allowance."""

    connects_per_s: Annotated[int, Field(ge=1, le=100_000)] = 100
    """Connections a second that one tenant's processes may make, after a burst of `connections_max`. Further ones
    wait."""

    fail_open: bool = False
    """True: if a tenant's directory lacks the file `limits`, a program waits 30 s for it, then runs without share and
    memory limit. False: its CUDA calls fail with CUDA_ERROR_SYSTEM_NOT_READY. The hook reads the setting from a
    read-only file, so no container can switch it on."""

    niceness: Annotated[int, Field(ge=-20, le=19)] = -10
    """Nice value that the agent sets for itself, where permitted. It counts only within the agent's cgroup; between
    pods the CPU request of the agent's pod counts."""

    http_bind: str = "0.0.0.0"  # noqa: S104 - Prometheus and the kubelet come from outside the pod
    """Address on which `/metrics` and `/healthz` are served."""

    health_port: Annotated[int | None, Field(ge=0, le=65_535)] = None
    """Port of `/healthz`, which the kubelet probes; 0: any free port. Default: the one after `http_port`, 9438."""

    http_port: Annotated[int, Field(ge=0, le=65_535)] = 9437
    """Port of `/metrics`; 0: any free port."""

    metrics_access: MetricsAccess = MetricsAccess.TOKEN
    """Readers of `/metrics` and `/trace`. `Token`: a reader sends a token that may `get` that path, as the ClusterRole
    `sharepod-metrics-reader` allows. `Open`: every client that reaches the port. Mode `standalone` has no API server,
    so it is always open."""

    log_level: str = "info"
    """Lowest level that is logged: `debug`, `info`, `warning` or `error`."""

    log_format: Annotated[str, Field(pattern="^(json|console)$")] = "json"
    """Form of the log: `json` (one object per line) or `console`."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.quantum_min_ms > self.quantum_max_ms:
            raise ValueError(
                f"quantum_min_ms {self.quantum_min_ms} is more than quantum_max_ms {self.quantum_max_ms}; lower it"
            )
        if self.mode is AgentMode.STANDALONE and self.tenants_file is None:
            raise ValueError("mode standalone has no cluster that could name its tenants; set tenants_file")
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
    """Setting with the path of the YAML file, which comes from the environment only."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="ignore")

    config: Annotated[Path, AfterValidator(lambda path: _readable(path))] | None = None


def _readable(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"{ENV_PREFIX}CONFIG names {path}, which is not a file")
    return path
