"""Tables as text."""

from collections.abc import Iterable, Iterator, Sequence

UNKNOWN = "-"


def aligned(rows: Iterable[Sequence[str]], gap: int = 2) -> Iterator[str]:
    """Each column as wide as its longest cell, the first one to the left and the others to the right; () is a gap."""
    cells = list(rows)
    widths = [max(map(len, column)) for column in zip(*filter(None, cells), strict=True)]
    for row in cells:
        first, *rest = row or [""]
        others = (" " * gap + cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=False))
        yield (first.ljust(widths[0]) + "".join(others)).rstrip()
