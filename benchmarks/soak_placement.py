"""Twenty minutes of random life of a cluster, against placement's rules: see `tests/property/soak_placement.py`."""

from __future__ import annotations

import sys

from harness.soak import main
from property.soak_placement import WANTED, soak

if __name__ == "__main__":
    sys.exit(main("placement", soak, wanted=WANTED))
