"""Watch of the GPUs' CDI devices. Only a GPU with such a device can be attached by a claim, so the watch reports GPUs
without one, with a remedy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import structlog

from sharepod.api.gpunode import Gpu

from .generation import CdiGenerator
from .gpu_devices import GpuDevices

log = structlog.get_logger(__name__)

INTERVAL_S = 2.0
"""Seconds between two checks. A check without changed files costs a few system calls."""
GENERATE_AFTER_S = 10.0
"""Seconds for which a device must be missing before the agent has it generated. NVIDIA's own service may be about to do
so."""
GENERATE_AGAIN_S = 300.0
"""Seconds between two attempts to generate."""


class CdiWatch:
    """Watch of one node's CDI devices, kept up to date by `run`."""

    def __init__(
        self,
        found: GpuDevices,
        gpus: Callable[[], Sequence[Gpu]],
        generator: CdiGenerator | None,
        *,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """Args:
        found: the devices in the CDI directories.
        gpus: returns the node's GPUs.
        generator: writes missing devices; None: none are written.
        changed: called when `problem` may have changed.
        """
        self._found = found
        self._gpus = gpus
        self._generator = generator
        self._changed = changed
        self._devices: Mapping[str, str] = {}
        self._lacking: tuple[Gpu, ...] = ()
        self._lacking_since: float | None = None
        self._generated_at: float | None = None
        self._failure: str | None = None

    def devices(self, uuids: Sequence[str]) -> Mapping[str, str]:
        """Return the CDI device of each of these GPUs, by UUID. GPUs without a device are missing."""
        return {uuid: self._devices[uuid] for uuid in uuids if uuid in self._devices}

    def all_devices(self) -> Sequence[str]:
        """Return the CDI devices of all GPUs of the node, sorted."""
        return sorted(self._devices.values())

    @property
    def problem(self) -> str | None:
        """Why GPUs of the node cannot be attached by a claim, as text with the remedy. None if all can be."""
        if not self._lacking:
            return None if self._devices else "the GPUs are not known yet"
        lacking = ", ".join(gpu.uuid for gpu in self._lacking)
        fix = "install NVIDIA's container toolkit and run `nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`"
        tried = f" ({self._failure})" if self._failure else ""
        return f"no CDI device names {lacking}{tried}; {fix}"

    async def run(self) -> None:
        """Check at intervals, until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self.look()
            await self._generate()

    async def look(self) -> None:
        """Look for the devices once."""
        gpus = tuple(self._gpus())
        before = (self._devices, self._lacking)
        self._devices = await asyncio.to_thread(self._found.find, gpus)
        self._lacking = tuple(gpu for gpu in gpus if gpu.uuid not in self._devices)
        if not self._lacking:
            self._lacking_since = self._failure = None
        elif self._lacking_since is None:
            self._lacking_since = asyncio.get_running_loop().time()
        if (self._devices, self._lacking) != before:
            log.info("CDI devices", devices=sorted(self._devices.values()), lacking=[gpu.uuid for gpu in self._lacking])
            self._changed()

    async def _generate(self) -> None:
        """Have missing devices generated if there is a generator, not too often."""
        now = asyncio.get_running_loop().time()
        if self._generator is None or self._lacking_since is None or now - self._lacking_since < GENERATE_AFTER_S:
            return
        if self._generated_at is not None and now - self._generated_at < GENERATE_AGAIN_S:
            return
        self._generated_at = now
        before, self._failure = self._failure, await self._generator.generate()
        if self._failure != before:
            self._changed()
