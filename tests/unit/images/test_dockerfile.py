"""The Dockerfile makes the same images as `make images`: packages, sources, locks, steps and configuration.

The tests have no container engine, so they parse the instructions of each stage.
"""

from __future__ import annotations

import json
import shlex
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from images.__main__ import USERS, image_config
from images.package import BUILT, PREFIX, SOURCES
from images.roots import BASE, COMPILES, REPEATABLE

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = ROOT / "manifests" / "images" / "Dockerfile"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@dataclass
class Stage:
    """Stage of a Dockerfile: the stage that it is based on, and its instructions in order."""

    below: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def each(self, instruction: str) -> list[str]:
        return [text for name, text in self.instructions if name == instruction]

    def run(self) -> str:
        """Return all commands of the stage."""
        return " && ".join(self.each("RUN"))

    def copied(self) -> dict[str, str]:
        """Return, by file copied from the context, the folder that it is copied to."""
        words = [text.split() for text in self.each("COPY") if not text.startswith("--from")]
        return {source: target for *sources, target in words for source in sources}


def stages() -> dict[str, Stage]:
    found: dict[str, Stage] = {}
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line.strip() and not line.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        instruction, _, text = " ".join(line.split()).partition(" ")
        if instruction == "FROM":
            below, _as, name = text.split()
            found[name] = Stage(below)
        elif found:
            found[name].instructions.append((instruction, text))
    return found


def installed(stage: Stage) -> set[str]:
    """Return the Debian packages that a stage installs."""
    (command,) = (each for each in stage.run().split(" && ") if each.startswith("apt-get install"))
    return {word for word in command.split()[2:] if not word.startswith("-")}


def test_both_images_have_the_debian_packages_of_make_images() -> None:
    found = stages()
    assert installed(found["base"]) == set(BASE)
    assert found["compiled"].below == "base"
    assert installed(found["compiled"]) == set(COMPILES)
    assert {found[part].below for part in USERS} == {"base"}


def test_the_package_is_compiled_from_the_sources_of_make_images_with_the_locked_compilers() -> None:
    (variables,) = stages()["compiled"].each("ENV")
    assert dict(each.split("=") for each in variables.split()) == REPEATABLE
    copied = stages()["compiled"].copied()
    sources = {name: target for name, target in copied.items() if not name.endswith(".lock")}
    assert {name: target.removeprefix("/src/") for name, target in sources.items()} == {
        name: name if (ROOT / name).is_dir() else "" for name in SOURCES
    }
    assert copied.keys() - sources.keys() == {"manifests/images/locks/build.lock"}


def test_the_context_has_the_sources_without_what_was_built() -> None:
    lines = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    everything, *rules = [line for line in lines if not line.startswith("#")]
    assert everything == "*"
    taken = [rule.removeprefix("!") for rule in rules if rule.startswith("!")]
    assert taken == [*SOURCES, "manifests/images/locks"]
    assert rules[len(taken) :] == [f"**/{pattern}" for pattern in BUILT]


def test_generated_c_files_are_no_sources() -> None:
    generated = [line for line in (ROOT / ".gitignore").read_text().splitlines() if line.endswith(".c")]
    assert {Path(line).name for line in generated} == {pattern for pattern in BUILT if pattern.endswith(".c")}


@pytest.mark.promise("install-dockerfile")
@pytest.mark.parametrize("part", USERS)
def test_an_image_has_the_packages_of_its_lock_and_the_compiled_package(part: str) -> None:
    found = stages()
    files = found[f"{part}-files"]
    assert files.below == "compiled"
    assert files.copied() == {f"manifests/images/locks/{part}.lock": "/locks/"}
    locked, own = (each for each in files.run().split(" && ") if each.startswith("$pip install"))
    options = {"--no-compile", "--only-binary=:all:", "--require-hashes", f"--requirement=/locks/{part}.lock"}
    assert set(locked.split()[2:]) == options
    assert set(own.split()[2:]) == {"--no-compile", "--no-index", "--no-deps", "--find-links=/made", "sharepod"}
    assert found[part].each("COPY") == [f"--from={part}-files /{PREFIX} /{PREFIX}"]
    assert found[part].each("RUN") == []


@pytest.mark.parametrize("part", USERS)
def test_an_image_has_the_configuration_of_make_images(part: str) -> None:
    stage = stages()[part]
    (user,), (entrypoint,) = stage.each("USER"), stage.each("ENTRYPOINT")
    (variables,), (labels,) = stage.each("ENV"), stage.each("LABEL")
    assert {
        "User": user,
        "Entrypoint": json.loads(entrypoint),
        "Env": shlex.split(variables),
        "Labels": dict(each.split("=", 1) for each in shlex.split(labels)),
    } == image_config(part, VERSION)
