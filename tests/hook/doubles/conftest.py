"""Fixtures of the tests of the doubles."""

from __future__ import annotations

from pathlib import Path

import pytest
from doubles.gpus import create_state
from hook.conftest import DEVICE_MEMORY, GPU_0, GPU_1, MIB


@pytest.fixture
def state(tmp_path: Path, double: Path) -> Path:
    """State file of two devices, of which the second has almost no memory."""
    return create_state(tmp_path / "gpus", [(GPU_0, "Simulated GPU", DEVICE_MEMORY), (GPU_1, "Simulated GPU", MIB)])
