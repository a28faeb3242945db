"""Block numbers that identify the prefix too; some files have others."""

from collections.abc import Iterator, Sequence

from lab.trace.requests import TraceRequest


def beginnings_named(requests: Sequence[TraceRequest]) -> Sequence[TraceRequest]:
    """Return the requests; renumber their blocks if a number follows two different ones."""
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
