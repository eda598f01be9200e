"""Layers of images: compressed tar files whose bytes depend only on names, modes, owners and contents.

Guarantees: entries are ordered by name and all have the same time. The compressed form contains no time and no name.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_TIME = 315532800
"""Time stamp of each file, in seconds since 1970: 1980-01-01, the earliest time that a zip file can contain."""
_LEVEL = 6
_FILE, _FACTS = "layer.tar.gz", "layer.json"


@dataclass(frozen=True)
class Layer:
    """Layer of an image. `digest`, `size`: of the compressed file. `diff_id`: digest of the uncompressed tar file."""

    path: Path
    digest: str
    diff_id: str
    size: int

    @classmethod
    def read(cls, folder: Path) -> Layer:
        """Return the layer that an earlier run has written to a folder."""
        return cls(folder / _FILE, **json.loads((folder / _FACTS).read_text()))

    def members(self) -> Iterator[tuple[str, bytes]]:
        """Yield (name, content) of each regular file in the layer."""
        with tarfile.open(self.path, "r:gz") as archive:
            for member in archive:
                if member.isfile():
                    content = archive.extractfile(member)
                    assert content is not None
                    yield member.name, content.read()


def layer_of_tar(archive: Path, folder: Path, *, left_out: Sequence[str] = ()) -> None:
    """Write the files of a tar archive as a layer to `folder`. Of each folder in `left_out`, the contents are left
    out."""
    with tarfile.open(archive) as source:
        chosen = []
        for member in source.getmembers():
            name = member.name.removeprefix("./").strip("/")
            if name in ("", ".") or any(name.startswith(f"{folder}/") for folder in left_out):
                continue
            member.name = name
            if member.islnk():
                member.linkname = member.linkname.removeprefix("./")
            chosen.append(member)
        # hard links come last, because a link must follow its target
        chosen.sort(key=lambda member: (member.islnk(), member.name))
        _write(folder, ((member, source.extractfile(member) if member.isreg() else None) for member in chosen))


def layer_of_folder(root: Path, folder: Path, *, top: str) -> None:
    """Write all files below `root / top` as a layer to `folder`. They are owned by root in the layer."""

    def entries() -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
        parents = [root / Path(*Path(top).parts[:depth]) for depth in range(1, len(Path(top).parts) + 1)]
        for path in [*parents, *sorted((root / top).rglob("*"))]:
            member = tarfile.TarInfo(str(path.relative_to(root)))
            status = path.lstat()
            member.mode = 0o777 if path.is_symlink() else 0o755 if status.st_mode & 0o100 else 0o644
            if path.is_symlink():
                member.type, member.linkname = tarfile.SYMTYPE, str(path.readlink())
                yield member, None
            elif path.is_dir():
                member.type, member.mode = tarfile.DIRTYPE, 0o755
                yield member, None
            else:
                member.size = status.st_size
                with path.open("rb") as content:
                    yield member, content

    _write(folder, entries())


def _write(folder: Path, entries: Iterable[tuple[tarfile.TarInfo, IO[bytes] | None]]) -> None:
    target = folder / _FILE
    with target.open("wb") as file:
        compressed = _Hashing(file)
        with gzip.GzipFile(filename="", mode="wb", compresslevel=_LEVEL, fileobj=compressed, mtime=0) as packed:
            plain = _Hashing(packed)
            with tarfile.open(fileobj=plain, mode="w|", format=tarfile.PAX_FORMAT) as archive:  # type: ignore[call-overload]
                for member, content in entries:
                    member.mtime = _TIME
                    member.uname = member.gname = ""
                    member.pax_headers = {}
                    archive.addfile(member, content)
    facts = {"digest": compressed.digest(), "diff_id": plain.digest(), "size": target.stat().st_size}
    (folder / _FACTS).write_text(json.dumps(facts))


class _Hashing:
    """Writable file that passes its input on, and computes the digest of the input."""

    def __init__(self, file: IO[bytes] | gzip.GzipFile) -> None:
        self._file = file
        self._hash = hashlib.sha256()

    def write(self, part: bytes) -> int:
        self._hash.update(part)
        return self._file.write(part)

    def flush(self) -> None:
        self._file.flush()

    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"
