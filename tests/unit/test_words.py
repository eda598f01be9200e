"""Ratchet of the words that CONTRIBUTING.md replaces: their counts in sources and pages never rise."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COUNTS = tomllib.loads((ROOT / "tests" / "stiff_words.toml").read_text())
SUFFIXES = (".md", ".py", ".c", ".h", ".yaml", ".sh")
SLACK = 0.05
"""Part by which a count may fall before the file must be updated, so that small changes do not conflict in the file."""
LINE_BREAK = re.compile(r"\n\s*(?:[#*] |//+ )?")
"""Pattern of the end of a line with the start of the next comment line. It is removed, so that a phrase counts across
both lines."""


def stiff(words: str, text: str) -> int:
    """Return how often words, separated by `|`, occur in a text in lower case."""
    # Each pattern begins with its literal text, which `re` searches ten times as fast as a group of alternatives.
    return sum(len(re.findall(rf"{word}(?<!\w{word})(?!\w)", text)) for word in words.split("|"))


def disagreement(words: str, kept: int, found: int) -> str | None:
    """Return the action that a count requires. None if the count agrees with the file."""
    if found > kept:
        return f"{words}: {found} instead of {kept}: reword the new text (CONTRIBUTING.md, Vocabulary)"
    if found < kept * (1 - SLACK):
        return f"{words}: {found} instead of {kept}: write {found} into tests/stiff_words.toml"
    return None


def test_no_count_of_a_stiff_word_rises_and_the_file_follows_a_fall() -> None:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    # crds/*.yaml is generated: SharePod's texts in it come from operator/, the other texts are Kubernetes'.
    paths = [ROOT / name for name in names if name.endswith(SUFFIXES) and not re.fullmatch(r"crds/.*\.yaml", name)]
    text = LINE_BREAK.sub(" ", "\n".join(path.read_text(encoding="utf-8") for path in paths if path.is_file())).lower()
    found = [disagreement(words, kept, stiff(words, text)) for words, kept in COUNTS.items()]
    problems = [problem for problem in found if problem]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(("found", "asks"), [(101, "reword"), (100, None), (95, None), (94, "write 94")])
def test_a_count_rises_never_and_falls_with_the_file(found: int, asks: str | None) -> None:
    problem = disagreement("gone", 100, found)
    assert (problem is None) if asks is None else (problem is not None and asks in problem)


def test_a_phrase_counts_as_whole_words_across_lines() -> None:
    text = LINE_BREAK.sub(" ", "# one\n    # that is one that; someone that, one thatch, _one that")
    assert stiff("one that", text) == 2
