"""The memory ledger never exceeds the limit, and never refuses memory because a sibling has idle credits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sharepod.agent.shares.memory_ledger import (
    CLAIM_MAX,
    DECIDED_AT_ONCE,
    RETURN_NS,
    Credited,
    LedgerError,
    MemoryAction,
    MemoryLedger,
    RecallFrom,
)

RECALL = 50


def answers(actions: list[MemoryAction]) -> list[tuple[object, int]]:
    return [(action.client, action.bytes) for action in actions if isinstance(action, Credited)]


def recalls(actions: list[MemoryAction]) -> list[tuple[object, int]]:
    return [(action.client, action.bytes) for action in actions if isinstance(action, RecallFrom)]


def test_a_process_that_reconnects_during_a_wait_is_asked_for_its_idle_credits() -> None:
    ledger = MemoryLedger(100, enforced=True, recall_ns=RECALL)
    ledger.restore(1, 60)
    assert ledger.reserve(0, "b", 1, 80) == []
    assert ledger.handover(RETURN_NS - 1, "a", 60, 1) == [RecallFrom("a", 40)]
    assert ledger.expire(RETURN_NS - 2 + RECALL) == []
    assert ledger.release(RETURN_NS - 2 + RECALL, "a", 50, recalled=True) == [Credited("b", 1, 80)]


def test_a_reconnected_process_that_does_not_answer_is_waited_for_a_bounded_time() -> None:
    ledger = MemoryLedger(100, enforced=True, recall_ns=RECALL)
    ledger.restore(1, 60)
    ledger.reserve(0, "b", 1, 80)
    assert ledger.handover(RETURN_NS - 1, "a", 60, 1) == [RecallFrom("a", 40)]
    assert ledger.expire(RETURN_NS - 1 + RECALL) == [Credited("b", 1, 0)]


@pytest.mark.promise("memory-limit")
@settings(max_examples=300)
@given(
    limit=st.integers(0, 1000),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["reserve", "release", "answer", "vanish", "disconnect", "exit", "pass"]),
            st.sampled_from("abc"),
            st.integers(1, 400),
        ),
        max_size=60,
    ),
)
def test_credits_never_exceed_the_limit_and_every_request_is_answered(
    limit: int, steps: list[tuple[str, str, int]]
) -> None:
    ledger = MemoryLedger(limit, enforced=True, recall_ns=RECALL)
    model: dict[str, int] = {}
    left: dict[int, int] = {}
    waiting: dict[int, str] = {}
    owing: set[str] = set()
    now = seq = 0

    def note(actions: list[MemoryAction]) -> None:
        for action in actions:
            if isinstance(action, Credited):
                name = waiting.pop(action.seq)
                assert name == action.client
                model[name] = model.get(name, 0) + action.bytes
            else:
                assert isinstance(action.client, str)
                assert action.client not in owing, "one recall at a time"
                owing.add(action.client)

    for what, name, amount in steps:
        if what == "reserve":
            seq += 1
            waiting[seq] = name
            note(ledger.reserve(now, name, seq, amount, ahead=amount % 3 == 0))
        elif what == "release" and model.get(name, 0) >= amount:
            model[name] -= amount
            note(ledger.release(now, name, amount, recalled=False))
        elif what == "answer" and name in owing:
            owing.discard(name)
            given = min(amount, model.get(name, 0))
            model[name] = model.get(name, 0) - given
            note(ledger.release(now, name, given, recalled=True))
        elif what in ("vanish", "disconnect"):
            held = model.pop(name, 0)
            owing.discard(name)
            waiting = {key: who for key, who in waiting.items() if who != name}
            if what == "vanish":
                note(ledger.vanish(now, name))
            else:
                left[ord(name)] = left.get(ord(name), 0) + held
                note(ledger.disconnect(now, name, ord(name)))
        elif what == "exit":
            left.pop(ord(name), None)
            note(ledger.exited(now, ord(name)))
        else:
            now += amount
            note(ledger.expire(now))
        assert ledger.tracked == sum(model.values()) + sum(left.values()) <= limit
        due = ledger.next_deadline()
        assert due is None or due > now
        assert bool(waiting) == (due is not None), "who waits has a time by which it is answered"
    now += RETURN_NS * (len(waiting) + 1)
    while waiting:
        note(ledger.expire(now))
        now += RETURN_NS


@pytest.mark.promise("memory-recall")
def test_idle_credits_of_a_sibling_are_recalled_before_a_request_is_refused() -> None:
    ledger = MemoryLedger(100, enforced=True, recall_ns=RECALL)
    assert answers(ledger.reserve(0, "a", 1, 80)) == [("a", 80)]
    actions = ledger.reserve(0, "b", 1, 50)
    assert answers(actions) == []
    assert recalls(actions) == [("a", 30)]
    assert answers(ledger.release(10, "a", 30, recalled=True)) == [("b", 50)]


def test_a_request_ahead_of_need_is_answered_at_once_without_a_recall() -> None:
    ledger = MemoryLedger(100, enforced=True, recall_ns=RECALL)
    ledger.reserve(0, "a", 1, 80)
    assert ledger.reserve(0, "b", 1, 50, ahead=True) == [Credited("b", 1, 0)]
    assert answers(ledger.reserve(0, "b", 2, 20, ahead=True)) == [("b", 20)]
    assert ledger.refused == 0


def test_a_request_waits_for_a_process_that_is_just_ending() -> None:
    ledger = MemoryLedger(100, enforced=True, recall_ns=RECALL)
    ledger.reserve(0, "a", 1, 100)
    ledger.disconnect(0, "a", 7)
    assert ledger.reserve(0, "b", 1, 100) == []
    assert answers(ledger.exited(1, 7)) == [("b", 100)]
    ledger.disconnect(2, "b", 8)
    assert ledger.reserve(2, "c", 1, 1) == []
    assert answers(ledger.expire(2 + RETURN_NS)) == [("c", 0)], "it lives on"


def test_a_request_is_refused_at_once_where_a_sibling_returns_nothing() -> None:
    ledger = MemoryLedger(100, enforced=True, recall_ns=RECALL)
    ledger.reserve(0, "a", 1, 80)
    ledger.reserve(0, "b", 7, 50)
    assert answers(ledger.release(1, "a", 0, recalled=True)) == [("b", 0)]


def test_a_request_is_refused_after_a_bounded_time_where_a_sibling_does_not_answer() -> None:
    ledger = MemoryLedger(100, enforced=True, recall_ns=RECALL)
    ledger.reserve(0, "a", 1, 80)
    ledger.reserve(0, "b", 7, 50)
    assert ledger.next_deadline() == RECALL
    assert answers(ledger.expire(RECALL - 1)) == []
    assert answers(ledger.expire(RECALL)) == [("b", 0)]


def test_a_late_answer_does_not_count_for_the_next_recall() -> None:
    ledger = MemoryLedger(100, enforced=True, recall_ns=RECALL)
    ledger.reserve(0, "a", 1, 80)
    ledger.reserve(0, "b", 7, 50)
    ledger.expire(RECALL)
    ledger.reserve(60, "b", 8, 30)
    actions = ledger.release(61, "a", 5, recalled=True)
    assert answers(actions) == []
    assert recalls(actions) == [("a", 5)], "asked once more, for what this request needs"
    assert answers(ledger.release(62, "a", 5, recalled=True)) == [("b", 30)]


def test_a_sibling_never_has_two_recalls_to_answer() -> None:
    ledger = MemoryLedger(100, enforced=True, recall_ns=RECALL)
    ledger.reserve(0, "a", 1, 80)
    sent = recalls(ledger.reserve(0, "b", 7, 50))
    for turn in range(1, 200):
        sent += recalls(ledger.expire(turn * RECALL))
        sent += recalls(ledger.reserve(turn * RECALL, "b", 7, 50))
    assert sent == [("a", 30)]


def test_memory_freed_after_a_driver_reading_does_not_refuse_the_next_request() -> None:
    ledger = MemoryLedger(10, enforced=True, recall_ns=RECALL)
    ledger.reserve(0, "a", 1, 9)
    ledger.begin_reading()
    ledger.release(0, "a", 8, recalled=False)
    ledger.observe(9)
    assert answers(ledger.reserve(0, "a", 2, 8)) == [("a", 8)]


def test_credits_granted_during_a_driver_reading_are_not_counted_twice() -> None:
    ledger = MemoryLedger(10, enforced=True, recall_ns=RECALL)
    ledger.begin_reading()
    ledger.reserve(0, "a", 1, 6)
    ledger.observe(7)
    assert ledger.used == 7


def test_a_handover_of_memory_that_the_driver_already_reported_is_not_counted_twice() -> None:
    ledger = MemoryLedger(10, enforced=True, recall_ns=RECALL)
    ledger.begin_reading()
    ledger.observe(6)
    assert ledger.used == 6
    ledger.handover(0, "a", 6, 1)
    assert ledger.used == 6
    assert answers(ledger.reserve(0, "a", 1, 4)) == [("a", 4)]


def test_a_lost_connection_of_a_living_process_frees_no_memory() -> None:
    ledger = MemoryLedger(10, enforced=True, recall_ns=RECALL)
    ledger.reserve(0, "a", 1, 10)
    ledger.disconnect(0, "a", 1)
    assert ledger.reserve(0, "b", 2, 1) == [], "it may end, or declare less"
    assert answers(ledger.expire(RETURN_NS - 1)) == []
    assert answers(ledger.expire(RETURN_NS)) == [("b", 0)]
    ledger.handover(0, "a again", 4, 1)
    assert ledger.used == 10, "what it does not declare is not known to be free"
    ledger.begin_reading()
    ledger.observe(5, covered={1})
    assert ledger.used == 5, "the driver has reported"
    ledger.vanish(0, "a again")
    ledger.begin_reading()
    ledger.observe(0)
    assert ledger.used == 0


def test_a_reading_begun_before_a_connection_was_lost_frees_none_of_its_memory() -> None:
    ledger = MemoryLedger(10, enforced=True, recall_ns=RECALL)
    ledger.begin_reading()
    ledger.reserve(0, "a", 1, 10)
    ledger.disconnect(0, "a", 1)
    ledger.observe(0, covered={1})
    assert ledger.used == 10
    assert ledger.reserve(0, "b", 2, 10) == []
    assert answers(ledger.exited(0, 1)) == [("b", 10)]


@pytest.mark.parametrize("enforced", [True, False])
def test_the_sum_fits_into_a_frame_whatever_clients_claim(enforced: bool) -> None:
    ledger = MemoryLedger(100, enforced=enforced, recall_ns=RECALL)
    ledger.handover(0, "a", CLAIM_MAX)
    with pytest.raises(LedgerError):
        ledger.handover(0, "a", 1)
    with pytest.raises(LedgerError):
        ledger.reserve(0, "a", 1, CLAIM_MAX + 1)
    for seq in range(1 << 16):
        ledger.reserve(0, "b", seq, CLAIM_MAX)
    assert ledger.used < 1 << 63


def test_a_request_above_the_limit_is_refused_without_a_recall() -> None:
    ledger = MemoryLedger(100, enforced=True, recall_ns=RECALL)
    ledger.reserve(0, "a", 1, 80)
    actions = ledger.reserve(0, "b", 7, 101)
    assert answers(actions) == [("b", 0)]
    assert recalls(actions) == []


def test_a_disconnected_clients_bytes_are_free_at_once() -> None:
    ledger = MemoryLedger(100, enforced=True, recall_ns=RECALL)
    ledger.reserve(0, "a", 1, 80)
    ledger.reserve(0, "b", 7, 50)
    assert answers(ledger.vanish(1, "a")) == [("b", 50)]


@pytest.mark.promise("memory-uncapped")
def test_not_enforced_is_counted_and_never_refused() -> None:
    ledger = MemoryLedger(100, enforced=False, recall_ns=RECALL)
    assert answers(ledger.reserve(0, "a", 1, 500)) == [("a", 500)]
    assert ledger.used == 500


@pytest.mark.promise("memory-driver-counts", "memory-counted-without-hook")
def test_memory_of_the_driver_beyond_credits_counts() -> None:
    ledger = MemoryLedger(100, enforced=True, recall_ns=RECALL)
    ledger.reserve(0, "a", 1, 40)
    ledger.observe(70)
    assert ledger.used == 70
    assert answers(ledger.reserve(0, "a", 2, 31)) == [("a", 0)]
    assert answers(ledger.reserve(0, "a", 3, 30)) == [("a", 30)]


@pytest.mark.promise("memory-raised")
def test_a_raised_limit_admits_waiting_requests() -> None:
    ledger = MemoryLedger(100, enforced=True, recall_ns=RECALL)
    ledger.reserve(0, "a", 1, 80)
    ledger.reserve(0, "b", 7, 50)
    assert answers(ledger.set_limit(1, 200, enforced=True)) == [("b", 50)]


def test_a_handover_is_credited_over_the_limit_and_later_requests_are_refused() -> None:
    ledger = MemoryLedger(100, enforced=True, recall_ns=RECALL)
    ledger.handover(0, "a", 150)
    assert ledger.used == 150
    assert answers(ledger.reserve(0, "a", 1, 1)) == [("a", 0)]


def test_a_client_cannot_return_credits_that_it_does_not_have() -> None:
    ledger = MemoryLedger(100, enforced=True, recall_ns=RECALL)
    ledger.reserve(0, "a", 1, 40)
    with pytest.raises(LedgerError):
        ledger.release(0, "a", 41, recalled=False)
    with pytest.raises(LedgerError):
        ledger.release(0, "a", 1, recalled=True)


def test_growth_that_cannot_be_refused_is_credited_over_the_limit_and_counted() -> None:
    ledger = MemoryLedger(100, enforced=True, recall_ns=RECALL)
    ledger.reserve(0, "a", 1, 90)
    ledger.grow("a", 30)
    assert (ledger.used, ledger.grown) == (120, 30)
    assert answers(ledger.reserve(0, "a", 2, 1)) == [("a", 0)]
    ledger.release(0, "a", 30, recalled=False)
    assert answers(ledger.reserve(0, "a", 3, 10)) == [("a", 10)]
    with pytest.raises(LedgerError):
        ledger.grow("a", CLAIM_MAX)


@pytest.mark.promise("security-claimed-memory")
def test_a_process_cannot_claim_more_than_its_gpus_memory() -> None:
    """A process may report twice the GPU's memory. Without an enforced limit it may report more, because managed memory
    may be larger than the GPU."""
    ledger = MemoryLedger(100, enforced=True, recall_ns=RECALL)
    ledger.gpu_memory = 1000
    ledger.reserve(0, "a", 1, 90)
    ledger.grow("a", 1910)
    with pytest.raises(LedgerError, match="the GPU has 1000"):
        ledger.grow("a", 1)
    with pytest.raises(LedgerError, match="the GPU has 1000"):
        ledger.handover(0, "b", 2001)
    ledger.handover(0, "b", 2000)
    counted = MemoryLedger(100, enforced=False, recall_ns=RECALL)
    counted.gpu_memory = 1000
    counted.grow("a", 5000)
    counted.handover(0, "b", 5000)
    assert counted.used == 10_000


def test_growth_that_the_driver_already_reported_is_not_counted_twice() -> None:
    ledger = MemoryLedger(100, enforced=True, recall_ns=RECALL)
    ledger.begin_reading()
    ledger.observe(30)
    ledger.grow("a", 30)
    assert ledger.used == 30


def test_refusals_are_counted() -> None:
    ledger = MemoryLedger(100, enforced=True, recall_ns=RECALL)
    ledger.reserve(0, "a", 1, 90)
    ledger.reserve(0, "a", 2, 11)
    assert ledger.refused == 1


def test_a_thousand_waiting_requests_are_decided_in_slices_in_order_without_those_cancelled() -> None:
    ledger = MemoryLedger(200, enforced=True, recall_ns=RECALL)
    ledger.reserve(0, "a", 0, 150)
    assert recalls(ledger.reserve(0, "first", 0, 100)) == [("a", 50)]
    clients = [f"client {number}" for number in range(20)]
    asked = [(client, seq) for seq in range(50) for client in clients]
    for client, seq in asked:
        assert ledger.reserve(1, client, seq, 201) == []
    assert ledger.vanish(2, "client 7") == []
    answered: list[tuple[object, int]] = []
    while (due := ledger.next_deadline()) is not None:
        assert due <= RECALL
        actions = ledger.expire(RECALL)
        assert len(actions) <= DECIDED_AT_ONCE
        answered += [(action.client, action.seq) for action in actions if isinstance(action, Credited)]
    assert answered == [("first", 0), *((client, seq) for client, seq in asked if client != "client 7")]
    assert ledger.refused == len(answered)
