"""Checks the layers of the hook's sources: prints which package uses which, and fails if units use each other in a
circle or a package uses a higher layer.

A package is a folder of sources, named `room` below. A unit is all files with the same name before the suffix: a header
and its source, or a `.def` file. An arrow goes from a unit to another unit that it includes, or whose symbols its
object file needs. So a call through an `extern` declaration, weak or not, makes an arrow. A call through a registered
function pointer does not. The exit status is 1, and the arrows at fault are printed, if

- units form a circle, or
- a unit uses a unit of a higher layer, or of another package of its own layer.

    python shim/layers.py            # part of `make lint`
"""

from __future__ import annotations

import os
import posixpath
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cuda_headers import include_dir

SHIM = Path(__file__).resolve().parent
SOURCES = SHIM / "src"

LAYERS = (
    ("base",),
    ("driver",),
    ("tenant",),
    ("session",),
    ("time", "memory"),
    ("process",),
    ("wrappers/memory",),
    ("wrappers/work",),
    ("wrappers/symbols",),
)
"""Packages from the lowest layer to the highest. A package uses packages of lower layers only. A folder that is missing
here belongs to the package of its parent folder.
"""

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>)', re.MULTILINE)
"""An `#include` line. Group 1: the name in quotes; group 2: the name in angle brackets."""
_NEEDED_KINDS = frozenset("Uwv")
"""Letters with which `nm` marks undefined symbols: U is needed, w and v are weakly needed (function, object)."""
_FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-D__CUDA_API_VERSION_INTERNAL", "-O0", "-fPIC", "-c")

Arrows = Mapping[str, set[str]]


def unit_of(path: str) -> str:
    """Return the unit of a file: its path below `src`, without the suffix."""
    return path.rsplit(".", 1)[0]


def room_of(unit: str) -> str:
    """Return the package of a unit. Raises SystemExit if the unit belongs to none."""
    for room in (room for layer in reversed(LAYERS) for room in layer):
        if unit.startswith(room + "/"):
            return room
    raise SystemExit(f"{unit} lies in no room: name its folder in LAYERS of shim/layers.py")


def included(texts: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the arrows that includes make: for each unit, the units that it includes. `texts`: text of each file, by
    its path below `src`.

    A name is searched as by the compiler: in quotes, first in the folder of the file and then below `src`; in brackets,
    only below `src`.
    """
    arrows: dict[str, set[str]] = {unit_of(path): set() for path in texts}
    for path, text in texts.items():
        for quoted, bracketed in _INCLUDE.findall(text):
            relative = posixpath.normpath(posixpath.join(posixpath.dirname(path), quoted)) if quoted else ""
            target = next((name for name in (relative, posixpath.normpath(quoted or bracketed)) if name in texts), None)
            if target is not None:
                arrows[unit_of(path)].add(unit_of(target))
    return {unit: targets - {unit} for unit, targets in arrows.items()}


def needed(defined: Mapping[str, Iterable[str]], undefined: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
    """Return the arrows that symbols make: for each unit, the units whose symbols its object file needs."""
    owner = {symbol: unit for unit, symbols in defined.items() for symbol in symbols}
    return {
        unit: {owner[symbol] for symbol in symbols if symbol in owner} - {unit} for unit, symbols in undefined.items()
    }


def symbols(listed: str) -> tuple[set[str], set[str]]:
    """Return (symbols that an object file defines for others, symbols that it needs). `listed`: output of `nm -g`."""
    defined: set[str] = set()
    undefined: set[str] = set()
    for line in listed.splitlines():
        kind, symbol = line.split()[-2:]
        (undefined if kind in _NEEDED_KINDS else defined).add(symbol)
    return defined, undefined


def circles(arrows: Arrows) -> list[list[str]]:
    """Return the groups of units that use each other in a circle (strongly connected components, by Tarjan's
    algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(unit: str) -> None:
        index[unit] = low[unit] = len(index)
        stack.append(unit)
        for target in sorted(arrows.get(unit, ())):
            if target not in index:
                visit(target)
            if target in stack:
                low[unit] = min(low[unit], low[target])
        if low[unit] == index[unit]:
            at = stack.index(unit)
            group = stack[at:]
            del stack[at:]
            if len(group) > 1:
                found.append(sorted(group))

    for unit in sorted(arrows):
        if unit not in index:
            visit(unit)
    return found


def upward(arrows: Arrows) -> list[tuple[str, str]]:
    """Return the forbidden arrows, as (unit, used unit): the used unit is in a higher layer, or in another package of
    the same layer."""
    height = {room: i for i, layer in enumerate(LAYERS) for room in layer}
    return [
        (unit, target)
        for unit, targets in sorted(arrows.items())
        for target in sorted(targets)
        if room_of(unit) != room_of(target) and height[room_of(target)] >= height[room_of(unit)]
    ]


def table(arrows: Arrows) -> str:
    """Return the printed table: one line per package, highest first, with its number of units, and each package that
    they use with the number of arrows."""
    units = Counter(room_of(unit) for unit in arrows)
    uses: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for unit, targets in arrows.items():
        uses[room_of(unit)].update(room_of(target) for target in targets if room_of(target) != room_of(unit))
    rooms = [room for layer in reversed(LAYERS) for room in layer]
    lines = [f"{'room':18}{'units':>5}  uses (arrows)"]
    for room in rooms:
        used = ", ".join(f"{other} {uses[room][other]}" for other in rooms if uses[room][other])
        lines.append(f"{room:18}{units[room]:>5}  {used or '-'}")
    return "\n".join(lines)


def _symbols(source: Path, folder: Path, number: int) -> tuple[set[str], set[str]]:
    """Compile a source. Return the symbols that its object file defines for others, and the symbols that it needs."""
    built = folder / f"{number}.o"
    compiler = shlex.split(os.environ.get("CC") or "cc")
    include = [f"-I{SHIM / 'include'}", f"-I{SOURCES}", "-isystem", str(include_dir())]
    subprocess.run([*compiler, *_FLAGS, *include, str(source), "-o", str(built)], check=True, timeout=120)
    listed = subprocess.run(["nm", "-g", str(built)], capture_output=True, text=True, check=True, timeout=30).stdout
    return symbols(listed)


def main() -> int:
    files = sorted(path for path in SOURCES.rglob("*") if path.is_file() and path.suffix != ".md")
    texts = {path.relative_to(SOURCES).as_posix(): path.read_text(encoding="utf-8") for path in files}
    arrows = included(texts)
    sources = [path for path in texts if path.endswith(".c")]
    with tempfile.TemporaryDirectory(prefix="layers") as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(lambda i: _symbols(SOURCES / sources[i], Path(folder), i), range(len(sources))))
    called = needed(
        {unit_of(path): defined for path, (defined, _) in zip(sources, found, strict=True)},
        {unit_of(path): undefined for path, (_, undefined) in zip(sources, found, strict=True)},
    )
    for unit, targets in called.items():
        arrows[unit] |= targets
    print(table(arrows))
    wrong = [f"a circle: {' - '.join(group)}" for group in circles(arrows)]
    wrong += [f"an arrow upward: {unit} -> {target}" for unit, target in upward(arrows)]
    count = sum(map(len, arrows.values()))
    print("\n".join(wrong) if wrong else f"{len(arrows)} units, {count} arrows, no circle, none upward")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
