"""The command that prints the bill: its prices, and statements that cannot be read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from sharepod.budgets.charges import Charged
from sharepod.controller.bill import BillError, read_prices, statements
from sharepod.kube import Json, NotFoundError

EXAMPLE = """
currency: EUR
charged: Held
default: {gpuHour: 1.5}
models: {T: {gpuHour: 2.40, memoryGiBHour: 0.01}}
"""


def statement(name: str, status: Json) -> Json:
    return {"metadata": {"name": name}, "status": status}


class _Pages:
    """API server with two pages of statements, or without the CRD."""

    def __init__(self, *pages: list[Json]) -> None:
        self._pages = pages

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Json:
        if not self._pages:
            raise NotFoundError("GET", 404, "NotFound", "none")
        at = int((query or {}).get("continue", 0))
        further = {"continue": str(at + 1)} if at + 1 < len(self._pages) else {}
        return {"metadata": further, "items": self._pages[at]}


def test_prices_are_read_as_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text(EXAMPLE)
    prices = read_prices(tmp_path / "prices.yaml")
    assert prices.charged is Charged.HELD
    assert str(prices.of("T").gpu_hour) == "2.4"
    assert str(prices.of("other").gpu_hour) == "1.5"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("default: {gpuHour: -1}", "default.gpuHour: Input should be greater than or equal to 0"),
        ("models: {T: {price: 1}}", "models.T.price: Extra inputs are not permitted"),
        ("charged: Never", "charged: Input should be 'Held'"),
        ("[", "cannot read the prices"),
    ],
)
def test_wrong_prices_are_refused_by_field(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "prices.yaml").write_text(text)
    with pytest.raises(BillError) as refused:
        read_prices(tmp_path / "prices.yaml")
    assert said in str(refused.value)


async def test_a_statement_that_cannot_be_read_is_named_and_the_others_are_billed() -> None:
    good = {"months": [{"month": "2026-01", "models": [{"model": "T", "heldMilliseconds": 7}]}]}
    server: Any = _Pages([statement("bad", {"months": [{"month": "x"}]})], [statement("good", good)])
    accounts, wrong = await statements(server, None)
    assert accounts["good"].months["2026-01"]["T"].held_ms == 7
    assert [text.partition(":")[0] for text in wrong] == ["the statement of bad cannot be read"]


async def test_without_statements_it_says_what_is_missing() -> None:
    server: Any = _Pages()
    with pytest.raises(BillError, match="the CRD gpustatements is missing"):
        await statements(server, None)
    with pytest.raises(BillError, match="namespace team has no GPUStatement"):
        await statements(server, "team")
