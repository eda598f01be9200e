"""Bill: `python -m sharepod.controller.bill` prints the namespaces' GPU time of one month, with costs by given prices.

It reads GPUStatements or, for `--by owner`, SharePods, and writes nothing.

Guarantees:
- An unreadable statement or SharePod is named on standard error. All others are billed, and the exit status is 1.
- Wrong prices are refused, with the name of the field, before the API server is called.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import yaml
from pydantic import ValidationError

from sharepod.api.objects import API_VERSION
from sharepod.api.sharepod import PLURAL, SharePodStatus
from sharepod.api.statement import STATEMENT_PLURAL, GPUStatementStatus
from sharepod.budgets.charges import Prices, as_allocations, as_csv, bill_lines
from sharepod.budgets.namespace_account import NamespaceAccount
from sharepod.budgets.owner_charges import owner_lines, owners_as_allocations, owners_as_csv
from sharepod.budgets.statement_status import account_of
from sharepod.kube import ApiError, Connection, Json, NoApiServerError, NotFoundError, PageTokens
from sharepod.setting_faults import first_fault

_PAGE = 100
"""Statements in one page of a list: 100 of the largest possible have about 90 MB."""
_PATH = f"/apis/{API_VERSION}/{STATEMENT_PLURAL}"


class BillError(Exception):
    """Failure to make the bill. The message states the remedy."""


def read_prices(path: Path) -> Prices:
    """Return the prices of a YAML file. Raise `BillError`."""
    try:
        return Prices.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BillError(f"cannot read the prices {path}: {error}") from None
    except ValidationError as error:
        raise BillError(
            f"the prices {path} are wrong: {first_fault(error, 'the file')}; write currency, charged, default and "
            "models, with gpuHour and memoryGiBHour for each model"
        ) from None


async def _listed(api: Connection, path: str) -> AsyncIterator[Json]:
    """Yield the objects of a list, read page by page. Raises `ApiError`."""
    tokens, token = PageTokens(path), ""
    while True:
        page = await api.get(path, {"limit": str(_PAGE), **({"continue": token} if token else {})})
        for item in page.get("items") or ():
            yield item
        token = tokens.after(page["metadata"])
        if not token:
            return


async def statements(api: Connection, namespace: str | None) -> tuple[dict[str, NamespaceAccount], list[str]]:
    """Return (account by namespace, errors of unreadable statements). `namespace`: None: all namespaces.

    Raises `ApiError`, and `BillError` if there are no statements.
    """
    found: dict[str, NamespaceAccount] = {}
    wrong: list[str] = []

    def take(item: Json) -> None:
        name = str(item["metadata"]["name"])
        try:
            found[name] = account_of(GPUStatementStatus.model_validate(item.get("status") or {}, extra="ignore"))
        except ValidationError as error:
            wrong.append(f"the statement of {name} cannot be read: {first_fault(error)}")

    try:
        if namespace is not None:
            take(await api.get(f"{_PATH}/{namespace}"))
        else:
            async for item in _listed(api, _PATH):
                take(item)
    except NotFoundError:
        what = f"namespace {namespace} has no GPUStatement" if namespace else "the CRD gpustatements is missing"
        raise BillError(f"{what}; the operator makes one once an agent has counted for it") from None
    return found, wrong


async def sharepods(api: Connection, namespace: str | None) -> tuple[list[tuple[Json, SharePodStatus]], list[str]]:
    """Return (metadata and status of each SharePod, errors of unreadable ones). `namespace`: None: all namespaces.
    Raises `ApiError`."""
    found: list[tuple[Json, SharePodStatus]] = []
    wrong: list[str] = []
    path = f"/apis/{API_VERSION}/namespaces/{namespace}/{PLURAL}" if namespace else f"/apis/{API_VERSION}/{PLURAL}"
    async for item in _listed(api, path):
        metadata: Json = item["metadata"]
        try:
            found.append((metadata, SharePodStatus.model_validate(item.get("status") or {}, extra="ignore")))
        except ValidationError as error:
            name = f"{metadata['namespace']}/{metadata['name']}"
            wrong.append(f"the status of SharePod {name} cannot be read: {first_fault(error)}")
    return found, wrong


async def _bill_by_owner(api: Connection, given: argparse.Namespace, prices: Prices) -> list[str]:
    """Print the GPU time of each owner's SharePods since they began; return the errors."""
    found, wrong = await sharepods(api, given.namespace)
    lines = owner_lines(found, prices)
    if given.format == "csv":
        print(owners_as_csv(lines, prices), end="")
    else:
        print(json.dumps(owners_as_allocations(lines, f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", prices), indent=2))
    return wrong


async def _bill_by_namespace(api: Connection, given: argparse.Namespace, prices: Prices) -> list[str]:
    """Print the namespaces' GPU time of a month; return the errors."""
    accounts, wrong = await statements(api, given.namespace)
    lines = bill_lines(accounts, given.month, prices)
    if given.format == "csv":
        print(as_csv(lines, given.month, prices), end="")
    else:
        print(json.dumps(as_allocations(lines, given.month, prices), indent=2))
    return wrong


async def _run(given: argparse.Namespace, prices: Prices) -> int:
    api = await Connection.open(given.kubeconfig, "sharepod-bill")
    try:
        by = _bill_by_owner if given.by == "owner" else _bill_by_namespace
        wrong = await by(api, given, prices)
    finally:
        await api.close()
    for text in wrong:
        print(f"sharepod bill: {text}", file=sys.stderr)
    return 1 if wrong else 0


def _month(text: str) -> str:
    if text == "last":
        return f"{datetime.now(UTC).replace(day=1) - timedelta(days=1):%Y-%m}"
    if not re.fullmatch(r"[0-9]{4}-(0[1-9]|1[0-2])", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a month; write it as 2026-01, or last")
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status. `arguments`: of the command line; None: the process's own."""
    parser = argparse.ArgumentParser(
        prog="python -m sharepod.controller.bill",
        description="Print the GPU time of namespaces in a month, in UTC, from GPUStatements.",
    )
    parser.add_argument("--month", type=_month, help="such as 2026-01, or last; default: this month")
    parser.add_argument("--namespace", help="only this namespace")
    parser.add_argument(
        "--by",
        choices=("namespace", "owner"),
        default="namespace",
        help="owner: GPU time of existing SharePods since they began, by their controller; default: namespace",
    )
    parser.add_argument("--format", choices=("csv", "json"), default="csv", help="default: csv")
    parser.add_argument("--prices", type=Path, metavar="FILE", help="YAML file of prices; without it all costs are 0")
    parser.add_argument(
        "--kubeconfig", type=Path, help="without it, as the ServiceAccount of the pod that this runs in"
    )
    given = parser.parse_args(arguments)
    if given.by == "owner" and given.month is not None:
        parser.error("--by owner has no months: it counts each SharePod from its beginning; leave --month out")
    given.month = given.month or f"{datetime.now(UTC):%Y-%m}"
    try:
        return asyncio.run(_run(given, read_prices(given.prices) if given.prices else Prices()))
    except (BillError, NoApiServerError, ApiError) as error:
        print(f"sharepod bill: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
