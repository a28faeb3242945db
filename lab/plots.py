"""Plots: one drawing is one file, PNG or SVG by its name; matplotlib is loaded when something is drawn."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from api.settings import Unusable

SUFFIXES = (".png", ".svg")
INCHES = (8.0, 4.5)


def check_plot(path: Path) -> None:
    """Before long work: whether it can be drawn there."""
    if path.suffix not in SUFFIXES:
        raise Unusable(f"{str(path)!r} ends with {path.suffix!r}; give a name that ends with {' or '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise Unusable(f"{str(path.parent)!r} is no folder; make it, or name another")
    import matplotlib.figure  # noqa: F401  its absence is better said now


@contextmanager
def drawing(path: Path, *, title: str, x: str, y: str) -> Iterator[Any]:
    """Yields matplotlib's axes; the file is there, whole, when nothing went wrong."""
    check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, layout="constrained")
    axes = figure.add_subplot(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    yield axes
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False)
    beside = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        figure.savefig(beside, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
