"""Plots: one drawing is one file, PNG or SVG by its name; matplotlib is loaded when something is drawn."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import click

from api.process.options import F, option
from api.process.settings import Unusable

SUFFIXES = (".png", ".svg")
INCHES = (8.0, 4.5)


def plot_option(what: str) -> Callable[[F], F]:
    """Make the option --plot, the parameter `plot_path`, whose file is checked before any work."""
    help = f"Draw {what}: .png or .svg."

    def checked(_: click.Context, __: click.Parameter, path: Path | None) -> Path | None:
        if path is not None:
            check_plot(path)
        return path

    return option("--plot", "FILE", help, name="plot_path", type=click.Path(path_type=Path), callback=checked)


def check_plot(path: Path) -> None:
    if path.suffix.lower() not in SUFFIXES:
        raise Unusable(f"{str(path)!r} ends with {path.suffix!r}; give a name that ends with {' or '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise Unusable(f"--plot: {str(path.parent)!r} is not a folder; create it, or name another")
    import matplotlib.figure  # noqa: F401  its absence is better said now


@contextmanager
def drawing(path: Path, *, title: str, x: str, y: str) -> Iterator[Any]:
    """Yield matplotlib's axes; write the file on success only."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, layout="constrained")
    axes = figure.add_subplot(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    yield axes
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False)
    kind = path.suffix.lower().removeprefix(".")
    drawn = BytesIO()
    figure.savefig(drawn, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    try:
        path.write_bytes(drawn.getvalue())
    except OSError as error:
        raise click.ClickException(f"cannot write {str(path)!r}: {error.strerror or error}") from error
