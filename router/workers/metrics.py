"""One answer out of those of all workers."""

import re
from collections.abc import Mapping

_HEAD = re.compile(rb"^# HELP ", re.MULTILINE)


def metrics_of_all(texts: Mapping[int, bytes]) -> bytes:
    """The metrics of numbered workers as one text, in which each line has its worker's number.

    Sums would fall when a worker ends, and what is computed from counters would take that for a restart of all.
    """
    heads: dict[bytes, bytes] = {}
    lines: dict[bytes, list[bytes]] = {}
    for number, text in sorted(texts.items()):
        for family in _HEAD.split(text)[1:]:
            help_line, type_line, *rows = family.rstrip(b"\n").split(b"\n")
            name = help_line.split(b" ", 1)[0]
            heads.setdefault(name, b"# HELP " + help_line + b"\n" + type_line + b"\n")
            lines.setdefault(name, []).extend(_marked(row, number) for row in rows)
    return b"".join(heads[name] + b"".join(row + b"\n" for row in lines[name]) for name in heads)


def _marked(row: bytes, number: int) -> bytes:
    name, brace, rest = row.partition(b"{")
    if brace:
        return b'%b{worker="%d",%b' % (name, number, rest)
    name, _, value = row.partition(b" ")
    return b'%b{worker="%d"} %b' % (name, number, value)
