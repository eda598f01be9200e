"""The queues that a thread of the hook remembers, for any set of streams: R9 and R10 of
shim/src/time/gate/remembered.h."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property.remembered_model import OWN_BITS, TABLE_BITS, Table, key_at

Step = tuple[Literal["add", "remove", "remove another"], int]

keys = st.one_of(
    st.integers(min_value=1, max_value=2**64 - 1),
    st.builds(key_at, st.integers(0, 3), st.just(OWN_BITS), st.integers(1, 6)),
    st.builds(key_at, st.sampled_from([0, 1, 254, 255]), st.just(TABLE_BITS), st.integers(1, 40)),
)
"""Keys of three kinds: any keys; keys that share a place in the slot; keys that share a place in the table, also at its
ends."""


@pytest.mark.promise("program-no-cliffs")
@settings(max_examples=200)
@given(st.data())
def test_every_live_stream_is_found_and_no_destroyed_one(data: st.DataObject) -> None:
    pool = data.draw(st.lists(keys, min_size=1, max_size=200, unique=True))
    steps: list[Step] = data.draw(
        st.lists(
            st.tuples(st.sampled_from(["add", "add", "remove", "remove another"]), st.integers(0, len(pool) - 1)),
            max_size=400,
        )
    )
    table, known = Table(), dict[int, int]()
    for number, (what, index) in enumerate(steps, 1):
        key = pool[index]
        if what == "add":
            table.add(key, 16 * number)
            known[key] = 16 * number
        elif what == "remove":
            table.remove(key, known.pop(key, 16))
        else:
            table.remove(key, 8)
        assert table.find(key) == known.get(key, 0)
    assert {key: table.find(key) for key in pool} == {key: known.get(key, 0) for key in pool}


def test_thousands_of_streams_are_remembered() -> None:
    table = Table()
    handles = [0x7F0000000000 + 0x40 * index for index in range(10_000)]
    for number, handle in enumerate(handles, 1):
        table.add(handle, 16 * number)
    for handle in handles[::2]:
        table.remove(handle, table.find(handle))
    assert [table.find(handle) // 16 for handle in handles] == [
        0 if number % 2 else number for number in range(1, 10_001)
    ]
    assert not table.lost


def test_a_queue_without_memory_is_dropped_and_the_others_are_found() -> None:
    """While host memory is exhausted, the table drops new queues. Once there is memory, it stores queues again."""
    table, (*kept, more) = Table(), [key_at(3, OWN_BITS, number) for number in range(1, 2**OWN_BITS // 2 + 2)]
    table.refuse_memory(True)
    for number, key in enumerate(kept, 1):
        table.add(key, 16 * number)
    assert not table.lost
    table.add(more, 8)
    assert ([table.find(key) // 16 for key in kept], table.find(more)) == (list(range(1, len(kept) + 1)), 0)
    assert table.lost
    table.refuse_memory(False)
    table.add(more, 8)
    assert ([table.find(key) // 16 for key in kept], table.find(more)) == (list(range(1, len(kept) + 1)), 8)
