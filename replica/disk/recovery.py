"""The records of a file that can still be found: a pure function of its valid headers."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from replica.disk.record import Record


class Recovered(NamedTuple):
    slot: int
    record: Record


class Recovery(NamedTuple):
    records: Sequence[Recovered]  # parents before their children
    last_identity: int  # give new identities above it


NOTHING = Recovery((), 0)


def findable(found: Iterable[Recovered]) -> Iterator[Recovered]:
    """Yield one record of each content, parents before their children.

    A lookup walks from the root, so nobody can ever find a record whose parent is missing: the parent's content would
    get a new identity. Such records are left out.
    """
    identities = {0}
    contents: set[tuple[int, bytes, bytes | None]] = set()
    for slot, record in sorted(found, key=lambda each: each.record.identity):  # a parent's identity is the lower one
        content = record.parent, record.tokens, record.exact
        if record.parent in identities and record.identity not in identities and content not in contents:
            identities.add(record.identity)
            contents.add(content)
            yield Recovered(slot, record)
