"""Leader election by a Lease of `coordination.k8s.io`.

Guarantees:
- At most one process acts at a time, even if machines' clocks differ. All times are read from this machine's own clock,
  which also counts suspension.
- A released Lease is taken as soon as the watch shows its release. The Lease of a dead process is taken as soon as it
  has ended.
- The Lease of another process counts as ended once this process has seen no change of it for the `leaseDurationSeconds`
  in it.
- If the Lease is deleted, the acting process creates it again. Any other process that has seen the Lease first waits
  until it has been missing for a Lease duration.
- Leadership counts from the *beginning* of the last successful renewal. Once that is longer ago than the renew
  deadline, `acting` returns False, even if no task runs.
- If a process stops acting and then renews its Lease, `on_lost` and `on_gained` are called. So the work that was
  dropped while its writes were refused is done again.
- The renew deadline is before the Lease's end by at least the timeout of one write (checked in `settings.py`).
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
"""Seconds after the computed end of another process's Lease at which this process tries to take it."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ObservedLease:
    """Lease of another process: its latest resourceVersion, and the time at which this process first saw that
    version."""

    version: str
    at: float


_MOST_TRANSITIONS = (1 << 31) - 1
"""Maximum of the field `leaseTransitions`: a client that writes this value into the Lease must not block leadership."""


class Leadership:
    """Leader elector.

    Args:
        client: The API server. It must be a client that may write before this process leads.
        namespace: Namespace of the Lease.
        identity: Name of this process in the Lease.
        duration: Seconds after its last renewal at which the Lease ends.
        renew_deadline: Seconds after which a leader that could not renew stops acting.
        retry_period: Seconds between two tries.
        on_gained: Called each time this process becomes the leader.
        on_lost: Called each time this process ceases to be the leader.
        clock: Seconds since the machine started, including suspension.
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
        """Time at which the last successful renewal began. None if this process does not lead."""
        self._led = False
        self._observed: ObservedLease | None = None
        self._ends: float | None = None
        """Time at which the Lease of another process ends if it does not change. None if unknown."""
        self._exists = False
        """True once this process has seen the Lease."""
        self._missing_since: float | None = None
        """Time at which the Lease was first found missing after this process had seen it."""
        self._wake = asyncio.Event()

    def acting(self) -> bool:
        """True if this process may write now."""
        return self._led and self._renewed is not None and self._clock() < self._renewed + self._renew_deadline

    async def run(self) -> None:
        """Try to take the Lease, and renew it, until cancelled. Then release it, so that the next leader need not wait
        for its end.
        """
        try:
            while True:
                await self.step()
                await self._wait()
        finally:
            await self._give_up()

    def noticed(self, lease: Json) -> None:
        """Record a Lease from the watch. If the Lease is free or was taken by another process, the next try begins at
        once.
        """
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
        """Return the seconds until the next try: the retry period, or less if another process's Lease ends earlier."""
        if self._led or self._ends is None:
            return self._retry_period
        return min(self._retry_period, max(0.0, self._ends - self._clock()) + _END_S)

    async def step(self) -> None:
        """Try once to take or to renew the Lease."""
        began = self._clock()
        try:
            held = await self._try()
        except Exception as error:  # an answer that is no Lease counts as no answer
            log.warning("cannot take or renew the Lease", lease=f"{self._namespace}/{NAME}", error=repr(error))
            held = self.acting()
        else:
            # This process may still hold the Lease, but its writes were refused: report the loss first.
            if not self.acting():
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
        """Try once to take or renew the Lease. Return True if this process now holds it."""
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
        """True if no change of another process's Lease was seen for the duration that the Lease names."""
        observed = self._observe(version)
        self._ends = observed.at + float(spec.get("leaseDurationSeconds") or self._duration)
        return self._clock() > self._ends

    def _observe(self, version: str, *, later: bool = False) -> ObservedLease:
        """Record a version of another process's Lease; return the version that now counts, with the time of its
        arrival. `later`: if True, ignore a version that is not later than the known version.
        """
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
        # The field takes whole seconds. They are rounded up, so that another process waits too long rather than too
        # short.
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
    """Return True if a version is later than a known version. A version that is not a number is never later."""
    return version.isdecimal() and known.isdecimal() and int(version) > int(known)
