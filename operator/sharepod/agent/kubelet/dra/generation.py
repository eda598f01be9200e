"""Generation of the GPUs' CDI devices by `nvidia-ctk`, for nodes where NVIDIA's toolkit is installed but has not
generated them.

Guarantees:
- The program runs from the node's filesystem, in the node's mount namespace, with a timeout.
- The output file has the path that NVIDIA's own service uses, so that no device is defined twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

PROGRAMS = (
    Path("/usr/bin/nvidia-ctk"),
    Path("/usr/local/bin/nvidia-ctk"),
    Path("/usr/local/nvidia/toolkit/nvidia-ctk"),  # installed by NVIDIA's GPU Operator
)
"""Possible paths of the program on the node."""
FILE = "nvidia.yaml"
"""Name of the file that NVIDIA's service nvidia-cdi-refresh writes in /var/run/cdi."""
TIMEOUT_S = 60.0
"""Timeout of the program in seconds. It queries the driver about each GPU and searches the disk for libraries."""
_OUTPUT_BYTES_MAX = 1 << 16
_NODE = Path("/proc/1")
"""Process 1 of the node, if the agent shares the node's PID namespace. Its root directory and mount namespace are the
node's."""


class CdiGenerator:
    """Generator of CDI devices. `generate` is called by one task at a time."""

    def __init__(
        self, folder: Path, *, programs: Sequence[Path] = PROGRAMS, node: Path = _NODE, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Args:
        folder: CDI directory, a path of the node.
        programs: possible paths of the program on the node.
        node: /proc folder of a process in the node's mount namespace.
        timeout_s: timeout of the program, in seconds.
        """
        self._folder = folder
        self._programs = tuple(programs)
        self._node = node
        self._timeout_s = timeout_s

    async def generate(self) -> str | None:
        """Run the program. Return why it failed, as text; None if it succeeded."""
        program = next((path for path in self._programs if _is_there(self._node, path)), None)
        if program is None:
            return "nvidia-ctk is not installed"
        command = [*self._enter(), str(program), "cdi", "generate", f"--output={self._folder / FILE}"]
        try:
            failure = await self._run(command)
        except OSError as error:
            failure = str(error)
        if failure is not None:
            log.error("cannot generate CDI devices", command=command, error=failure)
            return f"{program} cdi generate failed: {failure}"
        log.info("CDI devices generated", file=str(self._folder / FILE))
        return None

    def _enter(self) -> Sequence[str]:
        """Return the command that enters the node's mount namespace. Empty if the agent is in that namespace."""
        try:
            if (self._node / "ns/mnt").readlink() == Path("/proc/self/ns/mnt").readlink():
                return ()
        except OSError:
            return ()
        return ("nsenter", f"--mount={self._node / 'ns/mnt'}", "--")

    async def _run(self, command: Sequence[str]) -> str | None:
        process = await asyncio.create_subprocess_exec(
            *command,
            user=os.geteuid(),  # with a different real user, the dynamic linker would ignore the environment
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stderr is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                output = b""
                while part := await process.stderr.read(4096):
                    output = (output + part)[-_OUTPUT_BYTES_MAX:]
                status = await process.wait()
        except TimeoutError:
            return f"no end after {self._timeout_s:.0f} s"
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if status == 0:
            return None
        lines = output.decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else f"status {status}"


def _is_there(node: Path, program: Path) -> bool:
    try:
        return (node / "root" / program.relative_to("/")).is_file()
    except OSError:
        return False
