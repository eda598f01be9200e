"""Seccomp filter of the worker: the list of system calls that it may make. A process cannot remove its filter.

Guarantees:
- A call that is not listed fails with EPERM.
- No listed call opens a network connection, starts a program, reaches another process, or changes a file, a mount or a
  namespace.
- `clone` creates threads only. The only sockets that can be created are pairs within the process.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

_ALLOWED: dict[str, tuple[int | None, int | None]] = {
    # name: (number on x86_64, number on aarch64) from asm/unistd_64.h and asm-generic/unistd.h
    "accept": (43, 202),
    "accept4": (288, 242),
    "access": (21, None),
    "brk": (12, 214),
    "clock_getres": (229, 114),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "close": (3, 57),
    "close_range": (436, 436),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_pwait": (281, 22),
    "epoll_wait": (232, None),
    "eventfd2": (290, 19),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "fcntl": (72, 25),
    "fstat": (5, 80),
    "ftruncate": (77, 46),
    "futex": (202, 98),
    "get_robust_list": (274, 100),
    "getcwd": (79, 17),
    "getdents64": (217, 61),
    "getegid": (108, 177),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getpeername": (52, 205),
    "getpid": (39, 172),
    "getppid": (110, 173),
    "getpriority": (140, 141),
    "getrandom": (318, 278),
    "getrlimit": (97, 163),
    "getrusage": (98, 165),
    "getsockname": (51, 204),
    "getsockopt": (55, 209),
    "gettid": (186, 178),
    "gettimeofday": (96, 169),
    "getuid": (102, 174),
    "lseek": (8, 62),
    "lstat": (6, None),
    "madvise": (28, 233),
    "membarrier": (324, 283),
    "memfd_create": (319, 279),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "munmap": (11, 215),
    "nanosleep": (35, 101),
    "newfstatat": (262, 79),
    "open": (2, None),
    "openat": (257, 56),
    "pipe2": (293, 59),
    "poll": (7, None),
    "ppoll": (271, 73),
    "pread64": (17, 67),
    "prlimit64": (302, 261),
    "read": (0, 63),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "readv": (19, 65),
    "recvfrom": (45, 207),
    "recvmsg": (47, 212),
    "restart_syscall": (219, 128),
    "rseq": (334, 293),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sched_getaffinity": (204, 123),
    "sched_yield": (24, 124),
    "sendmsg": (46, 211),
    "sendto": (44, 206),
    "set_robust_list": (273, 99),
    "setsockopt": (54, 208),
    "shutdown": (48, 210),
    "sigaltstack": (131, 132),
    "socketpair": (53, 199),
    "stat": (4, None),
    "statx": (332, 291),
    "sysinfo": (99, 179),
    "tgkill": (234, 131),
    "timerfd_create": (283, 85),
    "timerfd_settime": (286, 86),
    "times": (100, 153),
    "uname": (63, 160),
    "write": (1, 64),
    "writev": (20, 66),
}
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""For each machine: (column of its numbers in `_ALLOWED`, its AUDIT_ARCH value)."""
_CLONE, _CLONE3, _IOCTL = (56, 220), (435, 435), (16, 29)
_IOCTLS = (0x5401, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX: the ioctl requests that a language runtime makes on any descriptor."""
_CLONE_THREAD = 0x00010000
_CLONE_NEW = 0x7E020080
"""All clone flags that create a namespace."""

_LOAD, _JUMP_EQUAL, _JUMP_FROM, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_KILL, _ALLOW, _FAIL = 0x80000000, 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = 0, 4, 16, 24
"""Offsets in struct seccomp_data: number of the call, architecture, and the lower halves of the first two arguments."""
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2


class UnknownMachineError(OSError):
    """Error for a machine whose system call numbers are not in the table."""


def program(machine: str) -> list[tuple[int, int, int, int]]:
    """Return the filter for a machine as BPF instructions: (code, instructions to skip if true, if false, value).

    Raises `UnknownMachineError`.
    """
    if machine not in _ARCHITECTURES:
        raise UnknownMachineError(errno.ENOSYS, f"system calls of {machine} are not known; use x86_64 or aarch64")
    column, architecture = _ARCHITECTURES[machine]
    fail = (_RETURN, 0, 0, _FAIL | errno.EPERM)
    allow = (_RETURN, 0, 0, _ALLOW)
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_FROM, 0, 1, 0x40000000),  # refuse the x32 calls of x86_64, which have these numbers
        fail,
    ]
    for number in sorted(number for each in _ALLOWED.values() if (number := each[column]) is not None):
        code += [(_JUMP_EQUAL, 0, 1, number), allow]
    # clone3 fails with ENOSYS, because a filter cannot read its flags. The C library then creates threads by clone.
    code += [(_JUMP_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _FAIL | errno.ENOSYS)]
    code += [
        (_JUMP_EQUAL, 0, 5, _CLONE[column]),
        (_LOAD, 0, 0, _FIRST),
        (_JUMP_ANY_BIT, 0, 2, _CLONE_THREAD),
        (_JUMP_ANY_BIT, 1, 0, _CLONE_NEW),
        allow,
        fail,
    ]
    code += [(_JUMP_EQUAL, 0, 2 * len(_IOCTLS) + 1, _IOCTL[column]), (_LOAD, 0, 0, _SECOND)]
    for request in _IOCTLS:
        code += [(_JUMP_EQUAL, 0, 1, request), allow]
    return [*code, fail]


def restrict() -> None:
    """Permanently restrict this process and its future threads to the calls in `_ALLOWED`. Raises `OSError`."""
    code = program(platform.machine())
    packed = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in code))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    filter_ = Program(len(code), ctypes.addressof(packed))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(filter_), 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"the kernel takes no filter of system calls: {errno.errorcode.get(number, number)}")
