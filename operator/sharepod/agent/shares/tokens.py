"""Tokens of a node's tenants: connects processes' frames with the scheduler (`timeshare/`). A tenant's token is shared
by all of its processes that want it.

Guarantees:
- A tenant wants the token while any of its processes does.
- E1 end-of-turn: a tenant has drained when each process with the grant has drained or exited. A running process that
  has lost its connection counts as not drained until it reports on a new connection that it has, or the tenant is
  preempted.
- E2 silent-holder: if another tenant waits, the gates of a silent tenant (`silence.py`) are barred. The next tenant
  gets the GPU when the silent tenant's last work ends, if that end is known. A frame of one process does not postpone
  the check of another process.
- E3 open-gpus: a tenant of a GPU that is not open gets no grant. If one of a holder's GPUs is closed, the holder's
  gates are barred at once.
- E4 siblings: a process that wants the token while other processes of its tenant hold it waits at most until the end of
  their quantum. It joins a grant without end at once, and any other grant when the grant is renewed.
- A call carries out all actions that are due. Later actions of the scheduler use one timer.
- A failure for one tenant does not affect other tenants.
- A prepared hand-off, which the loop's wait carries out (`prepared.py`), leaves the same state as a call of `drained`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import cast

import structlog

from sharepod import protocol
from sharepod.timeshare import (
    AccountSnapshot,
    Action,
    CoRuns,
    GpuTime,
    Parameters,
    Preemption,
    PreparedHandOff,
    Scheduler,
    Sharing,
    Suspension,
    TimeUsage,
    TokenGrant,
    TokenRevocation,
    TurnSpans,
)

from .deadline import Deadline
from .hint_sweep import HintSweep
from .histogram import HAND_OFF_BOUNDS_S, Histogram
from .looks import STALL_NS, Looks
from .prepared import PreparedHandOffs, Ready, SocketClient
from .silence import PATIENCE_MOST_NS, LookAgain
from .tenant_token import TenantToken, TokenClient
from .turn_log import LoggedTurn, TurnLog

log = structlog.get_logger(__name__)

_JOIN_NS = 1_000_000
"""Nanoseconds that must be left of a quantum for another process of the tenant to join it. With less, the process waits
for the tenant's next turn. 1 ms is a tenth of the shortest default quantum."""


class Tokens:
    """Tokens of all tenants of the node.

    Args:
        config: Durations of the scheduler.
        clock: Monotonic clock in nanoseconds.
    """

    def __init__(self, config: Parameters, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._scheduler = Scheduler(config)
        self._clock = clock
        self._tokens: dict[str, TenantToken] = {}
        self._open: frozenset[str] | None = None
        """GPUs that are open to tenants. None: all."""
        self._deadline = Deadline(clock, self._pump)
        self._due: int | None = None
        """Moment of the scheduler's next action, in nanoseconds of the clock. None if there is none."""
        self._hints = HintSweep(self._sweep_hints)
        self._looks = Looks(clock, self._listen)
        """Schedule of the silence checks of tenants that hold a GPU for which another tenant waits (E2)."""
        self._prepared = PreparedHandOffs(clock, self._prepare, self._handed_off, self._pump)
        self.hand_offs = Histogram(HAND_OFF_BOUNDS_S)
        """Durations from reading the frame that returned a token until the next grant was sent."""
        self._turn_log = TurnLog()

    def set_tenant(
        self,
        tenant_id: str,
        gpus: tuple[str, ...],
        *,
        request_milli: int,
        limit_milli: int,
        interactive: bool = False,
        group: str | None = None,
        contended: Callable[[bool], None],
        bar: Callable[[int], None],
        together: Callable[[bool], None] = lambda _: None,
        resumed: AccountSnapshot | None = None,
    ) -> None:
        """Add a tenant, or change the rates of one.

        Args:
            tenant_id: Id of the tenant's row.
            gpus: UUIDs of its GPUs, in the row's order.
            request_milli: Guaranteed share of each GPU, in thousandths.
            limit_milli: Limit of its share of each GPU, in thousandths.
            interactive: True if the tenant requests short waits.
            group: Group of tenants that are granted together; for a new tenant only.
            contended: Called when other tenants begin or cease to want its GPUs.
            bar: Called to prevent launches under the grant with the given id, or with a lower id.
            together: Called when other tenants begin or cease to hold its GPUs at the same time.
            resumed: Account of the tenant under an earlier agent, if known; for a new tenant only.
        """
        self._prepared.change(gpus)
        token = self._tokens.get(tenant_id) or TenantToken(gpus, contended, bar, together, closed=self._closes(gpus))
        self._scheduler.set_tenant(
            self._now(),
            tenant_id,
            gpus,
            request_milli=request_milli,
            limit_milli=limit_milli,
            interactive=interactive,
            group=group,
            read=token.samples,
            resumed=resumed,
        )
        self._tokens[tenant_id] = token
        self._pump()

    def set_sharing(self, gpu: str, sharing: Sharing) -> None:
        """Set how the tenants of a GPU take turns. `gpu`: its UUID."""
        if sharing is not self._scheduler.sharing(gpu):
            self._prepared.change((gpu,))
            self._scheduler.set_sharing(self._now(), gpu, sharing)
            self._pump()

    def set_open(self, gpus: frozenset[str] | None) -> None:
        """Grant time only on these GPUs from now on (E3). None: on all GPUs."""
        self._open = gpus
        self._prepared.change_all()
        now = self._now()
        for tenant_id, token in self._tokens.items():
            closes = self._closes(token.gpus)
            if closes and not token.closed:
                self._close(now, tenant_id, token)
            elif token.closed and not closes:
                token.closed = False
                if token.wanting and (token.grant_id is None or self._scheduler.displaced(tenant_id)):
                    self._wait_for_turn(now, tenant_id, token)
        self._pump()

    def _closes(self, gpus: tuple[str, ...]) -> bool:
        return self._open is not None and not self._open.issuperset(gpus)

    def _close(self, now: int, tenant_id: str, token: TenantToken) -> None:
        """Revoke a tenant's token, because one of its GPUs is closed. Its processes launch nothing more; launched work
        drains."""
        token.closed, token.wanted_at = True, None
        self._scheduler.unwant(now, tenant_id)
        if token.grant_id is None:
            return
        token.revoked_id = token.grant_id
        token.bar(token.grant_id)
        for client in list(token.undrained):
            client.send(protocol.Revoke(token.grant_id))

    def remove(self, tenant_id: str) -> None:
        """Remove a tenant. Its GPUs are free at once."""
        token = self._tokens.pop(tenant_id, None)
        if token is not None:
            self._prepared.change(token.gpus)
            self._looks.drop(tenant_id)
            now = self._now()
            self._log_turn(now, tenant_id, token)
            token.mark_together(False)
            self._scheduler.remove(now, tenant_id)
            self._pump()

    def want(self, tenant_id: str, client: TokenClient) -> None:
        """Let a process that waits at its gate join its tenant's grant, or wait for the next one."""
        token = self._tokens[tenant_id]
        displaced = self._scheduler.displaced(tenant_id)
        if client in token.undrained and token.undrained[client] == token.grant_id and not displaced:
            return  # this process already has the grant
        if token.closed:
            token.wanting[client] = None
            return
        now = self._now()
        if client.heartbeat is not None:
            client.heartbeat.read(self._clock)  # the frame shows that the process just had processor time
        running = self._scheduler.remaining_grant(now, tenant_id)
        if running is not None and not token.taken and (running.quantum_ns == 0 or running.quantum_ns >= _JOIN_NS):
            self._prepared.change(token.gpus)
            token.wanting.pop(client, None)
            self._send_grant(token, client, running)
            self._watch_still(tenant_id)
            return
        if client in token.wanting and not displaced:
            return  # this process already waits
        self._prepared.change(token.gpus)
        token.wanting[client] = None
        if token.grant_id is None or displaced:
            self._wait_for_turn(now, tenant_id, token)
            self._pump()

    def set_connected(self, tenant_id: str, *, connected: bool, concurrent: bool = False) -> None:
        """Set whether any process of the tenant is connected, and so may want the token at any moment. `concurrent`:
        True if the tenant may co-run; all its processes must sample their progress."""
        if tenant_id in self._tokens:
            self._prepared.change(self._tokens[tenant_id].gpus)
            now = self._now()
            self._scheduler.set_concurrent(now, tenant_id, concurrent=concurrent)
            self._scheduler.set_connected(now, tenant_id, connected=connected)
            self._pump()

    def draining(self, tenant_id: str, client: TokenClient, frame: protocol.Draining) -> None:
        """Record that a process has closed its gate and that its last work ends in `frame.expected_ns`.

        Once all processes of the tenant have announced this, the next tenant may be granted before they have drained.
        This tenant is charged until it has drained.
        """
        token = self._tokens[tenant_id]
        if token.undrained.get(client) != frame.grant_id:
            return
        self._prepared.change(token.gpus)
        now = self._now()
        token.silence.spoke(now)
        token.ending[client] = now + frame.expected_ns
        all_ending = not token.disconnected and token.ending.keys() >= token.undrained.keys()
        if all_ending or self._scheduler.displaced(tenant_id):
            token.draining_at = now if token.draining_at is None else token.draining_at
            self._scheduler.draining(now, tenant_id, expected_ns=max(token.ending.values()) - now)
            self._pump()

    def drained(self, tenant_id: str, client: TokenClient, frame: protocol.Drained) -> None:
        """Record that all work that a process launched under a grant has ended. A frame that names an older grant was
        sent before the newer one arrived: it does not end the newer grant."""
        token = self._tokens[tenant_id]
        disconnected = client.pid in token.disconnected
        drains = token.undrained.get(client, token.grant_id if disconnected else None)
        if drains is None or frame.grant_id != drains:
            if frame.wanting:
                self.want(tenant_id, client)
            return
        self._prepared.change(token.gpus)
        token.forget(client)
        token.disconnected.discard(client.pid)
        if frame.wanting:
            token.wanting[client] = None
            self._join_endless(tenant_id, token)
        self._end_grant_if_drained(tenant_id, token)

    def connection_lost(self, tenant_id: str, client: TokenClient, *, alive: bool = False) -> None:
        """Drop a closed connection. `alive`: True if its process still runs; it then counts as not drained (E1)."""
        token = self._tokens.get(tenant_id)
        if token is None:
            return
        self._prepared.change(token.gpus)
        token.wanting.pop(client, None)
        if client in token.undrained:
            token.forget(client)
            if alive:
                token.disconnected.add(client.pid)
            self._end_grant_if_drained(tenant_id, token)
        elif not token.wanting and (token.grant_id is None or self._scheduler.displaced(tenant_id)):
            token.wanted_at = None
            self._scheduler.unwant(self._now(), tenant_id)
            self._pump()

    def exited(self, tenant_id: str, pid: int) -> None:
        """Record that a process has exited: it has no work on a GPU."""
        token = self._tokens.get(tenant_id)
        if token is not None and pid in token.disconnected:
            self._prepared.change(token.gpus)
            token.disconnected.discard(pid)
            self._end_grant_if_drained(tenant_id, token)

    def account_of(self, tenant_id: str) -> TimeUsage | None:
        """Return the token time that a tenant has used up to now; None if there is no such tenant."""
        return self.usage(tenant_id) if tenant_id in self._tokens else None

    def usage(self, tenant_id: str) -> TimeUsage:
        """Return the token time that a tenant has used up to now. The tenant must exist."""
        return self._scheduler.usage(self._now(), tenant_id)

    def turns(self, tenant_id: str) -> TurnSpans:
        """Return the intervals of the last seconds in which the tenant could have work on its GPUs."""
        return self._scheduler.turns(self._now(), tenant_id)

    def turns_on(self, gpu: str, since: int) -> tuple[list[LoggedTurn], int]:
        """Return the turns on a GPU that ended after `since`, with current turns and waits for a turn, and the moment
        since which no turn is missing. Moments in nanoseconds of the clock."""
        found = list(self._turn_log.on(gpu, since))
        for tenant_id, token in self._tokens.items():
            if gpu in token.gpus:
                if (turn := token.turn(tenant_id, None)) is not None:
                    found.append(turn)
                if token.wanted_at is not None:
                    found.append(LoggedTurn(tenant_id, token.gpus, token.wanted_at, None, None, None, None))
        return found, max(since, self._turn_log.complete_since())

    def surcharge(self, tenant_id: str, ns: int) -> None:
        """Charge a tenant for time in which its kernels ran although it did not hold the token."""
        self._prepared.change(self._tokens[tenant_id].gpus)
        self._scheduler.surcharge(self._now(), tenant_id, ns)
        self._pump()

    def gpu_time(self, gpu: str) -> GpuTime | None:
        """Return the uses of a GPU's time up to now; None if it has no tenants."""
        return self._scheduler.gpu_time(self._now(), gpu)

    def co_runs(self, gpu: str) -> CoRuns:
        """Return a GPU's co-runners, and how often co-running ended, by reason."""
        return self._scheduler.co_runs(gpu)

    def alone_in_flight(self, tenant_id: str) -> float | None:
        """Return the fraction of its exclusive turns (0 to 1) in which the tenant has work in flight. None if
        unknown."""
        return self._scheduler.alone_in_flight(self._now(), tenant_id)

    def snapshot(self, tenant_id: str) -> AccountSnapshot:
        """Return the tenant's time account up to now, for the next agent to resume."""
        return self._scheduler.snapshot(self._now(), tenant_id)

    def waits(self, tenant_id: str) -> Histogram:
        """Return the histogram of the tenant's waits for its grants. Live: it continues to count."""
        return self._tokens[tenant_id].waits

    def waited_ns(self, tenant_id: str) -> int:
        """Return the nanoseconds that the tenant has waited in total, up to now."""
        token = self._tokens[tenant_id]
        return token.waits.sum_ns + (0 if token.wanted_at is None else max(0, self._now() - token.wanted_at))

    def close(self) -> None:
        """Stop the timers."""
        self._hints.close()
        self._deadline.close()
        self._looks.close()
        self._prepared.close()

    def _now(self) -> int:
        """Return the current moment. If the scheduler's next action is overdue by `STALL_NS`, the agent has stalled,
        and no tenant is charged for that time."""
        now = self._clock()
        if self._due is not None and now - self._due >= STALL_NS:
            due, self._due = self._due, None
            self._prepared.change_all()
            self._scheduler.stalled(now)
            log.warning(
                "the agent was held up; no tenant is charged for that time", milliseconds=(now - due) // 1_000_000
            )
        return now

    def _join_endless(self, tenant_id: str, token: TenantToken) -> None:
        """Let the processes that want the token join the grant that other processes of their tenant hold, if that grant
        has no end (E4)."""
        running = self._scheduler.remaining_grant(self._now(), tenant_id)
        if (token.undrained or token.disconnected) and running is not None and running.quantum_ns == 0:
            self._join(tenant_id, token, running)

    def _join(self, tenant_id: str, token: TenantToken, grant: TokenGrant) -> None:
        if token.closed or not token.wanting or token.taken:
            return
        wanting, token.wanting = token.wanting, {}
        for client in wanting:
            self._send_grant(token, client, grant)
        self._watch_still(tenant_id)

    def _end_grant_if_drained(self, tenant_id: str, token: TenantToken) -> None:
        """End the tenant's grant once all its processes have drained (E1), and grant to the next tenant."""
        now = self._now()
        if token.undrained or token.disconnected:
            self._watch_still(tenant_id)
            if self._scheduler.displaced(tenant_id):
                self._wait_as_wanted(now, tenant_id, token)
            elif self._suspend_if_silent(now, tenant_id, token) is None:
                self._pump()
            return
        token.mark_together(False)
        self._log_turn(now, tenant_id, token)
        token.grant_id = None
        self._looks.drop(tenant_id)
        wanting = bool(token.wanting) and not token.closed
        token.wanted_at = now if wanting else None
        self._scheduler.drained(now, tenant_id, wanting=wanting)
        if not wanting:
            self._scheduler.unwant(now, tenant_id)
        if self._pump():
            self.hand_offs.add(self._clock() - now)

    def _pump(self) -> bool:
        """Carry out the scheduler's due actions, and set the timer for the next one. Return whether a token was
        granted."""
        now = self._now()
        granted = False
        given_up: list[str] = []
        left: list[str] = []
        # 1. Carry out the scheduler's actions.
        actions = self._scheduler.tick(now)
        for action in actions:
            if isinstance(action, TokenGrant):
                self._tokens[action.tenant].concurrent = action.concurrent
        self._mark_together()
        for action in actions:
            try:
                granted = self._carry_out(now, action) or granted
            except Exception:
                log.exception("sending to a tenant has failed; others continue", tenant=action.tenant)
            if isinstance(action, Preemption | Suspension):
                self._tokens[action.tenant].lost_at = now
                left.append(action.tenant)
                if isinstance(action, Preemption) and self._tokens[action.tenant].disconnected:
                    given_up.append(action.tenant)
        # 2. Set the timer to the scheduler's next deadline.
        self._due = due = self._scheduler.next_deadline()
        self._deadline.set(due)
        self._prepared.end_by(None if due is None else due + STALL_NS - 1)
        if due is not None and not self._looks.pending:
            self._looks.by(now + PATIENCE_MOST_NS)
        # 3. Stop waiting for the disconnected processes of preempted tenants. `_end_grant_if_drained` calls this method
        #    again.
        for tenant_id in given_up:
            token = self._tokens[tenant_id]
            token.disconnected.clear()
            self._end_grant_if_drained(tenant_id, token)
        # 4. Queue preempted and suspended tenants for their next turn, if some of their processes want it.
        for tenant_id in left:
            self._looks.drop(tenant_id)
        waiting = [tenant_id for tenant_id in left if self._tokens[tenant_id].wanting]
        for tenant_id in waiting:
            self._wait_for_turn(now, tenant_id, self._tokens[tenant_id])
        return (self._pump() or granted) if waiting else granted

    def _carry_out(self, now: int, action: Action) -> bool:
        """Send one action of the scheduler to the tenant's processes. Return True if it gives the tenant a new
        grant."""
        token = self._tokens[action.tenant]
        self._prepared.change(token.gpus)
        if isinstance(action, TokenGrant):
            if action.grant_id != token.grant_id:
                self._log_turn(now, action.tenant, token)  # a displaced tenant may have an undrained turn
                wanting = token.begin(now, action)
                for client in wanting:
                    self._send_grant(token, client, action)
                self._watch_new(now, action.tenant, token, wanting)
                return True
            # The grant is renewed, or has new terms.
            before, token.ends_at = token.ends_at, now + action.quantum_ns if action.quantum_ns else None
            for client, held_id in () if token.closed else list(token.undrained.items()):
                if held_id == action.grant_id:  # clients with an earlier grant must drain it before they get this one
                    self._send_grant(token, client, action, renews=True)
            if before is not None and (token.ends_at is None or token.ends_at > before):
                self._join(action.tenant, token, action)
        elif isinstance(action, TokenRevocation):
            for client in token.undrained:
                client.send(protocol.Revoke(action.grant_id))
        elif isinstance(action, Preemption):
            log.warning("tenant was preempted before it had drained", tenant=action.tenant, grant=action.grant_id)
        else:
            log.debug("tenant has no processor time", tenant=action.tenant, grant=action.grant_id)
        return False

    def _watch_new(self, now: int, tenant_id: str, token: TenantToken, holders: Collection[TokenClient]) -> None:
        """Start the silence watch of a tenant with a new grant. `holders`: its clients that were sent the grant. If the
        loop cannot watch it, schedule a check where patience is short."""
        watched = self._scheduler.is_waited_for(tenant_id) and self._watch(tenant_id)
        if holders and not watched and token.silence.patience_ns < PATIENCE_MOST_NS:
            since = max(token.sent_at[client] for client in holders)
            self._looks.by(max(now, since + token.silence.patience_ns))

    def _prepare(self, gpu: str) -> Ready | None:
        """Decide the next hand-off of a GPU in advance. Return None unless one process hands over to one process and
        the scheduler has nothing else to do first."""
        turns = self._scheduler.prepare(self._now(), gpu)
        if not turns:
            return None
        grant = turns[0].grant
        holder, next_one = self._tokens[turns[0].holder], self._tokens[grant.tenant]
        if holder.closed or holder.disconnected or holder.wanting or holder.grant_id != turns[0].held_id:
            return None
        if next_one.closed or next_one.disconnected or next_one.undrained or len(next_one.wanting) != 1:
            return None
        holding = [client for client, grant_id in holder.undrained.items() if grant_id == holder.grant_id]
        [successor] = next_one.wanting
        if len(holding) != 1 or len(holder.undrained) != 1:
            return None
        frames = tuple(next_one.frame(turn.grant) for turn in turns)
        return Ready(cast(SocketClient, holding[0]), cast(SocketClient, successor), tuple(turns), frames)

    def _handed_off(self, ready: Ready, turn: PreparedHandOff, seen_at: int, sent_at: int) -> None:
        """Record a prepared hand-off that was carried out. The result equals `drained` followed by `_pump` at the
        moment `seen_at`, when the holder's DRAINED frame was read."""
        holder, client = self._tokens[turn.holder], cast(TokenClient, ready.holder)
        # 1. The holder has drained.
        holder.mark_together(False)
        holder.forget(client)
        self._log_turn(seen_at, turn.holder, holder)
        holder.grant_id = None
        self._looks.drop(turn.holder)
        if turn.wanting:
            holder.wanting[client] = None
        holder.wanted_at = seen_at if turn.wanting else None
        self._scheduler.hand_off(seen_at, turn)
        # 2. The next tenant has its grant.
        token = self._tokens[turn.grant.tenant]
        self._log_turn(seen_at, turn.grant.tenant, token)
        successors = token.begin(seen_at, turn.grant)
        token.concurrent = turn.grant.concurrent
        self._mark_together()
        for successor in successors:
            token.record_sent(successor, turn.grant, self._clock, seen_at)
        self._watch_new(seen_at, turn.grant.tenant, token, successors)
        self.hand_offs.add(sent_at - seen_at)

    def _mark_together(self) -> None:
        """Notify the tenants that now hold their GPUs together with others. Their hooks keep durations of this time
        separate."""
        for tenant_id, together in self._scheduler.holds_together():
            token = self._tokens[tenant_id]
            if token.concurrent:
                token.mark_together(together)

    def _log_turn(self, now: int, tenant_id: str, token: TenantToken) -> None:
        """Log the turn of a tenant that ends now, if there is one."""
        if (turn := token.turn(tenant_id, now)) is not None:
            self._turn_log.add(turn)
            token.begun_at = token.draining_at = token.lost_at = None

    def _wait_for_turn(self, now: int, tenant_id: str, token: TenantToken) -> None:
        if token.closed:
            return
        if token.wanted_at is None:
            token.wanted_at = now
        self._scheduler.want(now, tenant_id)
        if not all(map(self._looks.watches, self._scheduler.holders_beside(tenant_id))):
            self._looks.by(now + PATIENCE_MOST_NS)  # the tenants that hold its GPUs must be checked from now on
        self._hints.up(self._tokens[other].hint for other in self._scheduler.sharing_with(tenant_id))

    def _wait_as_wanted(self, now: int, tenant_id: str, token: TenantToken) -> None:
        """Let a displaced tenant wait for its next turn if one of its processes wants the token. Otherwise remove it
        from the queue."""
        if token.wanting:
            self._wait_for_turn(now, tenant_id, token)
        else:
            token.wanted_at = None
            self._scheduler.unwant(now, tenant_id)
        self._pump()

    def _listen(self, late: bool) -> None:
        """Check the heartbeats of all tenants that hold a GPU for which others wait (E2). `late`: True if the agent
        was stalled. The processes may have been too, so only the next check decides."""
        now = self._now()
        looks: list[int] = []
        silenced = False
        waited_for = self._scheduler.waited_for()
        for tenant_id in waited_for:
            again_at = None if late else self._suspend_if_silent(now, tenant_id, self._tokens[tenant_id])
            silenced = silenced or (again_at is None and not late)
            looks.append(now + PATIENCE_MOST_NS if again_at is None else again_at)
        if looks:
            # check again after the longest patience at the latest, because another tenant may hold by then
            at = now + min(max(min(looks) - now, 1), PATIENCE_MOST_NS)
            self._looks.watch({tenant_id: self._beats(tenant_id) for tenant_id in waited_for}, at)
        if silenced:
            self._pump()

    def _watch(self, tenant_id: str) -> bool:
        """Let the loop watch the heartbeats of a tenant that holds. Return False if it cannot."""
        return self._looks.put(tenant_id, self._beats(tenant_id))

    def _watch_still(self, tenant_id: str) -> None:
        """If a tenant that holds is watched, watch its present processes from now on."""
        if self._looks.watches(tenant_id) and not self._watch(tenant_id):
            self._looks.drop(tenant_id)
            self._looks.by(self._clock() + PATIENCE_MOST_NS)

    def _beats(self, tenant_id: str) -> list[protocol.Beat]:
        """Return where the event loop can read the heartbeats of a tenant that holds. Empty if it cannot watch the
        tenant."""
        token = self._tokens[tenant_id]
        if token.disconnected or token.grant_id is None or self._scheduler.displaced(tenant_id):
            return []
        return token.beats()

    def _suspend_if_silent(self, now: int, tenant_id: str, token: TenantToken) -> int | None:
        """If a tenant that holds is silent, bar its gates (E2).

        Return the moment of the next check. None if the gates were barred; the caller must then call `_pump`.
        """
        if token.disconnected or token.grant_id is None or self._scheduler.displaced(tenant_id):
            return now + PATIENCE_MOST_NS
        verdict = token.silence.judge(now, token.last_beats(self._clock))
        if isinstance(verdict, LookAgain):
            return verdict.at
        self._prepared.change(token.gpus)
        token.bar(token.grant_id)
        self._scheduler.silent(now, tenant_id, expected_ns=verdict.ends_at - now)
        return None

    def _send_grant(self, token: TenantToken, client: TokenClient, grant: TokenGrant, *, renews: bool = False) -> None:
        token.record_sent(client, grant, self._clock)
        client.send(token.frame(grant, renews=renews))

    def _sweep_hints(self) -> bool:
        now = self._now()
        for tenant_id, token in self._tokens.items():
            token.hint(self._scheduler.contended(now, tenant_id))
        return any(token.hinted for token in self._tokens.values())
