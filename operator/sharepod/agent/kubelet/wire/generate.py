"""Generator of the `*_pb2.py` next to the `.proto` files: `python -m sharepod.agent.kubelet.wire.generate [DIRECTORY]`.

Needs `grpcio-tools`. The generated files are checked in, so that an installation needs no protocol compiler. A test
fails if they are outdated.
"""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path

HERE = Path(__file__).parent
SOURCE_ROOT = HERE.parents[3]
PROTOS = ("csi.proto", "dra.proto", "podresources.proto", "registration.proto")


def generate(destination: Path = SOURCE_ROOT) -> tuple[Path, ...]:
    """Write the modules under `destination`, in the folder of their package; return their paths.

    Raise `RuntimeError` if the compiler refuses a file; the compiler prints the reason.
    """
    from grpc_tools import protoc  # type: ignore[import-untyped]

    well_known = str(resources.files("grpc_tools") / "_proto")
    sources = [str(HERE / proto) for proto in PROTOS]
    # Paths are relative to the source root, because the modules import each other and register their descriptors by
    # these paths.
    arguments = [
        "protoc",
        f"-I{SOURCE_ROOT}",
        f"-I{well_known}",
        f"--python_out={destination}",
        f"--pyi_out={destination}",
        *sources,
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError(f"protoc refused one of {', '.join(sources)}")
    folder = destination / HERE.relative_to(SOURCE_ROOT)
    for stub in folder.glob("*_pb2.pyi"):
        stub.write_text("# ruff: noqa\n# fmt: off\n" + stub.read_text(encoding="utf-8"), encoding="utf-8")
    return tuple(
        folder / (proto.removesuffix(".proto") + suffix) for proto in PROTOS for suffix in ("_pb2.py", "_pb2.pyi")
    )


if __name__ == "__main__":
    for written in generate(*(Path(argument) for argument in sys.argv[1:2])):
        print(written)
