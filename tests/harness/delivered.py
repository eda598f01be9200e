"""SharePod installed as its users install it: images of a source tree, and unchanged manifests.

Guarantees:
- The code of `make images` makes the images, which are kept in the cache; the node pulls none.
- The applied objects equal the result of `kubectl apply -k`. For other images an overlay with an `images` entry is
  applied.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml
from images.__main__ import make_images
from images.archive import MadeImage
from images.roots import why_no_images
from images.steps import NotHadError

from harness.cluster import Cluster
from harness.errors import CommandError
from harness.installation import NAMESPACE, await_in_force
from harness.node import Node

ROOT = Path(__file__).resolve().parents[2]
WORKLOADS = {"operator": "deployment/sharepod-operator", "agent": "daemonset/sharepod-agent"}
_ROLLOUT_S = 120


@dataclass(frozen=True)
class Delivery:
    """A version of SharePod: a source tree with its manifests, and its images by part (operator, agent)."""

    source: Path
    images: Mapping[str, MadeImage]

    @classmethod
    def of(cls, source: Path, into: Path) -> Delivery:
        """Make the images of a source tree. This takes a minute, or seconds if the cache has their layers."""
        return cls(source, make_images(into, source=source))

    @property
    def manifests(self) -> Path:
        """Folder of manifests that is applied."""
        return self.source / "manifests"

    def names(self, cluster: Cluster) -> dict[str, str]:
        """Return the images that the manifests name, by part."""
        found = yaml.safe_load_all(cluster.kubectl("kustomize", self.manifests).stdout)
        containers = [
            container
            for one in found
            if one["kind"] in ("Deployment", "DaemonSet")
            for container in one["spec"]["template"]["spec"]["containers"]
        ]
        return {container["name"]: container["image"] for container in containers}

    def load(self, node: Node, names: Mapping[str, str]) -> None:
        """Import the images on a node. `names`: by part, the name that the pods use."""
        for part, image in self.images.items():
            node.load_image(image.path)
            if names[part] != image.name:
                node.tag_image(image.name, names[part])

    def install(self, cluster: Cluster, node: Node) -> None:
        """Import the images and apply the unchanged manifests; wait until operator and agents run."""
        self.load(node, self.names(cluster))
        _apply(cluster, self.manifests)

    def upgrade(self, cluster: Cluster, node: Node, overlay: Path, *more: str) -> None:
        """Apply the manifests by an overlay in the folder `overlay`, which names the images by their contents.

        `more`: further folders of the manifests.
        """
        tags = {part: image.digest.removeprefix("sha256:")[:12] for part, image in self.images.items()}
        names = self.names(cluster)
        bare = {part: name.rpartition(":")[0] for part, name in names.items()}
        self.load(node, {part: f"{bare[part]}:{tag}" for part, tag in tags.items()})
        kustomization = {
            "resources": [os.path.relpath(self.manifests / each, overlay) for each in ("", *more)],
            "images": [{"name": bare[part], "newTag": tag} for part, tag in tags.items()],
        }
        (overlay / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        _apply(cluster, overlay)


def _apply(cluster: Cluster, folder: Path) -> None:
    cluster.kubectl("apply", "--server-side", "-k", folder, timeout=60)
    await_in_force(cluster)
    await_workloads(cluster)


def await_workloads(cluster: Cluster) -> None:
    """Wait until operator and agents run with the images and settings applied last. Raises CommandError with the state
    of their pods."""
    for workload in WORKLOADS.values():
        argv = ("rollout", "status", "-n", NAMESPACE, workload, f"--timeout={_ROLLOUT_S}s")
        done = cluster.kubectl(*argv, check=False, timeout=_ROLLOUT_S + 10)
        if done.returncode != 0:
            pods = cluster.kubectl("describe", "pods", "-n", NAMESPACE, check=False).stdout
            label = f"app.kubernetes.io/name={workload.partition('/')[2]}"
            logs = cluster.kubectl("logs", "-n", NAMESPACE, "-l", label, "--tail=40", "--prefix", check=False).stdout
            raise CommandError(f"{workload}: {done.stdout}{done.stderr}\n{logs}\n{pods}")


@functools.cache
def deliveries() -> tuple[Delivery, Delivery] | str:
    """Make the images of the commit before this tree, if git has it, and of this tree. Return the reason in one line if
    there are none.

    This takes minutes the first time, and seconds if the cache has all layers. The images stay until this process ends.
    """
    if (reason := why_no_images()) is not None:
        return reason
    folder = Path(tempfile.mkdtemp(prefix="shp-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    before = tree_before(folder)
    try:
        now = Delivery.of(ROOT, folder / "now")
        return (now if before is None else Delivery.of(before, folder / "then")), now
    except NotHadError as error:
        return str(error).splitlines()[0]


def tree_before(into: Path) -> Path | None:
    """Write the source tree of the commit before the last one to the folder `into`; None if git has none."""
    git = ["git", "-C", str(ROOT), "archive", "--format=tar", "HEAD~1"]
    archive = into / "before.tar"
    with archive.open("wb") as file:
        done = subprocess.run(git, stdout=file, stderr=subprocess.DEVNULL, check=False, timeout=60)
    if done.returncode != 0:
        return None
    tree = into / "before"
    with tarfile.open(archive) as packed:
        packed.extractall(tree, filter="data")
    return tree
