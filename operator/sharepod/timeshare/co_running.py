"""Co-running: decides which tenants hold a GPU while another tenant, the lead, has its turn, and for how long.

Guarantees:
- S9 gain: Tenants fill the gaps of a lead only while the sum of all holders' progress exceeds 1, the progress of one
  tenant alone, or for a trial (trials.py). The sum is predicted before they begin, then measured.
- S10 owed: While a lead is owed more than `OWED_NS` (50 ms) and its progress is less than `BORNE` (0.9), no tenant
  fills its gaps.
- S12 limits: A tenant must not co-run if it would reach its limit before it gets its request.
- A tenant that wakes with credit co-runs at once, for `_JOINS_NS`, and pays from its credit.
- Members of a group on one GPU hold it together, as the processes of one tenant do (members.py).
- A decision changes no state. The caller must carry it out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .account import Charge
from .groups import members_of_one_group
from .hold import CoRunEnd, Hold, HoldPhase
from .members import Members, kind_of_time
from .occupancy import Occupancy
from .parameters import Parameters
from .progress import foretell
from .tenant import TokenTenant
from .trials import Trials

_MS = 1_000_000
_WINDOW_NS = 25 * _MS
"""Time of co-running after which each tenant's loss of work is measured: 25 ms. Hooks take a sample every 0.5 ms, so a
window has 50 samples."""
_GAIN_BEGINS = 1.15
"""Least predicted sum of progress with which tenants begin to fill gaps: 1.15. So a gain is left after hand-offs and
errors of measurement."""
_GAIN_ENDS = 1.05
"""Least measured sum of progress with which co-running continues."""
BORNE = 0.9
"""Progress from which a lead tolerates co-runners although it is owed time: 0.9. In exclusive turns it would also lose
about a tenth."""
OWED_NS = 50 * _MS
"""Lag of a lead from which the lead holds alone: 50 ms. New co-runners begin only while its lag is less than half of
that."""
QUIET_NS = 10 * _MS
"""Time for which a lead that woke with credit holds alone: 10 ms. Most requests of a service end within this time."""
_JOINS_NS = 20 * _MS
"""Time for which a tenant with credit co-runs however much work the lead loses: 20 ms. Tenants with longer bursts of
work wait for their turn."""
_BACKOFF_NS = 200 * _MS
"""Time for which no tenant fills gaps on the GPU after a window without gain: 200 ms. It doubles with each further such
window."""
_BACKOFF_MOST_NS = 5_000 * _MS
"""Longest time for which no tenant fills gaps: 5 s. Then two busy tenants lose at most 8 % of the work of 25 ms in
every 5 s."""
_LIMIT_MARGIN = 1.02
"""Factor by which a limit must exceed the holding time that the tenant needs to get its request while it co-runs."""
_WAKE_AFTER_NS = 1 * _MS
"""Least time until the next decision on one GPU: 1 ms, so that decisions take little processor time."""


@dataclass(frozen=True)
class Changes:
    """Tenants of one GPU that begin or end co-running now."""

    ends: list[tuple[TokenTenant, CoRunEnd]] = field(default_factory=list)
    """Co-runners that end, with the reason."""
    begins: list[tuple[TokenTenant, Charge]] = field(default_factory=list)
    """Tenants that begin to co-run, each with the charge of its time (guaranteed or borrowed)."""
    members: list[TokenTenant] = field(default_factory=list)
    """Part of `begins`: tenants that co-run because another member of their group holds the GPU."""
    cut: TokenTenant | None = None
    """Lead whose turn ends now, because another tenant is owed more time or woke with credit, and leads next. None: the
    turn continues."""


class _GpuState:
    """State of one GPU: moment of its next decision, back-off after windows without gain, and trials. Moments in
    nanoseconds of the clock."""

    def __init__(self) -> None:
        self.due: int | None = None
        self.backoff_until = 0
        self.backoff_ns = _BACKOFF_NS
        self.trials = Trials()


class CoRunning:
    """Decides on the co-runners of the GPUs in `occupancy`."""

    def __init__(self, parameters: Parameters, occupancy: Occupancy) -> None:
        self._parameters = parameters
        self._occupancy = occupancy
        self._states: dict[str, _GpuState] = {}
        self._members = Members(occupancy, parameters.quantum_min_ns)

    def forget(self, gpu: str) -> None:
        """Drop the state of a GPU that has no tenants, or no longer allows co-running."""
        self._states.pop(gpu, None)
        self._members.forget(gpu)

    def due(self) -> Iterator[int]:
        """Yield the moments by which the caller must call `changes` again, if no other event comes first."""
        for state in self._states.values():
            if state.due is not None:
                yield state.due

    def is_due(self, now: int) -> list[str]:
        """Return the GPUs for which the moment of `due` has come, so that the caller must call `changes`."""
        return [gpu for gpu, state in self._states.items() if state.due is not None and state.due <= now]

    def changes(self, now: int, gpu: str) -> Changes:
        """Return which tenants must begin or end co-running on one GPU. The caller must have charged the accounts of
        all its holders up to `now`."""
        lead = self._occupancy.holder.get(gpu)
        hold = None if lead is None else lead.hold
        runners = list(self._occupancy.co_runners.get(gpu, {}).values())
        if lead is None or hold is None or gpu not in self._occupancy.tenants_on:
            self._states.pop(gpu, None)
            return Changes()
        running = [tenant for tenant in runners if _hold(tenant).phase is HoldPhase.RUNNING]
        if gpu not in self._occupancy.concurrent or not self._occupancy.may_co_run(lead):
            self._states.pop(gpu, None)
            return Changes(ends=[(tenant, CoRunEnd.EXCLUSIVE) for tenant in running])
        state = self._states.setdefault(gpu, _GpuState())
        self._occupancy.settle_on(now, [gpu])
        gains = self._judge(now, gpu, state) and self._trial_goes_on(now, gpu, state)
        # 1. A co-runner that is owed more than the lead leads next.
        state.due = now + _WAKE_AFTER_NS
        owed = self._owed_runner(now, lead, hold, running)
        if owed is not None:
            self._trial_fails(now, gpu, state)
            others = [t for t in running if t is not owed and _is_filler(t)]
            return Changes([(tenant, CoRunEnd.OWED) for tenant in others], cut=lead)
        if not gains and state.trials.active:
            state.trials.end(now, self._occupancy.tenants_on[gpu])
        # 2. Co-runners that end.
        probed = now >= lead.progress.probe_at and not state.trials.active
        ends = self._ends(now, lead, running, gains=gains, probed=probed)
        if ends:
            self._trial_fails(now, gpu, state)
        # 3. Tenants with credit that join at once.
        begins: list[tuple[TokenTenant, Charge]] = []
        waiting = [
            tenant
            for tenant in self._occupancy.tenants_on[gpu]
            if tenant.runnable and tenant.hold is None and self._occupancy.may_co_run(tenant)
        ]
        cut: TokenTenant | None = None
        self._members.look(now, gpu)
        members = [tenant for tenant in waiting if self._members.accompany(now, tenant, lead)]
        begins += [(tenant, kind_of_time(tenant, lead)) for tenant in members]
        for tenant in [] if lead.interactive else waiting:
            if tenant not in members and self._joins(now, lead, tenant, probed):
                begins.append((tenant, Charge.GUARANTEED))
                if tenant.woke_with_credit and tenant.habits.rests and hold.phase is HoldPhase.RUNNING:
                    cut = lead
        if cut is not None:
            fillers = [tenant for tenant in running if _is_filler(tenant)]
            return Changes([(tenant, CoRunEnd.WAKE) for tenant in fillers], begins, members, cut)
        # 4. Tenants that fill gaps, the most owed first.
        joined = [tenant for tenant, _charge in begins]
        stays = [lead, *(tenant for tenant in runners if tenant not in dict(ends)), *joined]
        candidates = [tenant for tenant in waiting if tenant not in joined]
        hopeful = False
        for tenant in sorted(candidates, key=lambda tenant: _order(tenant, gpu)):
            progress = _foretold(now, [*stays, tenant])
            hopeful = hopeful or progress is None or sum(progress) >= _GAIN_BEGINS
            if progress is not None and self._fills(now, state, lead, hold, stays, tenant, progress):
                begins.append((tenant, Charge.BORROWED))
                stays.append(tenant)
        if not runners and not begins and candidates:
            tried = min(candidates, key=lambda tenant: _order(tenant, gpu))
            if self._may_try(now, state, lead, hold, tried):
                state.trials.begin(now, [lead, tried])
                begins.append((tried, Charge.BORROWED))
                stays.append(tried)
        runners = [tenant for tenant in stays if tenant is not lead]
        state.due = self._next(now, gpu, state, lead, hold, runners, waiting=bool(candidates), hopeful=hopeful)
        return Changes(ends, begins, members)

    def _ends(
        self, now: int, lead: TokenTenant, running: list[TokenTenant], *, gains: bool, probed: bool
    ) -> list[tuple[TokenTenant, CoRunEnd]]:
        """Return the co-runners that must end, with the reason. For the others, set how their time is charged:
        guaranteed or borrowed."""
        ends: list[tuple[TokenTenant, CoRunEnd]] = []
        bears = self._bears(now, lead)
        for tenant in running:
            held = _hold(tenant)
            if held.accompanies:
                held.given_as = kind_of_time(tenant, lead)
                end = self._members.end(now, tenant, lead)
            elif held.given_as is Charge.GUARANTEED and now - held.begun_at < _JOINS_NS:
                continue
            else:
                held.given_as = Charge.BORROWED
                end = self._end(tenant, lead, gains=gains, bears=bears, probed=probed)
            if end is not None:
                ends.append((tenant, end))
        return ends

    def _end(
        self, tenant: TokenTenant, lead: TokenTenant, *, gains: bool, bears: bool, probed: bool
    ) -> CoRunEnd | None:
        """Return the reason for which a co-runner ends. None if it continues."""
        if lead.interactive or not self._occupancy.may_co_run(tenant):
            return CoRunEnd.EXCLUSIVE
        if not gains:
            return CoRunEnd.NO_GAIN
        if not bears:
            return CoRunEnd.OWED
        if probed:
            return CoRunEnd.PROBE
        fits = tenant.account.ceiling_fits(self._parameters.quantum_min_ns)
        return None if fits else CoRunEnd.LIMIT

    def _judge(self, now: int, gpu: str, state: _GpuState) -> bool:
        """If the window is over, measure each holder's loss of work. Return True if co-running may continue: the sum of
        progress is high enough, or is not known yet."""
        tenants = self._occupancy.occupants(gpu)
        if gpu not in self._occupancy.co_runners or len(tenants) < 2:
            return True
        if members_of_one_group(tenants):
            for tenant in tenants:
                tenant.progress.skip_window()
            return True
        if min(tenant.progress.window_ns for tenant in tenants) < _WINDOW_NS:
            return True
        processes = sum(tenant.progress.processes for tenant in tenants)
        progress = 0.0
        for tenant in tenants:
            others = 1 - tenant.progress.processes / processes
            progress += 1 - tenant.progress.judge(now, others, tenant.account.request_milli)
        fills = any(tenant.hold is not None and tenant.hold.co_runs and _is_filler(tenant) for tenant in tenants)
        if progress > _GAIN_BEGINS:
            state.backoff_ns = _BACKOFF_NS
        if state.trials.active and not all(tenant.progress.conclusive for tenant in tenants):
            return True
        if progress >= _GAIN_ENDS or not fills:
            return True
        state.backoff_until = now + state.backoff_ns
        state.backoff_ns = min(_BACKOFF_MOST_NS, 2 * state.backoff_ns)
        return False

    def _owed_runner(self, now: int, lead: TokenTenant, hold: Hold, running: list[TokenTenant]) -> TokenTenant | None:
        """Return a co-runner that must lead next, because it is owed more than the lead and makes too little progress
        next to other holders. None if there is none, or if the lead's turn is about to end anyway."""
        for tenant in running if hold.phase is HoldPhase.RUNNING else []:
            if (
                not _hold(tenant).accompanies
                and tenant.account.lag_ns() > lead.account.lag_ns()
                and not self._bears(now, tenant)
            ):
                return tenant
        return None

    def _trial_goes_on(self, now: int, gpu: str, state: _GpuState) -> bool:
        """Measure the present trial of co-running, if there is one. Return False if the trial must end, because it
        showed no gain."""
        tenants, trials = self._occupancy.tenants_on[gpu], state.trials
        if trials.begun_at is not None:
            return trials.goes_on(now, tenants, _GAIN_ENDS, _GAIN_BEGINS)
        trials.turns(now, tenants)
        return True

    def _trial_fails(self, now: int, gpu: str, state: _GpuState) -> None:
        """End the present trial unless it has already shown a gain: a tenant that is owed time loses too much work in
        it."""
        if state.trials.begun_at is not None and not state.trials.proven:
            state.trials.end(now, self._occupancy.tenants_on[gpu])

    def _may_try(self, now: int, state: _GpuState, lead: TokenTenant, hold: Hold, tenant: TokenTenant) -> bool:
        """Return True if a waiting tenant may co-run for a trial."""
        if hold.phase is not HoldPhase.RUNNING or now < hold.quiet_until or lead.interactive or lead.account.in_arrears:
            return False
        if tenant.account.in_arrears or not tenant.account.ceiling_fits(self._parameters.quantum_min_ns):
            return False
        if lead.account.limit_milli < 1000 or tenant.account.limit_milli < 1000:
            return False
        if lead.progress.hides_losses or tenant.progress.hides_losses:
            return False
        if self._occupancy.is_parted(lead) or self._occupancy.is_parted(tenant):
            return False
        if lead.progress.known(now) is None or tenant.progress.known(now) is None:
            return False
        owed = lead.account.assured > OWED_NS * 500
        return not owed and state.trials.may_begin(now, [lead, tenant])

    def joins(self, now: int, tenant: TokenTenant) -> bool:
        """Return True if a tenant that begins to wait will co-run at once. The caller then must not cut the lead's turn
        for it."""
        lead = self._occupancy.holder.get(tenant.gpus[0])
        if lead is None or tenant.hold is not None:
            return False
        if not self._occupancy.may_co_run(lead) or not self._occupancy.may_co_run(tenant):
            return False
        if self._members.accompany(now, tenant, lead):
            return True
        return not lead.interactive and self._joins(now, lead, tenant, now >= lead.progress.probe_at)

    def _joins(self, now: int, lead: TokenTenant, tenant: TokenTenant, probed: bool) -> bool:
        """Return True if a waiting tenant co-runs at once: it has credit, and it woke or works in short bursts.

        Unless the tenant pauses most of the time or is interactive, the lead must also tolerate it, and must not be
        `probed` (measured alone).
        """
        account, habits = tenant.account, tenant.habits
        if account.assured <= 0 or not account.ceiling_fits(self._parameters.quantum_min_ns):
            return False
        if not tenant.woke_with_credit and not habits.works_briefly(account.held_ns, _JOINS_NS):
            return False
        together = [lead, *self._occupancy.co_runners.get(tenant.gpus[0], {}).values(), tenant]
        if not _limits_allow(together, foretell([one.progress.known(now) or 1.0 for one in together])):
            return False
        return habits.rests or tenant.interactive or (not probed and self._bears(now, lead))

    def _fills(
        self,
        now: int,
        state: _GpuState,
        lead: TokenTenant,
        hold: Hold,
        stays: list[TokenTenant],
        tenant: TokenTenant,
        progress: list[float],
    ) -> bool:
        """Return True if a waiting tenant may fill the gaps of the holders `stays`. `progress`: predicted progress of
        each holder and, last, of the tenant."""
        tried = state.trials.active and lead.id in state.trials.rates and tenant.id in state.trials.rates
        if not tried and (now < state.backoff_until or now >= lead.progress.probe_at):
            return False
        if lead.interactive:
            return False
        if hold.phase is not HoldPhase.RUNNING or now < hold.quiet_until or tenant.account.in_arrears:
            return False
        if not tenant.account.ceiling_fits(self._parameters.quantum_min_ns):
            return False
        if sum(progress) < _GAIN_BEGINS and not tried:
            return False
        if not _limits_allow([*stays, tenant], progress):
            return False
        return self._bears(now, lead, 1.0 if tried else progress[0], OWED_NS // 2)

    def _bears(self, now: int, tenant: TokenTenant, progress: float = 1.0, owed_ns: int = OWED_NS) -> bool:
        """Return True if a tenant tolerates other holders. Either it is owed at most `owed_ns`, or its measured
        progress (without a measure: `progress`) is at least `BORNE` and covers its request."""
        account, lost = tenant.account, tenant.progress.known_loss(now)
        if lost is not None:
            progress = min(progress, 1 - lost)
        return account.assured <= owed_ns * 1000 or (progress >= BORNE and progress * 1000 >= account.request_milli)

    def _next(
        self,
        now: int,
        gpu: str,
        state: _GpuState,
        lead: TokenTenant,
        hold: Hold,
        runners: list[TokenTenant],
        *,
        waiting: bool,
        hopeful: bool,
    ) -> int | None:
        """Return the moment of the next decision, if no other event comes first; None: no decision is due.

        Args:
            now: The present moment.
            gpu: UUID of the GPU.
            state: State of the GPU.
            lead: Its lead.
            hold: The lead's hold.
            runners: Its co-runners.
            waiting: True if other tenants wait that may co-run.
            hopeful: True if one of these waiting tenants may gain by co-running, or if that cannot be predicted yet.
        """
        moments = self._members.due(gpu, lead)
        account, progress = lead.account, lead.progress
        if runners:
            left = max(0, _WINDOW_NS - min(tenant.progress.window_ns for tenant in [lead, *runners]))
            moments += [now + left, progress.probe_at]
            loss = self._occupancy.losses(now, [lead, *runners])[0]
            grows = account.request_milli - int((1 - loss) * 1000)
            if grows > 0:
                moments.append(now + max(0, OWED_NS * 1000 - account.assured) // grows)
            for tenant in runners:
                room = tenant.account.ceiling_room_ns()
                if room is not None:
                    moments.append(now + room - self._parameters.quantum_min_ns)
                moments.append(_hold(tenant).begun_at + _JOINS_NS if tenant.hold is not None else now + _JOINS_NS)
        trial_at = state.trials.due_at()
        if trial_at is not None and (waiting or state.trials.active):
            moments.append(trial_at)
        if hopeful or (waiting and trial_at is not None and trial_at <= now):
            moments += [
                state.backoff_until,
                hold.quiet_until,
                now + progress.until_measured_ns,
            ]
            if account.request_milli < 1000:
                moments.append(now + (account.assured - OWED_NS * 500) // (1000 - account.request_milli))
        return min([max(moment, now + _WAKE_AFTER_NS) for moment in moments if moment > now], default=None)


def _foretold(now: int, tenants: list[TokenTenant]) -> list[float] | None:
    """Return the predicted progress of each tenant if all held at once. None if one of them was not measured alone."""
    demands: list[float] = []
    for tenant in tenants:
        demand = tenant.progress.known(now)
        if demand is None:
            return None
        demands.append(demand)
    return foretell(demands)


def _limits_allow(tenants: list[TokenTenant], progress: list[float]) -> bool:
    """Return True if each tenant gets its request at this progress before it reaches its limit (S12). All time of
    holding counts against the limit."""
    return all(
        tenant.account.limit_milli >= 1000
        or part * tenant.account.limit_milli >= tenant.account.request_milli * _LIMIT_MARGIN
        for tenant, part in zip(tenants, progress, strict=True)
    )


def _is_filler(tenant: TokenTenant) -> bool:
    hold = _hold(tenant)
    return hold.given_as is Charge.BORROWED and not hold.accompanies


def _order(tenant: TokenTenant, gpu: str) -> tuple[int, int, str]:
    return (-max(0, tenant.account.lag_ns()), tenant.virtual_ns[gpu], tenant.id)


def _hold(tenant: TokenTenant) -> Hold:
    assert tenant.hold is not None, "the tenant has a hold"
    return tenant.hold
