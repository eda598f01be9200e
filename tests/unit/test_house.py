"""Rules of the repository that no linter checks: unique names, a README in every folder, and the form of docstrings."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "operator" / "sharepod"
SAME_CONCEPT = {"__init__.py", "main.py", "settings.py", "resizing.py"}
"""Module names that may occur twice: a program's entry and settings, and the decision about a resize in two
packages."""
NO_START = re.compile(r"(Who|What|Whether|Of|It|So|From|As|None)\b")
FEW = 3
"""Most files of a folder that needs no README."""


def sources(folder: Path) -> list[Path]:
    """Return the Python files below a folder, without generated ones."""
    return [path for path in sorted(folder.rglob("*.py")) if "_pb2" not in path.name and ".venv" not in path.parts]


def shown(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def test_a_class_name_occurs_once_in_the_package() -> None:
    classes: dict[str, list[Path]] = defaultdict(list)
    for path in sources(PACKAGE):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(path)
    assert {name: shown(paths) for name, paths in classes.items() if len(paths) > 1} == {}


def test_a_module_name_occurs_once_in_the_package() -> None:
    modules: dict[str, list[Path]] = defaultdict(list)
    for path in sources(PACKAGE):
        if path.name not in SAME_CONCEPT:
            modules[path.name].append(path)
    assert {name: shown(paths) for name, paths in modules.items() if len(paths) > 1} == {}


@pytest.mark.parametrize("top", ["operator/sharepod", "shim/src"])
def test_a_room_has_a_readme(top: str) -> None:
    files = ("*.py", "*.c", "*.h", "*.proto")
    rooms: dict[Path, int] = defaultdict(int)
    for pattern in files:
        for path in (ROOT / top).rglob(pattern):
            if not {"__pycache__", "hook-build"} & set(path.parts):
                rooms[path.parent] += 1
    without = [room for room, count in rooms.items() if count > FEW and not (room / "README.md").is_file()]
    assert sorted(shown(without)) == []


@pytest.mark.parametrize("top", ["operator", "cli", "tests", "benchmarks", "demo", "crds", "docs", "shim"])
def test_a_docstring_begins_with_a_noun_phrase(top: str) -> None:
    stiff = []
    for path in sources(ROOT / top):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if NO_START.match(text):
                    stiff.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}")
    assert stiff == []


TOPS = ("operator", "shim", "cli", "crds", "demo", "docs", "manifests", "benchmarks", "tests")
READMES = [path for top in TOPS for path in sorted((ROOT / top).rglob("README.md"))]
IN_WORDS = {"tests/harness", "tests/unit", "tests/unit/cli"}
"""Folders whose README describes them in sentences, instead of listing each module."""


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.parent.relative_to(ROOT)))
def test_a_readme_names_each_module_of_its_folder_and_no_missing_one(readme: Path) -> None:
    named = {name.rpartition("/")[2] for name in re.findall(r"`([\w./*-]+)`", readme.read_text(encoding="utf-8"))}
    modules = {path.name for kind in ("*.py", "*.c") for path in readme.parent.glob(kind)}
    modules -= {name for name in modules if name.startswith(("__", "conftest.")) or "_pb2" in name}
    if str(readme.parent.relative_to(ROOT)) not in IN_WORDS:
        unnamed = {
            name for name in modules if not any(fnmatch(name, one) or fnmatch(name, f"{one}.*") for one in named)
        }
        assert unnamed == set()
    assert {one for one in named if one.endswith(".py") and not _matching(one)} == set()


@cache
def _modules() -> frozenset[str]:
    return frozenset(path.name for top in TOPS for path in (ROOT / top).rglob("*.py")) | {"setup.py"}


def _matching(pattern: str) -> list[str]:
    """Return the names of the repository's modules that match the pattern."""
    return [name for name in _modules() if fnmatch(name, pattern)]
