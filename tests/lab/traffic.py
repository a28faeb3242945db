"""Traces made by chance that look like those of services: conversations, and agents with tools.

The distributions were chosen once, after what is published of such services (a few turns, lengths over three orders of
magnitude, a few long beginnings that most requests share), and are not to be tuned.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

from msgspec.structs import replace

from lab.trace.requests import Trace, TraceRequest

Session: TypeAlias = Callable[[random.Random, float, Iterator[int], int], Iterator[TraceRequest]]

CHAT_TURNS = 3.0
AGENT_CALLS = 6.0
TOOLS = 12
DECODE_TOKENS_PER_S = 40.0


def conversations(requests: int, seed: int = 0, *, block_tokens: int = 512, per_s: float = 3.0) -> Trace:
    """Sessions of a few turns with think time between them; prompts grow, some are very long."""
    chance = random.Random(f"conversations {seed}")
    return _trace("conversations", _chat, chance, requests, per_s / CHAT_TURNS, block_tokens)


def agents(requests: int, seed: int = 0, *, block_tokens: int = 64, per_s: float = 8.0) -> Trace:
    """A few tools, each with a long system prompt, and loops that call again and again with more history."""
    chance = random.Random(f"agents {seed}")
    numbers = itertools.count(1)
    tools = [[next(numbers) for _ in range(chance.randint(1500, 9000) // block_tokens)] for _ in range(TOOLS)]
    return _trace("agents", partial(_agent, tools), chance, requests, per_s / AGENT_CALLS, block_tokens, numbers)


def named(trace: Trace) -> Trace:
    """Requests that begin with what an earlier one ended with are of its session."""
    session_of: dict[tuple[int, ...], str] = {}
    requests = []
    for number, request in enumerate(trace.requests):
        full = request.blocks[: request.input_tokens // trace.block_tokens]
        before = (session_of.pop(full[:length], None) for length in range(len(full), 0, -1))
        session = next((found for found in before if found is not None), f"session {number}")
        session_of[full] = session
        requests.append(request._replace(session=session))
    return replace(trace, requests=requests)


def unshared(requests: int, seed: int = 0, *, block_tokens: int = 64, per_s: float = 4.0) -> Trace:
    """No prompt has a beginning in common with another."""
    chance = random.Random(f"unshared {seed}")

    def session(chance: random.Random, at_s: float, numbers: Iterator[int], size: int) -> Iterator[TraceRequest]:
        tokens = int(chance.lognormvariate(7.0, 1.0)) + 1
        yield TraceRequest(at_s, tokens, int(chance.lognormvariate(4.5, 0.8)), _grown([], tokens, size, numbers))

    return _trace("unshared", session, chance, requests, per_s, block_tokens)


def _trace(
    name: str,
    session: Session,
    chance: random.Random,
    requests: int,
    sessions_per_s: float,
    block_tokens: int,
    numbers: Iterator[int] | None = None,
) -> Trace:
    """Sessions go on beyond the last one's beginning; what is later than that is left out."""
    numbers = itertools.count(1) if numbers is None else numbers
    made: list[TraceRequest] = []
    at_s = 0.0
    while sum(request.at_s <= at_s for request in made[-8 * requests :]) < requests:
        for _ in range(max(1, requests // 50)):
            at_s += chance.expovariate(sessions_per_s)
            made += session(chance, at_s, numbers, block_tokens)
    made.sort(key=lambda request: request.at_s)
    return Trace(name, block_tokens, [one._replace(at_s=one.at_s - made[0].at_s) for one in made[:requests]])


def _chat(chance: random.Random, at_s: float, numbers: Iterator[int], size: int) -> Iterator[TraceRequest]:
    history: list[int] = []
    tokens = 0
    for _ in range(1 + int(chance.expovariate(1 / (CHAT_TURNS - 0.5)))):
        tokens += int(min(100_000.0, chance.lognormvariate(8.0, 1.3))) + 20
        output_tokens = int(chance.lognormvariate(5.5, 0.7)) + 1
        yield TraceRequest(at_s, tokens, output_tokens, _grown(history, tokens, size, numbers))
        tokens += output_tokens
        at_s += output_tokens / DECODE_TOKENS_PER_S + chance.lognormvariate(3.5, 1.0)


def _agent(
    tools: list[list[int]], chance: random.Random, at_s: float, numbers: Iterator[int], size: int
) -> Iterator[TraceRequest]:
    tool = tools[min(int(chance.paretovariate(1.0)), len(tools)) - 1]
    history = list(tool)
    tokens = len(tool) * size
    for _ in range(1 + int(chance.expovariate(1 / (AGENT_CALLS - 0.5)))):
        tokens += int(min(30_000.0, chance.lognormvariate(6.3, 1.2))) + 20
        output_tokens = int(chance.lognormvariate(4.5, 0.8)) + 1
        yield TraceRequest(at_s, tokens, output_tokens, _grown(history, tokens, size, numbers))
        tokens += output_tokens
        at_s += output_tokens / DECODE_TOKENS_PER_S + chance.expovariate(1 / 4.0)


def _grown(history: list[int], tokens: int, block_tokens: int, numbers: Iterator[int]) -> tuple[int, ...]:
    """The blocks of so many tokens; a last one that is not full will be another block when it is."""
    full = tokens // block_tokens
    history += [next(numbers) for _ in range(full - len(history))]
    return (*history, next(numbers)) if tokens % block_tokens else tuple(history)
