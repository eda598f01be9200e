"""State of one tenant's token for each of its processes: which processes want the token, which grant each was sent, and
which have not drained their grant."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from sharepod import protocol
from sharepod.timeshare import Samples, TokenGrant

from .histogram import WAIT_BOUNDS_S, Histogram
from .silence import AHEAD_NS, Silence
from .turn_log import LoggedTurn


class TokenClient(Protocol):
    """Connection of one process, as the token uses it."""

    @property
    def pid(self) -> int:
        """Pid of the process that connected."""

    @property
    def heartbeat(self) -> protocol.Heartbeat | None:
        """Heartbeats of the process. None if it writes none."""

    @property
    def version(self) -> int:
        """Version of the protocol that the process speaks: from `CONCURRENT_VERSION` on it can sample its progress,
        which co-running needs."""

    def send(self, frame: protocol.AgentFrame) -> None:
        """Send a frame, or close the connection. Never raises, never waits, calls no callback before it returns."""


@dataclass
class TenantToken:
    """Token of one tenant: its grant, and each process's state."""

    gpus: tuple[str, ...]
    """UUIDs of the tenant's GPUs."""
    contended: Callable[[bool], None]
    """Called with True when other tenants begin to want the tenant's GPUs, with False when they cease to."""
    bar: Callable[[int], None]
    """Bars the hooks' gates: prevents launches under the grant with this id or a lower one."""
    together: Callable[[bool], None] = lambda _: None
    """Called with True when other tenants begin to hold the tenant's GPUs at the same time, with False when they cease
    to."""
    wanting: dict[TokenClient, None] = field(default_factory=dict)
    """Clients that wait at their gates, in the order in which they came."""
    undrained: dict[TokenClient, int] = field(default_factory=dict)
    """Clients that were sent a grant and have not drained -> id of the last grant that each was sent."""
    sent_at: dict[TokenClient, int] = field(default_factory=dict)
    """For each undrained client: start of its silence, in nanoseconds of the clock. This is the moment at which its
    last grant was sent, or its last heartbeat before, if it wrote heartbeats while it waited."""
    disconnected: set[int] = field(default_factory=set)
    """Pids of processes that have not drained and have lost their connection, on which they would report that they
    have."""
    ending: dict[TokenClient, int] = field(default_factory=dict)
    """Undrained clients that have closed their gate and announced the end of their last work (DRAINING) -> that moment,
    in nanoseconds of the clock."""
    grant_id: int | None = None
    """Id of the grant that the tenant has not drained; None if there is none."""
    ends_at: int | None = None
    """End of the grant `grant_id`, as it was sent last, in nanoseconds of the clock. None if the grant has no end."""
    revoked_id: int | None = None
    """Id of the last grant that was revoked because a GPU was closed. No process may launch under it."""
    concurrent: bool = False
    """True if the last grant asks the processes to sample their progress."""
    counted: Samples = field(default_factory=lambda: Samples(0, 0, 0))
    """Sums of the progress counters of all processes so far."""
    closed: bool = False
    """True if one of its GPUs is not open (E3): its processes that want the token wait."""
    silence: Silence = field(default_factory=Silence)
    holds_together: bool = False
    """Last value given to `together`."""
    hinted: bool = False
    """Last value given to `contended`."""
    wanted_at: int | None = None
    """Moment since which the tenant waits for the token; None if it does not."""
    waited_since: int | None = None
    """Moment at which the wait for the latest turn began. None if unknown."""
    begun_at: int | None = None
    """Start of the turn that has not drained; None if there is no such turn."""
    draining_at: int | None = None
    """Moment at which all processes had closed their gates in the undrained turn; None if they have not."""
    lost_at: int | None = None
    """Moment from which others could hold the GPUs in the turn that has not drained."""
    waits: Histogram = field(default_factory=lambda: Histogram(WAIT_BOUNDS_S))

    @property
    def taken(self) -> bool:
        """True if the present grant was revoked because a GPU was closed (E3). No process may join such a grant."""
        return self.grant_id is not None and self.grant_id == self.revoked_id

    @property
    def gpu_mask(self) -> int:
        """Bit mask of the tenant's GPUs in a grant frame. All bits are set, because a grant is for all of them."""
        return (1 << len(self.gpus)) - 1

    def samples(self) -> Samples:
        """Read the progress counters of the processes that hold; return the sums over all processes so far."""
        self._count(self.undrained)
        return self.counted

    def _count(self, clients: Iterable[TokenClient]) -> None:
        """Add the growth of these clients' counters to the sums. Also set the number of processes to the number of
        undrained clients."""
        before = self.counted
        looks, flying, launches, several = before.looks, before.flying, before.launches, before.several
        for client in clients:
            if client.heartbeat is not None:
                grown = client.heartbeat.progress()
                looks += grown.samples
                flying += grown.in_flight
                launches += grown.launches
                several += grown.several
        self.counted = Samples(looks, flying, launches, len(self.undrained), several)

    def forget(self, client: TokenClient) -> None:
        """Remove a client's grant, because it has drained or its connection is closed. First add its progress since the
        last reading to the sums."""
        if client in self.undrained:
            self._count((client,))
        self.undrained.pop(client, None)
        self.sent_at.pop(client, None)
        self.ending.pop(client, None)

    def begin(self, now: int, grant: TokenGrant) -> dict[TokenClient, None]:
        """Record a new grant that begins at `now`, in nanoseconds of the clock. Return the clients to send it to, in
        order.
        """
        self.grant_id = grant.grant_id
        self.ends_at = now + grant.quantum_ns if grant.quantum_ns else None
        self.begun_at, self.waited_since = now, self.wanted_at
        if self.wanted_at is not None:
            self.waits.add(now - self.wanted_at)
            self.wanted_at = None
        wanting, self.wanting = self.wanting, {}
        return wanting

    def turn(self, tenant_id: str, end: int | None) -> LoggedTurn | None:
        """Return the turn that has not drained, with `end` as its end. None if there is none."""
        if self.begun_at is None:
            return None
        return LoggedTurn(tenant_id, self.gpus, self.waited_since, self.begun_at, self.draining_at, self.lost_at, end)

    def record_sent(
        self,
        client: TokenClient,
        grant: TokenGrant,
        clock: Callable[[], int],
        at: int | None = None,
    ) -> None:
        """Record that a client is sent a grant. `at`: moment from which its silence counts; None: now."""
        if self.undrained.get(client) != grant.grant_id:
            sign = None if client.heartbeat is None else client.heartbeat.read(clock)
            sent_at = clock() if at is None else at
            self.sent_at[client] = min(sign.at, sent_at) if sign is not None and sign.waits else sent_at
        self.undrained[client] = grant.grant_id
        self.ending.pop(client, None)

    def last_beats(self, clock: Callable[[], int]) -> Iterator[tuple[protocol.LastBeat | None, int]]:
        """Yield, for each client with a grant, its last heartbeat (None if it writes none) and the start of its
        silence (`sent_at`)."""
        for client, sent_at in self.sent_at.items():
            yield None if client.heartbeat is None else client.heartbeat.read(clock), sent_at

    def beats(self) -> list[protocol.Beat]:
        """Return the addresses of the granted clients' heartbeats. Empty if one of them is unknown."""
        patience_ns = self.silence.patience_ns
        beats = [
            client.heartbeat.beat(sent_at, patience_ns, AHEAD_NS)
            for client, sent_at in self.sent_at.items()
            if client.heartbeat is not None
        ]
        known = [beat for beat in beats if beat is not None]
        return known if len(known) == len(self.sent_at) else []

    def frame(self, grant: TokenGrant, *, renews: bool = False) -> protocol.Grant:
        """Return the frame that sends a grant to a client. `renews`: True if the client has this grant already, so that
        the frame only changes its terms."""
        return protocol.Grant(
            grant.grant_id,
            grant.quantum_ns,
            self.gpu_mask,
            grant.metered,
            announce=grant.metered,
            renews=renews,
            short=grant.short,
            prompt=grant.prompt,
            concurrent=grant.concurrent,
        )

    def mark_together(self, together: bool) -> None:
        """Set whether other tenants hold the tenant's GPUs at the same time. Call `together` if that has changed."""
        if self.holds_together != together:
            self.holds_together = together
            self.together(together)

    def hint(self, contended: bool) -> None:
        """Set whether other tenants want the tenant's GPUs. Call `contended` if that has changed."""
        if self.hinted != contended:
            self.hinted = contended
            self.contended(contended)
