"""`make play` as a reader uses it: the test runs the commands that it prints, in a shell prepared as the output
describes, then presses Ctrl-C.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.node_packages import why_no_node
from images.roots import why_no_images

ROOT = Path(__file__).resolve().parents[2]
LAST = "Ctrl-C here deletes all of it."

pytestmark = [pytest.mark.alone, pytest.mark.timeout(600)]


@pytest.fixture
def play() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a playground; yield it with its output up to the last line of its instructions."""
    if (reason := why_no_node() or why_no_images()) is not None:
        pytest.skip(reason)
    path = ":".join(str(ROOT / each) for each in ("tests", "benchmarks", "manifests"))
    process = subprocess.Popen(
        [sys.executable, "demo/play.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines: list[str] = []
    try:
        for line in process.stdout:
            lines.append(line)
            if line.strip() == LAST:
                break
        assert lines[-1].strip() == LAST, "".join(lines)
        yield process, "".join(lines)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def shell(lines: list[str]) -> str:
    """Run lines in one shell in the repository; return the output."""
    done = subprocess.run(
        ["bash", "-ec", "\n".join(lines)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, (lines[-1], done.stdout)
    return done.stdout


def await_phase(name: str, phase: str) -> str:
    return f"kubectl wait sharepod {name} --for=jsonpath={{.status.phase}}={phase} --timeout=60s"


@pytest.mark.promise("install-playground")
def test_each_line_can_be_pasted_and_leaves_nothing_behind(play: tuple[subprocess.Popen[str], str]) -> None:
    process, text = play
    path, user, admin = re.findall(r"^ +(export \S+=\S+)", text, re.MULTILINE)
    apply, watch, why, resize, *too_much = re.findall(
        r"^  (?:\d\. \w+(?: much)?|   ) +(kubectl .*)$", text, re.MULTILINE
    )
    as_user = [path, user]
    shell([*as_user, apply, await_phase("alpha", "Running"), await_phase("beta", "Running")])
    assert "alpha" in shell([*as_user, watch.removesuffix(" --watch")])
    assert "Placed: NoRoom" in shell([*as_user, f"{{ {why}; }} || test $? = 1"])
    assert "request 0.2" in shell([*as_user, resize])
    assert '"refused_allocations": 1' in shell([*as_user, *too_much])
    (line,) = re.findall(r"kubectl apply -f demo/line.yaml", text)
    shell([*as_user, line, "kubectl rollout status deployment/line -n team-b --timeout=90s"])
    (top,) = re.findall(r"(kubectl sharepod top) --watch( --all-namespaces)", text)
    seen = shell([path, admin, "".join(top)])
    assert all(name in seen for name in ("alpha", "beta", "gamma", "line-")), seen
    assert shell([*as_user, "! kubectl get nodes"]).count("forbidden") == 1

    folder = Path(path.partition("=")[2].partition(":")[0]).parent
    assert folder.is_dir()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert not folder.exists()
