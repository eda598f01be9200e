"""The command that prints the bill: its prices, and statements that cannot be read."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from sharepod.budgets.charges import Charged, Prices
from sharepod.budgets.owner_charges import owner_lines, owners_as_allocations, owners_as_csv
from sharepod.controller.bill import BillError, main, read_prices, sharepods, statements
from sharepod.kube import Json, NotFoundError, UnavailableError

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


class _Circle:
    """API server, or a proxy before it, whose second page names itself as the next page, so the list never ends."""

    def __init__(self) -> None:
        self.pages = 0

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Json:
        self.pages += 1
        assert self.pages < 10, "endless pages"
        return {"metadata": {"continue": "second"}, "items": []}


@pytest.mark.parametrize("read", [statements, sharepods])
async def test_a_list_whose_pages_come_round_again_makes_no_bill(read: Any) -> None:
    with pytest.raises(UnavailableError, match="continues where an earlier one did"):
        await read(_Circle(), None)


def test_prices_are_read_as_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text(EXAMPLE)
    prices = read_prices(tmp_path / "prices.yaml")
    assert prices.charged is Charged.HELD
    assert str(prices.of("T").gpu_hour) == "2.4"
    assert str(prices.of("other").gpu_hour) == "1.5"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("default: {gpuHour: -1}", "default.gpuHour: Input should be greater than or equal to 0"),
        ("models: {T: {price: 1}}", "models.T.price: Extra inputs are not permitted"),
        ("charged: Never", "charged: Input should be 'Held'"),
        ("[", "cannot read the prices"),
    ],
)
def test_wrong_prices_are_refused_by_field(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "prices.yaml").write_text(text)
    with pytest.raises(BillError) as refused:
        read_prices(tmp_path / "prices.yaml")
    assert message in str(refused.value)


async def test_a_statement_that_cannot_be_read_is_named_and_the_others_are_billed() -> None:
    good = {"months": [{"month": "2026-01", "models": [{"model": "T", "heldMilliseconds": 7}]}]}
    server: Any = _Pages([statement("bad", {"months": [{"month": "x"}]})], [statement("good", good)])
    accounts, wrong = await statements(server, None)
    assert accounts["good"].months["2026-01"]["T"].held_ms == 7
    assert [text.partition(":")[0] for text in wrong] == ["the statement of bad cannot be read"]


async def test_without_statements_the_error_names_the_missing_ones() -> None:
    server: Any = _Pages()
    with pytest.raises(BillError, match="the CRD gpustatements is missing"):
        await statements(server, None)
    with pytest.raises(BillError, match="namespace team has no GPUStatement"):
        await statements(server, "team")


def sharepod(name: str, held: int, *, owner: str | None = None, namespace: str = "team", **status: Any) -> Json:
    references = [{"kind": "Workflow", "name": owner, "controller": True}] if owner else []
    consumed = {
        "since": f"2026-01-0{held % 9 + 1}T00:00:00.000Z",
        "countedSince": "2026-01-09T00:00:00.000Z",
        "heldSeconds": held,
        "borrowedSeconds": held // 2,
        "reservedSeconds": 3600,
        "memoryMebibyteSeconds": 1024 * 3600,
    }
    metadata = {"name": name, "namespace": namespace, "ownerReferences": references}
    return {"metadata": metadata, "status": {"consumed": consumed, **status}}


@pytest.mark.promise("operator-bill-owners")
async def test_the_bill_by_owner_adds_up_what_the_sharepods_of_each_have_had() -> None:
    gpu: Any = {"gpus": [{"uuid": "u", "index": 0, "model": "T"}]}
    server: Any = _Pages(
        [sharepod("one", 3600, owner="train", **gpu), sharepod("two", 1800, owner="train", **gpu)],
        [sharepod("alone", 7200), {"metadata": {"name": "new", "namespace": "team"}}],
        [sharepod("broken", 1, restarts=-1)],
    )
    found, wrong = await sharepods(server, None)
    assert [text.partition(":")[0] for text in wrong] == ["the status of SharePod team/broken cannot be read"]
    prices = Prices.model_validate(yaml.safe_load(EXAMPLE))
    text = owners_as_csv(owner_lines(found, prices), prices)
    rows = list(csv.DictReader(text.splitlines()))
    assert [(row["controllerKind"], row["controller"], row["gpuModel"]) for row in rows] == [
        ("SharePod", "alone", "unknown"),
        ("Workflow", "train", "T"),
    ]
    assert [float(row["gpuHoursHeld"]) for row in rows] == [2.0, 1.5]
    assert [float(row["gpuHoursReserved"]) for row in rows] == [1.0, 2.0]
    assert [float(row["totalCost"]) for row in rows] == [3.0, 3.62]
    assert rows[1]["since"] == "2026-01-01T00:00:00.000Z"
    whole = owners_as_allocations(owner_lines(found, prices), "2026-02-01T00:00:00Z", prices)
    assert whole["totalCost"] == pytest.approx(3.0 + 1.5 * 2.4 + 0.02)
    assert [one["properties"]["controller"] for one in whole["allocations"]] == ["alone", "train"]


async def test_no_owner_writes_a_formula_into_an_administrators_spreadsheet() -> None:
    """The API server accepts any text as the kind of an owner."""
    server: Any = _Pages([sharepod("one", 3600, owner="\t=1+1"), sharepod("two", 3600, owner=" @x")])
    found, _ = await sharepods(server, None)
    for metadata, _ in found:
        metadata["ownerReferences"][0]["kind"] = "\r=HYPERLINK(1)"
    text = owners_as_csv(owner_lines(found, Prices()), Prices())
    cells = [cell for row in csv.reader(io.StringIO(text, newline="")) for cell in row]
    assert {"' =1+1", "' @x", "' =HYPERLINK(1)"} <= set(cells)
    assert not [cell for cell in cells if cell.lstrip().startswith(("=", "@"))]


@pytest.mark.parametrize("end", ["\r", "\n", "\r\n", "\x85", "\u2028"])
async def test_no_owner_writes_a_row_of_another(end: str) -> None:
    row = f"x{end}other-team,SharePod,train,2026-01-01T00:00:00Z,T,1000"
    server: Any = _Pages([sharepod("one", 3600, owner=row)])
    found, _ = await sharepods(server, None)
    text = owners_as_csv(owner_lines(found, Prices()), Prices())
    assert len(text.splitlines()) == 2, "a header and one owner"


def test_a_month_of_owners_is_refused_instead_of_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--by", "owner", "--month", "2026-01"])
    assert "--by owner has no months" in capsys.readouterr().err
