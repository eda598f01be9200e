"""Status report: writes the agent's facts into the status of its GPUNode.

Guarantees:
- Facts (GPUs, connections, drained, generation, conditions) are written when they change, at most once a second. Newly
  drained tenants are written at most every 0.1 s.
- Usage and consumption are written together with facts. Without changed facts they are written at most every 30 s, and
  only if they have changed.
- Consumption that was never written is written at once.
- `drained` is never written with an older generation of the ledger than was applied when the tenant was found drained.
- The status is written only to the GPUNode (by UID) whose ledger is applied.
- Conditions of other writers stay unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import structlog

from sharepod.agent.agent import AgentFacts
from sharepod.agent.kubelet.claim_self_test import ClaimsAttachReason
from sharepod.agent.kubelet.self_test import EnvInjectionReason, HookLoadsReason
from sharepod.api.gpunode import CONDITION_AGENT_READY, SLICES_WITHDRAWN, Gpu, Tenant
from sharepod.api.objects import ConditionReason
from sharepod.api.units import format_fraction
from sharepod.kube import JSON_PATCH, ApiError, Connection, Json, UnavailableError, backoff

from .ledger_watch import GPUNODES, LedgerWatch

log = structlog.get_logger(__name__)

FACTS_EVERY_S = 1.0
"""Shortest time between two writes, in seconds, so that the API server gets at most one write per node and second."""
DRAINED_EVERY_S = 0.1
"""Shortest time between two writes, in seconds, if the later one reports a newly drained tenant: the tenant's next run,
or the next tenant, waits for this write."""
USAGE_EVERY_S = 30.0
"""Shortest time between two writes of usage alone, in seconds."""
_USAGE = frozenset({"tenants", "consumption", "consumptionAt"})
"""Fields of the status that contain usage. Within `tenants`, fields other than usage count as facts."""
LOOK_EVERY_S = 5.0
"""Seconds between two checks without a wake-up, because some facts change with time only."""
_MESSAGE_MAX = 32768
"""Most characters of a condition's message. The API server refuses a status with a longer one."""
LAST_WRITE_S = 3.0
"""Timeout of the last write in seconds: only a part of the 30 s within which a terminating pod must exit."""


class ReadyReason(ConditionReason):
    """Reason of the condition `AgentReady`."""

    SERVING = "Serving", "True"
    STARTING = "Starting", "Unknown"
    STOPPED = "Stopped", "False"
    INVENTORY_UNAVAILABLE = "InventoryUnavailable", "False"
    LEDGER_UNREADABLE = "LedgerUnreadable", "False"
    VOLUMES_UNAVAILABLE = "VolumesUnavailable", "False"
    DEVICE_PLUGIN_UNUSABLE = "DevicePluginUnusable", "False"
    DRA_DRIVER_PRESENT = "DraDriverPresent", "False"


class CdiReason(ConditionReason):
    """Reason of the condition `CDIDevices`."""

    ATTACHABLE = "Attachable", "True"
    STARTING = "Starting", "Unknown"
    NOT_REGISTERED = "NotRegistered", "False"
    DEVICES_MISSING = "DevicesMissing", "False"


class OwnNodeReason(ConditionReason):
    """Reason of the condition `OwnNodeOnly`."""

    HELD = "Held", "True"
    NOT_IN_FORCE = "PolicyNotInForce", "False"
    NOT_ASKED = "NotAsked", "Unknown"


class SliceReason(ConditionReason):
    """Reason of the condition `SlicesPublished`."""

    PUBLISHED = "Published", "True"
    STARTING = "Starting", "Unknown"
    NOT_READY = "NotReady", "False"
    NO_SHARES = "NoConsumableCapacity", "False"
    REFUSED = "Refused", "False"
    WITHDRAWN = SLICES_WITHDRAWN, "False"


@dataclass(frozen=True)
class Readiness:
    """One condition of the agent: whether it could run a pod that is placed here now, in one respect."""

    reason: (
        ReadyReason
        | CdiReason
        | OwnNodeReason
        | HookLoadsReason
        | EnvInjectionReason
        | ClaimsAttachReason
        | SliceReason
    )
    message: str = ""
    """Message of the condition."""


@dataclass(frozen=True)
class _Written:
    """Last successful write."""

    uid: str
    status: Json
    facts: AgentFacts
    usage_at: float


class StatusReport:
    """Status report of one agent."""

    def __init__(
        self,
        api: Connection,
        *,
        node: str,
        ledger: LedgerWatch,
        facts: Callable[[], AgentFacts],
        readiness: Callable[[], Mapping[str, Readiness]],
        consumption: Callable[[], tuple[Sequence[Json], str | None]] = lambda: ((), None),
        woken: asyncio.Event,
    ) -> None:
        """Args:
        api: connection to the API server.
        node: name of the node.
        ledger: the node's ledger.
        facts: returns the agent's facts.
        readiness: returns the agent's readiness, by type of the condition.
        consumption: returns namespaces' GPU consumption, and the time of the count.
        woken: set by others when facts or readiness have changed; cleared here before they are read.
        """
        self._api = api
        self._path = f"{GPUNODES}/{node}/status"
        self._ledger = ledger
        self._facts = facts
        self._readiness = readiness
        self._consumption = consumption
        self._woken = woken
        self._written: _Written | None = None

    async def run(self) -> None:
        """Write the status when it has changed, until cancelled."""
        attempt = 0
        while True:
            await self._news()
            self._woken.clear()
            try:
                wrote = await self.write_if_due()
                attempt = 0
            except UnavailableError as error:
                log.warning("cannot write the agent's status; trying again", error=str(error))
            except ApiError as error:
                # 422: a test of the patch failed. 404: the GPUNode was deleted. The watch brings the new state.
                if error.status not in (404, 409, 422) or attempt > 2:
                    log.error("API server refuses the agent's status", path=self._path, error=str(error))
                self._written = None
            else:
                if wrote:
                    await self._rest()
                continue
            attempt += 1
            self._woken.set()
            await backoff(attempt, first_s=FACTS_EVERY_S)

    async def say_stopped(self) -> None:
        """Report that the agent has stopped, if the API server answers within `LAST_WRITE_S`."""
        if self._written is None:
            return
        last = self._readiness()
        stopped = Readiness(
            ReadyReason.STOPPED, "the agent was stopped; until it is back, tenants run on at their request"
        )
        self._readiness = lambda: {**last, CONDITION_AGENT_READY: stopped}
        try:
            async with asyncio.timeout(LAST_WRITE_S):
                await self.write_if_due()
        except (TimeoutError, ApiError) as error:
            log.info("cannot report that the agent stops", error=str(error))

    async def write_if_due(self) -> bool:
        """Write the parts of the status that are due. Return True if any was written. Raise `ApiError`."""
        ledger, now = self._ledger, asyncio.get_running_loop().time()
        gpunode = ledger.object
        if gpunode is None or ledger.uid is None or gpunode["metadata"].get("uid") != ledger.uid:
            return False
        facts = self._facts()
        still = facts.without_usage()
        server = gpunode.get("status") or {}
        wanted = self._status(facts, server)
        last = self._written
        if last is not None and (
            last.uid != ledger.uid or server.get("observedGeneration") != last.status["observedGeneration"]
        ):
            last = None
        if (
            last is not None
            and now - last.usage_at < USAGE_EVERY_S
            and ("consumptionAt" in last.status or "consumptionAt" not in wanted)
            and last.facts == still
            and _without_usage(last.status) == _without_usage(wanted)
        ):
            return False  # no fact has changed, and usage is not due
        operations = patch(gpunode, wanted, last.status if last else None)
        if not operations:
            return False
        ledger.note(await self._api.patch(self._path, operations, JSON_PATCH))
        self._written = _Written(ledger.uid, wanted, still, now)
        return True

    async def _rest(self) -> None:
        """Wait until the next write is due."""
        woken = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FACTS_EVERY_S):
                await asyncio.sleep(DRAINED_EVERY_S)
                while not self._drained_untold():
                    await self._woken.wait()
                    self._woken.clear()
                    woken = True
        if woken:
            self._woken.set()

    def _drained_untold(self) -> bool:
        reported = _drained(self._written.facts) if self._written is not None else frozenset()
        return not _drained(self._facts()) <= reported

    async def _news(self) -> None:
        """Wait until woken, at most `LOOK_EVERY_S`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_EVERY_S):
                await self._woken.wait()

    def _status(self, facts: AgentFacts, server: Mapping[str, Any]) -> Json:
        conditions = [condition(kind, readiness, server) for kind, readiness in self._readiness().items()]
        if facts.gpus_known:
            gpus, reserves = [gpu.dump() for gpu in facts.gpus], reserved(facts.gpus, self._ledger.in_force)
        else:
            gpus, reserves = list(server.get("gpus") or ()), str(server.get("reserved") or "")
        counted, counted_at = self._consumption()
        return {
            "gpus": gpus,
            "tenants": [tenant.dump() for tenant in facts.tenants],
            "conditions": conditions,
            "observedGeneration": self._ledger.generation,
            "agentVersion": facts.agent_version,
            "gpuCount": len(gpus),
            "tenantCount": len(self._ledger.in_force),
            "reserved": reserves,
            "simulated": facts.simulated,
            **({"consumption": list(counted), "consumptionAt": counted_at} if counted_at is not None else {}),
        }


def condition(kind: str, readiness: Readiness, server: Mapping[str, Any]) -> Json:
    """Return a condition of the status. It keeps the time of its last transition while its status stays the same.

    Args:
        kind: type of the condition.
        readiness: its reason and message.
        server: the status on the API server.
    """
    before: Mapping[str, Any] = next((c for c in server.get("conditions") or () if c.get("type") == kind), {})
    same = before.get("status") == readiness.reason.status
    since = before.get("lastTransitionTime") if same else None
    return {
        "type": kind,
        "status": readiness.reason.status,
        "reason": readiness.reason.value,
        "message": readiness.message[:_MESSAGE_MAX],
        "lastTransitionTime": since or datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def reserved(gpus: Sequence[Gpu], rows: Sequence[Tenant]) -> str:
    """Return the fraction of each GPU's time that the rows reserve, in order of index: `1,0.5`."""
    total = {gpu.uuid: 0 for gpu in sorted(gpus, key=lambda gpu: gpu.index)}
    for row in rows:
        for uuid in row.gpus:
            if uuid in total:
                total[uuid] += row.request_milli
    return ",".join(format_fraction(milli) for milli in total.values())


def patch(gpunode: Json, wanted: Mapping[str, Any], last: Mapping[str, Any] | None) -> list[Json]:
    """Return the JSON Patch that changes the status of `gpunode` from `last` to `wanted`. Empty if they are equal.

    The patch tests the object's UID. If it changes conditions, which others write too, it also tests the
    resourceVersion.

    Args:
        gpunode: the cached object.
        wanted: the status to write.
        last: the status as last written; None: unknown.
    """
    server = gpunode.get("status")
    fields = {name: value for name, value in wanted.items() if last is None or last.get(name) != value}
    if "conditions" in fields:
        ours = {condition["type"] for condition in wanted["conditions"]}
        others = [condition for condition in (server or {}).get("conditions") or () if condition["type"] not in ours]
        fields["conditions"] = [*others, *wanted["conditions"]]
    if not fields:
        return []
    metadata = gpunode["metadata"]
    operations: list[Json] = [{"op": "test", "path": "/metadata/uid", "value": metadata["uid"]}]
    if server is None or "conditions" in fields:
        operations.append({"op": "test", "path": "/metadata/resourceVersion", "value": metadata["resourceVersion"]})
    if server is None:
        operations.append({"op": "add", "path": "/status", "value": fields})
    else:
        operations += [{"op": "add", "path": f"/status/{name}", "value": value} for name, value in fields.items()]
    return operations


def _drained(facts: AgentFacts) -> frozenset[str]:
    return frozenset(tenant.id for tenant in facts.tenants if tenant.drained)


def _without_usage(status: Mapping[str, Any]) -> Json:
    return {name: value for name, value in status.items() if name not in _USAGE}
