"""Every field, annotation, condition, setting, link and `make` target on the pages exists."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from sharepod.api import sharepod as api
from sharepod.api.dialects import KEYS
from sharepod.api.gpubudget import BudgetBooks, GPUBudgetSpec, GPUBudgetStatus
from sharepod.api.gpunode import Gpu, GPUNodeSpec, GPUNodeStatus, Tenant, TenantStatus
from sharepod.api.objects import Model
from sharepod.api.sharepod import GpuSpec, SharePodStatus
from sharepod.api.statement import GPUStatementStatus

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = (ROOT / "docs" / "reference.md").read_text()
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(
        page
        for folder in ("docs", "operator", "shim", "tests", "benchmarks", "crds", "manifests", "examples", "demo")
        for page in sorted((ROOT / folder).rglob("*.md"))
        if ".egg-info" not in str(page)
    ),
]
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
SUCCESSES = {
    "Accepted",
    "Attachable",
    "Attached",
    "Claims",
    "Exclusive",
    "Held",
    "HookConnected",
    "Loaded",
    "NoResource",
    "NotInjected",
    "Published",
    "Reserved",
    "Serving",
}
"""Reasons of conditions that require no action."""
DECISIONS = ROOT / "docs" / "decisions"
MEASUREMENTS = sorted((ROOT / "docs" / "performance").glob("*.md"))
CHANGE_WORDS = 25
"""Most words of a line of CHANGELOG.md, so that a reader understands it at the first reading."""


@pytest.mark.parametrize(
    ("model", "head", "begin", "prefix"),
    [
        (GpuSpec, "SharePod", "| `", ""),
        (SharePodStatus, "Status", "| `", ""),
        (GPUNodeSpec, "GPUNode", "| `spec.", "spec."),
        (GPUBudgetSpec, "GPUBudget", "| `spec.", "spec."),
        (GPUBudgetStatus, "GPUBudget", "| `status.", "status."),
        (BudgetBooks, "GPUBudget", "| `status.books`", ""),
        (GPUNodeStatus, "GPUNode", "| `status.", "status."),
        (GPUStatementStatus, "GPUStatement", "| `status.", "status."),
        (Gpu, "GPUNode", "| `status.gpus[]`", ""),
        (Tenant, "GPUNode", "| `spec.tenants[]`", ""),
        (TenantStatus, "GPUNode", "| `status.tenants[]`", ""),
    ],
)
def test_every_field_is_in_its_table_of_the_reference(model: type[Model], head: str, begin: str, prefix: str) -> None:
    table = re.search(rf"^##+ {head}\b.*\n(?:[^|#].*\n|\n)*((?:\|.*\n)+)", REFERENCE, re.MULTILINE)
    assert table is not None
    rows = [line for line in table[1].splitlines() if line.startswith(begin)]
    # Fields of objects in a list are in the second cell of their table row, other fields in the first.
    cell = 2 if begin.endswith("`") and begin != "| `" else 1
    names = {name for row in rows for name in re.findall(r"`([\w.]+)(?:\[\])?`", row.split(" | ")[cell - 1])}
    named = {name.removeprefix(prefix) for name in names}
    assert not {field.alias for field in model.model_fields.values()} - named


def test_the_reference_lists_the_fields_that_may_change_as_the_messages_do() -> None:
    (listed,) = re.findall(r"The spec is immutable except\s+([^.]*(?:\.\w[^.]*)*)\. <!-- promise", REFERENCE)
    assert listed.replace("`", "").replace("\n", " ") == api.CHANGEABLE


def test_every_annotation_is_in_the_reference() -> None:
    names = {name for key in KEYS for name in (key.native, *key.foreign)}
    assert not {name for name in names if f"`{name}`" not in REFERENCE}


def test_every_condition_and_phase_is_in_the_reference() -> None:
    conditions = {value for name, value in vars(api).items() if name.startswith("CONDITION_")}
    assert not {name for name in conditions | {phase.value for phase in api.Phase} if f"`{name}`" not in REFERENCE}


def test_every_reason_that_is_no_success_has_its_remedy_in_troubleshooting() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    reasons = json.loads((ROOT / "cli" / "kubectl_sharepod" / "reasons.json").read_text())
    assert {reason for reason in reasons if f"`{reason}`" not in page} == SUCCESSES


def script(name: str) -> ModuleType:
    """Import a script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_settings_is_what_the_code_says() -> None:
    generate = script("generate")
    assert generate.PAGE.read_text() == generate.page(), "run make docs"


def test_pictures_are_what_their_script_draws() -> None:
    pictures = script("pictures")
    found = {path.stem: path.read_text() for path in pictures.FOLDER.glob("*.svg")}
    assert found == {name: pictures.drawn(name) for name in pictures.PICTURES}, "run make docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_and_make_target_of_a_page_exists(page: Path) -> None:
    text = page.read_text()
    for link in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = link.partition("#")
        if path.startswith(("http://", "https://")):
            continue
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in _anchors(target.read_text()), f"{page.name} links to {link}"
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    targets_named = set(re.findall(r"(?:`|^    |\bSEED=\d+ )make ([a-z][a-z-]*)", text, re.MULTILINE))
    assert not targets_named - targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_of_the_repository_that_a_page_names_exists(page: Path) -> None:
    tops = "|".join(("operator", "shim", "tests", "benchmarks", "crds", "manifests", "examples", "demo", "docs"))
    named = set(re.findall(rf"`((?:{tops})/[\w./-]*\w/?)(?:: [^`]*)?`", page.read_text()))
    assert not {path for path in named if not (ROOT / path).exists()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_of_yaml_of_a_page_parses(page: Path) -> None:
    for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        assert list(yaml.safe_load_all(block))


def test_every_step_of_the_walks_through_the_code_exists() -> None:
    steps = [step for walk in _walks() for step in walk]
    assert len(steps) > 20
    assert not [f"{path}: {name}" for _, path, name in steps if not _defines(ROOT / path, name)]


def test_no_walk_through_the_code_returns_to_a_room_that_it_has_left() -> None:
    for walk in _walks():
        outer = _rooms(path for level, path, _ in walk if level == 0)
        called = _rooms(path for level, path, _ in walk if level > 0)
        rooms = outer + called
        assert len(rooms) == len(set(rooms)), f"a walk comes back: {' -> '.join(outer)}; called: {' -> '.join(called)}"


def test_terms_of_the_glossary_are_in_alphabetical_order_and_explained_once() -> None:
    terms = [row[0].lower() for row in _rows(GLOSSARY)]
    assert terms == sorted(terms)
    assert len(terms) == len(set(terms))


@pytest.mark.parametrize("record", sorted(DECISIONS.glob("0*.md")), ids=lambda record: record.stem)
def test_every_decision_has_its_four_parts_and_is_in_the_index(record: Path) -> None:
    text = record.read_text()
    heads = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert heads == ["Context", "Decision", "Alternatives", "Consequences"]
    number, title = int(record.stem[:4]), text.splitlines()[0].partition(". ")[2]
    assert f"| [{number}]({record.name}) | {title} |" in (DECISIONS / "README.md").read_text()


@pytest.mark.parametrize("page", MEASUREMENTS, ids=lambda page: page.stem)
def test_a_page_of_measurements_has_a_table_and_a_command_for_each_benchmark_and_no_history(page: Path) -> None:
    machine, *sections = page.read_text().split("\n## ")
    assert "Machine: " in machine or "Machine: " in sections[0]
    assert not [
        section.splitlines()[0] for section in sections if "\n|---" not in section or "**Run**: " not in section
    ]
    assert not re.findall(r"\d{4}-\d\d-\d\d|\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,40}\b", page.read_text())


def test_a_change_is_one_short_line_of_the_changelog() -> None:
    sections = (ROOT / "CHANGELOG.md").read_text().partition("\n## ")[2].splitlines()[1:]
    changes = [line for line in sections if line and not line.startswith("#")]
    assert changes
    assert not [line for line in changes if not line.startswith("- ") or len(line[2:].split()) > CHANGE_WORDS]


def _walks() -> list[list[tuple[int, str, str]]]:
    """Return the steps of each walk in the design: indentation (0: the walk itself, more: a call), file, name."""
    design = (ROOT / "docs" / "design.md").read_text()
    section = design.partition("## Three walks through the code")[2].partition("\n## ")[0]
    walks = [re.findall(r"^( *)\d+\. `([^:`]+): ([^`]+)`", part, re.MULTILINE) for part in section.split("\n### ")[1:]]
    assert len(walks) == 3
    return [[(len(indent), path, name) for indent, path, name in walk] for walk in walks]


def _rooms(paths: Iterable[str]) -> list[str]:
    """Return the folders of these files in their order; consecutive equal folders are listed once."""
    return [room for room, _ in itertools.groupby(str(Path(path).parent) for path in paths)]


def _defines(path: Path, name: str) -> bool:
    """Return whether a source file defines this function, or a class with this method or field (`Class.name`)."""
    if path.suffix == ".c":
        return re.search(rf"^\w[^;=]*\b{name}\([^;]*\{{$", path.read_text(), re.MULTILINE) is not None
    body: list[ast.stmt] = ast.parse(path.read_text()).body
    for part in name.split("."):
        found = [node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
        body = next((node.body for node in found if node.name == part), [])
    return bool(body)


def _rows(text: str) -> list[list[str]]:
    """Return the cells of each line in a page's tables, without the headings."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]
    return [row for row in rows if row[0] != "term"]


def _anchors(text: str) -> set[str]:
    """Return the anchors that GitHub generates from a page's headings."""
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_every_row_of_what_people_do_names_a_test_that_exists() -> None:
    rows = [line.split("|") for line in (ROOT / "docs" / "what-people-do.md").read_text().splitlines()]
    held = [(int(cells[1]), cells[4].strip(" `")) for cells in rows if len(cells) > 5 and cells[1].strip().isdigit()]
    assert [number for number, _ in held] == list(range(1, len(held) + 1))
    for number, test in held:
        path, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(), (number, test)


def test_every_platform_has_a_state_with_its_test_its_source_or_its_reason() -> None:
    page = (ROOT / "docs" / "platforms.md").read_text()
    tables = page.partition("## Operating systems and runtimes")[2].partition("## SELinux")[0]
    states = [row[2] for row in _rows(tables) if row[0] != "platform"]
    assert len(states) > 10
    for state in states:
        if state.startswith("Tested here"):
            assert "`tests/" in state, state
        else:
            assert re.match(r"(By reading|Not supported): \S", state), state
    for path, name in re.findall(r"`(tests/[\w/.]+)::(\w+)`", page):
        assert f"def {name}(" in (ROOT / path).read_text(), (path, name)
