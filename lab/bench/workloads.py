"""Planned conversations, before they are text, and when they arrive: each prompt is the conversation so far.

They come at random, as in a trace, or whenever a client is free. There are four kinds of traffic,
each an endless row of conversations that follows from a seed. What is in them is said in docs/bench.md.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from lab.trace.requests import Trace, TraceRequest


class Passage(NamedTuple):
    """Equal names, equal text; where it is cut short, its beginning."""

    name: str
    tokens: int


class Turn(NamedTuple):
    said: tuple[Passage, ...]
    output_tokens: int
    think_s: float = 0.0  # the time from the end of the answer before to this; recorded: from its beginning


class Conversation(NamedTuple):
    name: str
    system: tuple[Passage, ...]  # may be empty
    turns: tuple[Turn, ...]
    is_recorded: bool = False  # each turn says itself what was said before it

    def before(self, turn: int) -> tuple[Turn, ...]:
        return () if self.is_recorded else self.turns[:turn]


class Arrival(NamedTuple):
    at_s: float  # after the beginning of the run
    talk: Conversation


def arriving(conversations: Iterable[Conversation], requests_per_s: float, seed: str) -> Iterator[Arrival]:
    """Yield independent arrivals at a rate of requests: a conversation counts with all its turns."""
    chance, at_s = random.Random(f"arrivals {seed}"), 0.0
    for talk in conversations:
        yield Arrival(at_s, talk)
        at_s += chance.expovariate(1) * len(talk.turns) / requests_per_s


def at_once(conversations: Iterable[Conversation]) -> Iterator[Arrival]:
    """Yield arrivals without times, for clients in a closed loop."""
    return (Arrival(0.0, talk) for talk in conversations)


def replayed(trace: Trace, *, by_session: bool = False) -> Iterator[Arrival]:
    sessions: dict[str | int, list[TraceRequest]] = {}
    for number, request in enumerate(trace.requests):
        sessions.setdefault((request.session if by_session else None) or number, []).append(request)
    for name, requests in sessions.items():
        turns, before_s = list[Turn](), requests[0].at_s
        for request in requests:
            *full, last = request.blocks
            said = [Passage(f"block {block}", trace.block_tokens) for block in full]
            said.append(Passage(f"block {last}", request.input_tokens - len(full) * trace.block_tokens))
            turns.append(Turn(tuple(said), max(1, request.output_tokens), request.at_s - before_s))
            before_s = request.at_s
        yield Arrival(requests[0].at_s, Conversation(str(name), (), tuple(turns), isinstance(name, str)))


def limited(arrivals: Iterable[Arrival], output_tokens: int | None) -> Iterator[Arrival]:
    if output_tokens is None:
        yield from arrivals
        return
    for arrival in arrivals:
        turns = tuple(turn._replace(output_tokens=output_tokens) for turn in arrival.talk.turns)
        yield arrival._replace(talk=arrival.talk._replace(turns=turns))


TURNS = 8  # the turns of a conversation of multi-turn


def conversations(workload: str, seed: str, think_s: float = 2.0) -> Iterator[Conversation]:
    """`think_s`: between two turns, on average."""
    chance = random.Random(f"{workload} {seed}")
    return multi_turn(chance, think_s) if workload == "multi-turn" else WORKLOADS[workload](chance)


def chatbot(chance: random.Random) -> Iterator[Conversation]:
    system = (Passage("system", 1000),)
    for name in _names():
        yield _single(name, system, [Passage(f"question {name}", chance.randint(16, 48))], chance.randint(32, 128))


def multi_turn(chance: random.Random, think_s: float = 2.0) -> Iterator[Conversation]:
    system = (Passage("system", 1000),)
    for name in _names():
        turns = []
        for number in range(TURNS):
            said = Passage(f"turn {number} of {name}", chance.randint(50, 150))
            pause_s = chance.uniform(0.5, 1.5) * think_s if number else 0.0
            turns.append(Turn((said,), chance.randint(50, 150), pause_s))
        yield Conversation(name, system, tuple(turns))


def rag(chance: random.Random) -> Iterator[Conversation]:
    instructions = (Passage("instructions", 256),)
    for name in _names():
        documents = [Passage(f"document {number} of {name}", 500) for number in range(4)]
        yield _single(name, instructions, [*documents, Passage(f"question {name}", 48)], chance.randint(64, 192))


def unrelated(chance: random.Random) -> Iterator[Conversation]:
    for name in _names():
        yield _single(name, (), [Passage(f"prompt {name}", chance.randint(100, 1000))], chance.randint(32, 128))


WORKLOADS: dict[str, Callable[[random.Random], Iterator[Conversation]]] = {
    "chatbot": chatbot,
    "multi-turn": multi_turn,
    "rag": rag,
    "random": unrelated,
}


def _single(name: str, system: tuple[Passage, ...], said: list[Passage], output_tokens: int) -> Conversation:
    return Conversation(name, system, (Turn(tuple(said), output_tokens),))


def _names() -> Iterator[str]:
    return map(str, itertools.count())
