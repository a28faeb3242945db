"""Writes results: tables as text, and files in one step or directly into pipes and devices."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import click

from api.process.settings import Unusable

UNKNOWN = "-"


def aligned(rows: Iterable[Sequence[str]], gap: int = 2) -> Iterator[str]:
    """Each column as wide as its longest cell, the first one to the left and the others to the right; () is a gap."""
    cells = list(rows)
    widths = [max(map(len, column)) for column in zip(*filter(None, cells), strict=True)]
    for row in cells:
        first, *rest = row or [""]
        others = (" " * gap + cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=False))
        yield (first.ljust(widths[0]) + "".join(others)).rstrip()


def check_file(path: Path, option: str) -> None:
    if not path.parent.is_dir():
        raise Unusable(f"{option}: {str(path.parent)!r} is not a folder; create it, or name another")
    if path.is_dir():
        raise Unusable(f"{option}: {str(path)!r} is a folder; name a file in it")


def new_file(_: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """Check an option's file before long work; a callback."""
    if path is not None:
        check_file(path, param.opts[0])
    return path


def write_whole(path: Path, content: bytes | str) -> None:
    """Write a file in one step. Pipes and devices are written to; a link's target is replaced."""
    raw = content.encode() if isinstance(content, str) else content
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(raw)
        else:
            target = Path(os.path.realpath(path))
            beside = target.with_name(f".{target.name}.{os.getpid()}")
            try:
                beside.write_bytes(raw)
                beside.replace(target)
            finally:
                beside.unlink(missing_ok=True)
    except OSError as error:
        raise click.ClickException(f"cannot write {str(path)!r}: {error.strerror or error}") from error
