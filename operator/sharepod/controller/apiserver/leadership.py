"""Leader election by a Lease of `coordination.k8s.io`.

Guarantees:
- At most one process acts at a time, whatever the clocks of the machines say: every time is read from the monotonic
  clock of this process.
- The Lease of another process counts as ended once it was not seen to change for its own duration.
- This process stops acting once its last successful renewal *began* longer ago than the renew deadline. `acting` turns
  false on its own: no task has to run for that.
- The renew deadline lies before the Lease's end by more than one write takes (checked in `settings.py`).
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from sharepod.controller import metrics
from sharepod.kube import AlreadyExistsError, ApiError, ConflictError, Json, NotFoundError

from .client import LEASES, Client

NAME = "sharepod-operator"
"""Name of the operator's Lease."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ObservedLease:
    """Lease of another process as last seen to change: its resourceVersion, and when, in monotonic seconds."""

    version: str
    at: float


class Leadership:
    """Leader elector.

    Args:
        client: Must not refuse to write while this process does not lead.
        namespace: Namespace of the Lease.
        identity: Name of this process in the Lease.
        duration: Seconds for which the Lease holds without renewal.
        renew_deadline: Seconds after which a leader that could not renew stops acting.
        retry_period: Seconds between two tries.
        on_gained: Called each time this process becomes the leader.
        on_lost: Called each time it ceases to be.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        client: Client,
        *,
        namespace: str,
        identity: str,
        duration: float,
        renew_deadline: float,
        retry_period: float,
        on_gained: Callable[[], None],
        on_lost: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._client = client
        self._namespace = namespace
        self.identity = identity
        self._duration = duration
        self._renew_deadline = renew_deadline
        self._retry_period = retry_period
        self._on_gained = on_gained
        self._on_lost = on_lost
        self._clock = clock
        self._renewed: float | None = None
        """When the last successful renewal began."""
        self._led = False
        self._observed: ObservedLease | None = None

    def acting(self) -> bool:
        """True if this process may write now."""
        return self._led and self._renewed is not None and self._clock() < self._renewed + self._renew_deadline

    async def run(self) -> None:
        """Try for the Lease and renew it until cancelled; then give it up, so that a successor need not wait."""
        try:
            while True:
                await self.step()
                await asyncio.sleep(self._retry_period)
        finally:
            await self._give_up()

    async def step(self) -> None:
        """Try once to take or to renew the Lease."""
        began = self._clock()
        try:
            held = await self._try()
        except ApiError as error:
            log.warning("cannot take or renew the Lease", lease=f"{self._namespace}/{NAME}", error=str(error))
            held = self.acting()
        else:
            self._renewed = began if held else None
        self._turn(held)

    def _turn(self, held: bool) -> None:
        if held and not self._led:
            self._led = True
            log.info("leading", identity=self.identity)
            metrics.LEADER.set(1)
            self._on_gained()
        elif self._led and not held:
            self._led = False
            self._renewed = None
            log.warning("leading no more: stops acting", identity=self.identity)
            metrics.LEADER.set(0)
            self._on_lost()

    async def _try(self) -> bool:
        """Try once; return whether this process holds the Lease now."""
        try:
            lease = await self._client.get(LEASES, NAME, self._namespace)
        except NotFoundError:
            try:
                await self._client.create(LEASES, self._lease(None), self._namespace)
            except AlreadyExistsError:
                return False
            return True
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        if holder not in ("", self.identity) and not self._ended(lease, spec):
            return False
        try:
            await self._client.replace(LEASES, NAME, self._lease(lease), self._namespace)
        except (ConflictError, NotFoundError):
            return False
        return True

    def _ended(self, lease: Json, spec: Json) -> bool:
        """True if the Lease of another process was not seen to change for its own duration."""
        version = str(lease["metadata"]["resourceVersion"])
        if self._observed is None or self._observed.version != version:
            self._observed = ObservedLease(version, self._clock())
            return False
        return self._clock() > self._observed.at + float(spec.get("leaseDurationSeconds") or self._duration)

    def _lease(self, current: Json | None) -> Json:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = dict((current or {}).get("spec") or {})
        if spec.get("holderIdentity") != self.identity:
            spec["acquireTime"] = now
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + (1 if current else 0)
        # Whole seconds only: the field is an integer; rounded up, so that a successor rather waits too long.
        spec |= {"holderIdentity": self.identity, "renewTime": now, "leaseDurationSeconds": -int(-self._duration // 1)}
        metadata = {"name": NAME, "namespace": self._namespace}
        if current is not None:
            metadata["resourceVersion"] = current["metadata"]["resourceVersion"]
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}

    async def _give_up(self) -> None:
        led = self.acting()
        self._led = False
        self._renewed = None
        metrics.LEADER.set(0)
        if not led:
            return
        self._on_lost()
        try:
            lease = await self._client.get(LEASES, NAME, self._namespace)
            if (lease.get("spec") or {}).get("holderIdentity") == self.identity:
                lease["spec"]["holderIdentity"] = ""
                lease["spec"]["leaseDurationSeconds"] = 1
                await self._client.replace(LEASES, NAME, lease, self._namespace)
        except ApiError as error:
            log.warning("cannot give up the Lease", lease=f"{self._namespace}/{NAME}", error=str(error))
