"""Control of budgets: charges each GPUBudget, writes its status, and computes each namespace's standing: how budgets
and use change its place in the queue.

Guarantees:
- BC1 once: each round computes the new account from the stored one, and stores it together with the totals that it has
  charged. The write fails if another one came first (resourceVersion). So neither a kill at any moment nor two leaders
  charge any use twice.
- BC2 told-after: an Event is recorded only after the status that contains its cause is stored. So a restarted operator
  does not repeat the Event.
- A status is written at most every `PERIOD_S`, and every `_FRESH_S` if it does not change. Exception: a budget that its
  reservations will spend within `_NEAR_S` is charged every `_NEAR_PERIOD_S`.
- The standing of each namespace is known before a leader's first decision.
- Invalid content of a GPUBudget affects only that budget.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping

import structlog

from sharepod.api.gpubudget import KIND, GPUBudgetStatus
from sharepod.budgets.budget import (
    BudgetEvent,
    BudgetRules,
    BudgetState,
    ConsumedTotal,
    TotalKey,
    announced,
    charged,
    standing_of,
)
from sharepod.budgets.budget_account import MICRO
from sharepod.budgets.coverage import Claimant, Coverage, coverages
from sharepod.budgets.forecast import RATE_HALF_LIFE_S, gone_at_ms
from sharepod.budgets.standing import WITHOUT_BUDGET, Standing
from sharepod.controller import metrics
from sharepod.controller.apiserver.client import GPUBUDGETS, Client, NotLeadingError
from sharepod.controller.apiserver.events import Events
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.facts.budget_facts import BudgetFacts
from sharepod.kube import ApiError, ConflictError, NotFoundError, UnavailableError

from .budget_status import budget_status, event_note, refill_text, same_but_time, unreadable_status
from .consumed_totals import ReportAges, consumed_totals, reserving

PERIOD_S = 30.0
"""Seconds between two rounds: as often as agents write consumption."""
_NEAR_S = 90.0
"""Seconds before its end from which a budget is charged more often: the time of one agent's report and one round."""
_NEAR_PERIOD_S = 5.0
"""Seconds between two charges of a budget that is nearly spent. With the delay of a report, its end is noticed in 10
s."""
_SOON_S = 1.0
"""Seconds from a change of a GPUBudget or namespace to the next round, so that several changes share one round."""
_FRESH_S = 600.0
"""Seconds after which an unchanged status is written again, and so the greatest age of the stored account."""

log = structlog.get_logger(__name__)


class BudgetControl:
    """Control of all GPUBudgets.

    Args:
        state: The cluster state, for budgets, namespaces and GPUNodes.
        client: The API server.
        events: Recorder of Events.
        namespace: The operator's namespace. Only GPUBudgets in it may select other namespaces.
        half_life_s: Half-life, in seconds, of past use in the order of the queue.
        now_ms: Time of day in milliseconds since 1970.
        written: Returns the totals that the GPUStatements contain. None before they are read.
        acts: Returns True while this process acts as the leader. Otherwise nothing is charged.
        on_changed: Called when a namespace's standing, and with it its place in the queue, has changed.
    """

    def __init__(
        self,
        state: ClusterState,
        client: Client,
        events: Events,
        *,
        namespace: str,
        half_life_s: float,
        now_ms: Callable[[], int],
        written: Callable[[], Mapping[TotalKey, ConsumedTotal] | None],
        acts: Callable[[], bool],
        on_changed: Callable[[], None],
    ) -> None:
        self._state = state
        self._client = client
        self._events = events
        self._namespace = namespace
        self._half_life_s = half_life_s
        self._now_ms = now_ms
        self._written = written
        self._acts = acts
        self._on_changed = on_changed
        self._standings: dict[str, Standing] = {}
        self._kick = asyncio.Event()
        self._reports = ReportAges()
        self._rates: Counter[TotalKey] = Counter()
        """Reserved GPU time per second, in milliseconds, by namespace and model."""
        self._nearly_spent: set[str] = set()
        """uids of the budgets that their reservations will spend within `_NEAR_S`."""
        state.budgets.on_changed = state.namespace_labels.on_changed = self._kick.set

    def standing(self, namespace: str) -> Standing:
        """Return the standing of a namespace."""
        return self._standings.get(namespace, WITHOUT_BUDGET)

    def begin(self) -> None:
        """Compute the standings from the stored accounts. A leader must call this before its first decision."""
        self._standings = self._worked_out({})

    async def run(self) -> None:
        """Run a round every `PERIOD_S`, and soon after a change, until cancelled."""
        while True:
            self._kick.clear()
            if self._acts():
                await self.look()
            for _ in range(round(PERIOD_S / _NEAR_PERIOD_S)):
                try:
                    await asyncio.wait_for(self._kick.wait(), _NEAR_PERIOD_S)
                except TimeoutError:
                    if self._nearly_spent and self._acts():
                        await self.look(only=frozenset(self._nearly_spent))
                else:
                    await asyncio.sleep(_SOON_S)
                    break

    async def look(self, *, only: frozenset[str] | None = None) -> None:
        """Charge consumption, write each changed status, and update the standings.

        `only`: uids of the budgets to charge; None: all.
        """
        written = self._written()
        if written is None:  # the totals are incomplete: a charge now would be wrong
            self._show(self._worked_out({}))
            self._kick.set()
            return
        now_ms = self._now_ms()
        gpunodes = list(self._state.gpunodes)
        totals = consumed_totals(gpunodes, written, self._reports.update(gpunodes, now_ms))
        self._rates = sum((reserving(each) for each in gpunodes), Counter())
        covered = self._covered()
        for item in self._state.budgets.known:
            if only is not None and item.uid not in only:
                continue
            try:
                await self._look_at(item, covered.get(item.uid, Coverage()), totals, now_ms)
            except UnavailableError as error:
                log.warning("cannot write a GPUBudget; trying again", name=_named(item), error=str(error))
                break
            except (NotFoundError, ConflictError):
                self._kick.set()  # the watch reports the new version
            except ApiError as error:
                log.warning("cannot write a GPUBudget", name=_named(item), error=str(error))
            except NotLeadingError:
                return
            except Exception as error:
                log.exception("cannot charge a GPUBudget", name=_named(item), error=str(error))
        self._show(self._worked_out(totals))

    async def _look_at(
        self, item: BudgetFacts, coverage: Coverage, totals: dict[TotalKey, ConsumedTotal], now_ms: int
    ) -> None:
        """Charge one budget and write its status."""
        if item.spec is None:
            if item.error is not None and item.generation:
                await self._write(item, unreadable_status(item, now_ms=now_ms), now_ms)
            return
        rules = BudgetRules.of(item.spec)
        stored = self._stored(item, rules, now_ms)
        state = charged(stored, rules, coverage.namespaces, totals, at_ms=now_ms, half_life_s=self._half_life_s)
        state, announcements = announced(stored, state, rules)
        status = budget_status(item, rules, state, coverage, now_ms=now_ms)
        if not await self._write(item, status, now_ms):
            return
        for event in announcements:
            self._tell(item, event, event_note(event, rules, state, status))

    async def _write(self, item: BudgetFacts, status: GPUBudgetStatus, now_ms: int) -> bool:
        """Write a status, unless it equals the stored status. Return True if it was written."""
        known = item.status
        age_ms = status.books.at - known.books.at if status.books is not None and known.books is not None else 0
        fresh = age_ms < _FRESH_S * 1000
        if item.status_error is None and known.conditions and fresh and same_but_time(known, status):
            return False
        body: dict[str, object] = dict.fromkeys(
            (field.alias or name for name, field in GPUBudgetStatus.model_fields.items())
        )
        body |= status.dump()
        metadata = {"uid": item.uid, "resourceVersion": str(item.version)}
        written = await self._client.patch_status(
            GPUBUDGETS, item.name, {"metadata": metadata, "status": body}, item.namespace
        )
        self._state.budgets.put(written)
        return True

    def _tell(self, item: BudgetFacts, event: BudgetEvent, note: str) -> None:
        if event is BudgetEvent.SPENT:
            self._events.warning(KIND, item, event.value, "Charging", note)
        else:
            self._events.normal(KIND, item, event.value, "Charging", note)

    def _stored(self, item: BudgetFacts, rules: BudgetRules, now_ms: int) -> BudgetState:
        """Return the stored state of a budget, or the state of a new budget if none is stored."""
        books = item.status.books
        return BudgetState.restored(books) if books is not None else BudgetState.begun(rules, now_ms)

    def _covered(self) -> dict[str, Coverage]:
        claimants = (
            Claimant(
                uid=item.uid,
                namespace=item.namespace,
                name=item.name,
                created=item.created,
                selector=item.spec.namespace_selector if item.spec is not None else None,
                readable=item.spec is not None,
            )
            for item in self._state.budgets.known
        )
        return coverages(claimants, self._state.namespace_labels.by_name(), self._namespace)

    def _worked_out(self, totals: dict[TotalKey, ConsumedTotal]) -> dict[str, Standing]:
        """Return the standing of each namespace with a budget. It counts the stored accounts, plus any use in `totals`
        that is not stored yet.
        """
        now_ms, covered = self._now_ms(), self._covered()
        found: dict[str, Standing] = {}
        self._nearly_spent.clear()
        for gauge in metrics.BUDGETS:
            gauge.clear()
        for item in self._state.budgets.known:
            coverage = covered.get(item.uid)
            if item.spec is None or coverage is None:
                continue
            try:
                standing = self._standing_by(item, coverage, totals, now_ms)
            except Exception as error:
                log.exception("cannot work out the standing by a GPUBudget", name=_named(item), error=str(error))
                continue
            found |= dict.fromkeys(coverage.namespaces, standing)
        return found

    def _standing_by(
        self, item: BudgetFacts, coverage: Coverage, totals: dict[TotalKey, ConsumedTotal], now_ms: int
    ) -> Standing:
        """Return the standing of the namespaces under one readable budget, and update the budget's gauges."""
        assert item.spec is not None
        rules = BudgetRules.of(item.spec)
        stored = self._stored(item, rules, now_ms)
        state = charged(stored, rules, coverage.namespaces, totals, at_ms=now_ms, half_life_s=self._half_life_s)
        _measure(item, rules, state)
        if not state.account.spent and state.account.left(rules.terms) <= _NEAR_S * self._rate(rules, coverage):
            self._nearly_spent.add(item.uid)
        return standing_of(state, rules, half_life_s=self._half_life_s, refill_at=refill_text(state, rules))

    def _rate(self, rules: BudgetRules, coverage: Coverage) -> int:
        """Return the speed at which the present reservations use up a budget, in account units per second."""
        return sum(
            rules.weighted(model, ConsumedTotal(0, milli)).by(rules.terms.charge_by)
            for (namespace, model), milli in self._rates.items()
            if namespace in coverage.namespaces
        )

    def _show(self, standings: dict[str, Standing]) -> None:
        """Replace the standings. Call `on_changed` if this changes the order of the queue or a message in it."""
        before, self._standings = self._standings, standings
        names = before.keys() | standings.keys()
        without = WITHOUT_BUDGET
        if any(_rank(before.get(name, without)) != _rank(standings.get(name, without)) for name in names):
            self._on_changed()


def _rank(standing: Standing) -> tuple[int | None, str | None, str | None, int]:
    """Return the parts of a standing that order the queue or appear in messages to waiting tenants, for comparison."""
    return standing.lowered_to, standing.waits_until, standing.refill_at, standing.step


def _measure(item: BudgetFacts, rules: BudgetRules, state: BudgetState) -> None:
    """Bring the gauges of one budget up to date."""
    account, terms = state.account, rules.terms
    labels = (item.namespace, item.name)
    rate = state.spending.rate(RATE_HALF_LIFE_S)
    metrics.BUDGET_AMOUNT_SECONDS.labels(*labels).set(terms.full / MICRO)
    metrics.BUDGET_LEFT_SECONDS.labels(*labels).set(account.left(terms) / MICRO)
    metrics.BUDGET_USED_RATIO.labels(*labels).set(account.used_milli(terms) / 1000)
    metrics.BUDGET_SPENDING_RATIO.labels(*labels).set(rate / MICRO)
    metrics.BUDGET_SPENT.labels(*labels).set(account.spent)
    if not account.spent and (gone_ms := gone_at_ms(account, terms, rate)) is not None:
        metrics.BUDGET_GONE_SECONDS.labels(*labels).set(gone_ms / 1000)


def _named(item: BudgetFacts) -> str:
    return f"{item.namespace}/{item.name}"
