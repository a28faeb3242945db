"""What the engine asks of whatever computes: the only part in which a simulated engine differs from a real one."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from replica.messages import TokenLogprobs
from replica.request import Scheduled


class Sampled(NamedTuple):
    token: int
    logprobs: TokenLogprobs | None = None


class Runner(Protocol):
    vocab_size: int  # token ids are below it
    attention_name: str  # empty where none is computed

    def run(self, batch: Sequence[Scheduled]) -> list[Sampled | None]:
        """Compute the step; one entry for each request, None where its chain does not end in this step."""
        ...
