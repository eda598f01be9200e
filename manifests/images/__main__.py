"""python -m images [--into DIR] [--source DIR] [--tag TAG]: make both images, each as an OCI archive.

`make images` calls this program. It prints name, digest and compressed size of each image. Without root or apt it makes
none, and prints one line with the reason.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.cache import cache_dir, exclusive
from harness.errors import HarnessError

from images.archive import MadeImage, write_archive
from images.package import PREFIX, check_libraries, imports_layer, package_layer
from images.roots import base_layer, compiling_root, why_no_images
from images.steps import ImageError

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "registry.invalid/sharepod"
"""Repository of the images in the manifests. `.invalid` is reserved, so no registry can ever serve this name."""
USERS = {"operator": "65532:65532", "agent": "0:0"}
"""User of each image. The agent is root, because it mounts into pods and reads every process from NVML."""
COMPRESSED_MAX = 150 * 10**6
"""Most bytes that an image may have in compressed form, in which nodes pull it."""


def make_images(into: Path, *, source: Path = ROOT, tag: str | None = None) -> dict[str, MadeImage]:
    """Make the images of a source tree and return them by part (operator, agent). Raise ImageError, HarnessError.

    Args:
        into: folder of the archives, operator.tar and agent.tar.
        source: source tree with the package `sharepod`.
        tag: tag of both images; None: the package's version.
    """
    if (reason := why_no_images()) is not None:
        raise ImageError(f"not made: {reason}")
    version = tomllib.loads((source / "pyproject.toml").read_text())["project"]["version"]
    into.mkdir(parents=True, exist_ok=True)
    with exclusive(cache_dir() / "images.lock", what="making images", timeout=3600.0):
        base, root = base_layer(), compiling_root()
        package = package_layer(root, source)
        layers = {part: (base, imports_layer(root, part), package) for part in USERS}
        for each in layers.values():
            check_libraries(each)
        return {
            part: write_archive(
                into / f"{part}.tar",
                f"{REPOSITORY}/{part}:{tag or version}",
                layers[part],
                image_config(part, version),
            )
            for part in USERS
        }


def image_config(part: str, version: str) -> dict[str, Any]:
    """Return the configuration of the image of a part: user, program, environment, labels."""
    return {
        "User": USERS[part],
        "Entrypoint": [f"/{PREFIX}/bin/sharepod-{part}"],
        "Env": ["PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "PYTHONUNBUFFERED=1", "PYTHONDONTWRITEBYTECODE=1"],
        "Labels": {
            "org.opencontainers.image.title": f"sharepod-{part}",
            "org.opencontainers.image.version": version,
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `python -m images`."""
    parser = argparse.ArgumentParser(prog="python -m images", description="Make the operator's and the agent's image.")
    parser.add_argument("--into", type=Path, default=ROOT / "build" / "images", help="folder of the archives")
    parser.add_argument("--source", type=Path, default=ROOT, help="source tree with the package")
    parser.add_argument("--tag", help="tag of both; by default the package's version")
    chosen = parser.parse_args(arguments)
    try:
        made = make_images(chosen.into, source=chosen.source, tag=chosen.tag)
    except HarnessError as error:
        print(f"images: {error}", file=sys.stderr)
        return 1
    for image in made.values():
        print(f"{image.path}  {image.compressed_bytes / 1e6:.0f} MB compressed\n  {image.name}\n  {image.digest}")
        if image.compressed_bytes > COMPRESSED_MAX:
            print(f"images: {image.name} is larger than {COMPRESSED_MAX / 1e6:.0f} MB", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
