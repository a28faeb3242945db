"""A drawing of docs/ is one SVG file, the same whenever it is drawn."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def drawing(path: Path, *, title: str, x: str, y: str) -> Iterator[Any]:
    """Yield matplotlib's axes; write the file on success only."""
    from matplotlib.figure import Figure  # it takes a second, and a fast test imports this file

    figure = Figure(figsize=(8.0, 4.5), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    yield axes
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False)
    figure.savefig(path, format="svg", metadata={"Date": None})
