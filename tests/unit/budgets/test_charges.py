"""The bill: its amounts, their sum, and the names that it shares with OpenCost."""

from __future__ import annotations

import csv
import io
import json
import re
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.api.consumption import MAX_COUNTER, MAX_MODEL
from sharepod.api.statement import MAX_SERIES, GPUStatementStatus
from sharepod.budgets.amounts import Amounts
from sharepod.budgets.charges import Charged, Price, Prices, as_allocations, as_csv, bill_lines
from sharepod.budgets.namespace_account import NamespaceAccount, TakenIn
from sharepod.budgets.statement_status import account_of, status_of

HOUR_MS = 3_600_000
AMOUNTS = Amounts(held_ms=3 * HOUR_MS, borrowed_ms=HOUR_MS, reserved_ms=4 * HOUR_MS, memory_mib_s=8 * 1024 * 3600)
ACCOUNTS = {"team": NamespaceAccount(months={"2026-01": {"T": AMOUNTS}, "2026-02": {"T": Amounts(held_ms=1)}})}


@pytest.mark.promise("operator-bill")
@pytest.mark.parametrize(
    ("charged", "hours"), [(Charged.HELD, 3), (Charged.RESERVED, 4), (Charged.RESERVED_AND_BORROWED, 5)]
)
def test_time_is_charged_by_the_prices(charged: Charged, hours: int) -> None:
    prices = Prices(charged=charged, default=Price(gpu_hour=Decimal("2.5"), memory_gib_hour=Decimal("0.01")))
    (line,) = bill_lines(ACCOUNTS, "2026-01", prices)
    assert line.charged_hours == hours
    assert line.gpu_cost == Decimal("2.5") * hours
    assert line.memory_gib_hours == 8
    assert line.memory_cost == Decimal("0.08")


def test_a_model_has_its_own_price_and_the_others_the_default() -> None:
    accounts = {"team": NamespaceAccount(months={"2026-01": {"A": AMOUNTS, "B": AMOUNTS}})}
    prices = Prices.model_validate({"default": {"gpuHour": 1}, "models": {"B": {"gpuHour": "0.1"}}})
    assert [line.gpu_cost for line in bill_lines(accounts, "2026-01", prices)] == [5, Decimal("0.5")]


def test_csv_has_a_line_for_each_namespace_and_model_and_no_formula() -> None:
    accounts = {"team": NamespaceAccount(months={"2026-01": {"=1+1": AMOUNTS}})}
    prices = Prices(currency="EUR", default=Price(gpu_hour=Decimal(2)))
    (row,) = csv.DictReader(io.StringIO(as_csv(bill_lines(accounts, "2026-01", prices), "2026-01", prices)))
    assert row["gpuModel"] == "'=1+1"
    assert (row["namespace"], row["month"], row["currency"]) == ("team", "2026-01", "EUR")
    assert (row["gpuHoursHeld"], row["gpuHours"], row["totalCost"]) == ("3.000000", "5.000000", "10.0000")


@pytest.mark.parametrize(
    "sign", ["=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20", "\u2212", "\t=", "\r=", "\u00a0=", '"=', "%"]
)
@pytest.mark.parametrize("before", ["", "A;", "A,", "A\t", "A|", "A\n"])
def test_no_text_of_a_bill_begins_a_cell_with_a_sign_in_any_country(before: str, sign: str) -> None:
    accounts = {"team": NamespaceAccount(months={"2026-01": {f"{before}{sign}1+1": AMOUNTS}})}
    text = as_csv(bill_lines(accounts, "2026-01", Prices()), "2026-01", Prices())
    assert len(text.splitlines()) == 2
    for delimiter in ",;\t|":
        for cell in list(csv.reader(io.StringIO(text), delimiter=delimiter))[1]:
            for part in re.split(r"[,;\t|]", cell):
                assert re.match(r"['A-Za-z0-9]|$", part), (delimiter, cell)


def test_names_and_models_are_in_a_bill_as_they_are() -> None:
    model = "NVIDIA GeForce RTX 4090 (24 GB)"
    accounts = {"team-a.b": NamespaceAccount(months={"2026-01": {model: AMOUNTS}})}
    (row,) = csv.DictReader(io.StringIO(as_csv(bill_lines(accounts, "2026-01", Prices()), "2026-01", Prices())))
    assert (row["namespace"], row["gpuModel"]) == ("team-a.b", model)


@pytest.mark.promise("operator-bill")
def test_json_has_the_fields_of_opencosts_allocations() -> None:
    prices = Prices(currency="EUR", default=Price(gpu_hour=Decimal(2)))
    bill = as_allocations(bill_lines(ACCOUNTS, "2026-01", prices), "2026-01", prices)
    (allocation,) = json.loads(json.dumps(bill))["allocations"]
    assert allocation["name"] == "team/T"
    assert allocation["properties"]["namespace"] == "team"
    assert allocation["window"] == {"start": "2026-01-01T00:00:00Z", "end": "2026-02-01T00:00:00Z"}
    assert (allocation["gpuHours"], allocation["gpuCost"], allocation["totalCost"]) == (5, 10, 10)
    assert bill["totalCost"] == 10


amounts = st.builds(Amounts, *[st.integers(0, 10**12)] * 4)
price = st.decimals(0, 1000, places=4)


@pytest.mark.promise("operator-bill")
@given(st.dictionaries(st.sampled_from("abcd"), amounts, max_size=4), price, price, st.sampled_from(Charged))
def test_a_bill_adds_up(models: dict[str, Amounts], hour: Decimal, gib: Decimal, charged: Charged) -> None:
    accounts = {name: NamespaceAccount(months={"2026-01": models}) for name in ("one", "two")}
    prices = Prices(charged=charged, default=Price(gpu_hour=hour, memory_gib_hour=gib))
    lines = bill_lines(accounts, "2026-01", prices)
    rows = list(csv.DictReader(io.StringIO(as_csv(lines, "2026-01", prices))))
    total = sum((Decimal(row["totalCost"]) for row in rows), Decimal(0))
    assert total == sum((Decimal(row["gpuCost"]) + Decimal(row["gpuMemoryCost"]) for row in rows), Decimal(0))
    assert as_allocations(lines, "2026-01", prices)["totalCost"] == float(total)


def test_the_largest_statement_fits_into_etcd() -> None:
    moment = "2026-01-01T00:00:00.000Z"
    most = Amounts(*[MAX_COUNTER] * 4)
    series = {
        f"{number:048x}": TakenIn(f"{number:048x}", "n" * 253, "m" * MAX_MODEL, moment, moment, most)
        for number in range(MAX_SERIES)
    }
    models = {f"{number:0{MAX_MODEL}}": most for number in range(4)}
    account = NamespaceAccount(series, models, {f"2026-{month:02}": models for month in range(1, 13)}, moment)
    assert len(json.dumps(status_of(account).dump(), separators=(",", ":"))) < 1_500_000


taken = st.builds(
    TakenIn,
    st.uuids().map(str),
    st.sampled_from(["n1", "n2"]),
    st.sampled_from("AB"),
    st.just("2026-01-01T00:00:00.000Z"),
    st.just("2026-02-01T00:00:00.000Z"),
    amounts,
)
by_model = st.dictionaries(st.sampled_from("AB"), amounts)


@given(
    st.lists(taken, max_size=5),
    by_model,
    st.dictionaries(st.sampled_from(["2026-01", "2026-02"]), by_model),
    st.sampled_from(["", "2026-01-01T00:00:00.000Z"]),
)
def test_an_account_that_is_written_and_read_is_the_same(
    series: list[TakenIn], totals: dict[str, Amounts], months: dict[str, dict[str, Amounts]], until: str
) -> None:
    account = NamespaceAccount({one.series: one for one in series}, totals, months, until)
    assert account_of(GPUStatementStatus.model_validate(status_of(account).dump())) == account
