"""A request on its way through the simulated fleet, and its results."""

from array import array
from collections import defaultdict
from collections.abc import Iterator
from itertools import count

from msgspec import Struct

from events.blocks import extend_keys, root_key
from lab.trace.requests import Trace, TraceRequest
from router.placement.classes import Outlook
from router.placement.cost import Question

MODEL = "simulated"


class SimulatedPrompt(Struct, frozen=True, eq=False):
    """A stand-in for the prompt: one number for each block of the trace.

    A pool with blocks of one token finds, stores and evicts the same blocks as one with the trace's block size, in a
    fraction of the time.
    """

    ids: "array[int]"  # one for each block, full or not
    full: int  # number of full blocks
    block_tokens: int  # the trace's
    tokens: int

    @property
    def exact(self) -> bool:
        return True

    @property
    def approximate_block_tokens(self) -> float:
        """Tokens per block for a router without events: it guesses in blocks of the trace."""
        return self.block_tokens

    def keys(self, block_size: int, lookahead: int = 0, /) -> list[int]:  # noqa: ARG002
        """Keys of the full blocks, as the router and the replica compute them; there is one block size."""
        return extend_keys(root_key(MODEL, block_size=1), memoryview(self.ids[: self.full].tobytes()), 1)


class Job(Struct, eq=False):
    number: int
    prompt: SimulatedPrompt
    request: TraceRequest
    replica: int = 0
    behind_s: float = 0.0  # see router.placement.cost.Question
    stands_back: bool = False  # see there
    is_cold: bool = False  # see there
    rank: float = 0.0  # the waiting queue's order; lower goes first
    uncached_tokens: int = 0  # the replica's finding
    first_s: float = 0.0
    ended_s: float = 0.0
    held: Question | None = None  # the router's question, if its session may not begin yet
    is_new: bool = True  # it was not placed before
    outlook: Outlook | None = None
    is_refused: bool = False  # it waited for room in vain, or was refused for its class's sake

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.request.at_s


def jobs_of(trace: Trace) -> Iterator[Job]:
    numbers: defaultdict[int, int] = defaultdict(count().__next__)
    for number, request in enumerate(trace.requests):
        ids = array("I", map(numbers.__getitem__, request.blocks))
        full = request.input_tokens // trace.block_tokens
        prompt = SimulatedPrompt(ids, full, trace.block_tokens, request.input_tokens)
        yield Job(number, prompt, request, rank=request.at_s)
