"""Label demand: the part of the arrivals that a GPU can still take, given the labels of its tenants.

- A GPU whose tenants have an exclusion label takes only that label: its worth is that label's part of the demand.
- A GPU whose tenants have no exclusion label takes all arrivals without one.
- A GPU with an anti-affinity label takes all arrivals except that label.
- A GPU that is full of interactive tenants takes all arrivals except interactive ones.

Guarantees:
- An arrival's weight halves with every `HALF_LIFE` later arrivals, as in `demand.py`.
- At most `_MAX_LABELS` labels of each sort are kept from one renewal to the next.
- If no arrival has labels, every GPU is worth 1, so labels have no effect in a cluster that does not use them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from sharepod.api.gpunode import Latency, Mode
from sharepod.placement.state.types import LabelKey, PlacementRequest, label_key

from .sliced_work import Slices

_MAX_LABELS = 4096
"""Most labels of one sort (exclusion, anti-affinity) that are kept. The rarest are dropped, and count as never
requested."""


@dataclass(frozen=True)
class LabelShares:
    """Weights of labels among all arrivals: by exclusion label, by anti-affinity label, and of latency Interactive.
    Divided by `total` they are parts of all arrivals."""

    exclusion: Mapping[LabelKey, float] = field(default_factory=dict)
    anti_affinity: Mapping[LabelKey, float] = field(default_factory=dict)
    interactive: float = 0.0
    total: float = 1.0

    def open_to(self, exclusion: LabelKey | None) -> float:
        """Return the part of all arrivals that may join tenants with this exclusion label. None: tenants without
        one."""
        if exclusion is not None:
            return min(self.exclusion.get(exclusion, 0.0) / self.total, 1.0)
        return self._unlabelled

    @cached_property
    def _unlabelled(self) -> float:
        return max(1.0 - sum(weight / self.total for weight in self.exclusion.values()), 0.0)

    def not_kept_off(self, anti_affinity: Iterable[LabelKey], *, interactive: bool) -> float:
        """Return the part of all arrivals that may join a GPU with these anti-affinity labels. With `interactive`, the
        GPU takes no further interactive tenant."""
        part = 1.0 - self.interactive / self.total if interactive else 1.0
        for label in anti_affinity:
            part *= 1.0 - self.anti_affinity.get(label, 0.0) / self.total
        return max(part, 0.0)

    def worth(self, exclusions: Iterable[LabelKey | None], anti_affinity: Iterable[LabelKey], *, full: bool) -> float:
        """Return the part of all arrivals whose labels allow them to join a GPU with tenants of these labels.

        Args:
            exclusions: Exclusion labels of the GPU's tenants, None for tenants without one; empty: no tenants.
            anti_affinity: Anti-affinity labels of the GPU's tenants.
            full: True if the GPU takes no further interactive tenant.
        """
        labels = list(exclusions)
        if len(labels) > 1:
            # No further tenant may join tenants with different exclusion labels. A loaded ledger may contain these.
            return 0.0
        part = self.not_kept_off(anti_affinity, interactive=full)
        return part * self.open_to(labels[0]) if labels else part


class LabelDemand:
    """Weighted count of arrivals by label."""

    def __init__(self) -> None:
        self._exclusion: dict[LabelKey, float] = {}
        self._anti_affinity: dict[LabelKey, float] = {}
        self._interactive = 0.0

    def count(self, request: PlacementRequest, weight: float) -> None:
        """Count one arrival with the given weight (see `Demand`)."""
        gpu = request.gpu
        exclusion = label_key(request.namespace, gpu.labels.exclusion)
        if exclusion is not None and gpu.mode is not Mode.EXCLUSIVE:
            self._exclusion[exclusion] = self._exclusion.get(exclusion, 0.0) + weight
        anti_affinity = label_key(request.namespace, gpu.labels.anti_affinity)
        if anti_affinity is not None:
            self._anti_affinity[anti_affinity] = self._anti_affinity.get(anti_affinity, 0.0) + weight
        if gpu.latency is Latency.INTERACTIVE:
            self._interactive += weight

    def rescale(self, unit: float) -> None:
        """Divide all weights by `unit`."""
        self._exclusion = {label: weight / unit for label, weight in self._exclusion.items()}
        self._anti_affinity = {label: weight / unit for label, weight in self._anti_affinity.items()}
        self._interactive /= unit

    def keep_commonest(self) -> Slices[None]:
        """Drop the rarest labels of each sort beyond `_MAX_LABELS`, in slices. Among equally rare labels, drop the
        earliest counted."""
        for weights in (self._exclusion, self._anti_affinity):
            if len(weights) > _MAX_LABELS:
                labels = list(weights)
                weight = np.fromiter(weights.values(), dtype=np.float64, count=len(labels))
                for number in np.argsort(weight, kind="stable")[:-_MAX_LABELS].tolist():
                    del weights[labels[number]]
                yield

    def shares(self, total: float) -> LabelShares:
        """Return the weights of all labels as parts of `total`, the weight of all arrivals."""
        return LabelShares(dict(self._exclusion), dict(self._anti_affinity), self._interactive, total)
