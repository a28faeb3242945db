"""Block numbers that say what was before the block too: so they must, and so not every file has them."""

from collections.abc import Iterator, Sequence

from lab.trace.requests import TraceRequest


def beginnings_named(requests: Sequence[TraceRequest]) -> Sequence[TraceRequest]:
    """The same, where each number comes after one other; else numbered anew, each with what is before it."""
    before: dict[int, int | None] = {}
    for request in requests:
        last = None
        for block in request.blocks:
            if before.setdefault(block, last) != last:
                return list(_numbered(requests))
            last = block
    return requests


def _numbered(requests: Sequence[TraceRequest]) -> Iterator[TraceRequest]:
    known: dict[tuple[int | None, int], int] = {}
    for request in requests:
        named: list[int] = []
        for block in request.blocks:
            named.append(known.setdefault((named[-1] if named else None, block), len(known)))
        yield request._replace(blocks=tuple(named))
