"""Offenders: the processes that cause a tenant's findings. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from sharepod.api.gpunode import FindingReason

from .attribution import TenantProcesses
from .rules import FindingRules


def offenders(
    rules: FindingRules, seen: TenantProcesses, beyond_credits: Mapping[str, Mapping[int, int]]
) -> dict[int, FindingReason]:
    """Return the processes that cause the present findings, by pid, each with its gravest finding.

    - No hook, or a replaced hook: each process without it.
    - Busy beyond turns: the busiest process on that GPU. If the driver does not report busy time by process: all of the
      tenant's processes on that GPU.
    - Memory beyond the limit: the process with the most memory on that GPU beyond its credits, if any has memory
      beyond.

    Args:
        rules: the tenant's rules, after the reading.
        seen: the tenant's processes in the reading.
        beyond_credits: bytes of each process beyond its credits, by GPU UUID and pid.
    """
    found: dict[int, FindingReason] = {}
    if rules.over_limit_on is not None:
        beyond = {pid: size for pid, size in beyond_credits.get(rules.over_limit_on, {}).items() if size > 0}
        if beyond:
            found[max(beyond, key=lambda pid: beyond[pid])] = FindingReason.MEMORY_BEYOND_LIMIT
    if rules.busy_on is not None:
        busy = seen.busy.get(rules.busy_on, {})
        blamed = [max(busy, key=lambda pid: busy[pid])] if busy else seen.memory.get(rules.busy_on, {})
        found |= dict.fromkeys(blamed, FindingReason.BUSY_BEYOND_HELD)
    found |= dict.fromkeys(rules.replaced, FindingReason.HOOK_REPLACED)
    found |= dict.fromkeys(rules.unhooked, FindingReason.PROCESS_WITHOUT_HOOK)
    return found
