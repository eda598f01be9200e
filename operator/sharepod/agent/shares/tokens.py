"""The token scheduler on the event loop: one token per tenant, shared by the processes of the tenant that want it.

A tenant wants the token while any of its processes does, and has drained when each process that was told of the grant
has. A process that has exited has drained; one whose connection is gone while it lives has not, until it says so on a
new connection or is overtaken. Every call takes effect at once; what has to happen later is one timer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from sharepod import protocol
from sharepod.timeshare import (
    AccountSnapshot,
    Parameters,
    Preemption,
    Scheduler,
    TimeUsage,
    TokenGrant,
    TokenRevocation,
)

from .histogram import HAND_OFF_BOUNDS_S, WAIT_BOUNDS_S, Histogram

log = structlog.get_logger(__name__)

_JOIN_NS = 1_000_000
"""A process that comes when less than this is left of its tenant's quantum waits for the next one."""
_HINTS_S = 0.5


class TokenClient(Protocol):
    """A process, as far as the token goes."""

    @property
    def pid(self) -> int:
        """Of the process that connected."""

    def send(self, frame: protocol.AgentFrame) -> None:
        """Sends, or gives the client up. Never raises, never waits, calls nothing back before it returns."""


@dataclass
class _Token:
    gpu_mask: int
    contended: Callable[[bool], None]
    wanting: set[TokenClient] = field(default_factory=set)
    undrained: dict[TokenClient, int] = field(default_factory=dict)
    """Processes that were told of a grant and have not drained, and the grant that each was told of last."""
    disconnected: set[int] = field(default_factory=set)
    """Pids that have not drained either, and have lost the connection on which they would say so."""
    ending: dict[TokenClient, int] = field(default_factory=dict)
    """Of those that have not drained, when the last work of each is expected to have ended, where it said so."""
    grant_id: int | None = None
    hinted: bool = False
    wanted_at: int | None = None
    """Since when it waits for the token."""
    waits: Histogram = field(default_factory=lambda: Histogram(WAIT_BOUNDS_S))


class Tokens:
    """All tokens of the node. `clock`: nanoseconds that never go back."""

    def __init__(self, config: Parameters, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._scheduler = Scheduler(config)
        self._clock = clock
        self._tokens: dict[str, _Token] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._sweep: asyncio.TimerHandle | None = None
        self.hand_offs = Histogram(HAND_OFF_BOUNDS_S)
        """From reading that a token came back to having sent the next grant."""

    def set_tenant(
        self,
        tenant_id: str,
        gpus: tuple[str, ...],
        *,
        request_milli: int,
        limit_milli: int,
        contended: Callable[[bool], None],
        resumed: AccountSnapshot | None = None,
    ) -> None:
        """Adds a tenant, with its account of an earlier agent if that is known, or changes its rates. `contended` is
        told when others begin or cease to want its GPUs."""
        self._scheduler.set_tenant(
            self._clock(), tenant_id, gpus, request_milli=request_milli, limit_milli=limit_milli, resumed=resumed
        )
        self._tokens.setdefault(tenant_id, _Token((1 << len(gpus)) - 1, contended))
        self._pump()

    def remove(self, tenant_id: str) -> None:
        """Forgets a tenant; its GPUs are free at once."""
        if self._tokens.pop(tenant_id, None) is not None:
            self._scheduler.remove(self._clock(), tenant_id)
            self._pump()

    def want(self, tenant_id: str, client: TokenClient) -> None:
        """A process waits at its gate."""
        token = self._tokens[tenant_id]
        overdue = self._scheduler.preempted(tenant_id)
        if client in token.undrained and not overdue:
            return
        now = self._clock()
        running = self._scheduler.remaining_grant(now, tenant_id)
        if running is not None and (running.quantum_ns == 0 or running.quantum_ns >= _JOIN_NS):
            self._tell(token, client, running)
            return
        if client in token.wanting and not overdue:
            return  # it has said so
        token.wanting.add(client)
        if token.grant_id is None or overdue:
            if token.wanted_at is None:
                token.wanted_at = now
            self._scheduler.want(now, tenant_id)
            self._hint_neighbours(tenant_id)
            self._pump()

    def set_connected(self, tenant_id: str, *, connected: bool) -> None:
        """Whether any process of the tenant is connected."""
        if tenant_id in self._tokens:
            self._scheduler.set_present(self._clock(), tenant_id, present=connected)
            self._pump()

    def draining(self, tenant_id: str, client: TokenClient, frame: protocol.Draining) -> None:
        """A process has closed its gate, and says when its last work is expected to have ended. Once all have, the next
        tenant may be granted before. Who says so and goes on is charged until it has drained."""
        token = self._tokens[tenant_id]
        if token.undrained.get(client) != frame.grant_id:
            return
        now = self._clock()
        token.ending[client] = now + frame.expected_ns
        if not token.disconnected and token.ending.keys() >= token.undrained.keys():
            self._scheduler.draining(now, tenant_id, expected_ns=max(token.ending.values()) - now)
            self._pump()

    def drained(self, tenant_id: str, client: TokenClient, frame: protocol.Drained) -> None:
        """A process has finished what it launched under a grant. An old grant's id is a frame that crossed with
        ours."""
        token = self._tokens[tenant_id]
        disconnected = client.pid in token.disconnected
        told = token.undrained.get(client, token.grant_id if disconnected else None)
        if told is None or frame.grant_id != told:
            if frame.wanting:
                self.want(tenant_id, client)
            return
        token.undrained.pop(client, None)
        token.ending.pop(client, None)
        token.disconnected.discard(client.pid)
        if frame.wanting:
            token.wanting.add(client)
        self._maybe_drained(tenant_id, token)

    def connection_lost(self, tenant_id: str, client: TokenClient, *, alive: bool = False) -> None:
        """A connection is gone. With it goes what its process held, unless that is still `alive`."""
        token = self._tokens.get(tenant_id)
        if token is None:
            return
        token.wanting.discard(client)
        if client in token.undrained:
            del token.undrained[client]
            token.ending.pop(client, None)
            if alive:
                token.disconnected.add(client.pid)
            self._maybe_drained(tenant_id, token)
        elif not token.wanting and (token.grant_id is None or self._scheduler.preempted(tenant_id)):
            token.wanted_at = None
            self._scheduler.unwant(self._clock(), tenant_id)
            self._pump()

    def exited(self, tenant_id: str, pid: int) -> None:
        """A process has ended: nothing of it is on a GPU."""
        token = self._tokens.get(tenant_id)
        if token is not None and pid in token.disconnected:
            token.disconnected.discard(pid)
            self._maybe_drained(tenant_id, token)

    def usage(self, tenant_id: str) -> TimeUsage:
        """What the tenant held up to now."""
        return self._scheduler.usage(self._clock(), tenant_id)

    def state(self, tenant_id: str) -> AccountSnapshot:
        """Its account up to now, for the agent that comes after this one."""
        return self._scheduler.snapshot(self._clock(), tenant_id)

    def waits(self, tenant_id: str) -> Histogram:
        """How long the tenant waited for each grant that it got."""
        return self._tokens[tenant_id].waits

    def waited_ns(self, tenant_id: str) -> int:
        """How long it waited in all, up to now."""
        token = self._tokens[tenant_id]
        return token.waits.sum_ns + (0 if token.wanted_at is None else max(0, self._clock() - token.wanted_at))

    def close(self) -> None:
        """Stops the timers."""
        for timer in (self._timer, self._sweep):
            if timer is not None:
                timer.cancel()
        self._timer = self._sweep = None

    def _maybe_drained(self, tenant_id: str, token: _Token) -> None:
        if token.undrained or token.disconnected:
            return
        now = self._clock()
        token.grant_id = None
        token.wanted_at = now if token.wanting else None
        self._scheduler.drained(now, tenant_id, wanting=bool(token.wanting))
        if not token.wanting:
            self._scheduler.unwant(now, tenant_id)
        if self._pump():
            self.hand_offs.add(self._clock() - now)

    def _pump(self) -> bool:
        """Carries out what is due, and sets the timer to what will be. Whether a token was granted."""
        now = self._clock()
        granted = False
        given_up: list[str] = []
        for action in self._scheduler.tick(now):
            token = self._tokens[action.tenant]
            if isinstance(action, TokenGrant):
                if action.grant_id == token.grant_id:  # it goes on
                    for client in list(token.undrained):
                        self._tell(token, client, action, renews=True)
                    continue
                granted = True
                token.grant_id = action.grant_id
                if token.wanted_at is not None:
                    token.waits.add(now - token.wanted_at)
                    token.wanted_at = None
                wanting, token.wanting = token.wanting, set()
                for client in wanting:
                    self._tell(token, client, action)
            elif isinstance(action, TokenRevocation):
                for client in token.undrained:
                    client.send(protocol.Revoke(action.grant_id))
            elif isinstance(action, Preemption):
                log.warning("holder is overdue and was overtaken", tenant=action.tenant, grant=action.grant_id)
                if token.disconnected:
                    given_up.append(action.tenant)
        due = self._scheduler.next_deadline()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(loop.time() + max(0, due - self._clock()) / 1e9, self._pump)
        for tenant_id in given_up:
            token = self._tokens[tenant_id]
            token.disconnected.clear()
            self._maybe_drained(tenant_id, token)
        return granted

    @staticmethod
    def _tell(token: _Token, client: TokenClient, grant: TokenGrant, *, renews: bool = False) -> None:
        token.undrained[client] = grant.grant_id
        token.ending.pop(client, None)
        frame = protocol.Grant(
            grant.grant_id, grant.quantum_ns, token.gpu_mask, grant.metered, announce=grant.metered, renews=renews
        )
        client.send(frame)

    def _hint_neighbours(self, tenant_id: str) -> None:
        """Hints go up at once and come down by a sweep."""
        for other in self._scheduler.sharing_with(tenant_id):
            self._set_hint(self._tokens[other], True)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(_HINTS_S, self._sweep_hints)

    def _sweep_hints(self) -> None:
        now = self._clock()
        for tenant_id, token in self._tokens.items():
            self._set_hint(token, self._scheduler.contended(now, tenant_id))
        lit = any(token.hinted for token in self._tokens.values())
        self._sweep = asyncio.get_running_loop().call_later(_HINTS_S, self._sweep_hints) if lit else None

    @staticmethod
    def _set_hint(token: _Token, contended: bool) -> None:
        if token.hinted != contended:
            token.hinted = contended
            token.contended(contended)
