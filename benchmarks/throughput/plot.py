"""Picture of the results: jobs finished per day and median wait, with a column for each workload and a group of bars
for each load.

If a workload was replayed with co-running, which is SharePod's default setting, the bar of SharePod shows that result.

Equal figures give an equal file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from throughput.replay import Sharing

COLOURS = {Sharing.EXCLUSIVE: "#9e9e9e", Sharing.STATIC: "#6fa8dc", Sharing.LENDING: "#2e8b57"}
NAMES = {Sharing.EXCLUSIVE: "a GPU for each job", Sharing.STATIC: "static fractions", Sharing.LENDING: "SharePod"}
TITLES = {"eager pairs": "programs with gaps", "default": "production mix", "gpushare100": "every job takes a share"}
WIDTH = 0.27
"""Width of a bar. The unit is the distance between two loads, which has room for three bars and a gap."""

Values = Mapping[float, Mapping[Sharing, float]]
"""One figure, by load and policy."""


def draw(per_day: Mapping[str, Values], waits_min: Mapping[str, Values], path: Path) -> None:
    """Write an SVG of the jobs finished per day and of the median waits in minutes, both by workload."""
    style: dict[Any, Any] = {"svg.hashsalt": "sharepod", "svg.fonttype": "none", "font.size": 9, "axes.titlesize": 9}
    with mpl.rc_context(style):
        figure, panels = plt.subplots(
            2,
            len(per_day),
            figsize=(3.1 * len(per_day) + 0.4, 4.4),
            squeeze=False,
            layout="constrained",
            gridspec_kw={"height_ratios": (3, 2)},
        )
        for column, name in enumerate(per_day):
            panels[0][column].set_title(TITLES.get(name, name))
            _bars(panels[0][column], per_day[name], gains=True)
            _bars(panels[1][column], waits_min[name], gains=False)
            panels[1][column].set_xlabel("load, in whole GPUs asked / GPUs there")
        panels[0][0].set_ylabel("jobs finished a day")
        panels[1][0].set_ylabel("median wait, minutes")
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None})
        plt.close(figure)


def _bars(panel: Axes, values: Values, *, gains: bool) -> None:
    """Draw a group of bars for each load. Above each bar is its value; with `gains`: its ratio to exclusive GPUs."""
    for place, by_policy in enumerate(values.values()):
        product = by_policy.get(Sharing.CO_RUNNING, by_policy[Sharing.LENDING])
        shown = {**{sharing: by_policy[sharing] for sharing in COLOURS}, Sharing.LENDING: product}
        for number, (sharing, value) in enumerate(shown.items()):
            at = place + (number - 1) * WIDTH
            label = NAMES[sharing] if place == 0 else None
            panel.bar(at, value, width=WIDTH * 0.92, color=COLOURS[sharing], label=label)
            if gains and sharing is Sharing.EXCLUSIVE:
                continue
            text = f"{value / by_policy[Sharing.EXCLUSIVE]:.2f}" if gains else f"{value:.0f}"
            panel.annotate(text, (at, value), ha="center", va="bottom", fontsize=7)
    panel.set_xticks(range(len(values)), [f"{load:g}" for load in values])
    panel.margins(y=0.12)
    panel.spines[["top", "right"]].set_visible(False)
