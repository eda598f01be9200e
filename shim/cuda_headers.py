"""Directory of the CUDA headers with which the hook and its test double are compiled.

The wheel `nvidia-cuda-runtime` (a build requirement) contains them. `CUDA_INCLUDE` in the environment overrides the
directory. As a program, this file prints it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path


class HeadersMissingError(RuntimeError):
    """No directory with cuda.h and cudaTypedefs.h was found. The message names the package to install."""


def include_dir() -> Path:
    """Return the directory that contains cuda.h and cudaTypedefs.h. Raises HeadersMissingError."""
    override = os.environ.get("CUDA_INCLUDE")
    if override:
        candidates = [Path(override)]
    else:
        spec = importlib.util.find_spec("nvidia")
        roots = [Path(root) for root in spec.submodule_search_locations or ()] if spec else []
        candidates = [include for root in roots for include in sorted(root.glob("cu*/include"), reverse=True)]
    for candidate in candidates:
        if (candidate / "cuda.h").is_file() and (candidate / "cudaTypedefs.h").is_file():
            return candidate
    where = f"in CUDA_INCLUDE={override}" if override else f"next to {sys.executable}"
    raise HeadersMissingError(
        f"no cuda.h and cudaTypedefs.h {where}; run `pip install nvidia-cuda-runtime==13.5.37` or set CUDA_INCLUDE"
    )


if __name__ == "__main__":
    try:
        print(include_dir())
    except HeadersMissingError as error:
        sys.exit(str(error))
