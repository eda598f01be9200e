"""Hand-offs that are decided before the holder drains equal hand-offs that are decided afterwards, with the same
accounts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from sharepod.timeshare import Action, Parameters, PreparedHandOff, Scheduler, TokenGrant

MS = 1_000_000
GPUS = ("g0", "g1")
LIVES, STEPS = 250, 120


class Life:
    """Random tenants of two GPUs and their events, under two schedulers. One decides each hand-off when it happens, the
    other uses prepared hand-offs."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.plain, self.ahead = self.schedulers = Scheduler(Parameters()), Scheduler(Parameters())
        self.now = 1
        self.gpus: dict[str, tuple[str, ...]] = {}
        self.holds: dict[str, int] = {}
        """For each tenant that holds: the id of its grant in the second scheduler."""
        self.prepared: list[PreparedHandOff] = []
        self.compared = 0
        gangs = self.random.random() < 0.2
        self.busy = self.random.random()
        self.span_ms = self.random.choice((0.1, 3, 40, 150))
        for name in "abcdef"[: self.random.randint(2, 6)]:
            whole = gangs and self.random.random() < 0.3
            self.gpus[name] = GPUS if whole else (self.random.choice((GPUS[0], GPUS[0], GPUS[1])),)
            self.set(name)
            connected = self.random.random() < 0.8
            self.both(name, lambda each: each.set_connected(self.now, name, connected=connected))  # noqa: B023

    def both(self, name: str, act: Callable[[Scheduler], object]) -> None:
        """Play an event of a tenant under both schedulers. Prepared hand-offs of its GPUs are dropped."""
        for scheduler in self.schedulers:
            act(scheduler)
        self.prepared = [each for each in self.prepared if each.gpu not in self.gpus[name]]

    def set(self, name: str) -> None:
        request = self.random.choice((0, 0, 100, 100, 300, 500, 1000))
        limit = self.random.choice((1000, 1000, 1000, request, max(request, 400)))
        interactive, gpus = self.random.random() < 0.2, self.gpus[name]
        self.both(
            name,
            lambda each: each.set_tenant(
                self.now, name, gpus, request_milli=request, limit_milli=limit, interactive=interactive
            ),
        )

    def tick(self, handed_off: PreparedHandOff | None = None) -> None:
        """Apply due changes under both schedulers. Their actions must be equal, except for ids, and for a grant that
        the second has already made by the hand-off `handed_off`."""
        seen: list[list[Action]] = []
        for scheduler in self.schedulers:
            actions = scheduler.tick(self.now)
            if scheduler is self.ahead:
                actions = [*([handed_off.grant] if handed_off else []), *actions]
                for action in actions:
                    self.prepared = [each for each in self.prepared if each.gpu not in self.gpus[action.tenant]]
                    if isinstance(action, TokenGrant):
                        self.holds[action.tenant] = action.grant_id
            seen.append(sorted([replace(action, grant_id=0) for action in actions], key=str))
        assert seen[0] == seen[1]
        assert self.plain.next_deadline() == self.ahead.next_deadline()

    def step(self) -> None:
        """Let time pass, and play one event."""
        self.tick()
        if self.random.random() < 0.8:
            done = {each.gpu for each in self.prepared}
            for gpu in GPUS:
                if gpu not in done:
                    # Prepare also settles accounts, so both schedulers settle them at the same moments
                    self.plain.prepare(self.now, gpu)
                    self.prepared += self.ahead.prepare(self.now, gpu)
        if self.prepared and self.random.random() < 0.4:
            self.drain_at_an_edge(self.random.choice(self.prepared))
            return
        self.now += self.random.randint(1, int(self.span_ms * MS * self.random.choice((0.01, 0.3, 1, 1, 8))))
        due = self.plain.next_deadline()
        if due is not None and due <= self.now:
            self.now = due
            self.tick()
        self.happen(self.random.choice(list(self.gpus)), self.random.random())

    def happen(self, name: str, what: float) -> None:
        flag, ns = self.random.random() < self.busy, self.random.randint(0, 5 * MS)
        if what < 0.55 and name in self.holds:
            self.drain(name, wanting=flag)
        elif what < 0.8:
            self.both(name, lambda each: each.want(self.now, name))
        elif what < 0.86 and name in self.holds:
            self.both(name, lambda each: each.draining(self.now, name, expected_ns=ns))
        elif what < 0.88 and name in self.holds:
            self.both(name, lambda each: each.silent(self.now, name, expected_ns=ns - MS))
        elif what < 0.9:
            self.both(name, lambda each: each.surcharge(self.now, name, 6 * ns))
        elif what < 0.93:
            self.both(name, lambda each: each.set_connected(self.now, name, connected=flag))
        elif what < 0.96:
            self.set(name)
        elif what < 0.97:
            self.both(name, lambda each: each.unwant(self.now, name))

    def drain_at_an_edge(self, prepared: PreparedHandOff) -> None:
        """Let a holder drain at the start or end of its window, unless another change is due before that."""
        moment, due = self.random.choice((prepared.since, prepared.until)), self.plain.next_deadline()
        if self.now <= moment <= self.now + 2000 * MS:
            self.now = moment if due is None else min(moment, due)
            if self.now == moment:
                self.drain(prepared.holder, wanting=prepared.wanting)

    def drain(self, name: str, *, wanting: bool) -> None:
        """Let a tenant drain. Use the prepared hand-off, if there is one."""
        fitting = [
            each
            for each in self.prepared
            if each.holder == name and each.wanting == wanting and each.since <= self.now <= each.until
        ]
        held = self.holds.pop(name)
        if not fitting:
            self.both(name, lambda each: each.drained(self.now, name, wanting=wanting))
            return
        [prepared] = fitting
        assert prepared.held_id == held
        self.plain.drained(self.now, name, wanting=wanting)
        self.ahead.hand_off(self.now, prepared)
        self.tick(prepared)
        self.compare()

    def compare(self) -> None:
        """Assert that both schedulers have equal accounts, to the nanosecond."""
        one, other = self.schedulers
        for name in self.gpus:
            assert one.snapshot(self.now, name) == other.snapshot(self.now, name)
            assert one.usage(self.now, name) == other.usage(self.now, name)
            assert one.turns(self.now, name) == other.turns(self.now, name)
        for gpu in GPUS:
            assert one.gpu_time(self.now, gpu) == other.gpu_time(self.now, gpu)
        self.compared += 1


@pytest.mark.promise("time-prepared")
def test_a_prepared_hand_off_is_the_one_that_would_be_decided_on() -> None:
    compared = 0
    for seed in range(LIVES):
        life = Life(seed)
        for _ in range(STEPS):
            life.step()
        compared += life.compared
    assert compared > 20 * LIVES / 10, "most were not comparable"


@pytest.mark.promise("time-prepared")
@pytest.mark.parametrize("wanting", [True, False])
def test_what_is_prepared_ends_where_common_credit_is_cancelled(*, wanting: bool) -> None:
    """Common credit is cancelled when a tenant is owed 750 ms. A tenant that has waited, and was owed time, for the
    target latency keeps its place before a tenant that woke with credit."""
    scheduler = Scheduler(Parameters())
    for name, request in (("long", 0), ("owed", 100), ("late", 100)):
        scheduler.set_tenant(1, name, GPUS[:1], request_milli=request, limit_milli=1000)
        scheduler.set_connected(1, name, connected=True)
    scheduler.want(1, "long")
    assert [action.tenant for action in scheduler.tick(1)] == ["long"]
    scheduler.want(2, "owed")
    scheduler.surcharge(2, "owed", 40 * MS)
    scheduler.tick(12 * MS)
    scheduler.want(600 * MS, "late")
    scheduler.tick(740 * MS)
    [prepared] = [each for each in scheduler.prepare(740 * MS, GPUS[0]) if each.wanting == wanting]
    assert prepared.grant.tenant == "owed"
    assert prepared.until < 751 * MS
    scheduler.drained(751 * MS, "long", wanting=wanting)
    assert [action.tenant for action in scheduler.tick(751 * MS)] == ["owed"]


@pytest.mark.promise("time-prepared")
def test_turns_that_outlast_the_target_latency_are_prepared_by_what_is_owed() -> None:
    scheduler = Scheduler(Parameters())
    for name, request in (("holder", 0), ("more", 100), ("less", 100)):
        scheduler.set_tenant(1, name, GPUS[:1], request_milli=request, limit_milli=1000)
        scheduler.set_connected(1, name, connected=True)
        # the tenant seems to have held for 400 ms beyond a turn once
        scheduler._tenants[name].habits.overran(400 * MS)
    scheduler.want(1, "holder")
    assert [action.tenant for action in scheduler.tick(1)] == ["holder"]
    scheduler.want(2, "less")
    scheduler.want(2, "more")
    scheduler.surcharge(2, "less", 10 * MS)
    for moment in (12 * MS, 600 * MS):
        scheduler.tick(moment)
    both = scheduler.prepare(600 * MS, GPUS[0])
    assert [prepared.wanting for prepared in both] == [True, False]
    for prepared in both:
        assert prepared.grant.tenant == "more"
        assert prepared.since == 600 * MS
        assert prepared.until > 749 * MS
    scheduler.drained(700 * MS, "holder", wanting=True)
    assert [action.tenant for action in scheduler.tick(700 * MS)] == ["more"]
