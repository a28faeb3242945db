"""From a prompt to a choice, and the choice's state while its request runs."""

import re
from pathlib import Path

import pytest
from msgspec import Struct

from events.native import Load
from router.placement.cost import Neighbour, Question, Unread
from router.placement.decision import Decision, predict
from router.placement.index import APPROXIMATE, Matches, PrefixIndex
from router.placement.load import Placed, ReplicaLoad
from router.placement.placement import Placement
from router.placement.prices import TOKENS_PER_S

ROOT = Path(__file__).resolve().parents[3]
SIZE = 16
TTL_S = 30.0


class Prompt(Struct):
    tokens: int = 160
    exact: bool = True
    approximate_block_tokens: float = 64.0
    first: int = 1

    def keys(self, block_size: int, lookahead: int = 0, /) -> list[int]:  # noqa: ARG002
        return list(range(self.first, self.first + self.tokens // (block_size or 64)))


class Scene:
    def __init__(self, replicas: int = 2, policy: str = "cost", limit: int = 0) -> None:
        self.it = Placement(policy, optimistic_ttl_s=TTL_S, first_token_timeout_s=300.0, seed=1)
        self.loads = [self.it.add(f"r{number}", limit=limit) for number in range(replicas)]
        for load in self.loads:
            load.reported(Load(free_blocks=1000, prefill_tokens_per_s=1000.0), 0.0)
        self.slots = {SIZE: sum(1 << load.candidate.slot for load in self.loads)}

    def matched(self, prompt: Prompt, now_s: float = 0.0) -> dict[int, float]:
        return dict(self.it.question(prompt, self.slots, now_s)[0].matched)

    def place(self, prompt: Prompt, now_s: float = 0.0, came_s: float | None = None) -> tuple[ReplicaLoad, Placed]:
        question, _ = self.it.question(prompt, self.slots, now_s, came_s=came_s)
        decision = self.it.decide(question, [load.candidate for load in self.loads])
        assert decision.chosen is not None
        load = self.loads[decision.chosen.slot]
        return load, self.it.sent(decision, load, prompt, SIZE, now_s, ranked=True)


def test_what_was_sent_counts_as_cached_and_queued_until_it_has_ended() -> None:
    scene, prompt = Scene(), Prompt()
    load, placed = scene.place(prompt)
    slot = load.candidate.slot
    assert scene.matched(prompt) == {slot: 160}
    assert (load.candidate.in_flight, load.candidate.queued_tokens) == (1, 160)
    scene.it.begun(placed, 1.0)
    scene.it.ended(placed, 2.0)
    assert (load.candidate.in_flight, load.candidate.queued_tokens) == (0, 0)
    assert scene.matched(prompt) == {slot: 160}, "the prompt's blocks are awaited"
    scene.it.expire(TTL_S + 2.0)
    assert scene.matched(prompt) == {}, "no event has confirmed the blocks"


def test_what_never_began_leaves_nothing() -> None:
    scene, prompt = Scene(), Prompt()
    load, placed = scene.place(prompt)
    scene.it.ended(placed, 1.0)
    assert scene.matched(prompt) == {}
    assert load.candidate.in_flight == 0


def test_a_lower_medium_counts_at_its_price() -> None:
    scene, prompt = Scene(), Prompt()
    scene.it.index.store(1, prompt.keys(SIZE), "CPU")
    question, found = scene.it.question(prompt, scene.slots, 0.0)
    assert (question.matched, question.below) == ({}, {"CPU": {1: 160}})
    decision = scene.it.decide(question, [load.candidate for load in scene.loads])
    assert decision.chosen is scene.loads[1].candidate
    assert decision.ttft_s == pytest.approx(160 / TOKENS_PER_S["CPU"])
    prediction = predict(prompt, decision, SIZE, found)
    assert prediction is not None and (prediction.blocks, prediction.sure) == (9, False)
    assert (prediction.claimed_blocks, prediction.brought_blocks) == (9, 9)


def test_what_is_dearer_than_computing_is_neither_predicted_nor_called_exact() -> None:
    scene, prompt = Scene(1), Prompt()
    scene.it.index.store(0, prompt.keys(SIZE)[:2])
    scene.it.index.store(0, prompt.keys(SIZE)[2:], "STORAGE")
    scene.loads[0].candidate.load_tokens_per_s = {"STORAGE": 900.0}
    question, found = scene.it.question(prompt, scene.slots, 0.0)
    decision = scene.it.decide(question, [scene.loads[0].candidate])
    assert decision.uncached_tokens == 128
    prediction = predict(prompt, decision, SIZE, found)
    assert prediction is not None
    assert (prediction.blocks, prediction.claimed_blocks, prediction.sure) == (2, 2, False)


def test_what_is_brought_counts_in_the_queue_at_its_price() -> None:
    scene, prompt = Scene(1), Prompt()
    scene.it.index.store(0, prompt.keys(SIZE)[:5], "CPU")
    load, placed = scene.place(prompt)
    assert placed.uncached_tokens == 81  # and 80 tokens from host memory, a hundred times as fast
    assert load.candidate.queued_tokens == 81


def neighbours(scene: Scene) -> tuple[Question, dict[int, Matches], Decision]:
    """The decision for a prompt whose blocks a busy replica holds."""
    prompt = Prompt(tokens=1600)
    scene.it.index.store(0, prompt.keys(SIZE)[:50])
    scene.it.index.store(0, prompt.keys(SIZE)[50:90], "CPU")
    scene.loads[0].candidate.queued_tokens = 1e6
    question, found = scene.it.question(prompt, scene.slots, 0.0)
    return question, found, scene.it.decide(question, [load.candidate for load in scene.loads])


def test_a_replica_reads_from_a_neighbour_if_both_say_that_they_can() -> None:
    scene = Scene()
    assert neighbours(scene)[2].neighbours == ()
    scene.it.offers(scene.loads[0], "tcp://10.0.0.1:5000", "layout")
    assert neighbours(scene)[2].neighbours == (), "the other one cannot"
    scene.it.offers(scene.loads[1], "tcp://10.0.0.2:5000", "layout")
    _, found, decision = neighbours(scene)
    assert decision.chosen is scene.loads[1].candidate
    assert decision.neighbours == (Neighbour(0, "r0", "tcp://10.0.0.1:5000", 90 * SIZE),)
    placed = scene.it.sent(decision, scene.loads[1], Prompt(tokens=1600), SIZE, 0.0)
    assert placed.uncached_tokens == 160 + 36 + 5  # 1,440 tokens forty times as fast, and the fixed cost
    prediction = predict(Prompt(tokens=1600), decision, SIZE, found)
    assert prediction is not None
    assert (prediction.blocks, prediction.claimed_blocks, prediction.sure) == (0, 0, False)


def test_a_restarted_replica_is_not_read_until_it_says_so_again() -> None:
    scene = Scene()
    for number, load in enumerate(scene.loads):
        scene.it.offers(load, f"tcp://10.0.0.{number}:5000", "layout")
    scene.it.restarted(scene.loads[0])
    assert neighbours(scene)[2].neighbours == ()
    scene.it.offers(scene.loads[0], "tcp://10.0.0.9:5000", "layout")
    assert neighbours(scene)[2].neighbours[0].endpoint == "tcp://10.0.0.9:5000"


def test_a_replica_whose_claims_are_doubted_is_no_source() -> None:
    scene = Scene()
    for number, load in enumerate(scene.loads):
        scene.it.offers(load, f"tcp://10.0.0.{number}:5000", "layout")
    scene.it.trust(0, 0.5)
    assert neighbours(scene)[2].neighbours == ()


def test_a_slot_is_not_readable_because_its_last_replica_was() -> None:
    scene = Scene()
    for number, load in enumerate(scene.loads):
        scene.it.offers(load, f"tcp://10.0.0.{number}:5000", "layout")
    scene.it.remove(scene.loads[0])
    scene.loads[0] = scene.it.add("new")
    assert neighbours(scene)[0].readable == {}


def test_a_block_that_cannot_be_a_hit_leaves_a_prediction_sure() -> None:
    scene, prompt = Scene(1), Prompt()
    scene.it.index.store(0, prompt.keys(SIZE)[:9])
    scene.it.index.store(0, prompt.keys(SIZE)[9:], "CPU")
    question, found = scene.it.question(prompt, scene.slots, 0.0)
    prediction = predict(prompt, scene.it.decide(question, [scene.loads[0].candidate]), SIZE, found)
    assert prediction is not None and (prediction.blocks, prediction.sure) == (9, True)


def test_waiting_for_room_counts_for_the_place_in_the_replicas_queue() -> None:
    scene = Scene(1)
    early, late = (scene.place(Prompt(first=number), 9.0, came_s)[1] for number, came_s in ((100, 4.0), (200, 9.0)))
    assert early.priority_s is not None and late.priority_s is not None
    assert late.priority_s - early.priority_s == pytest.approx(5.0)


def test_claims_that_are_not_believed_count_less() -> None:
    scene, prompt = Scene(), Prompt()
    scene.it.index.store(0, prompt.keys(SIZE))
    scene.it.trust(0, 0.5)
    assert scene.matched(prompt) == {0: 80}
    scene.it.trust(0, 1.0)
    assert scene.matched(prompt) == {0: 160}


def test_a_replica_without_events_is_matched_by_what_was_sent_there() -> None:
    scene = Scene(1)
    prompt, slots = Prompt(tokens=640), {APPROXIMATE: 1}
    question, _ = scene.it.question(prompt, slots, 0.0)
    decision = scene.it.decide(question, [scene.loads[0].candidate])
    scene.it.sent(decision, scene.loads[0], prompt, APPROXIMATE, 0.0)
    question, found = scene.it.question(prompt, slots, 1.0)
    assert dict(question.matched) == {0: 640}
    assert predict(prompt, decision, APPROXIMATE, found) is None
    scene.it.restarted(scene.loads[0])
    assert dict(scene.it.question(prompt, slots, 2.0)[0].matched) == {}


def test_a_request_that_is_not_understood_is_placed_by_load_alone() -> None:
    scene = Scene(policy="round-robin")
    scene.loads[0].sent(99, 500, 0.0)
    question, _ = scene.it.question(Unread(), {APPROXIMATE: 0b11}, 0.0)
    decision = scene.it.decide(question, [load.candidate for load in scene.loads], policy="least-loaded")
    assert decision.chosen is scene.loads[1].candidate


def test_a_replica_that_leaves_is_forgotten() -> None:
    scene, prompt = Scene(), Prompt()
    scene.it.index.store(1, prompt.keys(SIZE))
    scene.it.trust(1, 0.0)
    scene.it.remove(scene.loads[1])
    assert scene.it.add("r2").candidate.slot == 1
    assert scene.matched(prompt) == {}
    assert not scene.it.doubted
    assert isinstance(scene.it.index, PrefixIndex)


def product() -> dict[str, str]:
    return {
        str(path.relative_to(ROOT)): path.read_text()
        for package in ("router", "lab", "fleet")
        for path in (ROOT / package).rglob("*.py")
    }


def test_placement_happens_in_one_place() -> None:
    """The router and the simulator make no question, choice or expectation of their own."""
    own = re.compile(r"policy import .*\b(place|choose)\b|optimistic\.(add|withdraw)\(|\bages\.routed\(")
    found = {name for name, text in product().items() if own.search(text)}
    assert {name for name in found if not name.startswith("router/placement/")} == set()
    assert "router/placement/placement.py" in found, "negative control"


def test_placement_is_pure() -> None:
    impure = re.compile(r"^(?:import|from) (asyncio|time|socket|threading|logging)\b", re.MULTILINE)
    found = {name for name, text in product().items() if impure.search(text)}
    assert {name for name in found if name.startswith("router/placement/")} == set()
    assert "router/core.py" in found, "negative control"
