"""Reads a file's blocks, prompts and request names."""

from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from lab.analysis.breaks.prompts import Read, read_prompts
from lab.trace.formats import BadTrace, numbered_lines, read_log, read_trace
from lab.trace.requests import Trace

EVERY_BYTES = 1 << 20  # often enough to be told

Tell = Callable[[int], None]


class Timed(Struct):
    timestamp: float


_timed = msgspec.json.Decoder(Timed)


def read(path: Path, block_tokens: int | None, tell: Tell) -> Trace:
    trace = read_trace(path, block_tokens, _seldom(tell))
    if not trace.input_tokens:
        raise BadTrace(f"{path}: all of its prompts have 0 tokens; there is nothing to analyze")
    return trace


def is_log(path: Path) -> bool:
    """Only a log has the requests' ids; `read_trace` tells them apart by the same."""
    first = next(numbered_lines(path), None)
    return first is not None and b'"request_id"' in first[1]


def prompts(path: Path, tell: Tell) -> Read:
    return read_prompts(read_log(path, _seldom(tell)))


def names(path: Path) -> list[str]:
    """Name all requests: first those of the trace, in its order, then those that it leaves out."""
    if is_log(path):
        timed = [(line.ts, line.request_id, bool(line.blocks and line.block_tokens)) for line in read_log(path)]
    else:
        timed = [(_timed.decode(line).timestamp, str(number), True) for number, line in numbered_lines(path)]
    known = [(at_s, name) for at_s, name, is_known in timed if is_known]
    start_s = min((at_s for at_s, _ in known), default=0.0)
    known.sort(key=lambda each: each[0] - start_s)  # as the trace does, where two may become equal
    return [name for _, name in known] + [name for _, name, is_known in timed if not is_known]


def _seldom(tell: Tell) -> Tell:
    told = 0

    def on_bytes(done: int) -> None:
        nonlocal told
        if done - told >= EVERY_BYTES:
            told = done
            tell(done)

    return on_bytes
