"""What the free time of a GPU is worth to the requests that will come, which is what keeps odd slivers from adding up.

A hole is worth what the requests bring that fill it best: each its time, less a price. The prices are those at which
the holes of the cluster want of each size as many as will come while there is room: small requests that come too seldom
to fill all the slivers that others leave make none of these worth anything, and a size that comes more often than holes
suit it has a price below nothing. Prices are kept from one estimate to the next.
What a GPU's free memory allows bounds its worth: time that no memory goes with is worth nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from sharepod.api.units import WHOLE_GPU

from ._scores import ffi as _ffi
from ._scores import lib as _lib
from .arrays import pointer
from .demand import DemandClass
from .usable_capacity import memory_share

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.integer[Any]]

_MAX_SIZES = 64
"""Sizes that have a price; rarer ones are taken for the next smaller that has."""
_ROUNDS = range(40, 150)
_WORK = 2_000_000
"""Holes times sizes times rounds of one estimate, where `_ROUNDS` allows: what bounds its time, to some 30 ms."""
_COMMON = 0.95
"""The part of all requests that is looked at for what memory is worth; the rarest are not."""


class Prices:
    """Prices by size, as they were found last."""

    def __init__(self) -> None:
        self._prices: dict[int, float] = {}

    def worth(self, shares: Mapping[DemandClass, float], free: Ints) -> Floats:
        """For 0 to 1000 free thousandths. `free`: of each GPU that takes shares."""
        wanted: dict[int, float] = {}
        for known, share in shares.items():
            wanted[known.milli] = wanted.get(known.milli, 0.0) + share * known.count
        worth = np.zeros(WHOLE_GPU + 1)
        if not wanted:
            return worth
        kept = sorted(sorted(wanted, key=lambda milli: (-wanted[milli], milli))[:_MAX_SIZES])
        milli = np.array(kept, dtype=np.int64)
        coming = np.zeros(len(kept))
        for size, share in wanted.items():
            coming[max(int(np.searchsorted(milli, size, side="right")) - 1, 0)] += share
        # As many as fill what is free, if none of it were lost.
        coming *= free.sum() / sum(size * share for size, share in wanted.items())
        step = int(np.gcd.reduce(milli))
        holes = np.bincount(free - free % step, minlength=WHOLE_GPU + 1).astype(np.float64)
        price = np.array([self._prices.get(size, 0.0) for size in kept])
        self._settle(milli, step, coming, holes, price, worth)
        self._prices = dict(zip(kept, price.tolist(), strict=True))
        return worth

    def worth_of_memory(self, shares: Mapping[DemandClass, float], size: int) -> Floats:
        """For 0 to 1000 free thousandths of a memory of `size` bytes: what common requests bring for which it is
        enough, whatever time there is beside it; at the prices found last."""
        gains: dict[int, float] = {}
        common, total = 0.0, _COMMON * sum(shares.values())
        for known in sorted(shares, key=lambda known: (-shares[known], known)):
            takes = max(memory_share(known.memory, known.milli, size), 1)
            gain = known.milli - self._prices.get(known.milli, 0.0)
            gains[takes] = max(gains.get(takes, gain), gain)
            common += shares[known]
            if common >= total:
                break
        worth = np.zeros(WHOLE_GPU + 1)
        takes_of, gain_of = np.array(list(gains), dtype=np.int64), np.array(list(gains.values()))
        _lib.shp_fill_memory(len(gains), *map(pointer, (takes_of, gain_of, worth)))
        return worth

    @staticmethod
    def _settle(milli: Ints, step: int, coming: Floats, holes: Floats, price: Floats, worth: Floats) -> None:
        sizes = len(milli)
        market = _ffi.new("shp_market *")
        market.sizes, market.step = sizes, step
        arrays: dict[str, Floats | Ints] = {
            "milli": milli,
            "coming": coming,
            "holes": holes,
            "price": price,
            "worth": worth,
        }
        scratch = {"chance": (WHOLE_GPU + 1) * sizes, "flow": WHOLE_GPU + 1, "wanted": sizes}
        arrays |= {name: np.zeros(length) for name, length in scratch.items()}
        kept = {name: pointer(array) for name, array in arrays.items()}
        for name, of_array in kept.items():
            setattr(market, name, of_array)
        steps = (WHOLE_GPU // step + 1) * sizes
        _lib.shp_settle_prices(market, min(max(_WORK // steps, _ROUNDS.start), _ROUNDS.stop))
