"""One request in the engine, and its part in one step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from api.retention import Retain
from events.blocks import TOKEN_BYTES
from kernels.spans import Copy
from replica.cache.chain import Chain
from replica.grammar.matcher import Matcher
from replica.messages import KVSource, Sampling, TokenLogprobs


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """`computed` tokens of the chain have their KV in `blocks`; it waits when it has no blocks.

    A step may be launched before the results of the one before it are known, and then some tokens are only underway:

        computed <= launched    the KV of those between them is being computed
        len(chain) <= length    those between them are being drawn, and nobody knows them yet
    """

    id: int
    chain: Chain
    prompt_tokens: int  # the rest of the chain is output
    sampling: Sampling
    priority: tuple[float, int]  # lower goes first; the number of arrival breaks ties
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    launched: int = 0  # tokens that are computed or being computed; as many as are computed while nothing flies
    length: int = field(init=False)  # the chain's tokens, and those after them that are being drawn
    limit: int = field(init=False)  # the longest length; the scheduler knows if the model takes less
    retain: Sequence[Retain] = ()  # beginnings of the prompt to give up last
    is_cold: bool = False  # what it computes will not be asked for again
    sources: Sequence[KVSource] = ()  # neighbours to ask for missing blocks, each once
    is_loading: bool = False  # it has blocks, and waits for what lower media or a neighbour hold of its prompt
    preemptions: int = 0
    cached_tokens: int | None = None  # the prompt's cached tokens at its first admission
    uncached_tokens: int = field(init=False)  # tokens that admitting it would compute, by the last look-up
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # so far, if wanted; from the second token on
    runner_state: object = None  # the runner's own
    matcher: Matcher | None = None  # a constrained answer's: it says which tokens may come next
    # A token is drawn or reported with the host's help: by earlier tokens, or with more than an id. A runner waits
    # there for what flies; so that the others have their tokens by then, that lands first.
    _waits: bool = field(init=False)

    def __post_init__(self) -> None:
        self.length = self.uncached_tokens = len(self.chain)
        self.limit = self.prompt_tokens + self.sampling.max_tokens
        sampling = self.sampling
        self._waits = is_penalized(sampling) or bool(sampling.logit_bias) or sampling.top_logprobs is not None

    @property
    def generated(self) -> int:
        return len(self.chain) - self.prompt_tokens

    @property
    def computes_whole_prompt(self) -> bool:
        """True if the prompt's log probabilities are wanted, which are not cached."""
        return self.sampling.prompt_logprobs is not None and not self.generated

    @property
    def drawing(self) -> int:
        """Tokens being drawn, whose values are not known yet."""
        return self.length - len(self.chain)

    @property
    def remaining(self) -> int:
        """Tokens to launch before the next one can be drawn."""
        return self.length - self.launched

    @property
    def needs_results(self) -> bool:
        """True if no more of it can be launched before the flying step has landed."""
        if self.computes_whole_prompt:  # the words about its tokens are kept in their order
            return self.launched > self.computed
        may_not_stop = self.sampling.stop_token_ids and self.length - self.prompt_tokens < self.sampling.min_tokens
        return self.drawing > 0 and bool(self._waits or may_not_stop)

    @property
    def decodes(self) -> bool:
        """True if it needs one token computed; not if the one that is being drawn is its last, whatever it is.

        A constrained answer sits out the step that starts before its last token is known: its mask depends on it.
        """
        if self.length - self.launched != 1:
            return False
        return not self.drawing or (self.length < self.limit and self.matcher is None)

    def launch(self, tokens: int, copy: Copy | None = None) -> "Scheduled":
        """Schedule up to this many of its next tokens."""
        tokens = min(tokens, self.remaining)
        scheduled = Scheduled(self, self.launched, tokens, copy)
        self.launched += tokens
        self.length += self.launched == self.length
        return scheduled


class Scheduled(NamedTuple):
    """In this step, compute so many tokens of the chain from `start` on, and draw the next if that is all of them.

    A request's `start` can be the end of its chain: the token is the one that the step before draws.
    """

    request: Request
    start: int
    tokens: int
    copy: Copy | None = None  # to do before anything is computed

    @property
    def token_ids(self) -> NDArray[np.uint32]:
        return np.frombuffer(self.request.chain.tokens, np.uint32, self.tokens, self.start * TOKEN_BYTES)

    @property
    def samples(self) -> bool:
        """The same until the step is committed: only then can the chain be longer than what the step computes."""
        return self.start + self.tokens >= len(self.request.chain)

    @property
    def position(self) -> int:
        """The position in the output of the token that it draws."""
        return self.start + self.tokens - self.request.prompt_tokens


def is_penalized(sampling: Sampling) -> bool:
    """Return True if the logits depend on all tokens before."""
    return bool(sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty)
