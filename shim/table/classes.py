"""Reads classes.txt, the hand-written classification of the driver's entry points, and finds the class of each.

Guarantees:
- An entry point without a class, or with several, is an error that names it. No class is guessed.
- An entry point that launches, allocates, copies or frees is classified only by its full name.
- An entry of the file that matches no entry point of any header is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from table.headers import EntryPoint

CLASSES_FILE = Path(__file__).with_name("classes.txt")
WRAPPED = ("gate", "memory", "observe", "resolve")
_BLOCK = re.compile(r"^(gate|memory|observe|resolve|pass|call):\s+(\S.*)$")
_BY_FULL_NAME = re.compile(
    r"Launch|Alloc|Free|Mem(?!PerBlock|Config)|Cpy|Copy|Prefetch|Discard|Graph(?!ics)|Array(?:Create|Destroy)|Array3D|Pool|Ipc|Import|Extern|"
    r"Multicast|CtxCreate|CtxDestroy|CtxSetLimit|Retain|Release|Reset|Capture|Load|Execut|Decompress|GetProc|GetExport"
)


class ClassError(ValueError):
    """classes.txt and the headers do not agree. The message has one line for each difference."""


@dataclass(frozen=True)
class Rule:
    """One name, symbol or pattern of classes.txt, with the class and the reason of its block."""

    kind: str
    pattern: str
    why: str
    line: int


@dataclass(frozen=True)
class Classified:
    """An entry point and its class."""

    entry: EntryPoint
    kind: str
    """One of WRAPPED, or pass or call."""
    why: str


def needs_its_full_name(name: str) -> bool:
    """Return True if a pattern must not cover this name: the entry point may make the GPU work, or allocate or free
    memory. classes.txt must then contain the full name.
    """
    return _BY_FULL_NAME.search(name) is not None


def read_rules(path: Path = CLASSES_FILE) -> tuple[Rule, ...]:
    """Return the rules in the order of the file. Raises ClassError for a line that is neither the head of a block nor a
    list of names.
    """
    return tuple(_rules(path.read_text(encoding="utf-8").splitlines()))


def _rules(lines: Sequence[str]) -> Iterator[Rule]:
    block: tuple[str, str] | None = None
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].rstrip()
        if not text:
            continue
        if text[0].isspace():
            if block is None:
                raise ClassError(f"line {number}: names before the first block")
            yield from (Rule(block[0], pattern, block[1], number) for pattern in text.split())
            continue
        match = _BLOCK.match(text)
        if match is None:
            raise ClassError(f"line {number}: {text!r} is no block; write CLASS: WHY, or indent names")
        block = match[1], match[2]


def classify(entries: Iterable[EntryPoint], rules: Sequence[Rule]) -> list[Classified]:
    """Return the class of each entry point. Raises ClassError if an entry point has no class or several, or if a rule
    matches no entry point.
    """
    entries = list(entries)
    wrong: list[str] = []
    used: set[Rule] = set()
    named = [rule for rule in rules if rule.kind != "call"]
    classified = []
    for entry in entries:
        hits = [rule for rule in named if _covers(rule, entry.name)]
        exact = [rule for rule in hits if rule.pattern == entry.name]
        chosen = exact or ([] if needs_its_full_name(entry.name) else hits)
        if len(chosen) != 1:
            wrong.append(_complaint(entry, hits, chosen))
            continue
        kind = chosen[0].kind
        called = [rule for rule in rules if rule.kind == "call" and rule.pattern == entry.symbol]
        used.update((*chosen, *called))
        if called and kind != "pass":
            wrong.append(f"line {called[0].line}: {entry.symbol} is of class {kind}: the hook can call it anyway")
        classified.append(Classified(entry, "call" if called else kind, chosen[0].why))
    wrong += [f"line {rule.line}: no entry point is called {rule.pattern}" for rule in rules if rule not in used]
    if wrong:
        raise ClassError("\n".join(dict.fromkeys(wrong)))
    return classified


def _covers(rule: Rule, text: str) -> bool:
    return rule.pattern == text or ("*" in rule.pattern and fnmatchcase(text, rule.pattern))


def _complaint(entry: EntryPoint, hits: Sequence[Rule], chosen: Sequence[Rule]) -> str:
    if len(chosen) > 1:
        lines = " and ".join(str(rule.line) for rule in chosen)
        return f"{entry.name} stands in lines {lines}: leave one"
    since = ", ".join(f"{release // 1000}.{release % 1000 // 10}" for release in entry.headers)
    if hits:
        return f"{entry.name} (CUDA {since}) is covered by {hits[0].pattern} only: add its full name to a class"
    return f"{entry.name} (CUDA {since}) has no class: add it to one"
