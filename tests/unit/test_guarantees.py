"""The register of guarantee names in docs/design.md: each prefix has one home, and each name has one meaning there."""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DESIGN = (ROOT / "docs" / "design.md").read_text()
STATED = re.compile(r"^\s*(?:/?\*+ )?- (?:\*\*)?([A-Z]{1,2})(\d+)[:,]? [a-zA-Z(]", re.MULTILINE)
"""Pattern of a list item that states a guarantee."""


def register() -> dict[str, str]:
    """Return the home of each prefix: a folder, or the page itself."""
    table = DESIGN.partition("## Names of guarantees")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([A-Z, ]+) \| [^|]* \| (.*) \|$", table, re.MULTILINE)
    found = [(prefix, home.strip("`")) for prefixes, home in rows for prefix in prefixes.split(", ")]
    assert len(found) == len(dict(found)), "a prefix has two homes"
    return dict(found)


def stated() -> dict[str, set[str]]:
    """Return, by prefix, the files that state a guarantee with it."""
    names = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "shim", "operator"]
    listed = subprocess.run(names, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    found: dict[str, set[str]] = defaultdict(set)
    for name in listed:
        if name.endswith((".py", ".h", ".c", ".md")) and (ROOT / name).is_file():
            for prefix, _ in STATED.findall((ROOT / name).read_text()):
                found[prefix].add(name)
    return found


def test_each_guarantee_is_stated_in_the_home_of_its_prefix() -> None:
    homes, found = register(), stated()
    products = {prefix for prefix, home in homes.items() if home == "this page"}
    assert found.keys() - products == homes.keys() - products
    # A package may repeat a promise of the product that it keeps. The hook's folder `time` counts as one package.
    astray = {
        (prefix, name)
        for prefix, names in found.items()
        if prefix not in products
        for name in names
        if not name.startswith(f"{homes[prefix]}/") and name != f"{Path(homes[prefix]).parent}/README.md"
    }
    assert not astray


def test_no_name_of_a_guarantee_has_two_meanings_in_one_file() -> None:
    doubled = {}
    for names in stated().values():
        for name in names:
            numbers = STATED.findall((ROOT / name).read_text())
            if len(numbers) != len(set(numbers)):
                doubled[name] = sorted(each for each in set(numbers) if numbers.count(each) > 1)
    assert not doubled
