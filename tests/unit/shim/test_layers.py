"""The check of the hook's layers detects a file that includes a header of a higher layer."""

from __future__ import annotations

import pytest
from layers import circles, included, needed, room_of, symbols, table, unit_of, upward


def test_header_and_source_are_one_unit() -> None:
    texts = {
        "time/gate.h": '#include <cuda.h>\n#include "base/sys.h"\n',
        "time/gate.c": '#include "time/gate.h"\n#include "session/session.h"\n',
        "session/session.h": "",
        "base/sys.h": "",
    }
    assert unit_of("time/gate.h") == unit_of("time/gate.c") == "time/gate"
    assert included(texts)["time/gate"] == {"base/sys", "session/session"}


def test_an_include_of_another_package_is_no_arrow() -> None:
    assert included({"base/sys.h": '#include "sharepod/protocol.h"\n'}) == {"base/sys": set()}


@pytest.mark.parametrize(
    "include",
    [
        '#include "../time/gate.h"',
        '#include "./../time/gate.h"',
        '#include "time/gate.h"',
        '# include "time/gate.h"',
        ' #\tinclude\t"time/gate.h"',
        '#include"time/gate.h"',
        "#include <time/gate.h>",
        "#include<time/gate.h>",
        '#include "time/../time/gate.h"',
    ],
)
def test_an_include_is_an_arrow_however_it_is_written(include: str) -> None:
    assert included({"base/sys.c": f"{include}\n", "time/gate.h": ""})["base/sys"] == {"time/gate"}


def test_a_name_in_quotes_is_the_file_beside_before_the_one_below_src() -> None:
    texts = {"base/rows.c": '#include "sys.h"\n', "base/sys.h": "", "sys.h": ""}
    assert included(texts)["base/rows"] == {"base/sys"}


def test_a_name_in_brackets_is_never_the_file_beside() -> None:
    assert included({"base/rows.c": "#include <time.h>\n", "base/time.h": ""})["base/rows"] == set()


@pytest.mark.parametrize("suffix", ["inc", "def", "x.h"])
def test_an_include_through_a_file_of_any_suffix_is_an_arrow(suffix: str) -> None:
    texts = {
        "base/sys.c": f'#include "list.{suffix}"\n',
        f"base/list.{suffix}": '#include "time/gate.h"\n',
        "time/gate.h": "",
    }
    arrows = included(texts)
    listing = unit_of(f"base/list.{suffix}")
    assert arrows["base/sys"] == {listing}
    assert upward(arrows) == [(listing, "time/gate")]


def test_a_weak_symbol_without_definition_is_needed() -> None:
    listed = """\
                 w gate_open
                 v gate_count
                 U memcpy
0000000000000000 T sys_map
0000000000000010 W sys_default
0000000000000000 V sys_table
"""
    assert symbols(listed) == ({"sys_map", "sys_default", "sys_table"}, {"gate_open", "gate_count", "memcpy"})


def test_a_call_through_an_extern_declaration_is_an_arrow() -> None:
    defined = {"base/sys": {"sys_map"}, "time/gate": {"gate_open"}}
    undefined = {"base/sys": {"memcpy"}, "time/gate": {"sys_map", "memset"}}
    assert needed(defined, undefined) == {"base/sys": set(), "time/gate": {"base/sys"}}


def test_a_circle_is_found_however_long() -> None:
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": set()}
    assert circles(arrows) == [["a", "b", "c"]]
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize(
    ("unit", "target", "wrong"),
    [
        ("time/gate", "session/session", False),
        ("session/session", "time/gate", True),
        ("time/gate", "memory/credits", True),  # `time` and `memory` are in one layer, so neither may use the other
        ("time/gate", "time/streams", False),
        ("wrappers/work/launch", "wrappers/memory/contexts", False),
        ("wrappers/memory/contexts", "wrappers/work/launch", True),
    ],
)
def test_an_arrow_upward_is_found(unit: str, target: str, wrong: bool) -> None:
    assert upward({unit: {target}, target: set()}) == ([(unit, target)] if wrong else [])


def test_a_folder_inside_a_room_belongs_to_the_room() -> None:
    assert room_of("memory/pools/calls") == "memory"
    with pytest.raises(SystemExit, match="cellar/wine lies in no room"):
        room_of("cellar/wine")


def test_the_table_counts_arrows_between_rooms() -> None:
    lines = table({"time/gate": {"base/sys", "base/rows"}, "base/sys": set(), "base/rows": {"base/sys"}}).splitlines()
    assert "time                  1  base 2" in lines
    assert "base                  2  -" in lines
