"""The locks contain the dependencies of pyproject.toml, by hash. No other owner can have a manifest's image name."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from images.__main__ import REPOSITORY, USERS
from images.audit import judge
from images.package import LOCKS
from images.sbom import Contained, contained

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
NEEDS = {
    "operator": PROJECT["project"]["dependencies"] + EXTRAS["operator"],
    "agent": PROJECT["project"]["dependencies"] + EXTRAS["agent"],
    "build": PROJECT["build-system"]["requires"],
}


def _locked(name: str) -> dict[str, str]:
    """Return the version of each package in a lock."""
    return dict(re.findall(r"^([a-z0-9._-]+)==([^\s;]+)", (LOCKS / f"{name}.lock").read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", NEEDS)
def test_a_lock_has_the_versions_of_pyproject_and_hashes_of_every_package(name: str) -> None:
    locked = _locked(name)
    for need in NEEDS[name]:
        package, _, version = need.partition("==")
        assert locked[package.lower().replace("_", "-")] == version, "run make locks"
    text = (LOCKS / f"{name}.lock").read_text()
    entries = re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:]
    assert len(entries) == len(locked)
    assert all("--hash=sha256:" in entry for entry in entries)
    assert "://" not in text


@pytest.mark.promise("security-image-names")
def test_the_manifests_name_images_that_nobody_can_ever_serve() -> None:
    assert REPOSITORY.partition("/")[0].endswith(".invalid"), "reserved: no registry can have such a name"
    version = PROJECT["project"]["version"]
    kustomization = yaml.safe_load((ROOT / "manifests/kustomization.yaml").read_text())
    tags = {image["name"]: image["newTag"] for image in kustomization["images"]}
    assert tags == {f"{REPOSITORY}/{part}": version for part in USERS}
    named = [
        container["image"]
        for path in sorted((ROOT / "manifests").rglob("*.yaml"))
        for one in yaml.safe_load_all(path.read_text())
        if isinstance(one, dict) and one.get("kind") in ("Deployment", "DaemonSet")
        for kind in ("initContainers", "containers")
        for container in one["spec"]["template"]["spec"].get(kind, [])
        if "image" in container
    ]
    assert named
    assert set(named) <= set(tags)


def test_an_audit_passes_over_packages_that_its_data_does_not_have() -> None:
    fault = {"id": "PYSEC-1", "fix_versions": ["2.0"]}
    report = {
        "dependencies": [
            {"name": "a", "version": "1.0", "vulns": [fault]},
            {"name": "b", "version": "1.0", "vulns": []},
            {"name": "c", "skip_reason": "not found"},
        ]
    }
    assert judge(report) == (2, ["a 1.0: PYSEC-1, fixed in 2.0"])


def test_a_layer_lists_its_packages() -> None:
    status = (
        "Package: libc6\nStatus: install ok installed\nVersion: 2.36-9+deb12u1\n\n"
        "Package: removed\nStatus: deinstall ok config-files\nVersion: 1\n"
    )
    files = [
        ("var/lib/dpkg/status", status.encode()),
        ("opt/sharepod/lib/python3.11/site-packages/PyYAML-6.0.dist-info/METADATA", b"Name: PyYAML\nVersion: 6.0\n\nx"),
        ("opt/sharepod/lib/python3.11/site-packages/yaml/METADATA", b"Name: no\nVersion: 1\n"),
    ]
    assert list(contained(files)) == [Contained("deb", "libc6", "2.36-9+deb12u1"), Contained("pypi", "PyYAML", "6.0")]
    assert [one.purl for one in contained(files)] == ["pkg:deb/debian/libc6@2.36-9%2Bdeb12u1", "pkg:pypi/pyyaml@6.0"]
