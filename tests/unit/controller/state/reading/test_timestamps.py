"""Timestamps of objects, read as the standard library reads them."""

from __future__ import annotations

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.controller.state.reading.timestamps import seconds, text_of


@given(st.datetimes(timezones=st.just(datetime.UTC)))
def test_a_time_is_read_and_written_as_the_library_does(when: datetime.datetime) -> None:
    when = when.replace(microsecond=0)
    text = when.isoformat().replace("+00:00", "Z")
    assert seconds(text) == when.timestamp()
    assert text_of(when.timestamp()) == text


def test_fractions_are_read_and_rounded_up() -> None:
    assert seconds("1970-01-01T00:00:01.5Z") == 1.5
    assert text_of(1.5) == "1970-01-01T00:00:02Z"


@pytest.mark.parametrize("text", [None, "", "soon", "2026-13-01T00:00:00Z", "2026-01-01T00:00:00", "9" * 10_000])
def test_an_invalid_time_counts_as_none(text: str | None) -> None:
    assert seconds(text) is None
