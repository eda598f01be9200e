"""The check of the hook's layers finds what it is there to find."""

from __future__ import annotations

import pytest
from layers import circles, included, needed, room_of, table, unit_of, upward


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
        ("time/gate", "memory/credits", True),  # another room of the same layer
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
