"""Manifests that users paste, from examples/ and the pages: their containers do not restart, their namespaces exist,
and each image has one tag.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = sorted((ROOT / "examples").rglob("*.yaml"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SERVERS = ("quay.io/jupyter/", "vllm/vllm-openai:", "rayproject/ray:")
"""Images that serve until they are ended: by their entrypoint, or by the command that KubeRay sets."""
LIVES = re.compile(r"^sleep infinity$|\bwhile True:|\bsignal\.pause\(\)|^ray start .*--block$")
"""Pattern of commands that do not end by themselves."""
INSTALLED = {"default", "kube-system", "sharepod-system"}
"""Namespaces that exist in every cluster with SharePod."""
IMAGE = re.compile(r"""\bimage"?(?:: | = |=)["']?(?:docker\.io/)?([\w.-]+(?:/[\w.-]+)+):(\w[\w.-]*)""", re.IGNORECASE)


def documents() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the objects of each file in examples/, and of each YAML block on a page that contains a whole object."""
    for path in MANIFESTS:
        yield str(path.relative_to(ROOT)), [each for each in yaml.safe_load_all(path.read_text()) if each]
    for path in PAGES:
        for block in re.findall(r"^```yaml\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL):
            if block.startswith("apiVersion:"):
                yield str(path.relative_to(ROOT)), list(yaml.safe_load_all(block))


def pods(item: Any) -> Iterator[dict[str, Any]]:
    """Yield the PodSpecs inside an object of any kind."""
    if isinstance(item, list):
        yield from itertools.chain.from_iterable(map(pods, item))
    elif isinstance(item, dict):
        if isinstance(item.get("containers"), list):
            yield item
        yield from itertools.chain.from_iterable(map(pods, item.values()))


def ends(container: dict[str, Any]) -> bool:
    command = " ".join(map(str, container.get("command", ())))
    return not LIVES.search(command) if command else not container["image"].startswith(SERVERS)


def test_a_container_whose_command_ends_is_not_started_again() -> None:
    again = [
        (name, container["name"])
        for name, objects in documents()
        for spec in pods(objects)
        if spec.get("restartPolicy", "Always") == "Always"
        for container in spec["containers"]
        if ends(container)
    ]
    assert not again


def test_a_namespace_exists_before_it_is_used() -> None:
    made: dict[Path, set[str | None]] = defaultdict(lambda: {None, *INSTALLED})
    missing = []
    for name, objects in documents():
        # files of a folder are applied in their order
        here = made[(ROOT / name).parent if name.startswith("examples/") else Path()]
        for each in objects:
            if each.get("kind") == "Namespace":
                here.add(each["metadata"]["name"])
            if each.get("metadata", {}).get("namespace") not in here:
                missing.append((name, each["metadata"]["name"]))
    assert not missing


def test_each_image_has_one_tag_in_all_examples_pages_and_tests() -> None:
    tags: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in (*MANIFESTS, *PAGES, *(ROOT / "tests").rglob("*.py")):
        for image, tag in IMAGE.findall(path.read_text()):
            tags[image][tag].add(str(path.relative_to(ROOT)))
    assert tags
    assert {image: dict(found) for image, found in tags.items() if len(found) > 1} == {}


def test_notebooks_share_a_gpu() -> None:
    """A GPU takes one Interactive tenant. If notebooks were Interactive, a class of twenty notebooks of 0.2 would need
    twenty GPUs."""
    for path in MANIFESTS:
        if "notebook" in (text := path.read_text()):
            assert "Interactive" not in text, path.name
