"""Measure a decision: the choice alone, and all of it from packed token ids."""

import functools
import random
from collections.abc import Callable

from events.blocks import block_keys, pack_tokens, root_key
from events.cache.changes import Stored
from events.cache.groups import Group, Layout
from events.messages import BlockStored
from events.native import Load
from router.placement.ages import CacheAges, Reuse
from router.placement.cost import Candidate, Question
from router.placement.index import PrefixIndex
from router.placement.load import ReplicaLoad
from router.placement.policy import Ring, choose
from tests.bench.measure import cpu_us, heading, row

BLOCK = 16
PROMPT = 4096
ROOT = root_key("m", None, None, BLOCK)
DECISIONS = 2000
LAYOUTS = {
    "full attention and a window": Layout(BLOCK, (Group(0, "full", 1), Group(1, "window", 1, 8))),
    "full attention, two windows and mamba": Layout(
        BLOCK,
        (Group(0, "full", 1), Group(1, "window", 1, 8), Group(2, "window", 1, 64), Group(3, "state", 1)),
    ),
}
NO_EVENT = BlockStored([], None, [], BLOCK, None, "GPU", None)
KINDS = (
    "busy",
    "crowded",
    "busy, two media",
    "busy, three media",
    "busy, neighbours",
    "idle and cold",
    "two kinds of GPU",
)


def run(rounds: int) -> None:
    heading("choosing a replica for a prompt of 4,096 tokens, CPU per decision")
    for replicas, target in ((4, "<= 4 us"), (64, "<= 30 us")):
        for kind in KINDS:
            figures = cpu_us(functools.partial(choosing, "cost", replicas, kind), DECISIONS, rounds)
            row(f"cost, {replicas} replicas, {kind}", figures, "us", target)
        for policy in ("prefix", "session"):
            row(
                f"{policy}, {replicas} replicas, busy",
                cpu_us(functools.partial(choosing, policy, replicas, "busy"), DECISIONS, rounds),
                "us",
            )
    row("explaining a decision, 64 replicas", cpu_us(explaining, 100, rounds), "us")
    print()
    heading("from packed ids of 4,096 tokens to a decision over 64 replicas, CPU per decision")
    row("keys, match and choice; each replica has a part", cpu_us(deciding, DECISIONS // 4, rounds), "us", "<= 100 us")
    for name, layout in LAYOUTS.items():
        figures = cpu_us(functools.partial(deciding, layout), DECISIONS // 4, rounds)
        row(f"the same, {name}", figures, "us")
    print()
    heading("updating a replica's load, CPU per event")
    row("one request: sent, begun, ended", cpu_us(requests, 10_000, rounds), "us")
    row("a status", cpu_us(reports, 10_000, rounds), "us")


def replicas_of(kind: str, count: int) -> tuple[list[Candidate], Question]:
    chance, reuse = random.Random(1), Reuse()
    candidates = []
    for slot in range(count):
        rate = 8000.0 * (2 if kind == "two kinds of GPU" and slot % 2 else 1) + chance.random()
        candidate = Candidate(f"r{slot}", slot, prefill_tokens_per_s=rate, max_model_len=32768, limit=256)
        if kind == "idle and cold":
            candidate.empty_tokens = 400_000.0
        else:
            candidate.queued_tokens, candidate.running = float(chance.randrange(20_000)), chance.randrange(32)
        if kind == "crowded":
            _crowd(candidate, reuse, chance)
        candidates.append(candidate)
    matched = {} if kind == "idle and cold" else {slot: 16.0 * chance.randrange(128) for slot in range(0, count, 2)}
    asked = Question(PROMPT, matched, session="someone")
    if kind in ("busy, two media", "busy, three media", "busy, neighbours"):
        asked.below = {"CPU": {slot: held + 512 for slot, held in matched.items()}}
    if kind == "busy, three media":
        asked.below = {**asked.below, "STORAGE": {slot: held + 1024 for slot, held in matched.items()}}
    if kind == "busy, neighbours":
        asked.readable = asked.below["CPU"]
        for candidate in candidates:
            candidate.kv_read, candidate.kv_layout = "tcp://10.0.0.1:5000", "layout"
    return candidates, asked


def _crowd(candidate: Candidate, reuse: Reuse, chance: random.Random) -> None:
    """Its cache is full, and eight prompts wait for their turn."""
    candidate.ages = CacheAges(reuse)
    candidate.ages.describe(BLOCK, 400_000)
    for second in range(-600, 0):
        pages = [chance.randrange(4000) for _ in range(4)]
        reuse.used(pages, float(second))
        candidate.ages.routed(pages, float(second))
    for number in range(9):
        candidate.queue_positions.add(number, chance.random(), chance.randrange(8000))
    candidate.is_crowded = True


def choosing(policy: str, count: int, kind: str) -> Callable[[], object]:
    candidates, question = replicas_of(kind, count)
    ring, rng = Ring(candidate.name for candidate in candidates), random.Random(2)

    def work() -> None:
        for _ in range(DECISIONS):
            choose(policy, question, candidates, rng, ring)

    return work


def explaining() -> Callable[[], object]:
    candidates, question = replicas_of("busy", 64)
    decision = choose("cost", question, candidates, random.Random(2))
    return lambda: [list(decision.verdicts()) for _ in range(100)]


def deciding(layout: Layout | None = None) -> Callable[[], object]:
    """Every replica holds the first of the prompt's blocks, and each another share of the rest."""
    candidates, _ = replicas_of("busy", 64)
    chance, rng, index = random.Random(3), random.Random(2), PrefixIndex()
    packed = pack_tokens([chance.randrange(150_000) for _ in range(PROMPT)])
    keys = block_keys(packed, BLOCK, ROOT)
    for candidate in candidates:
        candidate.slot = index.add()
        held = keys[: 16 + chance.randrange(len(keys) - 16)]
        index.store(candidate.slot, held)
        if layout is not None:
            index.arrange(candidate.slot, layout)
            for group in layout.groups[1:]:
                index.apply(candidate.slot, Stored("GPU", held, held, 0, NO_EVENT, group.group))
    everyone = sum(1 << candidate.slot for candidate in candidates)

    def work() -> None:
        for _ in range(DECISIONS // 4):
            matches = index.match(block_keys(packed, BLOCK, ROOT), everyone, (PROMPT - 1) // BLOCK)
            matched = {slot: blocks * BLOCK for slot, blocks in matches.gpu.items()}
            choose("cost", Question(PROMPT, matched), candidates, rng)

    return work


def requests() -> Callable[[], object]:
    load = ReplicaLoad(Candidate("r0", 0), block_size=BLOCK)
    load.reported(Load(free_blocks=10_000, prefill_tokens_per_s=8000.0), 0.0)

    def work() -> None:
        for number in range(10_000):
            now_s = number / 1000
            load.sent(number, 500, now_s)
            load.begun(number, now_s + 0.1)
            load.ended(number, now_s + 0.2)

    return work


def reports() -> Callable[[], object]:
    load = ReplicaLoad(Candidate("r0", 0), block_size=BLOCK)
    status = Load(4, 2, 3000, 9000, 2000, 8000.0)

    def work() -> None:
        for number in range(10_000):
            load.reported(status, number / 4)

    return work
