"""Trace files: JSON lines, plain or gzipped, of Mooncake's kind or written by a router's request log.

Mooncake's lines are {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [block, ...]}, some
with a "session"; how long its blocks are, 512 tokens or less, follows from lengths and numbers of blocks. A first line
may say it, {"meta": {"block_size": tokens}}, and "hash_runs": [first, count, ...] stand for "hash_ids" where numbers
follow each other. A router writes `LogLine`; lines in which it was cut off, by a full disk or its end, are left out.
"""

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, count, islice
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct
from xxhash import xxh3_64_intdigest

from api.process.settings import Unusable
from lab.trace.requests import Trace, TraceRequest
from router.log_lines import LogLine

GZIP_MAGIC = b"\x1f\x8b"
BOM = b"\xef\xbb\xbf"
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
EVERY_BYTES = 1 << 20  # it is told how far the reading is
MAX_MS = 1e15  # some thousand years
MAX_TOKENS = 10**9
MAX_BLOCKS = 10**8  # the blocks of all prompts: some gigabytes
MOONCAKE_LINES = (
    'each line is {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}, '
    'or has "hash_runs": [first, count, ...]'
)
META_LINE = 'the first line may be {"meta": {"block_size": tokens}}'
LOG_LINES = "each line is one request, as `warmroute router --request-log` writes it"
COMMON_BLOCK_TOKENS = (512, 16, 64, 32, 128, 256, 1024)  # tried first

Line = TypeVar("Line")


class BadTrace(Unusable):
    """An error with the file, and the line if known."""


class MooncakeLine(Struct):
    timestamp: Annotated[float, Meta(ge=-MAX_MS, le=MAX_MS)]
    input_length: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    output_length: Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
    hash_ids: tuple[int, ...] | None = None
    hash_runs: tuple[int, ...] | None = None
    session: int | str | None = None

    def __post_init__(self) -> None:
        if (self.hash_ids is None) == (self.hash_runs is None):
            raise ValueError("it needs either hash_ids or hash_runs")
        if self.hash_runs is not None and (len(self.hash_runs) % 2 or min(self.hash_runs[1::2], default=1) < 1):
            raise ValueError("hash_runs are not pairs of a first number and a count")

    @property
    def named(self) -> int:
        """How many blocks."""
        return len(self.hash_ids) if self.hash_ids is not None else sum((self.hash_runs or ())[1::2])

    @property
    def blocks(self) -> tuple[int, ...]:
        if self.hash_ids is not None:
            return self.hash_ids
        assert self.hash_runs is not None, "it has one or the other"
        pairs = zip(self.hash_runs[::2], self.hash_runs[1::2], strict=True)
        return tuple(chain.from_iterable(range(first, first + count) for first, count in pairs))


class _About(Struct):
    block_size: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]


class MetaLine(Struct):
    meta: _About


_mooncake = msgspec.json.Decoder(MooncakeLine)
_meta = msgspec.json.Decoder(MetaLine)
_logged = msgspec.json.Decoder(LogLine)


def read_trace(path: Path, block_tokens: int | None = None, on_bytes: Callable[[int], None] | None = None) -> Trace:
    """`block_tokens`: for a file that does not say it; `on_bytes` is told how much of the file has been read."""
    numbered = numbered_lines(path, on_bytes)
    first = next(numbered, None)
    if first is None:
        raise BadTrace(f"{path} holds no requests")
    if _is_logged(first[1]):
        return _of_log(path, list(_whole(path, chain([first], numbered))), block_tokens)
    if b'"meta"' in first[1] and b'"timestamp"' not in first[1]:
        [(_, meta)] = _decoded(path, [first], _meta, META_LINE)
        block_tokens = block_tokens or meta.meta.block_size
    else:
        numbered = chain([first], numbered)
    return _of_mooncake(path, list(_decoded(path, numbered, _mooncake, MOONCAKE_LINES)), block_tokens)


def is_log(path: Path) -> bool:
    return any(_is_logged(line) for _, line in islice(numbered_lines(path), 1))


def _is_logged(line: bytes) -> bool:
    """Only lines of a log have ids."""
    return b'"request_id"' in line


def read_log(path: Path, on_bytes: Callable[[int], None] | None = None) -> Iterator[LogLine]:
    """The lines of a router's request log, as they were written, without those that it was cut off in."""
    yield from _whole(path, numbered_lines(path, on_bytes))


def _whole(path: Path, lines: Iterable[tuple[int, bytes]]) -> Iterator[LogLine]:
    """BadTrace: no line is one of a log, or one that is JSON, and not the last, is something else."""
    has_read = False
    torn: BadTrace | None = None  # the first
    wrong: BadTrace | None = None
    for number, line in lines:
        if wrong is not None:
            raise wrong
        try:
            logged = _logged.decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            bad = BadTrace(f"{path}, line {number}: {error}; {LOG_LINES}")
            torn = torn or bad
            with suppress(msgspec.DecodeError, RecursionError):  # it is JSON, and so was not cut off
                msgspec.json.decode(line)
                wrong = bad
        else:
            has_read = True
            yield logged
    if torn is not None and not has_read:
        raise torn


def _decoded(
    path: Path, lines: Iterable[tuple[int, bytes]], decoder: msgspec.json.Decoder[Line], expected: str
) -> Iterator[tuple[int, Line]]:
    for number, line in lines:
        try:
            yield number, decoder.decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadTrace(f"{path}, line {number}: {error}; {expected}") from error


def numbered_lines(path: Path, on_bytes: Callable[[int], None] | None = None) -> Iterator[tuple[int, bytes]]:
    """Empty lines are left out."""
    if path.exists() and not path.is_file():  # some read it more than once
        raise BadTrace(f"{path} is no ordinary file; save what it gives to one first")
    with path.open("rb") as plain:
        is_packed = plain.read(2) == GZIP_MAGIC
        plain.seek(0)
        opened, told = gzip.GzipFile(fileobj=plain) if is_packed else plain, 0
        try:
            for number, line in enumerate(opened, start=1):
                if number == 1 and line.startswith(UTF_16):
                    raise BadTrace(f"{path} is UTF-16; convert it to UTF-8: iconv -f utf-16 -t utf-8")
                if number == 1:
                    line = line.removeprefix(BOM)
                if line and not line.isspace():
                    yield number, line
                if on_bytes is not None and plain.tell() - told > EVERY_BYTES:
                    told = plain.tell()
                    on_bytes(told)
            if on_bytes is not None:
                on_bytes(plain.tell())
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise BadTrace(f"{path} is damaged: {error}") from error


def _of_mooncake(path: Path, numbered: Sequence[tuple[int, MooncakeLine]], block_tokens: int | None) -> Trace:
    if not numbered:
        raise BadTrace(f"{path} holds no requests")
    lines = [line for _, line in numbered]
    if (named := sum(line.named for line in lines)) > MAX_BLOCKS:
        raise BadTrace(f"{path} names {named:,} blocks; {MAX_BLOCKS:,} can be read at once, split it")
    size = block_tokens or _block_tokens(path, lines)
    start_ms = min(line.timestamp for line in lines)
    unused = count(1 + max(max(line.blocks, default=0) for line in lines))
    requests = []
    for number, line in numbered:
        full, rest = divmod(line.input_length, size)
        blocks, wanted = line.blocks, full + bool(rest)
        if rest and line.named == full:  # some files name full blocks only; one that is only begun is nobody else's
            blocks = (*blocks, next(unused))
        if len(blocks) != wanted:
            raise BadTrace(
                f"{path}, line {number} has {line.input_length:,} tokens, which is {wanted:,} blocks of {size}, "
                f"but it names {len(blocks):,}"
            )
        at_s = (line.timestamp - start_ms) / 1000
        session = None if line.session is None else str(line.session)
        requests.append(TraceRequest(at_s, line.input_length, line.output_length, blocks, session))
    return Trace(_name(path), size, sorted(beginnings_named(requests), key=lambda request: request.at_s))


def _of_log(path: Path, lines: Sequence[LogLine], block_tokens: int | None) -> Trace:
    known = [line for line in lines if line.blocks and line.block_tokens]
    if not known:
        raise BadTrace(f"{path}: no request of it names its blocks; only those of exact prompts can be used")
    size = block_tokens or known[0].block_tokens
    if mixed := {line.block_tokens for line in known} - {size}:
        raise BadTrace(f"{path} has blocks of {size} and of {min(mixed)} tokens; split it by model first")
    for number, line in enumerate(known, start=1):
        if not (abs(line.ts) <= MAX_MS and 1 <= line.prompt_tokens <= MAX_TOKENS):
            raise BadTrace(f"{path}, request {number}: {line.prompt_tokens} tokens at {line.ts} s cannot be")
    start_s = min(line.ts for line in known)
    requests = []
    for line in known:
        blocks = tuple(line.blocks)
        if line.prompt_tokens > len(blocks) * size:  # a log names full blocks; one that is only begun is nobody else's
            blocks = (*blocks, -1 - xxh3_64_intdigest(line.request_id.encode()))
        at_s = line.ts - start_s
        requests.append(TraceRequest(at_s, line.prompt_tokens, line.output_tokens or 0, blocks, line.session))
    return Trace(_name(path), size, sorted(beginnings_named(requests), key=lambda request: request.at_s))


def beginnings_named(requests: Sequence[TraceRequest]) -> Sequence[TraceRequest]:
    """Return the requests; renumber their blocks if a number follows two different ones.

    Numbers identify what comes before them, too; those of some files do not.
    """
    before: dict[int, int | None] = {}
    for request in requests:
        last = None
        for block in request.blocks:
            if before.setdefault(block, last) != last:
                return list(_renumbered(requests))
            last = block
    return requests


def _renumbered(requests: Sequence[TraceRequest]) -> Iterator[TraceRequest]:
    known: dict[tuple[int | None, int], int] = {}
    for request in requests:
        named: list[int] = []
        for block in request.blocks:
            named.append(known.setdefault((named[-1] if named else None, block), len(known)))
        yield request._replace(blocks=tuple(named))


def _block_tokens(path: Path, lines: Sequence[MooncakeLine]) -> int:
    """The size at which every prompt has as many blocks as it names."""
    longest = max(lines, key=lambda line: line.named)
    if not longest.named:
        raise BadTrace(f"{path}: no request of it names a block")
    about = longest.input_length / longest.named
    sizes: Iterable[int] = chain(COMMON_BLOCK_TOKENS, range(max(1, int(about)), int(about * 2) + 2))
    for size in sizes:
        if all(-(-line.input_length // size) == line.named for line in lines):
            return size
    raise BadTrace(
        f"{path}: no block size fits all of its requests: its longest has {longest.input_length:,} tokens in "
        f"{longest.named:,} blocks; give --block-tokens"
    )


def _name(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".jsonl")
