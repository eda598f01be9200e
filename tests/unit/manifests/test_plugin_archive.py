"""The kubectl plugin as krew installs it: it has the fields that krew requires, and its program needs no other
package."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart.plugin import REPOSITORY, write_plugin


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    archive, manifest = write_plugin(tmp_path_factory.mktemp("dist"), REPOSITORY)
    return archive, yaml.safe_load(manifest.read_text())


def test_the_manifest_has_the_fields_that_krew_requires(written: tuple[Path, dict[str, Any]]) -> None:
    archive, plugin = written
    assert (plugin["apiVersion"], plugin["kind"]) == ("krew.googlecontainertools.github.com/v1alpha2", "Plugin")
    assert plugin["metadata"] == {"name": "sharepod"}
    spec = plugin["spec"]
    assert re.fullmatch(r"v\d+\.\d+\.\d+", spec["version"])
    assert 0 < len(spec["shortDescription"]) <= 50
    assert "\n" not in spec["shortDescription"]
    assert max(map(len, spec["description"].splitlines())) <= 120
    known = {"version", "homepage", "shortDescription", "description", "caveats", "platforms"}
    assert set(spec) == known
    (platform,) = spec["platforms"]
    assert set(platform) == {"selector", "uri", "sha256", "files", "bin"}
    assert [each["key"] for each in platform["selector"]["matchExpressions"]] == ["os"]
    assert platform["uri"] == f"{REPOSITORY}/releases/download/{spec['version']}/{archive.name}"
    assert platform["sha256"] == hashlib.sha256(archive.read_bytes()).hexdigest()
    with tarfile.open(archive) as packed:
        assert {each["from"] for each in platform["files"]} == set(packed.getnames()) == {"kubectl-sharepod", "LICENSE"}
        assert packed.getmember(platform["bin"]).mode == 0o755


def test_the_program_needs_python_and_no_package(written: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    with tarfile.open(written[0]) as packed:
        packed.extractall(tmp_path, filter="data")
    program = tmp_path / "kubectl-sharepod"
    assert program.read_bytes().startswith(b"#!/usr/bin/env python3\n")
    listed = ran(str(program), "explain", "NoRoom", "-o", "yaml")
    assert yaml.safe_load(listed)["items"][0]["reason"] == "NoRoom"
    served = "from kubectl_sharepod.page.server import served\nwith served(bytes) as url: print(url)"
    url = ran("-c", f"import sys; sys.path.insert(0, sys.argv[1]); {served}", str(program))
    assert url.startswith("http://127.0.0.1:"), "the page's file is read from the archive"


def ran(*words: str) -> str:
    """Run the program with a Python that lacks the packages of this environment. Return its output."""
    argv = [sys.executable, "-I", "-S", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout


def test_the_same_sources_give_the_same_bytes(written: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    again, _ = write_plugin(tmp_path, REPOSITORY)
    assert again.read_bytes() == written[0].read_bytes()
