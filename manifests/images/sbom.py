"""python -m images.sbom: contents of each image, as SPDX 2.3 documents, next to the archives in build/images.

The contents are read from the layers: Debian packages from dpkg's records, Python packages from their metadata.
spdx-tools writes and validates the documents. Guarantees: the same image gives the same document.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.parser import Parser
from pathlib import Path

from harness.errors import HarnessError

from images.__main__ import ROOT, make_images
from images.archive import MadeImage
from images.roots import why_no_images
from images.steps import NotHadError

_STATUS = "var/lib/dpkg/status"
_METADATA = re.compile(r".*/site-packages/[^/]+\.dist-info/METADATA")


@dataclass(frozen=True, order=True)
class Contained:
    """Package in an image. `kind`: deb or pypi."""

    kind: str
    name: str
    version: str

    @property
    def purl(self) -> str:
        """Package URL, by which vulnerability scanners identify the package."""
        space = "debian/" if self.kind == "deb" else ""
        return f"pkg:{self.kind}/{space}{self.name.lower()}@{self.version.replace('+', '%2B')}"


def contained(files: Iterable[tuple[str, bytes]]) -> Iterator[Contained]:
    """Yield the packages that the files of a layer record. `files`: (name, content) of each file."""
    for name, content in files:
        if name == _STATUS:
            for paragraph in content.decode().split("\n\n"):
                fields = Parser().parsestr(paragraph.strip(), headersonly=True)
                if (fields.get("Status") or "").endswith(" installed"):
                    yield Contained("deb", fields["Package"], fields["Version"])
        elif _METADATA.fullmatch(name):
            fields = Parser().parsestr(content.decode(), headersonly=True)
            yield Contained("pypi", fields["Name"], fields["Version"])


def write_document(image: MadeImage, packages: Iterable[Contained], path: Path) -> None:
    """Write the image's SPDX document."""
    from spdx_tools.spdx.model import (
        Actor,
        ActorType,
        Checksum,
        ChecksumAlgorithm,
        CreationInfo,
        Document,
        ExternalPackageRef,
        ExternalPackageRefCategory,
        Package,
        PackagePurpose,
        Relationship,
        RelationshipType,
        SpdxNoAssertion,
    )
    from spdx_tools.spdx.writer.write_anything import write_file

    digest = image.digest.removeprefix("sha256:")
    name = image.name.rpartition(":")[0].rpartition("/")[2]
    whole = Package(
        spdx_id="SPDXRef-image",
        name=f"sharepod-{name}",
        version=image.name.rpartition(":")[2],
        download_location=SpdxNoAssertion(),
        files_analyzed=False,
        checksums=[Checksum(ChecksumAlgorithm.SHA256, digest)],
        primary_package_purpose=PackagePurpose.CONTAINER,
    )
    parts = [
        Package(
            spdx_id=f"SPDXRef-{one.kind}-{re.sub(r'[^A-Za-z0-9.-]', '-', one.name)}",
            name=one.name,
            version=one.version,
            download_location=SpdxNoAssertion(),
            files_analyzed=False,
            external_references=[
                ExternalPackageRef(ExternalPackageRefCategory.PACKAGE_MANAGER, "purl", one.purl),
            ],
        )
        for one in sorted(set(packages))
    ]
    described = Relationship("SPDXRef-DOCUMENT", RelationshipType.DESCRIBES, whole.spdx_id)
    contains = [Relationship(whole.spdx_id, RelationshipType.CONTAINS, part.spdx_id) for part in parts]
    info = CreationInfo(
        spdx_version="SPDX-2.3",
        spdx_id="SPDXRef-DOCUMENT",
        name=f"sharepod-{name}",
        document_namespace=f"https://sharepod.dev/spdx/{name}/{digest}",
        creators=[Actor(ActorType.TOOL, "sharepod-images")],
        created=datetime(1980, 1, 1, tzinfo=UTC).replace(tzinfo=None),
    )
    write_file(Document(info, [whole, *parts], relationships=[described, *contains]), str(path), validate=True)


def main() -> int:
    """Run `python -m images.sbom`."""
    if (reason := why_no_images()) is not None:
        print(f"sbom: skipped, {reason}")
        return 0
    into = ROOT / "build" / "images"
    try:
        made = make_images(into)
    except NotHadError as error:
        print(f"sbom: skipped, {str(error).splitlines()[0]}")
        return 0
    except HarnessError as error:
        print(f"images: {error}", file=sys.stderr)
        return 1
    for part, image in made.items():
        packages = [one for layer in image.layers for one in contained(layer.members())]
        path = into / f"{part}.spdx.json"
        write_document(image, packages, path)
        kinds = [one.kind for one in set(packages)]
        print(f"{path}  {kinds.count('deb')} of Debian, {kinds.count('pypi')} of Python")
    return 0


if __name__ == "__main__":
    sys.exit(main())
