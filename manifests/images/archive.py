"""OCI archives: one tar file with the layers, the configuration and the index of one image.

Guarantees: the same layers and configuration give the same bytes. The digest of an image, by which registries and
manifests name it, is the digest of its OCI manifest.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from images.layers import Layer

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_CREATED = "1980-01-01T00:00:00Z"
_MEDIA = "application/vnd.oci.image."


@dataclass(frozen=True)
class MadeImage:
    """Image in an archive. `name`: its full reference in the archive. `digest`: digest of its OCI manifest."""

    name: str
    digest: str
    path: Path
    layers: tuple[Layer, ...]

    @property
    def compressed_bytes(self) -> int:
        """Return the compressed size of all layers, which is what a registry transfers."""
        return sum(layer.size for layer in self.layers)


def write_archive(path: Path, name: str, layers: Sequence[Layer], config: Mapping[str, Any]) -> MadeImage:
    """Write an image to the file `path`. `config`: the field `config` of its configuration (User, Entrypoint, ...)."""
    configuration = _json(
        {
            "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "created": _CREATED,
            "config": dict(config),
            "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
            "history": [{"created": _CREATED} for _ in layers],
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": f"{_MEDIA}manifest.v1+json",
            "config": _described("config.v1+json", _digest(configuration), len(configuration)),
            "layers": [_described("layer.v1.tar+gzip", layer.digest, layer.size) for layer in layers],
        }
    )
    entry = _described("manifest.v1+json", _digest(manifest), len(manifest)) | {
        # containerd reads the first annotation, other tools the tag in the second
        "annotations": {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name.rpartition(":")[2]}
    }
    index = _json({"schemaVersion": 2, "mediaType": f"{_MEDIA}index.v1+json", "manifests": [entry]})
    draft = path.with_name(f".{path.name}")
    with tarfile.open(draft, "w") as archive:
        _add(archive, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
        _add(archive, "index.json", index)
        for blob in (configuration, manifest):
            _add(archive, _blob(_digest(blob)), blob)
        for layer in {layer.digest: layer for layer in layers}.values():
            member = tarfile.TarInfo(_blob(layer.digest))
            member.size = layer.size
            with layer.path.open("rb") as content:
                archive.addfile(member, content)
    draft.rename(path)
    return MadeImage(name, _digest(manifest), path, tuple(layers))


def _described(kind: str, digest: str, size: int) -> dict[str, Any]:
    return {"mediaType": _MEDIA + kind, "digest": digest, "size": size}


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True).encode()


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _blob(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))
