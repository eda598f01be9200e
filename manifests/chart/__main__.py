"""python -m chart [--into DIR] [--registry NAME] [--images DIR] [--repository URL]: write dist/ (`make dist`).

- `sharepod-VERSION.tgz`: the Helm chart, and its folder `sharepod/`.
- `install.yaml`: the objects of manifests/ in one file.
- `kubectl-sharepod-VERSION.tar.gz`: the kubectl plugin, and `sharepod.yaml`: its manifest for krew.

`--registry`: registry and folder of the images, which chart and install.yaml name. `--images`: archives of `make
images`; the images are then named by digest. `--repository`: URL whose releases have the plugin's archive.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from harness.build import built
from pydantic import BaseModel
from sharepod.agent.settings import AgentSettings
from sharepod.controller.settings import OperatorSettings

from chart.overlays import BASE, MANIFESTS, OVERLAYS, OverlayError, render
from chart.plugin import REPOSITORY, packed, write_plugin
from chart.templates import templates

ROOT = MANIFESTS.parent
CHART = ROOT / "charts" / "sharepod"
PARTS: dict[str, type[BaseModel]] = {"operator": OperatorSettings, "agent": AgentSettings}
REGISTRY = "registry.invalid/sharepod"
SET_ELSEWHERE = {
    "operator": ("runtime_class", "namespace", "identity", "kubeconfig", "webhook_port", "health_port", "metrics_port"),
    "agent": (
        "namespace",
        "node_name",
        "kubeconfig",
        "mode",
        "tenants_file",
        "inventory_file",
        "health_port",
        "http_port",
    ),
}
"""Settings that other values or the templates set, by part. The schema does not contain them."""


def find_kubectl() -> str:
    """Return the path of kubectl: the machine's, else the test cluster's. Raise OverlayError if there is none."""
    if machine := shutil.which("kubectl"):
        return machine
    if (cluster := built()) is not None:
        return str(cluster / "kubectl")
    raise OverlayError("no kubectl: install it and put it on PATH, or run `make cluster`, which builds one")


def settings_schema(part: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the JSON schema of the settings of a part (operator, agent), and the definitions to which it refers."""
    schema = PARTS[part].model_json_schema(ref_template="#/$defs/{model}")
    fields = {name: one for name, one in schema["properties"].items() if name not in SET_ELSEWHERE[part]}
    own = {"type": "object", "additionalProperties": False, "properties": fields}
    return own, schema.get("$defs", {})


def write_chart(into: Path, kubectl: str, values: Mapping[str, str]) -> Path:
    """Write the chart to the folder `into / "sharepod"`, and as an archive, whose path is returned. Raise OverlayError.

    Args:
        values: defaults of values.yaml to replace, by path, such as `image.tag`.
    """
    folder = into / "sharepod"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(CHART, folder)
    shutil.copy(ROOT / "LICENSE", folder)
    schema = json.loads((CHART / "values.schema.json").read_text())
    for part in PARTS:
        schema["properties"][part]["properties"]["settings"], definitions = settings_schema(part)
        schema["$defs"] |= definitions
    (folder / "values.schema.json").write_text(json.dumps(schema, indent=2) + "\n")
    for name, text in templates({overlay: render(kubectl, overlay) for overlay in OVERLAYS}).items():
        (folder / "templates" / name).write_text(text)
    (folder / "values.yaml").write_text(_with_values((CHART / "values.yaml").read_text(), values))
    facts = yaml.safe_load((CHART / "Chart.yaml").read_text())
    archive = into / f"sharepod-{facts['version']}.tgz"
    _pack(folder, archive)
    return archive


def _with_values(text: str, values: Mapping[str, str]) -> str:
    """Return the text of values.yaml with other defaults; its comments stay. `values`: new values by path, such as
    image.tag."""
    path: list[str] = []
    lines = []
    for line in text.splitlines():
        key, colon, _ = line.strip().partition(":")
        if colon and not key.startswith(("#", "-")):
            depth = (len(line) - len(line.lstrip())) // 2
            path = [*path[:depth], key]
            if (value := values.get(".".join(path))) is not None:
                line = f"{line[: len(line) - len(line.lstrip())]}{key}: {json.dumps(value)}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def _pack(folder: Path, archive: Path) -> None:
    """Write a folder as a tar file whose bytes depend only on the folder's contents."""
    files = sorted(each for each in folder.rglob("*") if each.is_file())
    archive.write_bytes(packed((str(path.relative_to(folder.parent)), path.read_bytes(), 0o644) for path in files))


def write_install(into: Path, kubectl: str, registry: str, digests: Mapping[str, str]) -> Path:
    """Write the objects of manifests/ to install.yaml. Raise OverlayError."""
    images = [
        {"name": f"{REGISTRY}/{part}", "newName": f"{registry}/{part}"}
        | ({"digest": digests[part]} if part in digests else {})
        for part in PARTS
    ]
    path = into / "install.yaml"
    objects = render(kubectl, BASE, images=images)
    comment = "# SharePod: kubectl apply --server-side -f install.yaml. Made of manifests/ by `make dist`.\n"
    path.write_text(comment + yaml.safe_dump_all(objects, sort_keys=False, width=120, explicit_start=True))
    return path


def digests_of(folder: Path) -> dict[str, str]:
    """Return the digests of the images in the archives of `make images`, by part. Raise OverlayError."""
    found = {}
    for part in PARTS:
        try:
            with tarfile.open(folder / f"{part}.tar") as archive:
                index = archive.extractfile("index.json")
                assert index is not None
                found[part] = str(json.load(index)["manifests"][0]["digest"])
        except OSError as error:
            raise OverlayError(f"--images {folder}: {error}; run `make images` first") from error
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `python -m chart`; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m chart", description="Write the Helm chart, install.yaml and the kubectl plugin."
    )
    parser.add_argument("--into", type=Path, default=ROOT / "dist", help="folder to write to")
    parser.add_argument("--registry", default=REGISTRY, help="registry and folder of the images")
    parser.add_argument("--images", type=Path, help="folder of the archives of `make images`: name images by digest")
    parser.add_argument("--repository", default=REPOSITORY, help="URL whose releases have the plugin's archive")
    chosen = parser.parse_args(arguments)
    chosen.into.mkdir(parents=True, exist_ok=True)
    try:
        kubectl = find_kubectl()
        digests = digests_of(chosen.images) if chosen.images else {}
        values = {"image.registry": chosen.registry} | {f"{part}.digest": each for part, each in digests.items()}
        for path in (
            write_chart(chosen.into, kubectl, values),
            write_install(chosen.into, kubectl, chosen.registry, digests),
            *write_plugin(chosen.into, chosen.repository),
        ):
            print(os.path.relpath(path))
    except OverlayError as error:
        print(f"dist: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
