"""Images: the same files give the same bytes, with the metadata that registries and nodes need."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
from pathlib import Path

import pytest
from images.archive import write_archive
from images.layers import Layer, layer_of_folder, layer_of_tar


def _tree(root: Path, *, time: int) -> None:
    top = root / "opt" / "sharepod"
    (top / "bin").mkdir(parents=True)
    (top / "lib").mkdir()
    for name, mode in (("bin/run", 0o750), ("lib/b.py", 0o600), ("lib/a.py", 0o644)):
        (top / name).write_text(name)
        (top / name).chmod(mode)
        os.utime(top / name, (time, time))
    (top / "bin" / "python").symlink_to("/usr/bin/python3")
    (root / "elsewhere").write_text("not in the layer")


def _layer(folder: Path, *, time: int = 1) -> Layer:
    root, made = folder / "root", folder / "made"
    root.mkdir(parents=True)
    made.mkdir()
    _tree(root, time=time)
    layer_of_folder(root, made, top="opt/sharepod")
    return Layer.read(made)


def test_a_layer_depends_on_names_kinds_and_contents_alone(tmp_path: Path) -> None:
    first, second = _layer(tmp_path / "a", time=1), _layer(tmp_path / "b", time=1_000_000_000)
    assert first.path.read_bytes() == second.path.read_bytes()
    with tarfile.open(first.path) as archive:
        found = {member.name: (member.mode, member.uid, member.linkname) for member in archive}
    assert found == {
        "opt": (0o755, 0, ""),
        "opt/sharepod": (0o755, 0, ""),
        "opt/sharepod/bin": (0o755, 0, ""),
        "opt/sharepod/bin/python": (0o777, 0, "/usr/bin/python3"),
        "opt/sharepod/bin/run": (0o755, 0, ""),
        "opt/sharepod/lib": (0o755, 0, ""),
        "opt/sharepod/lib/a.py": (0o644, 0, ""),
        "opt/sharepod/lib/b.py": (0o644, 0, ""),
    }


def test_a_layer_knows_the_digests_of_its_two_forms(tmp_path: Path) -> None:
    layer = _layer(tmp_path)
    packed = layer.path.read_bytes()
    assert layer.digest == f"sha256:{hashlib.sha256(packed).hexdigest()}"
    assert layer.diff_id == f"sha256:{hashlib.sha256(gzip.decompress(packed)).hexdigest()}"
    assert layer.size == len(packed)
    assert dict(layer.members())["opt/sharepod/lib/a.py"] == b"lib/a.py"


@pytest.mark.parametrize("names", [("b", "a", "dev/null", "dev"), ("dev", "a", "dev/null", "b")])
def test_a_layer_of_a_tar_file_has_its_files_in_order_without_what_is_left_out(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    with tarfile.open(tmp_path / "base.tar", "w") as archive:
        for name in names:
            member = tarfile.TarInfo(f"./{name}")
            member.type = tarfile.DIRTYPE if name == "dev" else tarfile.REGTYPE
            member.uid, member.mtime, member.size = 7, len(names), len(name) * (name != "dev")
            archive.addfile(member, io.BytesIO(name.encode()))
        link = tarfile.TarInfo("./0")
        link.type, link.linkname = tarfile.LNKTYPE, "./b"
        archive.addfile(link)
    layer_of_tar(tmp_path / "base.tar", tmp_path, left_out=["dev"])
    with tarfile.open(Layer.read(tmp_path).path) as archive:
        assert [(member.name, member.uid) for member in archive] == [("a", 7), ("b", 7), ("dev", 7), ("0", 0)]


def test_an_archive_is_what_oci_calls_one_and_is_named_by_its_digest(tmp_path: Path) -> None:
    layer = _layer(tmp_path / "layer")
    name = "registry.invalid/sharepod/agent:1"
    made = write_archive(tmp_path / "a.tar", name, [layer, layer], {"User": "0:0"})
    with tarfile.open(made.path) as archive:
        files = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    for path, content in files.items():
        if path.startswith("blobs/"):
            assert path == f"blobs/sha256/{hashlib.sha256(content).hexdigest()}"
    assert json.loads(files["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
    (entry,) = json.loads(files["index.json"])["manifests"]
    assert entry["digest"] == made.digest
    assert entry["annotations"]["io.containerd.image.name"] == name
    manifest = json.loads(files["blobs/" + made.digest.replace(":", "/")])
    assert [each["digest"] for each in manifest["layers"]] == [layer.digest] * 2
    config = json.loads(files["blobs/" + manifest["config"]["digest"].replace(":", "/")])
    assert config["config"] == {"User": "0:0"}
    assert config["rootfs"]["diff_ids"] == [layer.diff_id] * 2
    again = write_archive(tmp_path / "b.tar", name, [layer, layer], {"User": "0:0"})
    assert again.path.read_bytes() == made.path.read_bytes()
