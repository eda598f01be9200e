"""Arbitrary calls of the token scheduler in any order: its accounts are exact."""

from __future__ import annotations

from dataclasses import astuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sharepod.timeshare import Parameters, Preemption, Scheduler, Suspension, TokenGrant, TokenRevocation

MS = 1_000_000
GPUS = ("g0", "g1", "g2")
NAMES = ("a", "b", "c", "d")

operations = st.lists(
    st.tuples(
        st.sampled_from(["set", "remove", "want", "unwant", "drain", "drain-want", "draining", "silent", "wait"]),
        st.sampled_from(NAMES),
        st.sets(st.sampled_from(GPUS), min_size=1),
        st.integers(0, 1000),
        st.integers(0, 1000),
        st.integers(0, 2500 * MS),
    ),
    max_size=60,
)


class Books:
    """Driver of a scheduler, with its own record of the holders."""

    def __init__(self) -> None:
        self.parameters = Parameters()
        self.scheduler = Scheduler(self.parameters)
        self.now = 0
        self.gpus: dict[str, tuple[str, ...]] = {}
        self.holds: dict[str, int] = {}
        self.displaced: set[str] = set()
        self.ending: set[str] = set()
        """Holders that have announced the end of their work. The scheduler may already have granted their GPUs to other
        tenants.
        """
        self.charged = dict.fromkeys(GPUS, 0)
        self.opened: dict[str, int] = {}

    def advance(self, delay: int) -> None:
        """Let time pass, with a call of `tick` at each moment that the scheduler requests."""
        end = self.now + delay
        while True:
            self.carry_out()
            due = self.scheduler.next_deadline()
            assert due is None or due > self.now, "due transitions have been applied"
            if due is None or due > end:
                break
            self.now = due
        self.now = end
        self.carry_out()

    def carry_out(self) -> None:
        for action in self.scheduler.tick(self.now):
            if isinstance(action, TokenGrant):
                assert self.holds.get(action.tenant) in (None, action.grant_id) or action.tenant in self.displaced
                self.displaced.discard(action.tenant)
                self.ending.discard(action.tenant)
                assert 0 <= action.quantum_ns <= self.parameters.quantum_max_ns + self.parameters.renew_ahead_ns
                self.holds[action.tenant] = action.grant_id
            elif isinstance(action, TokenRevocation | Preemption | Suspension):
                assert self.holds[action.tenant] == action.grant_id
                if not isinstance(action, TokenRevocation):
                    self.displaced.add(action.tenant)
        holding = [gpu for name in self.holds.keys() - self.displaced - self.ending for gpu in self.gpus[name]]
        assert len(holding) == len(set(holding)), "a GPU has one holder that may launch"

    def end(self, name: str) -> None:
        """Record that a tenant has drained. The caller notifies the scheduler."""
        del self.holds[name]
        self.displaced.discard(name)
        self.ending.discard(name)

    def check_gpu_time(self) -> None:
        """Check that the amounts in each GPU's time account add up to the time since its first tenant."""
        used = {gpu for gpus in self.gpus.values() for gpu in gpus}
        self.opened = {gpu: self.opened[gpu] for gpu in used if gpu in self.opened}
        for gpu in GPUS:
            time = self.scheduler.gpu_time(self.now, gpu)
            assert (time is not None) == (gpu in used)
            if time is not None:
                spent = sum(astuple(time))
                self.opened.setdefault(gpu, self.now - spent)
                assert self.now - spent == self.opened[gpu]

    def forget(self, name: str) -> None:
        if name in self.gpus:
            held = self.scheduler.usage(self.now, name).held_ns
            for gpu in self.gpus.pop(name):
                self.charged[gpu] += held
            self.holds.pop(name, None)
            self.displaced.discard(name)
            self.ending.discard(name)
        self.scheduler.remove(self.now, name)


@pytest.mark.promise("time-exact-books")
@settings(max_examples=300, deadline=None)
@given(operations)
def test_each_second_of_a_gpu_is_charged_at_most_once(steps: list[tuple[str, str, set[str], int, int, int]]) -> None:
    books = Books()
    scheduler = books.scheduler
    for what, name, gpus, one, other, delay in steps:
        if what == "set":
            wanted = books.gpus.setdefault(name, tuple(sorted(gpus)))
            request, limit = sorted((one, other))
            scheduler.set_tenant(books.now, name, wanted, request_milli=request, limit_milli=limit)
        elif what == "remove":
            books.forget(name)
        elif name in books.gpus:
            if what == "want":
                scheduler.want(books.now, name)
            elif what == "unwant":
                scheduler.unwant(books.now, name)
            elif what.startswith("drain") and name in books.holds:
                books.end(name)
                scheduler.drained(books.now, name, wanting=what == "drain-want")
            elif what in ("draining", "silent") and name in books.holds:
                books.ending.add(name)
                getattr(scheduler, what)(books.now, name, expected_ns=delay // 10)
        books.advance(delay if what == "wait" else delay % (20 * MS))
        for name_ in books.gpus:
            usage = scheduler.usage(books.now, name_)
            assert 0 <= usage.borrowed_ns <= usage.held_ns <= books.now
            assert 0 <= usage.held_milli <= 1000
        books.check_gpu_time()
    for name in list(books.gpus):
        if len(books.gpus[name]) > 1:  # the account of a gang has the mean over its GPUs, not the time of each
            return
    for name in list(books.gpus):
        books.forget(name)
    assert all(charged <= books.now + 1 for charged in books.charged.values())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(1, 300)), min_size=1, max_size=40))
def test_a_free_gpu_never_stays_idle_while_someone_may_run(steps: list[tuple[str, int]]) -> None:
    books = Books()
    for name in NAMES:
        books.gpus[name] = ("g0",)
        books.scheduler.set_tenant(0, name, ("g0",), request_milli=200, limit_milli=1000)
    books.advance(1 * MS)
    for name, delay in steps:
        if name in books.holds:
            books.end(name)
            books.scheduler.drained(books.now, name, wanting=False)
        else:
            books.scheduler.want(books.now, name)
            books.carry_out()
            assert books.holds, "a tenant holds the GPU"
        books.advance(delay * MS)
