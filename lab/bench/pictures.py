"""Times to first token as pictures: how they are distributed, and when they came."""

from collections.abc import Sequence
from pathlib import Path

from lab.bench.answer import Outcome
from lab.plots import drawing

FEW = 2000  # points above this are drawn smaller


def draw(path: Path, title: str, names: Sequence[str], outcomes: Sequence[tuple[int, int, Outcome]]) -> None:
    """On the left the share of requests by time to first token, on the right each one when it was due."""
    with drawing(path, title=title, x="TTFT, s", y="share of requests") as left:
        sides = left.figure.add_gridspec(1, 2)
        left.set_subplotspec(sides[0])
        right = left.figure.add_subplot(sides[1], xlabel="due after, s", ylabel="TTFT, s")
        right.grid(alpha=0.3)
        right.spines[["top", "right"]].set_visible(False)
        for number, name in enumerate(names):
            own = [one for which, _, one in outcomes if which == number and not one.is_warm_up]
            points = [(one.intended_s, one.ttft_s) for one in own if one.ttft_s is not None]
            ttfts_s = sorted(ttft_s for _, ttft_s in points)
            shares = [(place + 1) / len(ttfts_s) for place in range(len(ttfts_s))]
            left.plot(ttfts_s, shares, drawstyle="steps-post", label=name, color=f"C{number}")
            size = 6 if len(points) <= FEW else 1
            right.scatter([at_s for at_s, _ in points], [ttft_s for _, ttft_s in points], s=size, color=f"C{number}")
        left.set_ylim(0, 1.02)
        right.set_ylim(bottom=0)
