"""What becomes of a hold: it goes on, is cut short, gives way, is revoked, is overtaken.

Guarantees: a holder whose turn it is again when its quantum ends goes on without draining; one that says when its last
work will have ended gives way to the next a hand-off's time before, one at a time on a GPU; one that has not drained a
grace period after its quantum is overtaken. For one that wakes with credit a holder keeps the token for the least
quantum only, as long as that does not happen so often that hand-offs would eat what is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from .actions import Action, Preemption, TokenGrant, TokenRevocation
from .occupancy import Occupancy
from .parameters import Parameters
from .tenant import Hold, TokenTenant
from .turns import Turns

_NOTICE_NS = 1_000_000
"""A holder whose quantum becomes shorter is told so if more than this is left of it."""


class Holds:
    """All grants that were not drained and not overtaken. `stale`: where GPUs are added that it may be someone's turn
    on."""

    def __init__(self, parameters: Parameters, gpus: Occupancy, turns: Turns, stale: set[str]) -> None:
        self._parameters = parameters
        self._gpus = gpus
        self._turns = turns
        self._stale = stale
        self._tenants: dict[str, TokenTenant] = {}
        self._cuts: dict[str, int] = {}
        """Per GPU, until when the holds that were cut for those who woke are paid for."""
        self._told: list[tuple[TokenTenant, TokenGrant]] = []
        """New terms, to be told by the next tick."""

    def begin(self, tenant: TokenTenant, hold: Hold) -> None:
        """The tenant holds its GPUs."""
        tenant.hold = hold
        self._tenants[tenant.id] = tenant
        self._gpus.occupy(tenant)

    def end(self, tenant: TokenTenant) -> None:
        """It has drained, or is gone."""
        tenant.hold = None
        self._tenants.pop(tenant.id, None)

    def forget(self, gpu: str) -> None:
        """Nobody is on this GPU any more."""
        self._cuts.pop(gpu, None)

    def bound(self, now: int, gpus: Iterable[str], company: TokenTenant) -> None:
        """What others launch on these GPUs is metered from now on."""
        for gpu in gpus:
            holder = self._gpus.holder.get(gpu)
            if holder is None or holder is company or holder.hold is None or holder.hold.bounded:
                continue
            holder.hold.bounded = True
            left = 0 if holder.hold.deadline is None else holder.hold.deadline - now
            if left > 0 or holder.hold.deadline is None:
                self._tell(holder, holder.hold, left)

    def shorten(
        self,
        now: int,
        gpus: Iterable[str],
        waiter: TokenTenant | None = None,
        *,
        unlimited: Callable[[int, TokenTenant], bool],
    ) -> None:
        """A holder that someone waits for keeps the token no longer than the quantum for that many.

        Once someone comes who has credit it keeps the token for the least quantum only, if it holds on borrowed time or
        is owed less by more than a quantum; for one that wakes with credit always, as long as that is not too often.
        """
        owed = waiter.account.owed_ns() if waiter is not None and waiter.account.assured > 0 else None
        for gpu in gpus:
            holder = self._gpus.holder.get(gpu)
            if holder is None or holder.hold is None or unlimited(now, holder):
                continue
            hold, quantum, cut = holder.hold, self._turns.quantum(holder), False
            if owed is not None and (not hold.assured or owed - holder.account.owed_ns() > quantum):
                quantum = self._parameters.quantum_min_ns
            elif waiter is not None and waiter.woke and self._cuts.get(gpu, now) <= now + self._parameters.cut_burst_ns:
                quantum, cut = self._parameters.quantum_min_ns, True
            deadline = max(now, hold.granted_at + quantum)
            if hold.deadline is None or hold.deadline - deadline >= self._parameters.quantum_min_ns:
                if cut:
                    self._cuts[gpu] = max(now, self._cuts.get(gpu, now)) + self._parameters.cut_every_ns
                self._gpus.settle(now, holder)
                self._set_deadline(now, holder, hold, deadline)

    def tick(self, now: int) -> list[Action]:
        """Everything that is due at `now`."""
        actions: list[Action] = [
            terms for tenant, terms in self._told if tenant.hold is not None and tenant.hold.grant_id == terms.grant_id
        ]
        self._told = []
        for tenant in list(self._tenants.values()):
            hold = _hold_of(tenant)
            if hold.gives_way_at is not None and now >= hold.gives_way_at:
                self._give_way(now, tenant, hold)
            if hold.deadline is None or now < self._look_at(hold):
                continue
            if not hold.considered and not hold.revoked and not hold.ending:
                hold.considered = True
                if now < hold.deadline:
                    actions.extend(self._renew(now, tenant, hold))
            if now < hold.deadline:
                continue
            if hold.shortened and not hold.revoked and not hold.ending:
                hold.revoked = True
                actions.append(TokenRevocation(tenant.id, hold.grant_id))
            if now >= hold.deadline + self._parameters.grace_ns:
                self._overtake(now, tenant, hold)
                actions.append(Preemption(tenant.id, hold.grant_id))
        return actions

    def due(self) -> Iterator[int]:
        """When `tick` has something to do at the latest."""
        for tenant in self._tenants.values():
            hold = _hold_of(tenant)
            if hold.gives_way_at is not None and self._gpus.may_give_way(tenant):
                yield hold.gives_way_at
            if hold.deadline is None:
                continue
            if hold.ending or hold.revoked or (hold.considered and not hold.shortened):
                yield hold.deadline + self._parameters.grace_ns
            else:
                yield hold.deadline if hold.considered else self._look_at(hold)

    def _look_at(self, hold: Hold) -> int:
        """When it is to be seen whether the holder goes on; its deadline once it was."""
        assert hold.deadline is not None, "it has a quantum"
        if hold.considered:
            return hold.deadline
        return hold.deadline - min(self._parameters.renew_ahead_ns, (hold.deadline - hold.granted_at) // 4)

    def _tell(self, tenant: TokenTenant, hold: Hold, left_ns: int) -> None:
        self._told.append((tenant, TokenGrant(tenant.id, hold.grant_id, left_ns, True)))

    def _set_deadline(self, now: int, tenant: TokenTenant, hold: Hold, deadline: int) -> None:
        """The holder is told at once, so that its queue is short by then; where that is too late, it is revoked when it
        is due."""
        hold.deadline, hold.considered = deadline, False
        hold.shortened = deadline - now < _NOTICE_NS
        if not hold.shortened and not hold.revoked and not hold.ending:
            hold.bounded = True
            self._tell(tenant, hold, deadline - now)

    def _renew(self, now: int, tenant: TokenTenant, hold: Hold) -> list[Action]:
        """Lets a holder go on whose turn it is again."""
        turn = self._turns.next_of(now, tenant)
        assert hold.deadline is not None, "it has a quantum"
        if turn is None:
            return []
        room, quantum, left = tenant.account.room_ns(), turn.quantum_ns, hold.deadline - now
        if room is not None:  # what is left of the present quantum comes off it first
            quantum = min(quantum, room - left)
        if turn.lent:  # until the moment for which its GPUs are kept, else those who are lent them outstay each other
            quantum = min(quantum, turn.quantum_ns - left)
        if (room is not None or turn.lent) and quantum < self._parameters.quantum_min_ns:
            return []
        self._gpus.settle_around(now, tenant)
        self._turns.forgive(tenant, hold.charged_ns)
        hold.granted_at, hold.deadline = hold.deadline, hold.deadline + quantum
        hold.assured = tenant.account.assured > 0
        hold.shortened = hold.considered = False
        hold.charged_ns = 0
        return [TokenGrant(tenant.id, hold.grant_id, hold.deadline - now, hold.bounded)]

    def _give_way(self, now: int, tenant: TokenTenant, hold: Hold) -> None:
        """Lets the next in while the tenant's last work ends, unless its own turn is the next. One at a time on a
        GPU."""
        if not self._gpus.may_give_way(tenant):
            return
        hold.gives_way_at = None
        if self._turns.next_of(now, tenant) is None:
            self._gpus.settle_around(now, tenant)
            hold.yielded = True
            self._gpus.give_way(tenant)
            self._stale.update(tenant.gpus)

    def _overtake(self, now: int, tenant: TokenTenant, hold: Hold) -> None:
        self._gpus.settle_around(now, tenant)
        hold.overdue = True
        tenant.account.preemptions += 1
        del self._tenants[tenant.id]
        self._gpus.overtake(tenant)
        self._stale.update(tenant.gpus)


def _hold_of(tenant: TokenTenant) -> Hold:
    assert tenant.hold is not None, "a holder holds"
    return tenant.hold
