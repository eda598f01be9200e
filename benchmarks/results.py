"""Output of every benchmark: a table on the terminal, and the file `build/results/NAME.json`.

The file contains `{name, commit, machine, rows: [{case, metric, unit, value}]}`, so that a program can compare two
runs. `commit` ends in `+` if the working tree differed from that commit.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "results"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of a benchmark: case, metric, unit and value."""

    case: str
    metric: str
    unit: str
    value: float


def paired_rows(case: str, of_policy: Mapping[str, Sequence[float]], *, against: str) -> list[Row]:
    """Return rows with the differences between the policy `against` and each other policy on the same seeds: mean and
    standard error."""
    rows = []
    for policy, values in of_policy.items():
        if policy == against or against not in of_policy:
            continue
        more = [one - other for one, other in zip(of_policy[against], values, strict=True)]
        rows.append(Row(f"{case} {against} - {policy}", "turned_away", "points", fmean(more)))
        if len(more) > 1:
            rows.append(Row(f"{case} {against} - {policy}", "standard_error", "points", stdev(more) / len(more) ** 0.5))
    return rows


def commit() -> str:
    """Return the short hash of HEAD. It ends in `+` if tracked files have changed. Outside a checkout, return
    `unknown`."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + (
            "+" if git("status", "--porcelain", "--untracked-files=no") else ""
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def machine() -> str:
    """Return processor, number of cores and Linux version. Results with different values should not be compared."""
    processor = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                processor = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    return f"{processor}, {os.cpu_count()} cores, {system}"


def print_table(rows: Iterable[Row], *, title: str) -> None:
    """Print the rows as an aligned table to standard output."""
    cells = [("case", "metric", "unit", "value")] + [(r.case, r.metric, r.unit, f"{r.value:.6g}") for r in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(4)]
    print(f"\n{title}")
    for number, row in enumerate(cells):
        print(
            "  ".join(
                [*(c.ljust(w) for c, w in zip(row[:3], widths[:3], strict=True)), row[3].rjust(widths[3])]
            ).rstrip()
        )
        if number == 0:
            print("  ".join("-" * width for width in widths))
    sys.stdout.flush()


def write(name: str, rows: Iterable[Row]) -> Path:
    """Print the table and write `build/results/NAME.json`; return the file's path."""
    listed = list(rows)
    print_table(listed, title=name)
    return store(name, listed)


def store(name: str, rows: Sequence[Row]) -> Path:
    """Write `build/results/NAME.json`; return the file's path."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    content = {"name": name, "commit": commit(), "machine": machine(), "rows": [asdict(row) for row in rows]}
    partial = path.with_suffix(".json.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)
    return path
