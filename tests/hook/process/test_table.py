"""The table of entry points matches the headers and the classification. A new entry point makes a test fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cuda_headers import include_dir
from hook.conftest import ROOT
from table import wheels
from table.classes import ClassError, Rule, classify, needs_its_full_name, read_rules
from table.headers import EntryPoint, read, union
from table.moves import MOVES_FILE, render_moves
from table.render import TABLE_FILE, read_table, render

INVENTED = """
CUresult CUDAAPI cuLaunchKernelTwice(CUfunction f, CUstream hStream);
CUresult CUDAAPI cuMemAllocEverywhere(CUdeviceptr *dptr, size_t bytesize);
CUresult CUDAAPI cuGraphLaunchLater(CUgraphExec hGraphExec, CUstream hStream);
CUresult CUDAAPI cuMemsetD64(CUdeviceptr dstDevice, cuuint64_t value, size_t N);
CUresult CUDAAPI cuMemcpyElsewhereAsync(CUdeviceptr dst, CUdeviceptr src, size_t count, CUstream hStream);
CUresult CUDAAPI cuMemPrefetchEverything(CUstream hStream);
CUresult CUDAAPI cuEventAllocMemory(CUevent event);
CUresult CUDAAPI cuBrandNew(int answer);
"""


@pytest.fixture(scope="module")
def covered() -> list[wheels.Wheel]:
    """Header wheels of the releases that the table covers."""
    try:
        return [wheels.fetch(requirement) for requirement in wheels.RELEASES]
    except wheels.UnreachableError as error:
        pytest.skip(str(error))


def names_complained_of(folder: Path) -> set[str]:
    with pytest.raises(ClassError) as refused:
        classify(union([read(folder)]), read_rules())
    return {line.split()[0] for line in str(refused.value).splitlines() if not line.startswith("line ")}


def test_the_table_is_not_stale(covered: list[wheels.Wheel]) -> None:
    headers = [read(wheel.include) for wheel in covered]
    expected = render(classify(union(headers), read_rules()), [header.release for header in headers])
    assert TABLE_FILE.read_text() == expected, "run `make table`"


def test_the_wrappers_of_moves_follow_from_the_table() -> None:
    """The generated wrappers of copies, memsets and moves equal the text that the table yields."""
    assert MOVES_FILE.read_text() == render_moves(read_table()), "run `make table`"


def test_the_table_covers_the_installed_header() -> None:
    """The check needs no network: the table has every entry point of the header that the hook is compiled with."""
    rows = {row.symbol: row for row in read_table()}
    for entry in union([read(include_dir())]):
        row = rows[entry.symbol]
        assert (row.name, row.since, row.parameters) == (entry.name, entry.since, entry.parameters)


def test_the_table_agrees_with_the_classification() -> None:
    rows = read_table()
    entries = [EntryPoint(row.symbol, row.name, row.since, row.parameters, ()) for row in rows]
    classified = {one.entry.symbol: one for one in classify(entries, read_rules())}
    for row in rows:
        one = classified[row.symbol]
        assert row.kind == one.kind
        assert one.why


def test_a_new_entry_point_in_a_newer_header_is_named_not_guessed(tmp_path: Path) -> None:
    """A new entry point that launches, allocates, copies or frees is reported, even if a pattern of its family covers
    its name.
    """
    header = (include_dir() / "cuda.h").read_text()
    end = header.rindex("#ifdef __cplusplus")
    (tmp_path / "cuda.h").write_text(header[:end] + INVENTED + header[end:])
    (tmp_path / "cudaTypedefs.h").write_text((include_dir() / "cudaTypedefs.h").read_text())
    assert names_complained_of(tmp_path) == {
        "cuLaunchKernelTwice", "cuMemAllocEverywhere", "cuGraphLaunchLater", "cuMemsetD64", "cuMemcpyElsewhereAsync",
        "cuMemPrefetchEverything", "cuEventAllocMemory", "cuBrandNew",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "table", "--check", f"--header={tmp_path}"],
        cwd=ROOT / "shim", capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "cuMemAllocEverywhere (CUDA 13.5) has no class: add it to one" in done.stderr
    assert "cuEventAllocMemory (CUDA 13.5) is covered by cuEvent* only: add its full name" in done.stderr


def test_the_newest_wheel_has_nothing_unclassified() -> None:
    try:
        newest = wheels.fetch(wheels.NEWEST)
    except wheels.UnreachableError as error:
        pytest.skip(str(error))
    classify(union([read(include_dir()), read(newest.include)]), read_rules())


@pytest.mark.parametrize(
    "name",
    ["cuLaunchGrid", "cuMemcpyPeer", "cuMemsetD2D8", "cuGraphExecUpdate", "cuMemPoolCreate", "cuArray3DCreate",
     "cuImportExternalMemory", "cuCtxSetLimit", "cuMemPrefetchBatchAsync", "cuModuleLoadFatBinary"],
)  # fmt: skip
def test_what_works_or_allocates_needs_its_full_name(name: str) -> None:
    assert needs_its_full_name(name)


def test_a_rule_for_nothing_is_an_error() -> None:
    entry = EntryPoint("cuMemAlloc_v2", "cuMemAlloc", 3020, "CUdeviceptr *dptr, size_t bytesize", (13050,))
    rules = (Rule("memory", "cuMemAlloc", "allocations", 1), Rule("gate", "cuMemAloc", "a slip", 2))
    with pytest.raises(ClassError, match="line 2: no entry point is called cuMemAloc"):
        classify([entry], rules)


def test_older_forms_and_stream_variants_are_told_apart() -> None:
    rows = {row.symbol: row for row in read_table()}
    assert [rows[symbol].since for symbol in ("cuMemcpyDtoD", "cuMemcpyDtoD_v2", "cuMemcpyDtoD_v2_ptds")] == [
        2000, 3020, 7000,
    ]  # fmt: skip
    assert "failIdx" in rows["cuMemcpyBatchAsync"].parameters
    assert "failIdx" not in rows["cuMemcpyBatchAsync_v2"].parameters
    assert rows["cuMemAlloc"].parameters == "CUdeviceptr_v1 *dptr, unsigned int bytesize"
    assert rows["cuGetProcAddress_v2"].since == 12000
