"""A request on its way through the simulated fleet, and its results."""

from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from types import MappingProxyType

from msgspec import Struct

from events.blocks import extend_keys, root_key
from lab.trace.requests import Trace, TraceRequest
from replica.messages import KVSource
from router.placement.classes import Outlook

MODEL = "simulated"
NOTHING: Mapping[str, int] = MappingProxyType({})
HALVES = 2**40  # numbers of first halves begin here


class SimulatedPrompt(Struct, frozen=True, eq=False):
    """A stand-in for the prompt: one number per block of the trace, repeated for each token of a block of the pool.

    A pool with blocks of one token finds, stores and evicts the same blocks as one with the trace's block size, in a
    fraction of the time. Only a scheduler that counts tokens needs all of them.
    """

    ids: "array[int]"  # one for each block, full or not
    full: int  # number of full blocks
    block_tokens: int  # the trace's
    tokens_per_block: int
    tokens: int

    def packed(self) -> bytes:
        each = self.tokens_per_block
        if each == 1:
            return self.ids.tobytes()
        packed = self.ids.tobytes()
        blocks = [packed[start : start + 4] * each for start in range(0, len(packed), 4)]
        return b"".join(blocks)[: 4 * self.tokens]

    @property
    def exact(self) -> bool:
        return True

    @property
    def approximate_block_tokens(self) -> float:
        """Tokens per block for a router without events: it guesses in blocks of the trace."""
        return self.block_tokens

    def keys(self, block_size: int, lookahead: int = 0, /) -> list[int]:  # noqa: ARG002
        """Keys of the full blocks, as the router and the replica compute them; there is one block size."""
        root = root_key(MODEL, block_size=self.tokens_per_block)
        return extend_keys(
            root, memoryview(self.packed())[: 4 * self.tokens_per_block * self.full], self.tokens_per_block
        )


class Job(Struct, eq=False):
    number: int
    prompt: SimulatedPrompt
    request: TraceRequest
    router: int = 0
    replica: int = 0
    behind_s: float = 0.0  # see router.placement.cost.Question
    stands_back: bool = False  # see there
    rank: float = 0.0  # the waiting queue's order; lower goes first
    sources: Sequence[KVSource] = ()  # neighbours that should have more of its prompt; the best is first
    uncached_tokens: int = 0  # the replica's finding
    brought_tokens: Mapping[str, int] = NOTHING  # tokens brought from elsewhere, by source
    first_s: float = 0.0
    ended_s: float = 0.0
    whole: "Job | None" = None  # the request, if this is only its first half, at a replica that computes its prompt
    prefill: "Job | None" = None  # the first half of it
    is_new: bool = True  # it was not placed before
    outlook: Outlook | None = None
    is_refused: bool = False  # it waited for room in vain, or was refused for its class's sake
    generated: list[int] = []  # tokens that the engine itself generates

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.request.at_s

    @property
    def token_s(self) -> float:
        return (self.ended_s - self.first_s) / max(1, self.request.output_tokens - 1)

    def first_half(self) -> "Job":
        request = self.request._replace(output_tokens=0)
        half = Job(self.number + HALVES, self.prompt, request, self.router, rank=self.rank, whole=self)
        self.prefill = half
        return half


def jobs_of(trace: Trace, tokens_per_block: int = 1) -> Iterator[Job]:
    numbers: defaultdict[int, int] = defaultdict(count().__next__)
    for number, request in enumerate(trace.requests):
        ids = array("I", map(numbers.__getitem__, request.blocks))
        full = request.input_tokens // trace.block_tokens
        yield Job(
            number,
            SimulatedPrompt(ids, full, trace.block_tokens, tokens_per_block, request.input_tokens),
            request,
            rank=request.at_s,
        )
