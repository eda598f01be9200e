"""The hook's C sources under the address, undefined-behaviour and thread sanitizers: `make sanitize`.

1. The sources are compiled with a sanitizer into a library. The programs `randomlife` and `memoryrace` are linked with
   it ahead of the double. interpose.c is left out, because its `dlsym` would replace the sanitizer's. Tests of the real
   file cover it.
2. Random lives run under the scripted agents of `randomlife.py`.
3. Threads race for memory under the real agent.

A finding ends its process, which then counts as failed. No finding is suppressed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from harness.soak import Run
from hook.conftest import BUILD, ROOT
from hook.life.randomlife import NOTHING_OF, Program, soak
from hook.world.agent_node import running, tenant

KINDS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    # -Wno-tsan: ThreadSanitizer does not follow fences. The hook's fences order only atomics.
    "thread": ["-fsanitize=thread", "-Wno-tsan"],
}
WRAPPED = ("object_libc_symbol", "sys_map", "sys_unmap")
"""Functions that sanitized/wrap.c replaces."""
LIMIT = 256 << 20
# No leak check: the double never frees objects that unfinished operations may use, and the hook has no heap.
# die_after_fork=0: a forked child of a process with threads may start threads.
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=66",
    "UBSAN_OPTIONS": "print_stacktrace=1:exitcode=66",
    "TSAN_OPTIONS": "die_after_fork=0:halt_on_error=1:exitcode=66",
}
FLAGS = [
    "-std=c11", "-D_GNU_SOURCE", "-D__CUDA_API_VERSION_INTERNAL", "-O1", "-g", "-fPIC", "-fno-omit-frame-pointer",
    "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-ftls-model=initial-exec",
]  # fmt: skip


def build(kind: str, folder: Path) -> Path:
    """Build the hook and the programs with a sanitizer in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    headers = subprocess.run(
        [sys.executable, str(ROOT / "shim" / "cuda_headers.py")], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()
    common = ["cc", *FLAGS, *KINDS[kind], f"-I{ROOT / 'shim' / 'include'}", f"-I{ROOT / 'shim' / 'src'}"]
    common += ["-isystem", headers]
    hook = folder / "libsharepod.so"
    sources = [path for path in sorted((ROOT / "shim" / "src").rglob("*.c")) if path.name != "interpose.c"]
    objects = [folder / f"{path.stem}.o" for path in [*sources, Path("wrap.c")]]
    compiling = [
        [*common, "-c", str(path), "-o", str(folder / f"{path.stem}.o")]
        for path in [*sources, ROOT / "tests" / "hook" / "life" / "sanitized" / "wrap.c"]
    ]
    _side_by_side(compiling)
    link = ["-shared", "-Wl,-Bsymbolic", *(f"-Wl,--wrap={name}" for name in WRAPPED), "-Wl,-soname,libsharepod.so"]
    _run([*common, *link, *map(str, objects), "-o", str(hook)])
    driver = [f"-L{BUILD / 'doubles' / 'libcuda'}", "-l:libcuda.so.1"]
    ahead = ["-Wl,--no-as-needed", f"-L{folder}", "-l:libsharepod.so"]
    for name in ("randomlife", "memoryrace"):
        source = str(ROOT / "tests" / "hook" / "programs" / f"{name}.c")
        _run([*common, "-o", str(folder / name), source, *ahead, *driver, "-lpthread"])
    return hook


def race(folder: Path, hook: Path, seed: int) -> dict[str, int]:
    """Run one race for memory. Return its counts, and whether the program ended without an error."""
    with (
        tempfile.TemporaryDirectory(prefix="sr") as directory,
        running(Path(directory), tenant("a", 0.5, memory=LIMIT), hook_file=str(hook)) as node,
    ):
        environment = node.environment("a") | OPTIONS
        del environment["LD_PRELOAD"]
        environment["LD_LIBRARY_PATH"] = f"{node.path('a')}:{BUILD / 'doubles' / 'libcuda'}"
        command = [str(folder / "memoryrace"), str(seed), "8", "2000"]
        ran = subprocess.run(command, env=environment, input=b"\n", stdout=subprocess.PIPE, timeout=300, check=False)
    counts: dict[str, int] = json.loads(ran.stdout) if ran.returncode == 0 else {"taken": 0, "refused": 0, "failed": 1}
    return counts


def _side_by_side(commands: Sequence[list[str]]) -> None:
    waiting = list(commands)
    running: list[subprocess.Popen[bytes]] = []
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            running.append(subprocess.Popen(waiting.pop()))
        if running.pop(0).wait() != 0:
            raise SystemExit("the hook does not compile under a sanitizer")


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, timeout=300)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="of each sanitizer")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    clean = True
    for kind in KINDS:
        folder = BUILD / "sanitize" / kind
        shutil.rmtree(folder, ignore_errors=True)
        hook = build(kind, folder)
        life = Program(folder / "randomlife", linked=True, more=OPTIONS)
        counts = soak(Run(kind, given.seed, given.seconds), hook, life)
        clean &= counts.get("launches", 0) > 0 and not any(counts[name] for name in NOTHING_OF)
        counts |= race(folder, hook, given.seed)
        clean &= counts["failed"] == 0 and counts["taken"] > 0 and counts["refused"] > 0
        print(f"{kind}: " + ", ".join(f"{name} {count}" for name, count in counts.items()), flush=True)
    print("clean" if clean else "NOT clean")
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
