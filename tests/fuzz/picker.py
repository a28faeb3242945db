"""Fuzz of a gateway's streams: `python -m tests.fuzz.picker --count 1000000`.

Random and mutated messages go through the picker's own conversations, several at a time, with a whole router behind
them but no socket. Whatever comes, in whatever order, each reply fits what was asked, a stream ends by an answer or by
a protocol error alone, and nothing is left in the books. Stream number N depends on the seed and N alone, and a router
lives for BLOCK streams, so a failure comes again with `--seed S --first F --count 1` as printed.
"""

import argparse
import asyncio
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from random import Random
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from msgspec import Struct, field

from router.http.picker.conversation import Conversation
from router.http.picker.wire import ProcessingRequest
from tests.fuzz.decode import GROWTH_MIB, Failure, peak_mib
from tests.fuzz.picker_world import (
    ANSWER_PARTS,
    ENDPOINTS,
    World,
    answer_heads,
    bodies,
    header_list,
    random_head,
    wired,
)
from tests.fuzz.watched import watched

BLOCK = 400  # streams by one router
TOGETHER = 6  # streams at a time
IDLE_S = 60.0  # for a few streams, which wait for a few tenths at most
STALL_S = 0.04
HEADS = 600  # of requests


class Aborted(Exception):
    """The stream ends by a protocol error."""


# ---- messages


class Sequences:
    """Makes sequences of messages: usual ones, most of them changed."""

    def __init__(self) -> None:
        rng = Random(0)
        self.heads = [random_head(rng) for _ in range(HEADS)]
        self.bodies = list(bodies())
        self.usable = self.bodies[:9]
        self.answers = list(answer_heads())
        self.trailers = [
            wired(request_trailers={"trailers": {"headers": header_list({"x-a": b"1"})}}),
            wired(request_trailers={}),
        ]

    def sequence(self, seed: int, number: int) -> list[bytes]:
        rng = Random(f"{seed}:{number}")
        messages = self._usual(rng)
        if rng.random() < 0.5:
            for _ in range(rng.choice((1, 1, 2, 4))):
                self._change(rng, messages)
        return messages

    def _usual(self, rng: Random) -> list[bytes]:
        body = rng.choice(self.usable if rng.random() < 0.8 else self.bodies)
        messages = [rng.choice(self.heads), *self._parts(rng, "request_body", body)]
        if rng.random() < 0.1:
            messages.append(rng.choice(self.trailers))
        messages.append(rng.choice(self.answers))
        parts = rng.choices(ANSWER_PARTS, k=rng.choice((1, 1, 2, 3, 8)))
        messages += [wired(response_body={"body": part}) for part in parts]
        messages.append(
            wired(response_body={"end_of_stream": True}) if rng.random() < 0.7 else wired(response_trailers={})
        )
        return messages

    @staticmethod
    def _parts(rng: Random, kind: str, body: bytes) -> list[bytes]:
        cut = rng.choice((1, 1, 1, 1, 1, 2, 3))
        size = len(body) // cut + 1
        pieces = [body[start : start + size] for start in range(0, len(body) or 1, size)]
        ends = rng.random() < 0.9
        return [
            wired(**{kind: {"body": piece, "end_of_stream": ends and number == len(pieces)}})
            for number, piece in enumerate(pieces, 1)
        ]

    def _change(self, rng: Random, messages: list[bytes]) -> None:
        at = rng.randrange(len(messages) + 1)
        if at == len(messages):
            messages.append(self._any(rng))
            return
        match rng.randrange(7):
            case 0:
                del messages[at:]
                messages.append(b"")
            case 1:
                del messages[at]
                messages.append(b"")
            case 2:
                messages.insert(at, messages[at])
            case 3:
                other = rng.randrange(len(messages))
                messages[at], messages[other] = messages[other], messages[at]
            case 4:
                messages.insert(at, self._any(rng))
            case 5:
                messages[at] = self._any(rng)
            case _:
                messages[at] = _changed_bytes(rng, messages[at])

    def _any(self, rng: Random) -> bytes:
        if rng.random() < 0.05:
            return rng.choice((b"", b"\xff", b"\x22\x00" * 200_000, rng.randbytes(20)))
        return rng.choice(self._usual(rng))


def _changed_bytes(rng: Random, raw: bytes) -> bytes:
    changed = bytearray(raw[:2000])
    for _ in range(rng.choice((1, 1, 3))):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(4):
            case 0:
                del changed[at:]
            case 1:
                changed[at:at] = rng.randbytes(rng.randrange(1, 6))
            case 2:
                del changed[at : at + rng.randrange(1, 9)]
            case _ if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
    return bytes(changed)


# ---- properties


class Report(Struct):
    messages: int = 0
    streams: int = 0
    picked: int = 0
    answered: int = 0  # to their end
    refused: Counter[int] = field(default_factory=Counter)  # by status
    aborted: int = 0
    cancelled: int = 0
    seconds: float = 0.0
    growth_mib: float = 0.0

    def __str__(self) -> str:
        refused = ", ".join(f"{status}: {count}" for status, count in sorted(self.refused.items()))
        return (
            f"{self.messages} messages in {self.streams} streams: {self.picked} picked, {self.answered} answered, "
            f"{self.aborted} aborted, {self.cancelled} cancelled, refused {refused or 'none'}; {self.seconds:.1f} s of "
            f"the processor, peak memory +{self.growth_mib:.0f} MiB"
        )


class Context:
    """The gateway's end of a stream: it gives the messages, and checks each reply."""

    def __init__(self, messages: list[bytes], rng: Random, report: Report) -> None:
        self._messages = iter(messages)
        self._rng = rng
        self._report = report
        self._read: Counter[str] = Counter()
        self._written: Counter[str] = Counter()
        self._is_over = False
        self._length: int | None = None
        self._came_back = 0

    async def read(self) -> Any:
        if (chance := self._rng.random()) < 0.3:
            await asyncio.sleep(0)
        elif chance > 0.999:
            await asyncio.sleep(STALL_S)
        elif chance > 0.995:
            raise asyncio.CancelledError  # as gRPC does if the gateway leaves
        raw = next(self._messages, None)
        if raw is None:
            return grpc.aio.EOF
        self._report.messages += 1
        self._read["any"] += 1
        with suppress(DecodeError):
            self._read.update(field.name for field, _ in ProcessingRequest.FromString(raw).ListFields())
        return raw

    async def write(self, response: Any) -> None:
        if self._rng.random() < 0.001:
            raise asyncio.CancelledError
        assert not self._is_over, "a reply came after the last one"
        [kind] = [field.name for field, _ in response.ListFields() if field.name != "dynamic_metadata"]
        self._written[kind] += 1
        if kind == "immediate_response":
            self._check_refusal(response.immediate_response)
            return
        assert self._read[kind], f"a reply about {kind} came unasked"
        if kind in ("request_headers", "request_body"):
            self._check_request(kind, response)
        response.SerializeToString()

    async def abort(self, code: Any, details: str) -> None:
        assert code is grpc.StatusCode.INVALID_ARGUMENT and len(details) < 1000, (code, details)
        self._is_over = True
        raise Aborted(details)

    def _check_refusal(self, refusal: Any) -> None:
        self._is_over = True
        self._report.refused[refusal.status.code] += 1
        assert "response_headers" not in self._written, "a request was refused after its answer began"
        assert not self._is_picked, "a request was refused after it was picked"
        told = [one.header.raw_value for one in refusal.headers.set_headers]
        assert b"sk-" not in refusal.body + b"".join(told), "an error shows a key"

    def _check_request(self, kind: str, response: Any) -> None:
        common = getattr(response, kind).response
        mutation = common.header_mutation
        changed = {one.header.key: one.header.raw_value for one in mutation.set_headers}
        named = response.dynamic_metadata.fields.get("envoy.lb")
        if named is not None:
            self._check_choice(named.struct_value["x-gateway-destination-endpoint"], changed, mutation)
        part = common.body_mutation.streamed_response
        if common.body_mutation.HasField("streamed_response"):
            assert self._is_picked, "a body came back before the request was picked"
            self._came_back += len(part.body)
            assert not part.end_of_stream or self._length in (None, self._came_back), "the body has another length"

    @property
    def _is_picked(self) -> bool:
        return self._written["picked"] > 0

    def _check_choice(self, endpoints: str, changed: dict[str, bytes], mutation: Any) -> None:
        assert not self._is_picked, "a request was picked twice"
        self._written["picked"] += 1
        self._report.picked += 1
        assert set(endpoints.split(",")) <= {*ENDPOINTS}, endpoints
        assert changed["x-gateway-destination-endpoint"] == endpoints.encode()
        assert "x-gateway-destination-endpoint" not in mutation.remove_headers
        assert changed["authorization"] == b"Bearer sk-replicas", "a replica gets another key"
        length = changed.get("content-length")
        self._length = None if length is None else int(length)

    def check_replies(self) -> None:
        """Check that no reply is without a message."""
        replies = self._written.total() - self._written["picked"] - self._written["immediate_response"]
        most_parts = 2 + self._came_back // 62_000 + 70_000 * self._read["any"] // 62_000
        assert replies <= self._read["any"] + most_parts, f"{replies} replies to {self._read['any']} messages"
        for kind in ("request_headers", "request_trailers", "response_headers", "response_trailers"):
            assert self._written[kind] <= 1, f"{self._written[kind]} replies about {kind}"


async def converse(world: World, context: Context, report: Report) -> None:
    report.streams += 1
    world.gateway.streams += 1
    try:
        conversation = Conversation(world.gateway, context, 1.0, 1.0)
        await conversation.run()
        report.answered += conversation._stream.phase.name == "OVER"
    except Aborted:
        report.aborted += 1
    except asyncio.CancelledError:
        report.cancelled += 1
    finally:
        world.gateway.streams -= 1
    context.check_replies()


async def disturbances(world: World, rng: Random) -> None:
    for _ in range(rng.choice((0, 0, 0, 1, 3))):
        await asyncio.sleep(0)
        world.disturb(rng)


# ---- many of them


def fuzz(count: int, seed: int, first: int = 0) -> Iterator[Report]:
    """Run whole blocks from stream number `first` on until so many messages have come; yield the report after each."""
    sequences, report = Sequences(), Report()
    baseline, started = peak_mib(), time.process_time()
    block = first // BLOCK
    while report.messages < count:
        with collecting_errors():
            asyncio.run(run_block(sequences, seed, block, report))
        block += 1
        report.seconds = time.process_time() - started
        report.growth_mib = peak_mib() - baseline
        if report.growth_mib > GROWTH_MIB:
            raise Failure(f"memory grew by {report.growth_mib:.0f} MiB until stream {block * BLOCK}")
        yield report


async def run_block(sequences: Sequences, seed: int, block: int, report: Report) -> None:
    world = World()
    ERRORS.found.clear()
    numbers = iter(range(block * BLOCK, (block + 1) * BLOCK))
    try:
        while together := list(islice(numbers, TOGETHER)):
            await run_together(world, sequences, seed, together, report)
    finally:
        await world.close()


async def run_together(world: World, sequences: Sequences, seed: int, numbers: list[int], report: Report) -> None:
    streams = [sequences.sequence(seed, number) for number in numbers]
    rngs = [Random(f"{seed}:{number}:timing") for number in numbers]
    contexts = [Context(messages, rng, report) for messages, rng in zip(streams, rngs, strict=True)]
    try:
        async with asyncio.timeout(IDLE_S):
            others = disturbances(world, rngs[0])
            await asyncio.gather(*(converse(world, context, report) for context in contexts), others)
        world.settle()
        world.check()
        assert not ERRORS.found, ERRORS.found
    except Exception as error:
        shown = "\n".join(f"{n}: {[raw[:300].hex() for raw in one]}" for n, one in zip(numbers, streams, strict=True))
        raise Failure(f"streams {numbers[0]} to {numbers[-1]}: {type(error).__name__}: {error}\n{shown}") from error


class Errors(logging.Handler):
    """Collects the exceptions that nobody expects: those that the router logs, and those of its tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


ERRORS = Errors()


@contextmanager
def collecting_errors() -> Iterator[None]:
    root = logging.getLogger()
    before, level = root.handlers, root.level
    root.handlers = [ERRORS]
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.handlers = before
        root.setLevel(level)


# ---- the command


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=1_000_000, help="how many messages, at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first stream; its whole block is run")
    options = parser.parse_args()
    report = Report()
    try:
        for report in watched(fuzz(options.count, options.seed, options.first)):  # noqa: B007 (the last one is shown)
            pass
    except Failure as failure:
        begin = options.first // BLOCK * BLOCK + report.streams // BLOCK * BLOCK
        print(f"FAILED {failure}")
        print(f"again: python -m tests.fuzz.picker --seed {options.seed} --first {begin} --count 1")
        return 1
    print(f"passed: {report}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
