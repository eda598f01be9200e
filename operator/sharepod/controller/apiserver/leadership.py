"""Leader election by a Lease of `coordination.k8s.io`.

Guarantees:
- At most one process acts at a time, whatever the clocks of other machines. Every time is read from this machine's own
  clock, which includes suspension.
- A released Lease is taken as soon as the watch shows it; the Lease of a dead holder as soon as it has ended.
- The Lease of another process counts as ended once it was not seen to change for its own duration.
- The acting process creates a deleted Lease again. Another process that has ever seen the Lease creates it only once it
  has been missing for its duration.
- This process stops acting once its last successful renewal *began* longer ago than the renew deadline. `acting` turns
  false without any task running.
- A leader that stopped acting and then renews after all has lost and gained leadership: it reconsiders all that it
  dropped.
- The renew deadline lies before the Lease's end by more than one write takes (checked in `settings.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from sharepod.controller import metrics
from sharepod.kube import AlreadyExistsError, ApiError, ConflictError, Json, NotFoundError

from .client import LEASES, Client

NAME = "sharepod-operator"
"""Name of the operator's Lease."""

_END_S = 0.02
"""Seconds after the end of another's Lease until it is tried for."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ObservedLease:
    """Lease of another process as last seen to change: its resourceVersion, and when, in seconds of the clock."""

    version: str
    at: float


_MOST_TRANSITIONS = (1 << 31) - 1
"""Maximum of the field `leaseTransitions`: a client that writes this value into the Lease must not block leadership."""


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
        clock: Seconds since the machine started, time asleep included.
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
        self._ends: float | None = None
        """When the Lease of another process ends, unless it changes; None: not known."""
        self._exists = False
        """The Lease has existed."""
        self._missing_since: float | None = None
        """When the Lease was first seen to be missing after it had existed."""
        self._wake = asyncio.Event()

    def acting(self) -> bool:
        """True if this process may write now."""
        return self._led and self._renewed is not None and self._clock() < self._renewed + self._renew_deadline

    async def run(self) -> None:
        """Try for the Lease and renew it until cancelled; then give it up, so that a successor need not wait."""
        try:
            while True:
                await self.step()
                await self._wait()
        finally:
            await self._give_up()

    def noticed(self, lease: Json) -> None:
        """Record a Lease from the watch: a free Lease, or another process's, is handled at once."""
        if str(lease["metadata"].get("name")) != NAME:
            return
        holder = (lease.get("spec") or {}).get("holderIdentity") or ""
        if holder == self.identity:
            return
        self._missing_since = None
        if self._led or not holder:
            self._wake.set()
        else:
            self._observe(str(lease["metadata"].get("resourceVersion")), later=True)

    async def _wait(self) -> None:
        """Wait until the next try, or until the watch shows that the Lease is free, or was taken."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), self.wait_s())
        self._wake.clear()

    def wait_s(self) -> float:
        """Return the seconds until the next try: the period, or less if another's Lease ends earlier."""
        if self._led or self._ends is None:
            return self._retry_period
        return min(self._retry_period, max(0.0, self._ends - self._clock()) + _END_S)

    async def step(self) -> None:
        """Try once to take or to renew the Lease."""
        began = self._clock()
        try:
            held = await self._try()
        except Exception as error:  # an answer that is no Lease is worth as much as none
            log.warning("cannot take or renew the Lease", lease=f"{self._namespace}/{NAME}", error=repr(error))
            held = self.acting()
        else:
            if not self.acting():  # even if it is still the leader: its writes in between were refused
                self._turn(False)
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
        """Try once; return whether this process now holds the Lease."""
        try:
            lease = await self._client.get(LEASES, NAME, self._namespace)
            version = str(lease["metadata"]["resourceVersion"])
        except NotFoundError:
            if not self._may_create():
                return False
            try:
                await self._client.create(LEASES, self._lease(None), self._namespace)
            except AlreadyExistsError:
                return False
            self._exists = True
            return True
        spec, self._exists, self._missing_since = lease.get("spec") or {}, True, None
        holder = spec.get("holderIdentity") or ""
        if holder not in ("", self.identity) and not self._ended(version, spec):
            return False
        try:
            await self._client.replace(LEASES, NAME, self._lease(lease), self._namespace)
        except (ConflictError, NotFoundError):
            return False
        return True

    def _may_create(self) -> bool:
        """True if no other process can act while the Lease is missing."""
        if self.acting() or not self._exists:
            return True
        if self._missing_since is None:
            self._missing_since = self._clock()
        return self._clock() > self._missing_since + self._duration

    def _ended(self, version: str, spec: Json) -> bool:
        """True if the Lease of another process was not seen to change for its own duration."""
        observed = self._observe(version)
        self._ends = observed.at + float(spec.get("leaseDurationSeconds") or self._duration)
        return self._clock() > self._ends

    def _observe(self, version: str, *, later: bool = False) -> ObservedLease:
        """Note a version of another's Lease; `later`: only if it is later than the known one."""
        known = self._observed
        if known is None or (_is_later(version, known.version) if later else version != known.version):
            known = self._observed = ObservedLease(version, self._clock())
            self._ends = None
        return known

    def _lease(self, current: Json | None) -> Json:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = dict((current or {}).get("spec") or {})
        if spec.get("holderIdentity") != self.identity:
            spec["acquireTime"] = now
            transitions = int(spec.get("leaseTransitions") or 0) + (1 if current else 0)
            spec["leaseTransitions"] = min(transitions, _MOST_TRANSITIONS)
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


def _is_later(version: str, known: str) -> bool:
    """Return whether a version is later than a known version. Versions are numbers; others are never later."""
    return version.isdecimal() and known.isdecimal() and int(version) > int(known)
