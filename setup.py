"""Build of the compiled parts. cffi builds the binding of the wire format, placement's inner loops and the agent's
reading of frames. A C compiler builds the hook, the shared object that is preloaded into tenants' programs. mypyc
compiles the token scheduler (`sharepod.timeshare`).

`pip install` builds all of them. An editable install builds in place and does not compile the token scheduler, so that
edits of it take effect. `python setup.py build_hook` builds only the hook, in place. The project's metadata is in
pyproject.toml.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Distribution, setup  # type: ignore[import-untyped]
from setuptools.command.build import build  # type: ignore[import-untyped]
from setuptools.command.build_ext import build_ext  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parent
SHIM = ROOT / "shim"
HOOK = Path("sharepod", "agent", "hook", "libsharepod.so")
CORE = Path("sharepod", "timeshare")

sys.path.insert(0, str(SHIM))
from cuda_headers import include_dir  # noqa: E402

# __CUDA_API_VERSION_INTERNAL: cuda.h declares every form of every function under its own name.
# No startup files and no libraries: the hook has no NEEDED entry.
CFLAGS = [
    "-std=c11", "-D_GNU_SOURCE", "-D__CUDA_API_VERSION_INTERNAL", "-O2", "-g", "-Wall", "-Wextra", "-Werror",
    "-fPIC", "-fvisibility=hidden", "-ftls-model=initial-exec",
    "-fno-tree-switch-conversion", "-fno-stack-protector", "-U_FORTIFY_SOURCE", "-fno-builtin-printf",
]  # fmt: skip
# Symbols that the hook takes from the program's libc. The function `dl_iterate_phdr` is in every glibc since 2.17 and
# in musl. `_r_debug`, the list of loaded objects, may be missing. Any other missing symbol would end each program of
# the container that binds its symbols at the start. So memcpy and similar functions, which the compiler calls, are in
# the hook itself (base/strings.c).
TAKEN_FROM_LIBC = frozenset({"dl_iterate_phdr", "_r_debug"})
LDFLAGS = [
    "-shared",
    "-nostdlib",
    "-Wl,-Bsymbolic",
    "-Wl,-soname,libsharepod.so",
    "-Wl,-z,relro",
    # bind the hook's symbols when it is loaded, so that the table of their addresses is read-only from then on
    "-Wl,-z,now",
    "-Wl,-z,noseparate-code",  # saves two mappings, and so 5 us of each start of a program
    "-Wl,--build-id",
    "-Wl,--hash-style=both",
]


def hook_sources() -> list[Path]:
    """Return the files that the hook is made of, in a fixed order."""
    return sorted([*SHIM.glob("src/**/*.[ch]"), *SHIM.glob("src/**/*.def"), *SHIM.glob("include/**/*.h")])


def sources_hash() -> str:
    """Return the content hash of the hook's sources, which the hook sends in HELLO."""
    digest = hashlib.sha256()
    for path in hook_sources():
        digest.update(path.relative_to(SHIM).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def machine_flags(compiler: list[str]) -> list[str]:
    """Return the flags for this machine's processor. They mark the targets of indirect jumps (CET, BTI) and sign return
    addresses: if one library lacks this protection, its whole program loses it. On arm64 they also keep atomics inline,
    because gcc would call a library of its own, which the hook does not link."""
    asked = subprocess.run([*compiler, "-dumpmachine"], capture_output=True, text=True, check=True, timeout=30)
    if asked.stdout.startswith(("aarch64", "arm64")):
        return ["-mno-outline-atomics", "-mbranch-protection=standard"]
    return ["-fcf-protection=full"] if asked.stdout.startswith("x86_64") else []


def folder_flags() -> list[str]:
    """Return the flags that keep the names of this machine's folders out of the file, so that its bytes are the same
    wherever it is built. If both flags match a path, the last one applies: the CUDA headers may be in a folder below
    the sources."""
    return [f"-ffile-prefix-map={ROOT}=.", f"-ffile-prefix-map={include_dir()}=cuda"]


def strip(draft: Path, debug: Path) -> None:
    """Move the debug sections from `draft` to the file `debug`, which a debugger finds next to the hook."""
    tool = shlex.split(os.environ.get("OBJCOPY") or "objcopy")
    for arguments in (
        ["--only-keep-debug", str(draft), str(debug)],
        ["--strip-all", f"--add-gnu-debuglink={debug}", str(draft)],
    ):
        subprocess.run([*tool, *arguments], check=True, timeout=30)


def check_needs(built: Path) -> None:
    """Raise SystemExit if the hook needs a symbol of libc outside TAKEN_FROM_LIBC, because some programs could not load
    such a hook."""
    tool = shlex.split(os.environ.get("NM") or "nm")
    command = [*tool, "-D", "--undefined-only", str(built)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    more = {line.split()[-1].partition("@")[0] for line in listed.stdout.splitlines()} - TAKEN_FROM_LIBC
    if more:
        names = ", ".join(sorted(more))
        raise SystemExit(f"the hook needs {names}, which a program need not have: see CFLAGS in setup.py")


def compile_hook(target: Path, debug: Path, *, extra: tuple[str, ...] = ()) -> None:
    """Compile the hook, write its debug information to `debug`, and rename the stripped file to `target`. Because of
    the rename, no program ever maps half a file."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    for file in (target, debug):
        file.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    command = [
        *compiler, *CFLAGS, *machine_flags(compiler), *folder_flags(), *extra, f'-DSHAREPOD_BUILD="{sources_hash()}"',
        f"-I{SHIM / 'include'}", f"-I{SHIM / 'src'}", "-isystem", str(include_dir()),
        *(str(path) for path in hook_sources() if path.suffix == ".c"), *LDFLAGS, "-o", str(draft),
    ]  # fmt: skip
    try:
        if subprocess.run(command, check=False).returncode:
            raise SystemExit(f"the hook does not compile: {' '.join(command)}")
        check_needs(draft)
        strip(draft, debug)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


class BuildHook(Command):  # type: ignore[misc]  # setuptools has no types
    """Command `build_hook`: builds the hook as a part of `build`. Called by itself, it builds in place."""

    description = "build the hook, libsharepod.so"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = [
        ("target=", None, "another file to build"),
        ("define=", None, "further -D for the compiler, separated by commas"),
    ]
    editable_mode = False

    def initialize_options(self) -> None:
        self.build_lib: str | None = None
        self.target: str | None = None
        self.define: str | None = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def _output(self) -> Path:
        if self.target:
            return Path(self.target)
        return (ROOT / "operator" if self._in_place() else Path(self.build_lib or "build/lib")) / HOOK

    def _in_place(self) -> bool:
        return bool(self.editable_mode or "build_hook" in self.distribution.commands)

    def run(self) -> None:
        target = self._output()
        debug_folder = target.parent if self.target or self._in_place() else ROOT / "build"  # a wheel has no use for it
        extra = tuple(f"-D{macro}" for macro in (self.define or "").split(",") if macro)
        compile_hook(target, debug_folder / f"{target.name}.debug", extra=extra)

    def get_outputs(self) -> list[str]:
        return [str(self._output())]

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def get_source_files(self) -> list[str]:
        return [str(path.relative_to(ROOT)) for path in (*hook_sources(), *sorted(SHIM.glob("*.py")))]


class BuildCore(Command):  # type: ignore[misc]
    """Command `build_core`, a part of `build`: compiles the sources of the token scheduler. It does nothing in an
    editable install, so that edits take effect at once."""

    description = "compile the token scheduler"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = [("build-lib=", None, "another folder to build in")]
    editable_mode = False

    def initialize_options(self) -> None:
        self.build_lib: str | None = None
        self.build_temp: str | None = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"), ("build_temp", "build_temp"))

    def run(self) -> None:
        if self.editable_mode:
            return
        from mypyc.build import mypycify

        built = Path(self.build_lib or "build/lib").resolve()
        temporary = Path(self.build_temp or "build/temp").resolve()
        with contextlib.chdir(ROOT / "operator"):  # mypyc names the modules by their paths relative to this folder
            extensions = mypycify(
                ["--config-file", os.devnull, *(str(path) for path in sorted(CORE.glob("*.py")))],
                opt_level="3",
                debug_level="0",
                group_name="sharepod_timeshare",
                target_dir=str(temporary / "core"),
            )
            command = build_ext(Distribution({"ext_modules": extensions}))
            command.build_lib, command.build_temp = str(built), str(temporary)
            command.ensure_finalized()
            command.run()

    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def get_source_files(self) -> list[str]:
        return []  # build_py names them


class Build(build):  # type: ignore[misc]
    sub_commands: ClassVar[list[object]] = [*build.sub_commands, ("build_hook", None), ("build_core", None)]


setup(
    cffi_modules=[
        "shim/wire_build.py:ffi",
        "operator/sharepod/placement/binpack/native/scores_build.py:ffi",
        "operator/sharepod/agent/sockets/native/frame_reader_build.py:ffi",
        "operator/sharepod/agent/native/timed_wait_build.py:ffi",
    ],
    cmdclass={"build": Build, "build_hook": BuildHook, "build_core": BuildCore},
)
