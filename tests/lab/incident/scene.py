"""A router of a few lines, made of the shipped parts, that logs; and a recorder beside it that hears all a bit apart.

Everything happens in virtual time, at random, and in another order at the recorder than at the router.
"""

import random
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from itertools import count
from pathlib import Path

import msgspec

from events.blocks import block_keys, root_key
from events.cache.resolver import Resolver
from events.messages import BlockRemoved, BlockStored, EventBatch, Hash, KnownEvent, encode_batch
from events.native import Load, SnapshotHeader, Status, encode_native
from events.recording.recording import Recorder
from events.source import Record, Source
from router.log_lines import Decided, LogLine, Report, Sending, Weighed
from router.members.feed import ReplicaFeed
from router.placement.cost import Candidate, Question
from router.placement.index import PrefixIndex
from router.placement.load import ReplicaLoad
from router.placement.policy import SEED_BITS, TieBreak, choose

MODEL, SIZE, TTL_S = "m", 16, 30.0
ZERO_S = 1_700_000_000.0  # on the wall, when the router's clock is 0
TOPIC = b"kv@r@m"
TRUNKS = 4
BLOCKS = 6  # of the longest trunk


class Replica:
    """A replica: its cache, the events it sent, and the router's index."""

    def __init__(self, name: str, index: PrefixIndex) -> None:
        self.name = name
        at = f"ipc:///{name}"
        self.source = Source(f"source-of-{name}", f"{at}/events", f"{at}/replay", f"{at}/status", f"{at}/snapshot")
        self.truth = Resolver(MODEL, native=True)
        self.seq = -1
        self.load = Load(prefill_tokens_per_s=8000.0, free_blocks=200)
        self.candidate = Candidate(name, index.add(), limit=512)
        self.figures = ReplicaLoad(self.candidate, block_size=SIZE, total_blocks=200)
        self.view = ReplicaFeed(index, self.candidate.slot, msgspec.structs.replace(self.source, name=name)).view
        self.report: Report | None = None


class Scene:
    def __init__(self, folder: Path, seed: int, *, apart_s: float = 0.05, policy: str = "cost") -> None:
        self.recording, self.log = folder / "scene.wre", folder / "scene.jsonl"
        self.chance = random.Random(seed)
        self.policy = policy
        self.now_s = 100.0
        self.apart_s = apart_s
        self.index = PrefixIndex()
        self.replicas = [Replica(f"r{number}", self.index) for number in range(3)]
        self.lines: list[LogLine] = []
        self.records: list[Record] = []
        self.order = count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()
        self._delays: dict[tuple[int, str], float] = {}
        self._last_delivery_s = 0.0
        self._trunks = [self._tokens(BLOCKS * SIZE) for _ in range(TRUNKS)]

    def run(self, requests: int) -> None:
        for replica in self.replicas:
            self._connect(replica)
        end_s = self.now_s + requests * 0.02
        for replica in self.replicas:
            for number in range(round((end_s - self.now_s) / 0.2) + 3):
                self._at(self.now_s + 0.01 + 0.2 * number, partial(self._status, replica))
        for _ in range(requests):
            self._at(self.chance.uniform(self.now_s + 0.3, end_s), self._request)
            self._at(self.chance.uniform(self.now_s + 0.3, end_s), self._evict)
        while self._agenda:
            self.now_s, _, act = heappop(self._agenda)
            act()
        self._write()

    def _write(self) -> None:
        with Recorder(self.recording, [replica.source for replica in self.replicas]) as recorder:
            for record in sorted(self.records, key=lambda record: record.time):
                recorder.write(record)
        self.log.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in self.lines))

    def _at(self, at_s: float, act: Callable[[], None]) -> None:
        heappush(self._agenda, (at_s, next(self._number), act))

    def _tokens(self, length: int) -> list[int]:
        return [self.chance.randrange(1000) for _ in range(length)]

    # ---- replicas

    def _connect(self, replica: Replica) -> None:
        """Router and recorder ask for a snapshot at once, and get it."""
        header = encode_native(SnapshotHeader(7, -1, 1.0, 0, MODEL))
        replica.view.receive("connected", [], self.now_s)
        replica.view.asked("snapshot")
        replica.view.receive("snapshot", [b"", header], self.now_s)
        number = self.replicas.index(replica)
        self.records += [
            Record(ZERO_S + self.now_s, number, "connected", []),
            Record(ZERO_S + self.now_s + 0.0001, number, "snapshot", [b"", header]),
        ]

    def _publish(self, replica: Replica, event: KnownEvent) -> None:
        batch = EventBatch(self.now_s, [event])
        replica.truth.apply(batch.events)
        replica.seq += 1
        self._deliver(replica, "events", [TOPIC, replica.seq.to_bytes(8, "big"), encode_batch(batch)])

    def _status(self, replica: Replica) -> None:
        digest = replica.truth.digest()
        status = Status(
            7, replica.seq, self.now_s + self.chance.random() / 1e6, digest.blocks, digest.xor, replica.load
        )
        self._deliver(replica, "status", [TOPIC, encode_native(status)])

        def heard() -> None:
            replica.figures.reported(status.load, self.now_s)
            replica.report = Report(status.ts, self.now_s, next(self.order))

        self._at(self._last_delivery_s, heard)

    def _deliver(self, replica: Replica, socket: str, frames: list[bytes]) -> None:
        """Deliver a message to the router and to the recorder, in order for each, at independent times."""
        number = self.replicas.index(replica)
        to_router_s = self._last_delivery_s = self.now_s + self._delay_s(number, "router")
        to_recorder_s = self.now_s + self._delay_s(number, "recorder")
        self._at(to_router_s, lambda: self._heard(replica, socket, frames))
        self.records.append(Record(ZERO_S + to_recorder_s, number, socket, frames))

    def _heard(self, replica: Replica, socket: str, frames: list[bytes]) -> None:
        requests = replica.view.receive(socket, frames, self.now_s)
        assert not requests, requests

    def _delay_s(self, number: int, to: str) -> float:
        """Delay of a message, never less than that of the one before, so that none overtakes another."""
        free_s = max(self._delays.get((number, to), 0.0), self.now_s + self.chance.random() * self.apart_s)
        self._delays[number, to] = free_s + 1e-6
        return free_s - self.now_s

    def _evict(self) -> None:
        replica = self.chance.choice(self.replicas)
        held: list[Hash] = [key for held in replica.truth.held() for key in held.keys]
        if held:
            self._publish(replica, BlockRemoved([self.chance.choice(held)], "GPU"))

    def _store(self, replica: Replica, tokens: list[int]) -> None:
        keys = block_keys(tokens, SIZE, root_key(MODEL, None, None, SIZE))
        held = {key for held in replica.truth.held() for key in held.keys}
        first = next((number for number, key in enumerate(keys) if key not in held), len(keys))
        if first < len(keys):
            parent = keys[first - 1] if first else None
            new: list[Hash] = [*keys[first:]]
            self._publish(
                replica, BlockStored(new, parent, tokens[first * SIZE : len(keys) * SIZE], SIZE, None, "GPU", None)
            )

    # ---- requests

    def _request(self) -> None:
        trunk = self.chance.choice(self._trunks)
        tokens = trunk[: self.chance.randint(1, BLOCKS) * SIZE] + self._tokens(self.chance.randint(1, 40))
        keys = block_keys(tokens, SIZE, root_key(MODEL, None, None, SIZE))
        found = self.index.match(keys, 0b111)
        matched = {slot: float(blocks * SIZE) for slot, blocks in found.gpu.items()}
        question = Question(len(tokens), matched, turn=len(self.lines))
        candidates = [replica.candidate for replica in self.replicas]
        lot = TieBreak(self.chance.getrandbits(SEED_BITS))
        decision = choose(self.policy, question, candidates, lot)
        assert decision.chosen is not None
        weighed = [self._weighed(one, cost, matched) for one, cost in zip(self.replicas, decision.costs, strict=True)]
        decided = Decided(
            next(self.order), self.now_s, self.policy, lot.number, question.turn, decision.chosen.name, [], weighed
        )
        chosen = self.replicas[candidates.index(decision.chosen)]
        uncached = max(1, len(tokens) - int(matched.get(chosen.candidate.slot, 0)))
        sending = Sending(chosen.name, next(self.order), self.now_s, uncached)
        chosen.figures.sent(sending.sent_order, uncached, self.now_s)
        expected = keys, self.index.optimistic.add(chosen.candidate.slot, keys, self.now_s + TTL_S)
        self.lines.append(
            LogLine(
                ts=ZERO_S + self.now_s,
                request_id=f"q{len(self.lines)}",
                model=MODEL,
                prompt_tokens=len(tokens),
                block_tokens=SIZE,
                blocks=keys,
                replica=chosen.name,
                run="scene",
                at_s=self.now_s,
                decisions=[decided],
                sendings=[sending],
            )
        )
        begins_s = self.now_s + self.chance.uniform(0.001, 0.4)
        if self.chance.random() < 0.1:  # it fails before it begins, and nothing of it is stored
            self._at(begins_s, lambda: self._ended(chosen, sending, expected))
            return
        self._at(begins_s, lambda: self._begun(chosen, sending, tokens))
        self._at(begins_s + self.chance.uniform(0.001, 0.4), lambda: self._ended(chosen, sending, None))

    def _begun(self, chosen: Replica, sending: Sending, tokens: list[int]) -> None:
        self._store(chosen, tokens)
        sending.begun_order, sending.begun_at_s = next(self.order), self.now_s
        chosen.figures.begun(sending.sent_order, self.now_s)

    def _ended(self, chosen: Replica, sending: Sending, expected: tuple[list[int], int] | None) -> None:
        sending.ended_order, sending.ended_at_s = next(self.order), self.now_s
        chosen.figures.ended(sending.sent_order, self.now_s)
        if expected is not None:
            self.index.optimistic.withdraw(chosen.candidate.slot, *expected)
        busy = chosen.candidate.in_flight
        queued = self.chance.choice((0, 300, 2000)) if busy else 0
        chosen.load = Load(busy, 0, queued, self.chance.randint(50, 200), 20, 8000.0)

    def _weighed(self, replica: Replica, cost: float, matched: dict[int, float]) -> Weighed:
        one, load = replica.candidate, replica.figures
        return Weighed(
            one.name, cost, matched.get(one.slot, 0), None, one.queued_tokens, one.running, one.waiting, one.in_flight,
            one.prefill_tokens_per_s, one.empty_tokens, one.assigned_tokens, block_tokens=SIZE,
            cache_block_tokens=load.block_size, cache_blocks=load.total_blocks, seq=replica.view.stream.last_seq,
            inexact=replica.view.inexact, report=replica.report,
        )  # fmt: skip
