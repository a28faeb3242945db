"""Planned conversations, before they are text, and when they arrive: each prompt is the conversation so far.

They come at random, evenly or in bursts; as in a trace; or whenever a client is free.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from lab.bench.words import Passage
from lab.trace.requests import Trace, TraceRequest

# Of a gamma distribution: gaps whose deviation is twice their mean, where it is the mean for poisson.
BURST_SHAPE = 0.25
GAPS: dict[str, Callable[[random.Random], float]] = {  # 1 on average
    "poisson": lambda chance: chance.expovariate(1),
    "constant": lambda chance: 1.0,  # noqa: ARG005
    "bursty": lambda chance: chance.gammavariate(BURST_SHAPE, 1 / BURST_SHAPE),
}


class Turn(NamedTuple):
    said: tuple[Passage, ...]
    output_tokens: int
    think_s: float = 0.0  # from the end of the answer before to this


class Conversation(NamedTuple):
    name: str
    system: tuple[Passage, ...]  # may be empty
    turns: tuple[Turn, ...]


class Arrival(NamedTuple):
    at_s: float  # after the beginning of the run
    talk: Conversation


def arriving(conversations: Iterable[Conversation], kind: str, requests_per_s: float, seed: str) -> Iterator[Arrival]:
    """Yield arrivals at a rate of requests: a conversation counts with all its turns."""
    chance, at_s = random.Random(f"arrivals {seed}"), 0.0
    for talk in conversations:
        yield Arrival(at_s, talk)
        at_s += GAPS[kind](chance) * len(talk.turns) / requests_per_s


def at_once(conversations: Iterable[Conversation]) -> Iterator[Arrival]:
    """Yield arrivals without times, for clients in a closed loop."""
    return (Arrival(0.0, talk) for talk in conversations)


def replayed(trace: Trace, speed: float = 1.0) -> Iterator[Arrival]:
    for number, request in enumerate(trace.requests):
        yield Arrival(request.at_s / speed, _talk(number, request, trace.block_tokens))


def _talk(number: int, request: TraceRequest, block_tokens: int) -> Conversation:
    *full, last = request.blocks
    said = [Passage(f"block {block}", block_tokens) for block in full]
    said.append(Passage(f"block {last}", request.input_tokens - len(full) * block_tokens))
    return Conversation(str(number), (), (Turn(tuple(said), max(1, request.output_tokens)),))


def limited(arrivals: Iterable[Arrival], output_tokens: int | None) -> Iterator[Arrival]:
    """Set the length of all answers, if one is given."""
    if output_tokens is None:
        yield from arrivals
        return
    for arrival in arrivals:
        turns = tuple(turn._replace(output_tokens=output_tokens) for turn in arrival.talk.turns)
        yield arrival._replace(talk=arrival.talk._replace(turns=turns))
