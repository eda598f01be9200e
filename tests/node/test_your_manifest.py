"""The output in docs/your-manifest.md, compared with the output of the same commands on a real node with
simulated GPUs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.cluster import Cluster, wait_until
from harness.errors import HarnessError
from harness.installation import GROUP
from node.simulated_node import NODE, PATIENCE_S, simulated_node

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"((?:^    \$ kubectl apply -f examples/\S+\n)(?:^    .*\n)+)", re.MULTILINE)
_AGE = re.compile(r" +(AGE|\d+m?\d*s)$", re.MULTILINE)


def sessions() -> list[list[tuple[str, str]]]:
    """Return the terminal sessions of the page, each a list of commands with their output."""
    page = (ROOT / "docs" / "your-manifest.md").read_text()
    found = []
    for block in _BLOCK.findall(page):
        parts = "".join(line[4:] for line in block.splitlines(keepends=True)).split("$ ")[1:]
        found.append([(command, output) for command, _, output in (part.partition("\n") for part in parts)])
    return found


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Run SharePod on a cluster whose only node has two simulated GPUs and the images of the examples."""
    gpus = [(f"GPU-5a9e000{n}-0000-4000-8000-00000000000{n}", "NVIDIA GeForce GTX 1080", "8Gi") for n in (1, 2)]
    with simulated_node(tmp_path_factory.mktemp("gpus"), gpus) as (cluster, _):
        yield cluster


@pytest.mark.promise("install-your-manifest")
def test_the_page_has_a_session_for_every_example_of_another_system() -> None:
    shown = {session[0][0].rpartition("/")[2] for session in sessions()}
    numbers = {f"{number}-" for number in (15, 16, 17, 20, 21, 22, 23)}
    assert shown == {path.name for path in (ROOT / "examples").glob("*.yaml") if path.name[:3] in numbers}


@pytest.mark.promise("install-your-manifest")
@pytest.mark.parametrize("session", sessions(), ids=lambda session: Path(session[0][0]).stem)
def test_a_command_of_the_page_prints_what_the_page_shows(installed: Cluster, session: list[tuple[str, str]]) -> None:
    manifest = ROOT / session[0][0].split()[-1]
    assert installed.kubectl("apply", "-f", manifest).stdout == session[0][1]
    try:
        for command, expected in session[1:]:
            _await_output(installed, command, expected)
    finally:
        installed.kubectl("delete", "-f", manifest, timeout=PATIENCE_S)
        wait_until(lambda: not _tenants(installed), what="an empty ledger", timeout=PATIENCE_S)


def _await_output(cluster: Cluster, command: str, expected: str) -> None:
    program, *arguments = command.split()
    assert program == "kubectl"
    printed = ""

    def as_expected() -> bool:
        nonlocal printed
        printed = cluster.kubectl(*arguments, check=False).stdout
        return _words(printed) == _words(expected)

    with contextlib.suppress(HarnessError):  # the comparison below shows the difference, unlike this timeout
        wait_until(as_expected, what=command, timeout=PATIENCE_S, interval=0.5)
    assert _words(printed) == _words(expected), command


def _words(output: str) -> list[list[str]]:
    """Return the words of each line of an output, without the column of ages."""
    return [line.split() for line in _AGE.sub("", output).splitlines()]


def _tenants(cluster: Cluster) -> list[object]:
    tenants: list[object] = cluster.api.get(f"{GROUP}/gpunodes/{NODE}")["spec"].get("tenants", [])
    return tenants
