"""Every way in which a program looks up a wrapped entry point returns the hook's wrapper for the same version and
stream semantics of that entry point.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hook.conftest import GPU_0
from hook.world.catalogue_driver import PRIVATE, build, expected_symbol, exported
from table import wheels
from table.render import read_table

SOURCES = Path(__file__).with_name("resolution")
NEWEST = 13050
HOOK = "libsharepod.so"
DRIVER = "libcuda.so.1"
LEGACY, PER_THREAD = 1, 2
STUB, OTHER_DRIVER = 34, 804
"""Results of cuInit: of the toolkit's stub library, and of a compatibility library that does not fit the driver in the
operating system.
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of ask, runtime and libwitness.so."""
    folder = tmp_path_factory.mktemp("resolution")
    flags = ["-O1", "-Wall", "-Werror", "-fPIC"]
    for name in ("ask", "runtime"):
        subprocess.run(["cc", *flags, "-o", str(folder / name), str(SOURCES / f"{name}.c"), "-ldl"], check=True)
    version = "GLIBC_2.2.5" if os.uname().machine == "x86_64" else "GLIBC_2.17"
    witness = [*flags, f'-DNEXT_VERSION="{version}"', "-shared", "-o", str(folder / "libwitness.so")]
    subprocess.run(["cc", *witness, str(SOURCES / "witness.c"), "-ldl"], check=True)
    return folder


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a driver with every entry point of the table."""
    return build(tmp_path_factory.mktemp("driver") / "newest", NEWEST)


@pytest.fixture(scope="module")
def hook(tmp_path_factory: pytest.TempPathFactory, hook_file: Path) -> Path:
    folder = tmp_path_factory.mktemp("tenant")
    shutil.copy2(hook_file, folder / HOOK)
    (folder / "limits").write_text(f"gpu {GPU_0} request 500 limit 1000 memory 1048576 enforced 1\n")
    return folder / HOOK


def run(program: Path, *arguments: str, questions: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(program), *arguments],
        input=questions,
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )


def ask(programs: Path, driver: Path, questions: list[str], *preloads: Path) -> tuple[list[list[str]], str]:
    """Look up symbols. Return the words of the answers, with base names of files, and standard error."""
    done = run(
        programs / "ask",
        questions="\n".join([f"load {driver / DRIVER}", *questions]) + "\n",
        LD_PRELOAD=":".join(str(preload) for preload in preloads),
    )
    answers = [line.split(" ") for line in done.stdout.splitlines()]
    assert answers[0][1] == "cuDriverGetVersion"
    return [[*words[:-2], Path(words[-2]).name, words[-1]] for words in answers[1:]], done.stderr


@pytest.mark.promise("program-entry-points", "security-share")
def test_every_wrapped_symbol_comes_out_wrapped_by_dlsym(programs: Path, driver: Path, hook: Path) -> None:
    rows = exported(NEWEST)
    ways = ("handle", "vhandle", "default", "next")
    answers, errors = ask(programs, driver, [f"{way} {row.symbol}" for way in ways for row in rows], hook)
    for (way, row), (file, symbol) in zip(((way, row) for way in ways for row in rows), answers, strict=True):
        if row.wrapped:
            # dlvsym finds nothing, because the driver's symbols have no version named NONE
            wanted = ("-", "-") if way == "vhandle" else (HOOK, row.symbol)
        elif way == "handle":
            wanted = (DRIVER, row.symbol)
        else:
            continue  # the driver is not in the global scope, so the result is the same as without the hook
        assert (file, symbol) == wanted, (way, row)
    assert errors == ""


@pytest.mark.promise("program-entry-points", "security-share")
@pytest.mark.parametrize("call", ["proc1", "proc2"])
@pytest.mark.parametrize("flags", [0, LEGACY, PER_THREAD])
@pytest.mark.parametrize("version", [10010, 11080, 12000, 12090, NEWEST])
def test_every_wrapped_form_comes_out_wrapped_by_proc_address(
    programs: Path, driver: Path, hook: Path, call: str, flags: int, version: int
) -> None:
    wrapped = {row.symbol for row in read_table() if row.wrapped}
    names = sorted({row.name for row in read_table()})
    answers, errors = ask(programs, driver, [f"{call} {name} {version} {flags}" for name in names], hook)
    for name, (result, status, file, symbol) in zip(names, answers, strict=True):
        form = expected_symbol(name, version, flags == PER_THREAD)
        if form is None:
            assert (file, symbol) == ("-", "-"), name
            assert result == ("500" if call == "proc1" else "0"), name
            assert status == ("-" if call == "proc1" else "2"), name
        else:
            assert (result, file, symbol) == ("0", HOOK if form in wrapped else DRIVER, form), name
            assert status == ("-" if call == "proc1" else "0"), name
    assert errors == ""


def test_the_drivers_refusals_stay_as_they_are(programs: Path, driver: Path, hook: Path) -> None:
    questions = [
        'proc2 "" 12000 0',
        "proc2 cuLaunchKernel 99000 0",
        "proc2 cuNoSuchCall 12000 0",
        "proc2 cublas 12000 0",
    ]
    questions += ['handle ""', 'default ""', "handle cuNoSuchCall", "next cuNoSuchCall", "default cuMemAllocMore"]
    assert ask(programs, driver, questions, hook) == ask(programs, driver, questions)


def test_the_export_table_is_passed_through(programs: Path, driver: Path, hook: Path) -> None:
    questions = ["handle cuGetExportTable", "proc2 cuGetExportTable 12000 0"]
    answers, _ = ask(programs, driver, questions, hook)
    assert [answer[-2:] for answer in answers] == [[DRIVER, "cuGetExportTable"]] * 2


@pytest.mark.promise("program-unknown-entry")
def test_an_unknown_function_under_a_gated_name_is_not_found_and_said_once(
    programs: Path, tmp_path: Path, hook: Path
) -> None:
    unknown, newer = ("cuLaunchKernel", "cuMemAlloc", "cuTexRefCreate", "cuStreamDestroy"), NEWEST + 1000
    driver = build(tmp_path / "driver", newer, private=unknown)
    questions = [f"proc2 {name} {newer} {flags}" for name in unknown for flags in (0, 2)] + [
        f"proc1 cuMemAlloc {newer} 0"
    ] * 3
    answers, errors = ask(programs, driver, questions, hook)
    assert answers[:4] == [["0", "1", "-", "-"]] * 4, "gated: not found"
    assert [answer[-1] for answer in answers[4:8]] == [PRIVATE] * 4, "not gated: the driver's own word"
    assert answers[8:] == [["500", "-", "-", "-"]] * 3
    lines = errors.splitlines()
    assert [name for name in unknown for line in lines if f"the driver's {name} of this version" in line] == [
        "cuLaunchKernel", "cuMemAlloc",
    ]  # fmt: skip
    assert len(lines) == 2


def test_an_unknown_function_is_found_by_name_version_and_flags(programs: Path, tmp_path: Path, hook: Path) -> None:
    names = sorted({row.name for row in read_table() if row.kind in ("gate", "memory")})
    driver = build(tmp_path / "driver", NEWEST, private=tuple(names))
    asked = [(name, version, flags) for name in names for version in (2000, 3020, 12000, NEWEST) for flags in (0, 2)]
    answers, errors = ask(programs, driver, [f"proc2 {name} {version} {flags}" for name, version, flags in asked], hook)
    assert errors == ""
    for (name, version, flags), (_, _, file, symbol) in zip(asked, answers, strict=True):
        wanted = expected_symbol(name, version, per_thread=flags == 2)
        assert (file, symbol) == ((HOOK, wanted) if wanted else ("-", "-")), (name, version, flags)


def test_dlsym_asked_of_a_handle_is_the_hooks(programs: Path, driver: Path, hook: Path) -> None:
    """A program that looks up dlsym in the C library also gets the hook's dlsym."""
    answers, _ = ask(programs, driver, ["load libc.so.6", "handle dlsym", "handle dlvsym", "handle strlen"], hook)
    assert [answer[0] for answer in answers[1:3]] == [HOOK, HOOK]
    assert answers[3][0] != HOOK


@pytest.mark.promise("program-unknown-entry")
def test_functions_of_a_second_driver_are_refused_where_they_would_slip_through(
    programs: Path, driver: Path, tmp_path: Path, hook: Path
) -> None:
    second = build(tmp_path / "second", 12090) / DRIVER
    wanted = ["handle cuLaunchKernel", "handle cuGetProcAddress_v2", "handle cuTexRefCreate"]
    answers, errors = ask(programs, driver, [*wanted, "init -", f"load {second}", *wanted, wanted[0]], hook)
    assert [file for file, _ in answers] == [HOOK, HOOK, DRIVER, "-", DRIVER, "-", "-", DRIVER, "-"]
    refused = [line.split()[1] for line in errors.splitlines() if "is not handed out" in line]
    assert sorted(refused) == ["cuGetProcAddress_v2", "cuLaunchKernel"]


@pytest.mark.promise("program-first-libcuda")
@pytest.mark.parametrize("closes", [True, False], ids=["closed", "kept open"])
@pytest.mark.parametrize("error", [STUB, OTHER_DRIVER])
def test_the_driver_is_the_libcuda_whose_initialization_succeeds(
    programs: Path, driver: Path, tmp_path: Path, hook: Path, error: int, closes: bool
) -> None:
    """Loaders try the toolkit's stub or a compatibility library first, and open the driver after cuInit of the first
    has failed.
    """
    first = build(tmp_path / "first", NEWEST, init=error)
    left = ["close -"] if closes else []
    wanted = ["handle cuLaunchKernel", "default cuLaunchKernel", "proc2 cuLaunchKernel 12000 0"]
    questions = [*wanted, "init -", *left, f"load {driver / DRIVER}", "init -", *wanted]
    answers, errors = ask(programs, first, questions, hook)
    assert "handed out" not in errors
    assert [answer[-1] for answer in answers if answer[-1].isdigit()] == [str(error), *("0" for _ in left), "0"]
    assert [answer[-2:] for answer in answers[-3:]] == [[HOOK, "cuLaunchKernel"]] * 3
    assert answers[:3] == answers[-3:]


def test_after_the_only_libcuda_is_closed_nothing_is_found(programs: Path, tmp_path: Path, hook: Path) -> None:
    stub = build(tmp_path / "stub", NEWEST, init=STUB)
    questions = ["init -", "close -", "default cuLaunchKernel"]
    answers, _ = ask(programs, stub, questions, hook)
    assert answers == ask(programs, stub, questions)[0]


def test_repeated_lookups_answer_alike(programs: Path, driver: Path, hook: Path) -> None:
    questions = ["default cuLaunchKernel", "next cuLaunchKernel", "handle cuLaunchKernel", "handle cuTexRefCreate"]
    answers, _ = ask(programs, driver, questions * 20, hook)
    assert answers == answers[: len(questions)] * 20


@pytest.mark.promise("program-rtld-next")
@pytest.mark.parametrize("first", ["hook", "witness"])
def test_beside_another_preload_that_wraps_dlsym_the_driver_stays_gated(
    programs: Path, driver: Path, hook: Path, tmp_path: Path, first: str
) -> None:
    """`first`: library that is preloaded first. If that is the witness, it sees every lookup, and the hook gives it
    wrappers.
    """
    witness = programs / "libwitness.so"
    preloads = [hook, witness] if first == "hook" else [witness, hook]
    done = run(
        programs / "ask",
        questions=f"load {driver / DRIVER}\nhandle cuLaunchKernel\nhandle cuTexRefCreate\nproc2 cuLaunchKernel 12000 0",
        LD_PRELOAD=":".join(map(str, preloads)), LD_BIND_NOW="1", WITNESS_LOG=str(tmp_path / "log"),
    )  # fmt: skip
    files = [Path(line.split(" ")[-2]).name for line in done.stdout.splitlines()[1:]]
    assert files == [HOOK, DRIVER, HOOK]
    assert (tmp_path / "log").exists() == (first == "witness")


@pytest.mark.promise("program-preload-file")
def test_preloaded_by_the_file_it_holds_in_an_empty_environment(programs: Path, driver: Path, hook: Path) -> None:
    """The file is /etc/ld.so.preload, in a mount namespace with an /etc of its own."""
    script = (
        'cache=$(mktemp) && cp /etc/ld.so.cache "$cache" && mount -t tmpfs tmpfs /etc && '
        'cp "$cache" /etc/ld.so.cache && rm "$cache" && echo "$1" >/etc/ld.so.preload && exec env -i "$2"'
    )
    probe = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip("a mount namespace needs root")
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", str(hook), str(programs / "ask")],
        input=f"load {driver / DRIVER}\nhandle cuLaunchKernel\ndefault cuMemAlloc_v2\n",
        capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert [Path(line.split(" ")[0]).name for line in done.stdout.splitlines()] == [DRIVER, HOOK, HOOK]


@pytest.mark.parametrize("requirement", wheels.RELEASES)
def test_nvidias_runtime_gets_nothing_gated_but_wrappers(
    programs: Path, driver: Path, hook: Path, tmp_path: Path, requirement: str
) -> None:
    """NVIDIA's libcudart looks up the driver as in production. It stops at NVIDIA's internal table, which the double
    lacks.
    """
    try:
        runtime = wheels.fetch(requirement).runtime
    except wheels.UnreachableError as error:
        pytest.skip(str(error))
    log = tmp_path / "log"
    run(
        programs / "runtime", str(runtime),
        LD_PRELOAD=f"{programs / 'libwitness.so'}:{hook}", LD_LIBRARY_PATH=str(driver), WITNESS_LOG=str(log),
    )  # fmt: skip
    got = [line.split(" ") for line in log.read_text().splitlines()]
    wrapped = {row.symbol for row in read_table() if row.wrapped}
    gated = {row.name for row in read_table() if row.wrapped and row.kind != "observe"}
    asked = {words[0] for words in got}
    assert len(asked) > 200
    assert {"cuLaunchKernel", "cuMemAlloc", "cuGraphLaunch", "cuMemGetInfo"} <= asked
    for name, version, flags, result, file, symbol in got:
        form = expected_symbol(name, int(version), int(flags) & PER_THREAD != 0)
        assert symbol == (form or "-"), (name, version, flags)
        if name in gated and form:
            assert result == "0"
            assert Path(file).name == (HOOK if form in wrapped else DRIVER), (name, version, flags)
        if form in wrapped:
            assert Path(file).name == HOOK, (name, version, flags)
