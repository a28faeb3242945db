"""Runs commands of `warmroute events` in this process or on a terminal, against a replica that the test controls."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from click.testing import CliRunner

from events.blocks import block_keys, root_key
from events.cli import events
from events.messages import BlockRemoved, BlockStored, KnownEvent, decode_batch
from events.native import Load
from events.publisher import Publisher, PublisherConfig
from tests.events.processes import FREE, wait_until
from tests.events.recorded import Engine
from tests.events.terminals import terminal

BLOCK_SIZE = 4


class Ran(NamedTuple):
    status: int
    lines: list[dict[str, Any]]
    notes: str


def run(*arguments: str) -> Ran:
    """In this process, with JSON lines."""
    result = CliRunner().invoke(events, [*arguments, "--json"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ran(result.exit_code, [json.loads(line) for line in result.stdout.splitlines()], result.stderr)


def on_terminal(*arguments: str, columns: int = 80) -> tuple[int, list[str]]:
    """In a process of its own, on a terminal of this width without colours."""
    environment = {"COLUMNS": str(columns), "LINES": "50", "TERM": "dumb", "NO_COLOR": "1"}
    with terminal("events", *arguments, size=(columns, 50), **environment) as shown:
        status = shown.end()
        return status, [line.rstrip() for line in shown.written.decode().replace("\r\n", "\n").split("\n")]


class Replica:
    """A publisher with native sockets (its hashes are keys) or with a replay socket only."""

    def __init__(self, publisher: Publisher, seed: int) -> None:
        self.publisher = publisher
        self.engine = Engine(1)  # for a foreign one whose batches are as they come
        self._seed = seed
        ends = publisher.endpoints
        self.native = ends.snapshot is not None
        self.events = ends.events
        self.replay = str(ends.replay)
        self.snapshot = str(ends.snapshot)
        self.arguments = [
            self.events,
            *(
                ["--status", str(ends.status), "--snapshot", self.snapshot]
                if self.native
                else ["--replay", self.replay]
            ),
        ]

    def step(self, batches: int) -> None:
        for _ in range(batches):
            self.publisher.publish(decode_batch(self.engine.step()).events)  # type: ignore[arg-type]

    def hashes(self, tokens: Sequence[int]) -> list[int]:
        keys = block_keys(tokens, BLOCK_SIZE, root_key("", None, None, BLOCK_SIZE))
        return keys if self.native else [hash((self._seed, key)) & (2**64 - 1) for key in keys]

    def stored(self, tokens: Sequence[int], first: int = 0) -> BlockStored:
        """The blocks of a prompt from this one on."""
        hashes = self.hashes(tokens)
        own = list(tokens[first * BLOCK_SIZE : len(hashes) * BLOCK_SIZE])
        parent = hashes[first - 1] if first else None
        return BlockStored(list(hashes[first:]), parent, own, BLOCK_SIZE, None, "GPU", None)

    def store(self, tokens: Sequence[int], first: int = 0) -> None:
        self.publish(self.stored(tokens, first))

    def remove(self, tokens: Sequence[int]) -> None:
        """The last block of the prompt."""
        self.publish(BlockRemoved(list(self.hashes(tokens)[-1:]), "GPU"))

    def publish(self, *published: KnownEvent) -> None:
        before = self.publisher.stats.batches
        self.publisher.publish(published)
        self.publisher.report(Load())
        wait_until(lambda: self.publisher.stats.batches > before, "the batch is sent")


@contextmanager
def replica(*, native: bool = True, seed: int = 0, **config: Any) -> Iterator[Replica]:
    own = FREE if native else None
    settings = {"events": FREE, "replay": FREE, "status": own, "snapshot": own, "topic": "kv@r@m", **config}
    with Publisher(PublisherConfig(**settings)) as publisher:
        yield Replica(publisher, seed)


def prompt(*names: int) -> list[int]:
    """One block of equal tokens for each name."""
    return [name for name in names for _ in range(BLOCK_SIZE)]
