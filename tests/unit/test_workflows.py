"""The workflows of a fork: they pin actions, have few rights, use the project's own targets, and release by one tag."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.build import built
from harness.releases import ACTIONLINT

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
SET_UP = ("apt-get ", "git config --global --add safe.directory")
REGISTRY = "ghcr.io/a-fork/sharepod"
DIGEST = f"sha256:{'a' * 64}"
STUB = """#!/bin/bash
echo "$(basename "$0") $*" >> "$RECORD"
case "$*" in
  "inspect --format"*) echo "$DIGEST" ;;
  "inspect --raw"*) echo manifest ;;
esac
"""


def jobs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
    return found


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in jobs(path).values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_an_action_is_pinned_by_its_commit_and_its_version_is_named(path: Path) -> None:
    used = re.findall(r"uses: (.*)", path.read_text())
    assert len(used) == sum("uses" in step for step in steps(path))
    for action in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_only_targets_and_scripts_of_the_project(path: Path) -> None:
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    for step in steps(path):
        for line in step.get("run", "").splitlines():
            first, *words = line.split()
            if first == "make":
                assert set(words) <= targets, line
            elif not line.startswith(SET_UP):
                assert (ROOT / (words[0] if first == "bash" else first)).is_file(), line


def test_only_jobs_that_publish_may_write_and_they_build_nothing() -> None:
    for path in WORKFLOWS:
        assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}
    writing = {name: job for path in WORKFLOWS for name, job in jobs(path).items() if "permissions" in job}
    assert writing.keys() == {"publish", "deploy"}
    assert writing["deploy"]["permissions"] == dict.fromkeys(("pages", "id-token"), "write")
    assert not [step for step in writing["deploy"]["steps"] if "run" in step]
    assert writing["publish"]["permissions"] == dict.fromkeys(("contents", "packages", "id-token"), "write")
    assert [step["run"] for step in writing["publish"]["steps"] if "run" in step] == [".ci/release publish"]


def test_no_checkout_leaves_a_token_in_the_tree() -> None:
    checkouts = [step for path in WORKFLOWS for step in steps(path) if "checkout" in step.get("uses", "")]
    assert len(checkouts) == 4
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_actionlint_finds_no_fault_in_the_workflows() -> None:
    if (kept := built(ACTIONLINT)) is None:
        pytest.skip("no actionlint here: run `make workflows`, which builds it")
    done = subprocess.run([kept / "actionlint", *WORKFLOWS], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def release(tree: Path, part: str, *, tag: str = f"v{VERSION}") -> subprocess.CompletedProcess[str]:
    """Run .ci/release in a copy of its files. Programs that record their calls replace make, skopeo and others."""
    for name in (".ci/release", "pyproject.toml", "CHANGELOG.md"):
        copy = tree / name
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    programs = tree / "programs"
    programs.mkdir(exist_ok=True)
    (tree / "dist").mkdir(exist_ok=True)
    for name in ("make", "skopeo", "cosign", "helm", "gh"):
        (programs / name).write_text(STUB)
        (programs / name).chmod(0o755)
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HOME": str(tree),
        "RECORD": str(tree / "record"),
        "DIGEST": DIGEST,
        "GITHUB_REF_NAME": tag,
        "GITHUB_REPOSITORY": "A-Fork/SharePod",
        "GITHUB_ACTOR": "actor",
        "GH_TOKEN": "token",
    }
    argv = ["bash", str(tree / ".ci/release"), part]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.promise("install-release-digests")
def test_a_release_names_images_by_digest_and_has_the_notes_of_its_version(tmp_path: Path) -> None:
    done = release(tmp_path, "build")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "record").read_text() == (
        f"make dist DIST_ARGS=--registry {REGISTRY} --images build/images --repository https://github.com/A-Fork/SharePod\n"
    )
    notes = (tmp_path / "dist/notes.md").read_text()
    assert "### Placement" in notes
    assert "\n## " not in notes


def test_a_release_pushes_signs_and_attests_both_images_and_the_chart_and_drafts_notes(tmp_path: Path) -> None:
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist/install.yaml").write_text(
        f"image: {REGISTRY}/operator@{DIGEST}\nimage: {REGISTRY}/agent@{DIGEST}\n"
    )
    done = release(tmp_path, "publish")
    assert done.returncode == 0, done.stderr
    record = (tmp_path / "record").read_text().splitlines()
    for part in ("operator", "agent"):
        image = f"{REGISTRY}/{part}"
        commands = [line for line in record if f"/{part}" in line]
        assert commands == [
            f"skopeo copy --preserve-digests oci-archive:build/images/{part}.tar docker://{image}:{VERSION}",
            f"skopeo inspect --format {{{{.Digest}}}} docker://{image}:{VERSION}",
            f"cosign sign --yes {image}@{DIGEST}",
            f"cosign attest --yes --type spdxjson --predicate build/images/{part}.spdx.json {image}@{DIGEST}",
        ]
    assert f"helm push dist/sharepod-{VERSION}.tgz oci://{REGISTRY}/charts" in record
    assert re.fullmatch(rf"cosign sign --yes {REGISTRY}/charts/sharepod@sha256:[0-9a-f]{{64}}", record[-2])
    assert record[-1].startswith(f"gh release create v{VERSION} --repo A-Fork/SharePod --draft --verify-tag")
    assert "token" not in "\n".join(record), "no token on a command line"


def test_images_that_the_manifests_do_not_name_are_not_signed(tmp_path: Path) -> None:
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist/install.yaml").write_text(f"image: {REGISTRY}/operator@sha256:{'b' * 64}\n")
    done = release(tmp_path, "publish")
    assert done.returncode == 1
    assert "build again" in done.stderr
    assert "cosign" not in (tmp_path / "record").read_text()


@pytest.mark.promise("install-release-version")
@pytest.mark.parametrize("part", ["build", "publish"])
def test_a_tag_of_another_version_releases_nothing(tmp_path: Path, part: str) -> None:
    done = release(tmp_path, part, tag="v9.9.9")
    assert done.returncode == 1
    assert f"tag v{VERSION}" in done.stderr
    assert not (tmp_path / "record").exists()
