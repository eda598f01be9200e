"""The filter of system calls of the process without rights, evaluated as Linux evaluates it."""

from __future__ import annotations

import errno
import platform
import re
from pathlib import Path

import pytest
from sharepod.agent.apart import system_calls

_ALLOWED, _KILLED = 0x7FFF0000, 0x80000000
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_HEADER = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")


def verdict(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """Return the filter's result for a system call, by interpreting the filter's BPF instructions."""
    words = {0: number, 4: _ARCHITECTURE[machine] if architecture is None else architecture}
    for index, argument in enumerate(arguments):
        words[16 + 8 * index] = argument & 0xFFFFFFFF
    code, at, loaded = system_calls.program(machine), 0, 0
    while True:
        kind, true, false, value = code[at]
        at += 1
        if kind == 0x20:
            loaded = words.get(value, 0)
        elif kind == 0x06:
            return value
        else:
            holds = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[kind]
            at += true if holds else false


def refused(error: int = errno.EPERM) -> int:
    return 0x00050000 | error


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_thread_is_made_and_a_process_or_a_namespace_is_not(machine: str) -> None:
    clone, clone3 = {"x86_64": (56, 435), "aarch64": (220, 435)}[machine]
    thread = 0x003D0F00
    assert verdict(machine, clone, thread) == _ALLOWED
    assert verdict(machine, clone, 17) == refused(), "fork"
    for space in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000, 0x00000080):
        assert verdict(machine, clone, thread | space) == refused()
    assert verdict(machine, clone3) == refused(errno.ENOSYS)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_only_what_is_listed_is_let_through(machine: str) -> None:
    column = list(_ARCHITECTURE).index(machine)
    listed = {number for each in system_calls._ALLOWED.values() if (number := each[column]) is not None}
    for number in range(600):
        if number not in listed | {
            435,
            {"x86_64": 56, "aarch64": 220}[machine],
            {"x86_64": 16, "aarch64": 29}[machine],
        }:
            assert verdict(machine, number) == refused(), number
        elif number in listed:
            assert verdict(machine, number) == _ALLOWED, number


def test_another_architectures_numbers_end_the_process() -> None:
    assert verdict("x86_64", 0, architecture=0x40000003) == _KILLED, "calls of 32 bits"
    assert verdict("x86_64", 0x40000000 + 1) == refused(), "x32"


@pytest.mark.parametrize("request_code", [0x5401, 0x5421])
def test_a_descriptor_is_asked_what_a_runtime_asks(request_code: int) -> None:
    assert verdict("x86_64", 16, 3, request_code) == _ALLOWED
    assert verdict("x86_64", 16, 3, 0x5412) == refused(), "TIOCSTI"


def test_an_unknown_machine_is_reported() -> None:
    with pytest.raises(OSError, match="use x86_64 or aarch64"):
        system_calls.program("riscv64")


@pytest.mark.skipif(platform.machine() != "x86_64" or not _HEADER.exists(), reason="no kernel headers of x86_64")
def test_the_numbers_are_the_kernels() -> None:
    numbers = dict(re.findall(r"#define __NR_(\w+) (\d+)", _HEADER.read_text()))
    for name, (number, _other) in system_calls._ALLOWED.items():
        if number is not None:
            assert numbers[name] == str(number), name
    generic = Path("/usr/include/asm-generic/unistd.h").read_text()
    others = dict(re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)", generic))
    others["newfstatat"] = others["fstatat"]
    for name, (_number, other) in system_calls._ALLOWED.items():
        if other is not None:
            assert others[name] == str(other), name
