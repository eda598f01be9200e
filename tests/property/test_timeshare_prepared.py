"""Hand-offs that are decided on before the holder drains: the same, with the same books, as those decided on after."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
from sharepod.timeshare import Parameters, PreparedHandOff, Scheduler, TokenGrant

MS = 1_000_000
GPUS = ("g0", "g1")
LIVES, STEPS = 150, 120


class Life:
    """Tenants of two GPUs and what happens to them, at random. Each hand-off is made the ordinary way; one that was
    prepared is also made as it was prepared, on a copy."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.scheduler = Scheduler(Parameters())
        self.now = 1
        self.gpus: dict[str, tuple[str, ...]] = {}
        self.holds: dict[str, int] = {}
        self.prepared: list[PreparedHandOff] = []
        self.compared = 0
        gangs = self.random.random() < 0.2
        self.busy = self.random.random()
        self.span_ms = self.random.choice((0.1, 3, 40))
        for name in "abcdef"[: self.random.randint(2, 6)]:
            whole = gangs and self.random.random() < 0.3
            self.gpus[name] = GPUS if whole else (self.random.choice((GPUS[0], GPUS[0], GPUS[1])),)
            self.set(name)
            self.scheduler.set_connected(self.now, name, connected=self.random.random() < 0.8)

    def set(self, name: str) -> None:
        """Add a tenant, or give it other rates."""
        request = self.random.choice((0, 0, 100, 100, 300, 500, 1000))
        limit = self.random.choice((1000, 1000, 1000, request, max(request, 400)))
        self.scheduler.set_tenant(
            self.now,
            name,
            self.gpus[name],
            request_milli=request,
            limit_milli=limit,
            interactive=self.random.random() < 0.2,
        )
        self.changed(name)

    def changed(self, name: str) -> None:
        """Forget what was prepared for the GPUs of a tenant to which something has happened."""
        self.prepared = [each for each in self.prepared if each.gpu not in self.gpus[name]]

    def tick(self) -> None:
        """Carry out what is due."""
        for action in self.scheduler.tick(self.now):
            self.changed(action.tenant)
            if isinstance(action, TokenGrant):
                self.holds[action.tenant] = action.grant_id

    def prepare(self) -> None:
        """Prepare the hand-offs of all GPUs."""
        for gpu in GPUS:
            if not any(each.gpu == gpu for each in self.prepared):
                self.prepared += self.scheduler.prepare(self.now, gpu)

    def step(self) -> None:
        """Let something happen."""
        self.tick()
        if self.random.random() < 0.8:
            self.prepare()
        if self.prepared and self.random.random() < 0.4:
            self.drain_at_an_edge(self.random.choice(self.prepared))
            return
        self.now += self.random.randint(1, int(self.span_ms * MS * self.random.choice((0.01, 0.3, 1, 1, 8))))
        due = self.scheduler.next_deadline()
        if due is not None and due <= self.now:
            self.now = max(due, 1)
            self.tick()
        name = self.random.choice(list(self.gpus))
        what = self.random.random()
        if what < 0.55 and name in self.holds:
            self.drain(name, wanting=self.random.random() < self.busy)
        elif what < 0.8:
            self.scheduler.want(self.now, name)
            self.changed(name)
        elif what < 0.86 and name in self.holds:
            self.scheduler.draining(self.now, name, expected_ns=self.random.randint(0, 5 * MS))
            self.changed(name)
        elif what < 0.88 and name in self.holds:
            self.scheduler.silent(self.now, name, expected_ns=self.random.randint(-MS, 5 * MS))
            self.changed(name)
        elif what < 0.9:
            self.scheduler.surcharge(self.now, name, self.random.randint(0, 30 * MS))
            self.changed(name)
        elif what < 0.93:
            self.scheduler.set_connected(self.now, name, connected=self.random.random() < 0.5)
            self.changed(name)
        elif what < 0.96:
            self.set(name)
        elif what < 0.97:
            self.scheduler.unwant(self.now, name)
            self.changed(name)

    def drain_at_an_edge(self, prepared: PreparedHandOff) -> None:
        """Let a holder drain when its window begins or ends, unless something is due before."""
        moment, due = self.random.choice((prepared.since, prepared.until)), self.scheduler.next_deadline()
        if self.now <= moment <= self.now + 2000 * MS:
            self.now = moment if due is None else min(moment, due)
            if self.now == moment:
                self.drain(prepared.holder, wanting=prepared.wanting)

    def drain(self, name: str, *, wanting: bool) -> None:
        """Let a tenant drain, and compare what was prepared for that."""
        for prepared in self.prepared:
            if prepared.holder == name and prepared.wanting == wanting and prepared.since <= self.now <= prepared.until:
                assert prepared.held_id == self.holds[name]
                self.compare(prepared)
        del self.holds[name]
        self.scheduler.drained(self.now, name, wanting=wanting)
        self.changed(name)

    def compare(self, prepared: PreparedHandOff) -> None:
        """Hand off in both ways: the grants agree but for their ids, and the books to the nanosecond."""
        ordinary, ahead = copy.deepcopy(self.scheduler), copy.deepcopy(self.scheduler)
        ordinary.drained(self.now, prepared.holder, wanting=prepared.wanting)
        granted = [each for each in ordinary.tick(self.now) if self._begins(each, prepared.gpu)]
        assert [replace(each, grant_id=0) for each in granted] == [replace(prepared.grant, grant_id=0)]
        ahead.hand_off(self.now, prepared)
        ahead.tick(self.now)
        assert ahead.next_deadline() == ordinary.next_deadline()
        later = self.now + 3 * MS
        for name in self.gpus:
            assert ahead.snapshot(later, name) == ordinary.snapshot(later, name)
            assert ahead.usage(later, name) == ordinary.usage(later, name)
            assert ahead.turns(later, name) == ordinary.turns(later, name)
        for gpu in GPUS:
            assert ahead.gpu_time(later, gpu) == ordinary.gpu_time(later, gpu)
        self.compared += 1

    def _begins(self, action: object, gpu: str) -> bool:
        return (
            isinstance(action, TokenGrant)
            and self.gpus[action.tenant] == (gpu,)
            and action.grant_id != self.holds.get(action.tenant)
        )


@pytest.mark.promise("time-prepared")
def test_a_prepared_hand_off_is_the_one_that_would_be_decided_on() -> None:
    compared = 0
    for seed in range(LIVES):
        life = Life(seed)
        for _ in range(STEPS):
            life.step()
        compared += life.compared
    assert compared > 20 * LIVES / 10, "most were not comparable"
