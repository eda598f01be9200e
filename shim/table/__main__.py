"""`python -m table` writes shim/src/driver/entries.def and shim/src/wrappers/work/moves.def. With `--check` it writes
nothing, and fails if one of them is out of date.

`--header DIR` (repeatable) reads other headers instead of the headers of the releases in wheels.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from table import wheels
from table.classes import CLASSES_FILE, WRAPPED, ClassError, classify, read_rules
from table.headers import HeaderError, read, union
from table.moves import MOVES_FILE, render_moves
from table.render import TABLE_FILE, parse_table, render


def main() -> int:
    """Return 0 if both files were written or are up to date, else 1, with the reason on standard error."""
    parser = argparse.ArgumentParser(prog="python -m table", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when entries.def is stale")
    parser.add_argument("--header", action="append", type=Path, metavar="DIR", help="headers to read instead")
    chosen = parser.parse_args()
    try:
        folders = chosen.header or [wheels.fetch(requirement).include for requirement in wheels.RELEASES]
        headers = [read(folder) for folder in folders]
        classified = classify(union(headers), read_rules())
    except ClassError as error:
        print(f"{CLASSES_FILE.name} and the headers do not agree:\n{error}", file=sys.stderr)
        return 1
    except (HeaderError, wheels.UnreachableError) as error:
        print(error, file=sys.stderr)
        return 1
    text = render(classified, [header.release for header in headers])
    texts = {TABLE_FILE: text, MOVES_FILE: render_moves(parse_table(text))}
    if chosen.check:
        stale = [file for file, wanted in texts.items() if file.read_text(encoding="utf-8") != wanted]
        for file in stale:
            print(f"{file.name} is not what classes.txt and the headers make of it; run `make table`", file=sys.stderr)
        return 1 if stale else 0
    for file, wanted in texts.items():
        file.write_text(wanted, encoding="utf-8")
    wrapped = sum(one.kind in WRAPPED for one in classified)
    print(f"{TABLE_FILE.name}: {len(classified)} entry points, {wrapped} wrapped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
