"""The hook changes nothing for a program without CUDA, and nothing but CUDA for a program with it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest
from hook.conftest import BUILD, MIB, Tenant, last_report
from hook.world.child import end
from hook.world.probe import NOT_FOUND, NOT_INITIALIZED, SYSTEM_NOT_READY
from sharepod.protocol import Want
from table.render import read_table

# Symbols that the hook may import from the C library: dl_iterate_phdr, which musl and every glibc since 2.17 have, and
# _r_debug, glibc's list of loaded objects, which may be missing.
ALLOWED_UNDEFINED = {"dl_iterate_phdr", "_r_debug"}


def output_of(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
    assert done.stderr == ""
    return done.stdout


@pytest.mark.promise("program-no-library")
def test_the_hook_needs_no_library(hook_file: Path) -> None:
    dynamic = output_of("readelf", "-dW", hook_file)
    assert "(NEEDED)" not in dynamic
    assert "(INIT)" not in dynamic
    assert re.search(r"\(INIT_ARRAYSZ\) +8 ", dynamic), "only keep_errors runs when it is loaded: one fstat"
    assert "(TEXTREL)" not in dynamic
    assert "(SYMBOLIC)" in dynamic


@pytest.mark.promise("program-no-library")
def test_it_takes_only_what_every_libc_has(hook_file: Path) -> None:
    symbols = output_of("nm", "-D", "--undefined-only", hook_file).split()
    assert {name for name in symbols if name not in {"U", "w"}} <= ALLOWED_UNDEFINED


def test_it_costs_the_loader_no_relocation_of_tables(hook_file: Path) -> None:
    relocations = output_of("readelf", "-rW", hook_file).count("_RELATIVE")
    assert relocations <= 1, "only the address of keep_errors, which runs when it is loaded"


@pytest.mark.promise("program-entry-points")
def test_it_exports_the_table_and_nothing_else(hook_file: Path) -> None:
    exported = set(re.findall(r" [A-Z] (\w+)$", output_of("nm", "-D", "--defined-only", hook_file), re.MULTILINE))
    table = {row.symbol for row in read_table() if row.wrapped}
    assert exported == table | {"dlsym", "dlvsym", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"}


@pytest.mark.promise("program-silent")
@pytest.mark.parametrize("bind", ["LD_BIND_NOW", "LD_BIND_LAZILY"])
def test_a_program_without_cuda_notices_nothing(tenant: Tenant, bind: str) -> None:
    program = BUILD / "programs" / "plain"
    alone = json.loads(output_of(program))
    hooked = json.loads(output_of(program, LD_PRELOAD=str(tenant.directory / "libsharepod.so"), **{bind: "1"}))
    assert alone["hook"] == 0
    assert hooked == {**alone, "hook": 1}
    assert hooked["threads"] == 1


@pytest.mark.promise("program-silent")
@pytest.mark.parametrize("kind", ["address", "thread"])
def test_a_program_with_a_sanitizer_of_its_own_runs_as_without_the_hook(
    kind: str, hook_file: Path, tmp_path: Path
) -> None:
    """At its start a sanitizer uses dlsym to find the functions of the C library that its own memcpy, strcmp and
    dl_iterate_phdr call."""
    library = {"address": "-static-libasan", "thread": "-static-libtsan"}[kind]
    (tmp_path / "main.c").write_text('#include <stdio.h>\nint main(void) { puts("ran"); }')
    output_of("cc", f"-fsanitize={kind}", library, "-o", tmp_path / "main", tmp_path / "main.c")
    assert output_of(tmp_path / "main", LD_PRELOAD=str(hook_file)) == "ran\n"


@pytest.mark.promise("program-silent")
def test_a_library_may_look_up_the_next_of_what_it_wraps_when_that_is_called(hook_file: Path, tmp_path: Path) -> None:
    """The library calls dlsym, which is the hook's dlsym. It must not call any function that a library may wrap,
    because that function might call dlsym again."""
    (tmp_path / "front.c").write_text(
        textwrap.dedent("""
            #define _GNU_SOURCE
            #include <dlfcn.h>
            #include <link.h>
            typedef int visitor(struct dl_phdr_info *, size_t, void *);
            int strcmp(const char *one, const char *other) {
                return ((int (*)(const char *, const char *))dlsym(RTLD_NEXT, "strcmp"))(one, other);
            }
            int dl_iterate_phdr(visitor *visit, void *of) {
                return ((int (*)(visitor *, void *))dlsym(RTLD_NEXT, "dl_iterate_phdr"))(visit, of);
            }""")
    )
    (tmp_path / "main.c").write_text(
        textwrap.dedent("""
            #define _GNU_SOURCE
            #include <link.h>
            #include <stdio.h>
            #include <string.h>
            static int first(struct dl_phdr_info *info, size_t size, void *of) { return 7; }
            int main(int count, char **words) {
                printf("%d %d\\n", dl_iterate_phdr(first, NULL), strcmp(words[0], words[count - 1]));
            }""")
    )
    front, program = tmp_path / "libfront.so", tmp_path / "main"
    output_of("cc", "-fPIC", "-fno-builtin", "-shared", "-o", front, tmp_path / "front.c", "-ldl")
    output_of("cc", "-fno-builtin", "-o", program, tmp_path / "main.c")
    for hook in ("", f":{hook_file}"):
        assert output_of(program, LD_PRELOAD=f"{front}{hook}") == "7 0\n"


@pytest.mark.parametrize("own", ["", "int cuInit(unsigned flags) { return 7; }"])
def test_where_no_libcuda_is_loaded_a_name_of_its_leads_where_it_does_without_the_hook(
    own: str, hook_file: Path, tmp_path: Path
) -> None:
    """Programs look such a name up to check whether they are linked with CUDA, or to find a fake driver of their
    tests."""
    (tmp_path / "main.c").write_text(
        textwrap.dedent("""
            #define _GNU_SOURCE
            #include <dlfcn.h>
            #include <stdio.h>
            OWN
            static int ask(void *handle) {
                int (*found)(unsigned) = (int (*)(unsigned))dlsym(handle, "cuInit");
                return found ? found(0) : -1;
            }
            int main(void) {
                printf("%d %d %d\\n", ask(dlopen(NULL, RTLD_LAZY)), ask(RTLD_DEFAULT), ask(RTLD_NEXT));
            }""").replace("OWN", own)
    )
    output_of("cc", "-rdynamic", "-o", tmp_path / "main", tmp_path / "main.c", "-ldl")
    alone = output_of(tmp_path / "main")
    assert alone == ("7 7 -1\n" if own else "-1 -1 -1\n")
    assert output_of(tmp_path / "main", LD_PRELOAD=str(hook_file)) == alone


@pytest.mark.promise("program-preload-file")
def test_preloaded_by_file_and_variable_it_is_harmless(tenant: Tenant) -> None:
    """The loader treats two copies of the hook at two paths as two libraries. Only the first one must gate launches."""
    tenant.agent().on_want = lambda client: None
    copy = tenant.directory / "copy" / "libsharepod.so"
    copy.parent.mkdir()
    shutil.copy2(tenant.directory / "libsharepod.so", copy)
    both = f"{tenant.directory / 'libsharepod.so'}:{copy}"
    for resolve in ("symbol", "dlsym", "getproc"):
        assert last_report(tenant.loop("--seconds", "0.2", "--resolve", resolve, LD_PRELOAD=both))["launches"] == 0


@pytest.mark.promise("program-silent")
def test_it_starts_with_the_first_cuda_call(tenant: Tenant) -> None:
    agent = tenant.agent()
    probe = tenant.probe()
    probe.ok("load")
    before = probe.ok("facts")
    assert probe.ok("symbol_file", "cuLaunchKernel").endswith("libsharepod.so")
    assert probe.ok("symbol_file", "cuCtxGetCurrent").endswith("libcuda.so.1")
    assert probe.ok("proc_address", "cuMemAlloc")[0].endswith("libsharepod.so")
    after = probe.ok("facts")
    assert "sharepod" not in after["threads"]
    assert not any("socket" in file or "eventfd" in file for file in after["files"])
    assert len(after["files"]) == len(before["files"])
    assert agent.clients == []
    probe.ok("init")
    agent.client()
    assert probe.ok("facts")["threads"].count("sharepod") == 1


def test_its_thread_takes_no_signals(tenant: Tenant) -> None:
    agent = tenant.agent()
    probe = tenant.probe()
    probe.ok("init")
    agent.client()
    blocked = int(probe.ok("signals_of_agent"), 16)
    for number in (1, 2, 10, 12, 15, 17):
        assert blocked >> (number - 1) & 1


@pytest.mark.parametrize(
    ("name", "file"),
    [("cuLaunchKernel", "libsharepod.so"), ("cuGetProcAddress", "libsharepod.so"), ("cuEventQuery", "libcuda.so.1")],
)
@pytest.mark.parametrize("flags", [0, 1, 2])
def test_proc_address_gives_wrappers_for_what_is_gated(tenant: Tenant, name: str, file: str, flags: int) -> None:
    probe = tenant.probe()
    found, status = probe.ok("proc_address", name, 13000, flags)
    assert found.endswith(file)
    assert status == 0


def test_proc_address_keeps_the_drivers_no(tenant: Tenant) -> None:
    probe = tenant.probe()
    assert probe.ok("proc_address", "cuNoSuchCall") == ["", 1]
    assert probe.ok("proc_address", "cuLaunchKernelEx", 11000) == ["", 2]
    old = tenant.probe(double=tenant.double.with_name("libcuda-11.8"))
    assert old.call("proc_address_v1", "cuCtxRecordEvent", 11080).code == NOT_FOUND
    assert old.ok("proc_address_v1", "cuCtxSynchronize", 11080) != ""


@pytest.mark.promise("program-rtld-next")
def test_dlsym_keeps_the_order_of_rtld_next(tenant: Tenant, tmp_path: Path) -> None:
    """RTLD_NEXT means the libraries behind the caller, which the C library finds by the return address. With a hook
    that simply forwarded the call, an interposer would find itself.
    """
    sources = {
        "behind.c": "int answer(void) { return 40; }",
        "before.c": """
            #define _GNU_SOURCE
            #include <dlfcn.h>
            int answer(void) {
                int (*next)(void) = (int (*)(void))dlsym(RTLD_NEXT, "answer");
                int (*same)(void) = (int (*)(void))dlvsym(RTLD_NEXT, "answer", "NONE");
                return next() + (same == 0 ? 2 : 100);
            }""",
        "main.c": """
            #include <stdio.h>
            int answer(void);
            int main(void) { printf("%d\\n", answer()); }""",
    }
    for name, text in sources.items():
        (tmp_path / name).write_text(textwrap.dedent(text))
    compiler = ["cc", "-fPIC", "-o"]
    output_of(*compiler, tmp_path / "libbehind.so", "-shared", "-Wl,-soname,libbehind.so", tmp_path / "behind.c")
    output_of(
        *compiler, tmp_path / "libbefore.so", "-shared", "-Wl,-soname,libbefore.so", tmp_path / "before.c", "-ldl"
    )
    program = tmp_path / "main"
    output_of(
        *compiler, program, tmp_path / "main.c", "-Wl,--no-as-needed", f"-L{tmp_path}", "-lbefore", "-lbehind", "-ldl"
    )
    hook = str(tenant.directory / "libsharepod.so")
    assert output_of(program, LD_LIBRARY_PATH=str(tmp_path)) == output_of(
        program, LD_LIBRARY_PATH=str(tmp_path), LD_PRELOAD=hook
    )


@pytest.mark.promise("program-fork")
def test_a_child_of_fork_starts_clean(tenant: Tenant) -> None:
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant()
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("alloc", 10 * MIB)
    probe.ok("launch", "noop")
    first = agent.client()
    (_, inherited), (initialized, _), (_, after) = probe.ok("fork", ["facts"], ["init"], ["facts"])
    assert "sharepod" not in inherited["threads"]
    assert not any("socket" in file or "eventfd" in file for file in inherited["files"]), (
        "the parent's connection is not kept open"
    )
    assert initialized == NOT_INITIALIZED, "as the driver has it for a child of a process that used CUDA"
    assert after["threads"] == inherited["threads"]
    assert agent.clients == [first]
    assert not first.closed
    probe.ok("launch", "noop")


@pytest.mark.promise("program-fork")
def test_a_child_forked_before_cuda_has_a_session_of_its_own(tenant: Tenant) -> None:
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant()
    probe = tenant.probe()
    probe.ok("load")
    steps = [["init"], ["context_create"], ["alloc", 4096], ["launch", "noop"], ["stream_sync"]]
    assert [code for code, _ in probe.ok("fork", *steps)] == [0] * 5
    probe.start_cuda()
    probe.ok("launch", "noop")
    assert len(agent.frames(agent.client(1), Want)) == 1


def test_the_hook_goes_on_where_standard_error_is_full(tenant: Tenant) -> None:
    """Without an agent the hook thread writes a message to a full pipe. A write that blocks would stop that thread and
    all launches.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, bytes(4096))
    os.set_blocking(write, True)
    command = [str(BUILD / "programs" / "launchloop"), "--seconds", "60"]
    process = subprocess.Popen(command, env=tenant.environment(), stdout=subprocess.DEVNULL, stderr=write)
    try:
        tenant.until(lambda: tenant.submitted() > 0, "a launch")
    finally:
        end(process)
        os.close(read)
        os.close(write)


def test_what_the_hook_says_ends_no_program_whose_standard_error_nobody_reads(tenant: Tenant) -> None:
    """The hook writes its message in a thread of the program, to a pipe without a reader. An ordinary write would end
    the program by SIGPIPE."""
    tenant.agent()
    read, write = os.pipe()
    os.close(read)
    command = [str(BUILD / "programs" / "lifecycle"), "no_threads"]
    try:
        done = subprocess.run(
            command, env=tenant.environment(), stdout=subprocess.PIPE, stderr=write, text=True, timeout=20
        )
    finally:
        os.close(write)
    assert done.returncode == 0
    assert done.stdout.split() == ["results", *[str(SYSTEM_NOT_READY)] * 3]


def test_errno_and_output_are_left_alone(tenant: Tenant) -> None:
    """In a run without faults, nothing is written to standard error."""
    tenant.agent().on_want = lambda client: None
    program = BUILD / "programs" / "launchloop"
    done = subprocess.run(
        [program, "--seconds", "0.2"], env=tenant.environment(), capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stderr == ""
