"""Metric families of the agent: name, kind, labels and help text of each. `make docs` lists them in docs/settings.md.

Guarantees:
- A tenant of one GPU has 32 series at most; each further GPU adds 16 at most.
"""

from __future__ import annotations

from dataclasses import dataclass

_TENANT = ("tenant", "namespace", "pod", "mode")
_EACH = (*_TENANT, "gpu")
"""Labels of a tenant's series for each GPU."""
_GPU = ("gpu", "index")


@dataclass(frozen=True)
class Family:
    """Metric family."""

    kind: str
    """`counter` (its samples end in `_total`), `gauge` or `histogram`."""
    labels: tuple[str, ...]
    help: str


FAMILIES = {
    "sharepod_tenant_request_ratio": Family("gauge", _EACH, "Part of the GPU's time that the tenant is guaranteed"),
    "sharepod_tenant_limit_ratio": Family("gauge", _EACH, "Largest part of the GPU's time that the tenant may use"),
    "sharepod_tenant_usage_ratio": Family(
        "gauge", _EACH, "Part of the last 10 s in which the tenant held the GPU (or, without sharing, kept it busy)"
    ),
    "sharepod_tenant_held_seconds": Family(
        "counter", _EACH, "Time for which the tenant held the GPU (or, without sharing, kept it busy)"
    ),
    "sharepod_tenant_waited_seconds": Family(
        "counter", _EACH, "Time for which the tenant wanted the GPU and did not hold it"
    ),
    "sharepod_tenant_co_run_seconds": Family(
        "counter", _EACH, "Part of the held time in which other tenants held the GPU, too"
    ),
    "sharepod_tenant_co_run_progress_seconds": Family(
        "counter",
        _EACH,
        "Progress while other tenants held the GPU, too: the time in which the tenant would have done the same work "
        "alone",
    ),
    "sharepod_tenant_in_flight_ratio": Family(
        "gauge",
        _EACH,
        "Part of the time with work in flight while the tenant held the GPU alone; absent if not measured for 30 s",
    ),
    "sharepod_tenant_surcharged_seconds": Family(
        "counter", _EACH, "Time that the tenant was charged because NVML saw its kernels run without the token"
    ),
    "sharepod_tenant_overtaken": Family(
        "counter", _EACH, "Turns after which the next tenant was granted before this one had drained"
    ),
    "sharepod_tenant_suspended": Family(
        "counter", _EACH, "Turns in which the tenant lost the GPU because its processes had no processor time"
    ),
    "sharepod_tenant_grants": Family("counter", _EACH, "Turns that the tenant was granted"),
    "sharepod_tenant_busy_ratio": Family(
        "gauge",
        _EACH,
        "Part of the last 10 s in which NVML saw kernels of the tenant run; absent if NVML does not report it",
    ),
    "sharepod_tenant_memory_used_bytes": Family(
        "gauge", _EACH, "Device memory that the tenant uses, by its allocations or by NVML, whichever is larger"
    ),
    "sharepod_tenant_memory_limit_bytes": Family("gauge", _EACH, "Device memory that the tenant may use"),
    "sharepod_tenant_denied_allocations": Family(
        "counter", _EACH, "Allocations that were refused because they would exceed the tenant's memory limit"
    ),
    "sharepod_tenant_wait_seconds": Family("histogram", _TENANT, "Time for which the tenant waited for each grant"),
    "sharepod_tenant_throttled": Family(
        "counter", _TENANT, "How often the tenant was throttled because its processes sent the agent too many frames"
    ),
    "sharepod_tenant_enforced": Family(
        "gauge", _TENANT, "1 if the tenant's share is enforced, 0 if not; absent if not known"
    ),
    "sharepod_gpu_memory_bytes": Family("gauge", (*_GPU, "model"), "Device memory of the GPU that tenants can have"),
    "sharepod_gpu_free_memory_bytes": Family("gauge", _GPU, "Device memory of the GPU that no tenant has reserved"),
    "sharepod_gpu_free_ratio": Family("gauge", _GPU, "Part of the GPU's time that no tenant has reserved"),
    "sharepod_gpu_tenants": Family("gauge", _GPU, "Tenants that have a share of the GPU"),
    "sharepod_gpu_busy_ratio": Family(
        "gauge", _GPU, "Part of the last 10 s in which any kernel ran on the GPU; absent if NVML does not report it"
    ),
    "sharepod_gpu_co_runners": Family("gauge", _GPU, "Tenants that co-run: they hold the GPU while another one leads"),
    "sharepod_gpu_co_runs_ended": Family(
        "counter",
        (*_GPU, "reason"),
        "How often a tenant ceased to co-run: no_gain (together the tenants did no more than one alone), owed (a "
        "tenant lost work that it is owed), probe (the lead is measured alone), limit (the tenant's limit is reached), "
        "wake (a tenant that woke with credit leads next), exclusive (a tenant takes exclusive turns), group (no other "
        "member of its group holds the GPU), leads (the tenant itself leads), drained (it has no work, has left, or "
        "was preempted)",
    ),
    "sharepod_gpu_time_seconds": Family(
        "counter",
        (*_GPU, "use"),
        "Time of a GPU by use: held, gap (several tenants held it, none had work in flight), anticipated, handed_over, "
        "idle, stalled, unmetered (no agent counted); the parts "
        "add up to all of it, over all agents",
    ),
    "sharepod_gpu_healthy": Family("gauge", _GPU, "1 if the GPU is healthy"),
    "sharepod_gpu_shareable": Family(
        "gauge", _GPU, "1 if the GPU can be shared; 0 also while NVIDIA's device plugin has given it to another pod"
    ),
    "sharepod_gpu_foreign_processes": Family("gauge", _GPU, "Processes on the GPU that belong to no tenant"),
    "sharepod_gpu_xids": Family("counter", (*_GPU, "xid"), "Xids that the driver has reported for the GPU"),
    "sharepod_agent_hand_off_seconds": Family(
        "histogram", (), "Time from reading a returned token to having sent the next grant"
    ),
    "sharepod_agent_frames_refused": Family(
        "counter", ("why",), "Clients whose connection the agent closed, by reason"
    ),
    "sharepod_agent_processes_killed": Family(
        "counter", ("reason",), "Tenants' processes that the agent killed by unenforced_policy, by finding"
    ),
    "sharepod_agent_inventory_simulated": Family(
        "gauge", (), "1 if the inventory is simulated and there is no GPU behind it"
    ),
    "sharepod_agent_build_info": Family("gauge", ("version",), "Always 1; the version is a label"),
}
