"""One request in the engine, and what one step does for it."""

from typing import NamedTuple

from kernels.spans import Copy
from replica.chain import Chain
from replica.messages import Sampling, TokenLogprobs


class Request:
    """`computed` tokens of the chain have their KV in `blocks`; it waits when it has no blocks."""

    __slots__ = (
        "blocks",
        "cached_tokens",
        "chain",
        "computed",
        "id",
        "preemptions",
        "priority",
        "prompt_logprobs",
        "prompt_tokens",
        "runner_state",
        "sampling",
        "uncached_tokens",
    )

    def __init__(
        self, request_id: int, chain: Chain, prompt_tokens: int, sampling: Sampling, priority: tuple[float, int]
    ) -> None:
        self.id = request_id
        self.chain = chain
        self.prompt_tokens = prompt_tokens  # the rest of the chain is output
        self.sampling = sampling
        self.priority = priority  # lower goes first; the number of arrival breaks ties
        self.blocks: list[int] = []
        self.computed = 0
        self.preemptions = 0
        self.cached_tokens: int | None = None  # of the prompt, when it was first admitted
        self.uncached_tokens = len(chain)  # what admitting it would have to compute, when last looked up
        self.prompt_logprobs: list[TokenLogprobs] = []  # so far, where they are wanted; from the second token on
        self.runner_state: object = None  # the runner's own

    @property
    def generated(self) -> int:
        return len(self.chain) - self.prompt_tokens

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.chain) - self.computed


class Scheduled(NamedTuple):
    """In this step, compute so many tokens of the chain from `start` on, and sample if that is all of them."""

    request: Request
    start: int
    tokens: int
    copy: Copy | None = None  # to do before anything is computed

    @property
    def samples(self) -> bool:
        return self.start + self.tokens == len(self.request.chain)
