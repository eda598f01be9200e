"""Tokens of the pages of a list: repeated tokens end the list with an error; long tokens do not."""

from __future__ import annotations

import pytest
from sharepod.kube import PageTokens, UnavailableError


@pytest.mark.promise("operator-list-ends")
def test_a_list_of_very_many_pages_is_read_to_its_end() -> None:
    tokens = PageTokens("/api/v1/pods")
    for number in range(100_000):
        assert tokens.after({"continue": str(number)}) == str(number)
    assert not tokens.after({})


@pytest.mark.parametrize("circle", [["a", "a"], ["a", "b", "a"], ["a", "b", "c", "b"]])
def test_a_list_whose_pages_come_round_again_is_an_error(circle: list[str]) -> None:
    tokens = PageTokens("/api/v1/pods")
    for token in circle[:-1]:
        tokens.after({"continue": token})
    with pytest.raises(UnavailableError, match=f"LIST /api/v1/pods.*page {len(circle)} continues where"):
        tokens.after({"continue": circle[-1]})
