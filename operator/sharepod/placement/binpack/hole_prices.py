"""Shadow prices: the value of a GPU's free time, its *hole*, to the requests that will arrive.

The value of a hole is the time of the best set of requests that fits into it, less a price for each request, which
depends on its size. At the right prices, the best fillings of the cluster's holes contain each request size as often as
it is expected to arrive. They are the dual prices of the cutting-stock problem (Gilmore and Gomory, 1961), kept from
one estimate to the next.

- Requests that are too rare to fill all remaining slivers of time give these slivers no value.
- A size that arrives more often than there are holes for it has a price below zero, so holes that fit it are worth
  more.
- A GPU's free memory bounds the value of its hole: time without memory is worth nothing.
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
from .demand import DemandClass, memory_milli
from .sliced_work import Slices

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.integer[Any]]

_MAX_SIZES = 64
"""Most request sizes that have a price: the most frequent sizes. Any other size has the price of the next smaller
priced size."""
_ROUNDS = range(40, 150)
"""Least and most rounds of one estimate. Prices change little in later rounds."""
_WORK = 2_000_000
"""Steps of one estimate, about 30 ms: holes x sizes x rounds, where rounds are within `_ROUNDS`."""
_SLICE = 200_000
"""Steps of one slice, about 3 ms."""
_COMMON = 0.95
"""Part of all arrivals that the classes which determine the value of memory make up: the most frequent classes."""


class ShadowPrices:
    """Price of each request size, as of the last estimate. Sizes and prices in thousandths of a GPU's time."""

    def __init__(self) -> None:
        self._prices: dict[int, float] = {}

    def hole_values(self, shares: Mapping[DemandClass, float], free: Ints) -> Slices[Floats]:
        """Return the value of a hole of 0 to 1000 thousandths, of shape (1001,). Prices are found in slices, starting
        from the last ones.

        Args:
            shares: Part of all arrivals, by class.
            free: Free thousandths of each GPU that takes shares.
        """
        wanted: dict[int, float] = {}
        for known, share in shares.items():
            wanted[known.milli] = wanted.get(known.milli, 0.0) + share * known.count
        value = np.zeros(WHOLE_GPU + 1)
        if not wanted:
            return value
        kept = sorted(sorted(wanted, key=lambda milli: (-wanted[milli], milli))[:_MAX_SIZES])
        milli = np.array(kept, dtype=np.int64)
        coming = np.zeros(len(kept))
        for size, share in wanted.items():
            coming[max(int(np.searchsorted(milli, size, side="right")) - 1, 0)] += share
        # Expected arrivals until the free time of all GPUs is used up, by size.
        coming *= free.sum() / sum(size * share for size, share in wanted.items())
        step = int(np.gcd.reduce(milli))
        holes = np.bincount(free - free % step, minlength=WHOLE_GPU + 1).astype(np.float64)
        price = np.array([self._prices.get(size, 0.0) for size in kept])
        yield from self._settle(milli, step, coming, holes, price, value)
        self._prices = dict(zip(kept, price.tolist(), strict=True))
        return value

    def memory_values(self, shares: Mapping[DemandClass, float], size: int) -> Floats:
        """Return the value of 0 to 1000 free thousandths of a GPU memory of `size` bytes, of shape (1001,).

        The value is the time, less prices, of the best set of frequent requests that fits into this memory, as if GPU
        time were unlimited.
        """
        gains: dict[int, float] = {}
        common, total = 0.0, _COMMON * sum(shares.values())
        for known in sorted(shares, key=lambda known: (-shares[known], known)):
            takes = max(memory_milli(known.memory, known.milli, size), 1)
            gain = known.milli - self._prices.get(known.milli, 0.0)
            gains[takes] = max(gains.get(takes, gain), gain)
            common += shares[known]
            if common >= total:
                break
        value = np.zeros(WHOLE_GPU + 1)
        takes_of, gain_of = np.array(list(gains), dtype=np.int64), np.array(list(gains.values()))
        _lib.shp_fill_memory(len(gains), *map(pointer, (takes_of, gain_of, value)))
        return value

    @staticmethod
    def _settle(milli: Ints, step: int, coming: Floats, holes: Floats, price: Floats, value: Floats) -> Slices[None]:
        sizes = len(milli)
        stock = _ffi.new("shp_cutting_stock *")
        stock.sizes, stock.step = sizes, step
        arrays: dict[str, Floats | Ints] = {
            "milli": milli,
            "coming": coming,
            "holes": holes,
            "price": price,
            "value": value,
        }
        scratch = {"chance": (WHOLE_GPU + 1) * sizes, "flow": WHOLE_GPU + 1, "wanted": sizes}
        arrays |= {name: np.zeros(length) for name, length in scratch.items()}
        kept = {name: pointer(array) for name, array in arrays.items()}
        for name, of_array in kept.items():
            setattr(stock, name, of_array)
        steps = (WHOLE_GPU // step + 1) * sizes
        rounds = min(max(_WORK // steps, _ROUNDS.start), _ROUNDS.stop)
        at_once = max(_SLICE // steps, 1)
        for first in range(0, rounds, at_once):
            _lib.shp_settle_prices(stock, first, min(first + at_once, rounds), rounds)
            yield
