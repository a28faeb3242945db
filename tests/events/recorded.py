"""A made-up foreign engine, and recordings of it over a network with chosen losses."""

import random
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path

from events.messages import BlockRemoved, BlockStored, EventBatch, Hash, KnownEvent, encode_batch
from events.publisher import END_OF_REPLAY
from events.recording import Moment, Recorder, Recording
from events.source import Record, Source
from events.stream.actions import Replay
from events.view import CacheView, Request

BLOCK_SIZE = 4
TOPIC = b"kv@a@m"
SOURCE = Source("a", "tcp://127.0.0.1:1", "tcp://127.0.0.1:2", model="m")


class Engine:
    """Stores and removes chains of blocks under private hashes."""

    def __init__(self, seed: int = 0, *, secrets: bool = False) -> None:
        self.random = random.Random(seed)
        self.seed = str(seed).encode()
        self.secrets = secrets
        self.chains: list[list[Hash]] = []
        self.tokens: set[int] = set()
        self.published: list[bytes] = []

    def step(self) -> bytes:
        """The next batch: a chain more, longer or shorter."""
        kind = self.random.random()
        if kind < 0.25 and self.chains:
            chain = self.chains.pop(self.random.randrange(len(self.chains)))
            events: list[KnownEvent] = [BlockRemoved(chain[::-1], "GPU")]
        elif kind < 0.6 and self.chains:
            events = [self._extend(self.random.choice(self.chains), self.random.randint(1, 3))]
        else:
            self.chains.append([])
            events = [self._extend(self.chains[-1], self.random.randint(1, 4))]
        payload = encode_batch(EventBatch(len(self.published) + 0.5, list(events)))
        self.published.append(payload)
        return payload

    def _extend(self, chain: list[Hash], blocks: int) -> BlockStored:
        tokens = [self.random.randrange(2**24, 2**31) for _ in range(blocks * BLOCK_SIZE)]
        self.tokens.update(tokens)
        parent = chain[-1] if chain else None
        new: list[Hash] = []
        for index in range(blocks):
            name = repr((chain[-1:] or new[-1:], tokens[index * BLOCK_SIZE :][:BLOCK_SIZE], index)).encode()
            new.append(sha256(self.seed + name).digest())
        chain += new
        event = BlockStored(new, parent, tokens, BLOCK_SIZE, 7, "GPU", None)
        if self.secrets:
            event.lora_name, event.session_id = "secret-lora", "secret-session"
            event.extra_keys = [["secret-lora", ("secret-image", 1), "secret-salt", b"secret-embed"]] * blocks
            event.lookahead_token_ids = [tokens[:BLOCK_SIZE]] * len(event.block_hashes)
        return event


class Line:
    """A recorder's view behind a line. Every message that arrives is recorded and fed, at a time of its own."""

    def __init__(self, recorder: Recorder, source: Source = SOURCE, started_s: float = 1000.0) -> None:
        self.view = source.view()
        self.recorder = recorder
        self.now_s = started_s
        self.sent: list[bytes] = []
        self.keep_replays: Callable[[int], bool] = lambda _: True
        self.on_record: Callable[[Record], None] = lambda _: None

    def arrive(self, kind: str, frames: list[bytes]) -> None:
        self.now_s += 0.001
        record = Record(self.now_s, 0, kind, frames)
        self.recorder.write(record)
        requests = self.view.receive(kind, frames, self.now_s)
        self.on_record(record)
        self._answer(requests)

    def publish(self, payload: bytes, *, lost: bool = False) -> None:
        self.sent.append(payload)
        if not lost:
            self.arrive("events", [TOPIC, (len(self.sent) - 1).to_bytes(8, "big"), payload])

    def wait(self, seconds: float) -> None:
        """Ticks as the subscriber does, and marks those that change something."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 0.02
            exact = self.view.stream.exact
            requests = self.view.receive("tick", [], self.now_s)
            if requests or self.view.stream.exact != exact:
                self.recorder.write(Record(self.now_s, 0, "tick", []))
            self._answer(requests)

    def restart(self) -> None:
        self.sent = []
        self.recorder.write(Record(self.now_s, 0, "disconnected", []))
        self.view.receive("disconnected", [], self.now_s)
        self.arrive("connected", [])

    def _answer(self, requests: Iterable[Request]) -> None:
        for request in requests:
            assert isinstance(request, Replay)
            self.view.asked("replay")
            for seq, payload in enumerate(list(self.sent)):
                if seq >= request.start and self.keep_replays(seq):
                    self.arrive("replay", [b"", TOPIC, seq.to_bytes(8, "big"), payload])
            self.arrive("replay", [b"", *END_OF_REPLAY])


def record_incident(path: Path, *, steps: int = 60, seed: int = 1, restart: bool = True) -> Engine:
    """A stream joined late, with losses that a replay repairs and (if wanted) a restart at half of it."""
    engine, chance = Engine(seed), random.Random(seed)
    with Recorder(path, [SOURCE]) as recorder:
        line = Line(recorder)
        line.sent = [engine.step() for _ in range(5)]
        line.arrive("connected", [])
        for step in range(steps):
            if restart and step == steps // 2:
                line.restart()
                engine.chains = []
            line.publish(engine.step(), lost=chance.random() < 0.2)
        line.wait(2.0)
        assert line.view.stream.exact
        assert line.view.stream.stats.gaps > 2
        assert line.view.stream.stats.restarts == restart
    return engine


def record_payloads(path: Path, payloads: Iterable[bytes]) -> None:
    """A recording of these batches."""
    with Recorder(path, [SOURCE]) as recorder:
        recorder.write(Record(1.0, 0, "connected", []))
        recorder.write(Record(1.5, 0, "replay", [b"", *END_OF_REPLAY]))
        for seq, payload in enumerate(payloads):
            recorder.write(Record(2.0 + seq, 0, "events", [TOPIC, seq.to_bytes(8, "big"), payload]))


def replay_into_view(
    recording: Recording, source: Source, until_time: float | None = None, until_seq: int | None = None
) -> CacheView:
    """The replica's cache as the recorder knew it at a moment, or at the end."""
    view = next(own for own in recording.sources if own.name == source.name).view()
    recording.replay_into(view, source, Moment(until_time, seq=until_seq))
    return view
